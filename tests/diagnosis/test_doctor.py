"""`tfopt-bench doctor` on scripts as users write them.

Most of them import small stand-ins for Keras and TensorFlow, and `diagnose_fit` is replaced in the script's process, so
that each takes a fraction of a second. Those at the end train with Keras.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    if arguments["x"] == "bad": raise ZeroDivisionError("the data are bad")
    if arguments["x"] == "strange":
        from tfopt.errors import UnsupportedError
        raise UnsupportedError("Expected data. Found none.")
    if arguments["x"] == "nested": model.fit("one epoch")
    if arguments["x"] == "slow":
        import time
        print("diagnosing", flush=True)
        time.sleep(60)
    given = {name: str(value) for name, value in arguments.items()}
    return Diagnosis(model=type(model).__name__, arguments=given, steps=steps)

sys.modules["tfopt.diagnosis.diagnosing"] = types.SimpleNamespace(diagnose_fit=diagnose_fit)
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
    (tmp_path / "temporary").mkdir()
    return tmp_path


DOCTOR = (sys.executable, "-m", "tfopt.bench", "doctor")


@pytest.fixture
def start(folder):
    """Starts the command, or another, on a script."""

    def start(script, *options, command=DOCTOR, run=("train.py",), **environ):
        (folder / "train.py").write_text(script)
        path = os.pathsep.join([str(folder / "own"), str(ROOT)])
        environ = os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder / "temporary")} | environ
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen([*command, *options, *run], cwd=folder, env=environ, text=True, **pipes)

    yield start
    assert not list((folder / "temporary").iterdir())
    assert not list(folder.glob("__pycache__"))


@pytest.fixture
def doctor(start):
    """Runs the command on a script; what it wrote is in `.out` and `.err`, the latter without line breaks."""

    def doctor(*arguments, **more):
        process = start(*arguments, **more)
        process.out, process.written = process.communicate("typed\n", timeout=300)
        process.err = " ".join(process.written.split())
        return process

    return doctor


SHOWS_WHAT_IT_FINDS = """
import json, os, sys
print(json.dumps([__name__, __file__, __spec__ and __spec__.name, sys.argv, sys.orig_argv, sys.path]))
print(os.getcwd(), input(), sorted(os.environ.items()), sorted(vars()), sys.modules["sitecustomize"])
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


def test_a_later_fit(doctor):
    script = "import keras\nfor x in 'abcd':\n    print(keras.Model().fit(x))"
    found = doctor(script, "--fit", "3", "--json")
    assert found.err.startswith("trained on a None trained on b None")
    assert json.loads(found.out)["arguments"]["x"] == "c"
    few = doctor(script, "--fit", "5")
    assert few.returncode == cli.ENVIRONMENT
    assert "to call Model.fit 5 times. Found 4. Pass --fit 4 or less." in few.err


def test_the_experiments_may_fit(doctor):
    assert doctor(TRAINS, run=["train.py", "nested"]).out == "begin\ntrained on one epoch\nat exit\nTHE DIAGNOSIS\n"


THREAD = """
import keras, threading, time
thread = threading.Thread(target=keras.Model().fit, args=["data"])
thread.start()
thread.join()
print("on")
"""
OVERRIDES = """
import keras

class Net(keras.Model):
    def fit(self, x):
        return super().fit(x + " prepared")

Net().fit("data")
print("on")
"""


@pytest.mark.parametrize(("script", "x"), [(THREAD, "data"), (OVERRIDES, "data prepared")])
def test_a_fit_in_a_thread_and_one_that_calls_super(doctor, script, x):
    found = doctor(script, "--json")
    assert json.loads(found.out)["arguments"]["x"] == x
    assert "on" not in found.err.split()


FAILS = "def load():\n    raise ValueError('no data')\nload()"


def test_a_script_that_fails_shows_its_own_traceback(doctor):
    plain, found = doctor(FAILS, command=[sys.executable]), doctor(FAILS)
    assert found.written.startswith(plain.written)
    assert "Expected train.py to call Model.fit. Found that it ended with exit code 1 before that." in found.err
    assert found.returncode == cli.INTERNAL


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("", cli.ENVIRONMENT, "exit code 0 without doing so; it did not even import Keras. Only fit"),
        ("import keras", cli.ENVIRONMENT, "exit code 0 without doing so. Only fit"),
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
        ("import os; os.kill(os.getpid(), 9)", cli.INTERNAL, "was ended by SIGKILL before that"),
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
        ("bad", cli.INTERNAL, "Found ZeroDivisionError: the data are bad, as above."),
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


def ended(pid):
    """Whether a process has ended, or ends soon."""
    due = time.monotonic() + 10
    while time.monotonic() < due:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


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
    assert all(map(ended, pids))


def test_what_the_script_has_started_ends_with_it(doctor):
    found = doctor(STARTS_OTHERS, run=["train.py", "data"])
    assert found.returncode == cli.DONE
    *pids, _, _ = found.out.split()
    assert len(pids) == 3
    assert all(map(ended, map(int, pids)))


@pytest.mark.slow
def test_a_worker_that_waits_for_ever_holds_nothing_up(doctor):
    script = "import keras, multiprocessing, time\nmultiprocessing.Process(target=time.sleep, args=[600]).start()\n"
    began = time.monotonic()
    assert doctor(script + "keras.Model().fit('data')").out == "THE DIAGNOSIS\n"
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.py"], "Found no file 'none.py'"),
        (["--html", "none/page.html", "train.py"], "No such file or directory"),
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
    assert doctor(TRAINS, "doctor", command=[sys.executable, "-c", code]).returncode == cli.DONE
