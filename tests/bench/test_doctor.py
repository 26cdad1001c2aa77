"""`tfopt-bench doctor` on scripts as users write them.

Most of them import small stand-ins for Keras and TensorFlow, and `diagnose_fit` is replaced in the script's process, so
that each takes a fraction of a second. Those at the end train with Keras.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from gone import gone
from quick import campaign

import tfopt
from tfopt.bench import cli

ROOT = Path(tfopt.__file__).parents[1]

# The user's own sitecustomize, which must still be run.
STAND_IN = """
import sys, types
from pathlib import Path

class Diagnosis:
    def __init__(self, **values): self.values = values
    def __str__(self): return "THE DIAGNOSIS"
    def to_dict(self): return self.values
    def to_html(self, path): Path(path).write_text("<p>the page")

def diagnose_fit(model, arguments, steps):
    x = str(arguments["x"])
    if x == "bad": raise ZeroDivisionError("the data are bad")
    if x == "strange":
        from tfopt.errors import UnsupportedError
        raise UnsupportedError("Expected data. Found none.")
    if "nested" in x: model.fit("one epoch")
    if x == "slow":
        import tempfile, time
        file, _ = tempfile.mkstemp()
        print("diagnosing", flush=True)
        time.sleep(60)
    given = {name: str(value) for name, value in arguments.items()}
    return Diagnosis(model=type(model).__name__, arguments=given, steps=steps)

class Tuning:
    def __init__(self, applied, **values): self.applied, self.diagnosis = applied, Diagnosis(**values)
    def __str__(self): return "THE TUNING"
    def to_dict(self): return {"applied": self.applied}

def tune_fit(model, arguments, steps):
    return Tuning([] if arguments["x"] == "fine" else ["the cause"], steps=steps)

def timed_fit(fit, model, arguments, steps, causes):
    fit(model, **arguments)
    ms = 1.0 if causes else 2.0
    times = {"repeats_ms": [[ms, ms]], "steps_per_sample": 1, "first_step_seconds": 1.0, "examples_per_step": None}
    return {"times": times, "steps": steps, "loss": 0.5 * ms}

sys.modules["tfopt.diagnosis.diagnosing"] = types.SimpleNamespace(diagnose_fit=diagnose_fit)
sys.modules["tfopt.diagnosis.tuning"] = types.SimpleNamespace(tune_fit=tune_fit)
sys.modules["tfopt.bench.timed_fit"] = types.SimpleNamespace(timed_fit=timed_fit)
"""
KERAS = """
import os
import tensorflow

class config:
    backend = staticmethod(lambda: os.environ.get("KERAS_BACKEND", "tensorflow"))

class Trainer:
    def fit(self, x=None, y=None, epochs=1): print("trained on", x, flush=True)
    def train_on_batch(self, x): return 0.0

class Model(Trainer): pass
"""
TENSORFLOW = """
class GradientTape:
    def __enter__(self): return self
    def __exit__(self, *error): pass
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the stand-ins, in which scripts are written and run."""
    for name, text in {"own/sitecustomize.py": STAND_IN, "keras.py": KERAS, "tensorflow.py": TENSORFLOW}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


DOCTOR = (sys.executable, "-B", "-m", "tfopt.bench", "doctor")


@pytest.fixture
def start(folder):
    """Starts the command, or another, on a script. It leaves nothing behind."""
    temporary = Path(tempfile.mkdtemp(prefix="t"))  # short: multiprocessing puts sockets there

    def start(script, *options, command=DOCTOR, run=("train.py",), **environ):
        (folder / "train.py").write_text(script)
        path = os.pathsep.join([str(folder / "own"), str(ROOT)])
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environ = own | {"PYTHONPATH": path, "TMPDIR": str(temporary)} | environ
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen([*command, *options, *run], cwd=folder, env=environ, text=True, **pipes)

    yield start
    temporary.rmdir()
    assert not list(folder.glob("__pycache__"))


@pytest.fixture
def doctor(start):
    """Runs the command on a script; what it wrote is in `.out` and `.err`, the latter without line breaks."""

    def doctor(*arguments, **more):
        process = start(*arguments, **more)
        try:
            process.out, process.written = process.communicate("typed\n", timeout=300)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.communicate()
            raise
        process.err = " ".join(process.written.split())
        return process

    return doctor


SHOWS_WHAT_IT_FINDS = """
import json, os, sys
print(json.dumps([__name__, __file__, __spec__ and __spec__.name, sys.argv, sys.orig_argv, sys.path]))
print(os.getcwd(), input(), {"keras", "tensorflow"} & set(sys.modules), sys.modules["sitecustomize"])
print(sorted(os.environ.items()), sorted(vars()))
import helper
raise SystemExit(helper.CODE)
"""


@pytest.mark.parametrize("run", [["train.py"], ["sub/train.py"], ["-m", "train"], ["-m", "sub.train"]])
def test_a_script_finds_what_it_finds_under_python(doctor, folder, run):
    (folder / "sub").mkdir()
    (folder / "sub/train.py").write_text(SHOWS_WHAT_IT_FINDS)
    for name in ("helper.py", "sub/helper.py"):
        (folder / name).write_text("CODE = 7")
    run = [*run, "--fit", "2", "--", "a b", "--json"]
    plain = doctor(SHOWS_WHAT_IT_FINDS, command=[sys.executable, "-B"], run=run)
    plain.out = plain.out.replace('"-B", ', "")
    assert plain.returncode == 7
    found = doctor(SHOWS_WHAT_IT_FINDS, run=run)
    assert found.out == plain.out
    assert found.returncode == cli.INTERNAL
    assert "ended with exit code 7 before that" in found.err
    assert not list(folder.rglob("__pycache__"))


TRAINS = """
import atexit, sys
import keras

class Net(keras.Model):
    pass

def main():
    atexit.register(print, "at exit")
    print("begin")
    try:
        Net().fit(X, epochs=3)
        print("on")
    except BaseException as error:
        print("caught", repr(error))
    except:
        print("caught")
    finally:
        print("cleaning up")

X = sys.argv[1] if len(sys.argv) > 1 else "data"
if __name__ == "__main__":
    main()
    print("end")
"""


def test_the_first_fit_is_diagnosed_and_ends_the_script(doctor, folder):
    before = set(folder.rglob("*"))
    found = doctor(TRAINS)
    assert found.returncode == cli.DONE
    assert found.out.splitlines() == ["begin", "at exit", "THE DIAGNOSIS"]
    assert "Traceback" not in found.err
    assert set(folder.rglob("*")) - before == {folder / "train.py"}


def test_json_is_one_document_and_the_page_is_written(doctor, folder):
    found = doctor(TRAINS, "--json", "--html", "page.html", "--steps", "7")
    assert json.loads(found.out) == {
        "model": "Net",
        "arguments": {"x": "data", "y": "None", "epochs": "3"},
        "steps": 7,
    }
    assert "begin" in found.err
    assert (folder / "page.html").read_text() == "<p>the page"


def test_the_script_is_run_as_it_is_and_tuned(doctor):
    found = doctor("import keras; print('begun'); keras.Model().fit('few', epochs=3); print('over')", "--apply")
    assert found.returncode == cli.DONE, found.err
    lines = found.out.splitlines()
    assert (lines.count("begun"), lines.count("trained on few"), lines.count("over")) == (3, 2, 0)
    assert " ".join(found.out.split()).endswith(
        "THE DIAGNOSIS THE TUNING The script itself, run twice up to step 50: 2 ms a step as it is, 1 ms tuned, "
        "2 times as fast, too few repeats to tell. Its loss there: 1 as it is, 0.5 tuned."
    )


def test_a_script_that_needs_no_change_is_not_run_again(doctor):
    found = doctor("import keras; keras.Model().fit('fine')", "--apply", "--json", "--steps", "7")
    assert found.returncode == cli.DONE, found.err
    assert json.loads(found.out) == {"diagnosis": {"steps": 7}, "tuning": {"applied": []}, "runs": None}


def test_a_later_fit(doctor):
    script = "import keras\nfor x in 'abcd':\n    print(keras.Model().fit(x))"
    found = doctor(script, "--fit", "3", "--json")
    assert found.err.startswith("tfopt-bench: running train.py up to fit number 3 trained on a None trained on b ")
    assert json.loads(found.out)["arguments"]["x"] == "c"
    few = doctor(script, "--fit", "5")
    assert few.returncode == cli.ENVIRONMENT
    assert "to call Model.fit 5 times. Found 4. Pass a smaller --fit." in few.err


THREAD = """
import keras, threading, time
thread = threading.Thread(target=keras.Model().fit, args=["data"])
thread.start()
thread.join()
print("on")
"""
OVERRIDES = """
import keras, sys

class Net(keras.Model):
    def fit(self, x):
        return super().fit(x + " prepared")

Net().fit(sys.argv[1] if sys.argv[1:] else "data")
print("on")
"""


@pytest.mark.parametrize(("script", "x"), [(THREAD, "data"), (OVERRIDES, "data prepared")])
def test_a_fit_in_a_thread_and_one_that_calls_super(doctor, script, x):
    found = doctor(script, "--json")
    assert json.loads(found.out)["arguments"]["x"] == x
    assert "on" not in found.err.split()


@pytest.mark.parametrize("script", [TRAINS, OVERRIDES])
def test_the_experiments_call_the_fit_of_keras(doctor, script):
    found = doctor(script, run=["train.py", "nested"])
    assert "\ntrained on one epoch\n" in f"\n{found.out}"
    assert found.out.endswith("THE DIAGNOSIS\n")


FAILS = "def load():\n    raise ValueError('no data')\nload()"


def test_a_script_that_fails_shows_its_own_traceback(doctor):
    plain, found = doctor(FAILS, command=[sys.executable]), doctor(FAILS)
    assert found.written.startswith(f"tfopt-bench: running train.py up to its first fit\n{plain.written}")
    assert "Expected train.py to call Model.fit. Found that it ended with exit code 1 before that." in found.err
    assert found.returncode == cli.INTERNAL


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("", cli.ENVIRONMENT, "exit code 0 without doing so; it did not even import Keras. Only Model.fit"),
        ("import keras", cli.ENVIRONMENT, "exit code 0 without doing so. Only Model.fit"),
        (
            "import keras\nfor _ in range(300): keras.Model().train_on_batch(1)\nraise SystemExit",
            cli.ENVIRONMENT,
            "it called train_on_batch 300 times",
        ),
        (
            "import keras, tensorflow as tf\nwith tf.GradientTape() as tape: pass",
            cli.ENVIRONMENT,
            "it trained with tf.GradientTape in a loop of its own",
        ),
        ("import sys; sys.exit('no GPU')", cli.INTERNAL, "no GPU tfopt-bench: Expected train.py"),
        ("import os; os.kill(os.getpid(), 9)", cli.INTERNAL, "was ended by signal 9 before that"),
        (
            "import keras, os, threading\nthreading.Timer(1, os._exit, [5]).start()\nkeras.Model().fit('slow')",
            cli.INTERNAL,
            "Found that it ended with exit code 5 meanwhile",
        ),
    ],
)
def test_a_script_without_fit(doctor, script, code, said):
    found = doctor(script)
    assert found.returncode == code
    assert said in found.err
    assert found.out in ("", "diagnosing\n")


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        ("bad", cli.INTERNAL, "Found ZeroDivisionError: the data are bad. Run"),
        ("strange", cli.ENVIRONMENT, "tfopt-bench: Expected data. Found none."),
    ],
)
def test_a_diagnosis_that_fails(doctor, data, code, said):
    found = doctor(TRAINS, run=["train.py", data])
    assert found.returncode == code
    assert said in found.err
    assert ("in diagnose_fit" in found.err) == (data == "bad")
    assert found.out == "begin\nat exit\n"


@pytest.mark.parametrize("module", ["keras", "tf_keras"])
def test_another_keras_is_refused_by_name(doctor, folder, module):
    (folder / "tf_keras.py").write_text(KERAS)
    found = doctor(f"import {module}\n{module}.Model().fit('data')", KERAS_BACKEND="jax")
    assert found.returncode == cli.ENVIRONMENT
    assert f"Found Keras {'on jax' if module == 'keras' else '2 (tf_keras)'}. Run it with" in found.err
    assert found.out == ""


LOOKED_UP = "import importlib.util\nassert importlib.util.find_spec('keras')\n"


def test_a_look_up_of_keras_is_not_its_import(doctor):
    assert "THE DIAGNOSIS" in doctor(LOOKED_UP + TRAINS).out
    assert "did not even import Keras" in doctor(LOOKED_UP).err


CHILDREN = """
import keras, multiprocessing, os, subprocess, sys

def train(x):
    keras.Model().fit(x)
    sys.exit(0)

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=train, args=[method])
        child.start()
        child.join()
        assert child.exitcode == 0
    subprocess.run([sys.executable, "-B", "-c", "import keras; keras.Model().fit('subprocess')"], check=True)
    if not os.fork():
        train("os.fork")
    os.wait()
    if len(sys.argv) > 1:
        keras.Model().fit("data")
"""


def test_children_of_the_script_train(doctor):
    ways = ["fork", "spawn", "forkserver", "subprocess", "os.fork"]
    found = doctor(CHILDREN)
    assert found.returncode == cli.ENVIRONMENT
    assert found.out == "".join(f"trained on {way}\n" for way in ways)
    found = doctor(CHILDREN, "--json", run=["train.py", "x"])
    assert json.loads(found.out)["arguments"]["x"] == "data"


def test_the_report_of_a_forked_child_does_not_count(doctor):
    found = doctor("import keras, os\nif os.fork():\n  os.wait(), os._exit(0)\nkeras.Model().fit('data')")
    assert found.returncode == cli.ENVIRONMENT
    assert "exit code 0 without doing so. Only Model.fit" in found.err


STARTS_OTHERS = """
import keras, os, subprocess, sys
orphan = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
print(os.getpid(), subprocess.Popen(["sleep", "60"]).pid, flush=True)
subprocess.run([sys.executable, "-c", orphan])
try:
    keras.Model().fit(sys.argv[1])
except KeyboardInterrupt:
    import time; time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_script_and_all_it_has_started(start, number):
    process = start(STARTS_OTHERS, run=["train.py", "slow"])
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
    assert process.stdout.readline() == "diagnosing\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert len(pids) == 3
    assert all(map(gone, pids))


@pytest.mark.slow
def test_a_doctor_that_is_killed_leaves_nothing_behind(start):
    process = start(STARTS_OTHERS, run=["train.py", "slow"])
    script, child, orphan = (int(pid) for _ in range(2) for pid in process.stdout.readline().split())
    assert process.stdout.readline() == "diagnosing\n"
    os.kill(orphan, signal.SIGKILL)  # it has no parent by which it could be found
    process.kill()
    process.communicate(timeout=30)
    assert gone(script)
    assert gone(child)


def test_what_the_script_has_started_ends_with_it(doctor):
    found = doctor(STARTS_OTHERS, run=["train.py", "data"])
    assert found.returncode == cli.DONE
    *pids, _, _ = found.out.split()
    assert len(pids) == 3
    assert all(map(gone, map(int, pids)))


@pytest.mark.slow
def test_a_worker_that_waits_for_ever_holds_nothing_up(doctor):
    script = "import keras, multiprocessing, time\nmultiprocessing.Process(target=time.sleep, args=[600]).start()\n"
    began = time.monotonic()
    assert doctor(script + "keras.Model().fit('data')").out == "THE DIAGNOSIS\n"
    assert time.monotonic() - began < 60


def test_options_behind_the_script_are_its_own_and_said_to_be(doctor):
    found = doctor("import sys; print(sys.argv[1:])", run=["train.py", "--steps", "5", "--fast"])
    assert "tfopt-bench: train.py gets --steps. Options for doctor go before the script." in found.err
    assert "['--steps', '5', '--fast']" in found.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.py"], "Found: no file 'none.py'"),
        (["own"], "Found: 'own' is a folder"),
        (["--html", "none/page.html", "train.py"], "there is no folder 'none'"),
        (["--html", "own", "train.py"], "'own' is a folder"),
        (["--steps", "4", "train.py"], "expected a whole number of 5 or more, received '4'"),
        (["--fit", "0", "train.py"], "expected a whole number of 1 or more, received '0'"),
        ([], "the following arguments are required: SCRIPT"),
    ],
)
def test_wrong_usage(doctor, arguments, said):
    found = doctor("print('run')", run=arguments)
    assert found.returncode == cli.USAGE
    assert said in found.err
    assert found.out == ""


def test_doctor_itself_loads_nothing_heavy(doctor):
    code = (
        "import sys; from tfopt.bench.cli import main; code = main(sys.argv[1:])\n"
        "sys.exit(100 + code if {'tensorflow', 'keras', 'numpy'} & set(sys.modules) else code)"
    )
    assert doctor(TRAINS, "doctor", command=[sys.executable, "-B", "-c", code]).returncode == cli.DONE


REAL = """
import argparse
import keras
import numpy as np

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, x):
        return self.dense(x)

def train(batch_size):
    model = Net()
    model.compile("sgd", "mse")
    model.fit(np.ones((64, 8)), np.ones((64, 4)), batch_size, verbose=0)
    print("epoch of", batch_size, flush=True)
    model.fit(np.ones((64, 8)), np.ones((64, 4)), batch_size, callbacks=[keras.callbacks.TerminateOnNaN()])
    print("on")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=1)
    train(parser.parse_args().batch_size)
"""


@pytest.fixture
def real(folder):
    """Keras and TensorFlow themselves."""
    (folder / "keras.py").unlink()
    (folder / "tensorflow.py").unlink()


@pytest.mark.slow
@pytest.mark.usefixtures("real")
def test_a_fit_of_keras_itself(doctor):
    found = doctor(REAL, "--fit", "2", "--json", run=["train.py", "--batch-size", "16"])
    assert "epoch of 16" in found.err, found.err
    diagnosis = json.loads(found.out)
    assert diagnosis["model"] == "Net"
    given = diagnosis["arguments"]
    assert (given["batch_size"], given["epochs"], given["shuffle"]) == ("16", "1", "True")
    assert "TerminateOnNaN" in given["callbacks"]
    assert "Traceback" not in found.err


WORKERS = """
import keras
import numpy as np

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return np.full((8, 4), number), np.ones((8, 1))

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def fit(self, data, **options):
        return super().fit(data, verbose=0, **options)

if __name__ == "__main__":
    model = Net()
    model.compile("sgd", "mse")
    model.fit(Batches(workers=2, use_multiprocessing=True, max_queue_size=4), epochs=2)
    print("on")
"""
OWN_LOOP = """
import keras
import tensorflow as tf

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD()

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    gradients = tape.gradient(loss, model.trainable_weights)
    optimizer.apply_gradients(zip(gradients, model.trainable_weights))

for _ in range(3):
    step(tf.ones((2, 4)))
"""
ON_BATCHES = """
import keras
import numpy as np

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
for _ in range(5):
    model.train_on_batch(np.ones((2, 4)), np.ones((2, 1)))
"""
WRONG_SHAPE = """
import keras
import numpy as np

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((2, 5)), np.ones((2, 1)))
"""


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        pytest.param(REAL, cli.DONE, "", marks=pytest.mark.slow),
        pytest.param(WORKERS, cli.DONE, "", marks=pytest.mark.slow),
        *campaign(
            [
                (OWN_LOOP, cli.ENVIRONMENT, "it trained with tf.GradientTape in a loop of its own"),
                (ON_BATCHES, cli.ENVIRONMENT, "it called train_on_batch 5 times"),
                (WRONG_SHAPE, cli.INTERNAL, "Expected to diagnose the training of train.py. Found ValueError"),
            ]
        ),
    ],
)
def test_diagnoses_of_real_trainings(doctor, folder, script, code, said):
    (folder / "own/sitecustomize.py").unlink()
    found = doctor(script, "--steps", "5", "--html", "page.html")
    assert found.returncode == code, found.written
    assert said in found.err
    assert (folder / "page.html").exists() == (code == cli.DONE)
    assert "on" not in found.out.splitlines()
