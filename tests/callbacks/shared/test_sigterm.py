"""SIGTERM during fit leaves the last rows and the page, and ends the process as it would have without tfopt."""

import json
import signal
import subprocess
import sys
import textwrap
from itertools import pairwise

import pytest

pytestmark = pytest.mark.slow

# `act` is called once after the second step, when rows wait to be written.
SCRIPT = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
import keras
import numpy as np
from tfopt.callbacks import LossScaleLogger, ReportWriter, ThroughputLogger, UtilizationLogger
from tfopt.callbacks.shared.running_fit import end_with_fit

folder = Path(sys.argv[1])

class Acts(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        end_with_fit(self, lambda: (folder / "ended").write_text(str(os.getpid())))

    def on_train_batch_end(self, step, logs=None):
        if step == 1:
            act()

def term():
    os.kill(os.getpid(), signal.SIGTERM)

def hang():
    "As a step whose all-reduce never ends: no bytecode runs in this thread."
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def fit(*more, **options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False)
    callbacks = [UtilizationLogger(folder, 0.05), ThroughputLogger(folder), ReportWriter(folder / "page.html"), Acts()]
    callbacks += more
    return model.fit(np.zeros((64, 3)), np.zeros((64, 2)), batch_size=1, verbose=0, callbacks=callbacks, **options)

"""


def run(tmp_path, body):
    """Runs SCRIPT and a body that defines `act`; the exit code, what it printed, and the files it left."""
    command = [sys.executable, "-c", SCRIPT + textwrap.dedent(body), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, {path.name for path in tmp_path.iterdir()}


LEFT = {"ended", "page.html", "utilization.csv", "utilization.jsonl", "throughput.csv", "throughput.jsonl"}


@pytest.mark.parametrize("step", ["time.sleep(100)", "hang()", "keras.ops.convert_to_numpy(keras.ops.zeros(3))"])
def test_a_killed_training_leaves_its_page_and_rows(tmp_path, step):
    """The process ends by SIGTERM, be it between steps or in one that hangs."""
    code, _, left = run(
        tmp_path,
        f"""
        def act():
            threading.Timer(0.5, term).start()
            while True:
                {step}
        fit()
    """,
    )
    assert code == -signal.SIGTERM
    assert left >= LEFT
    assert "had not ended when this page was written" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "utilization.jsonl").read_text().endswith("}\n")


def test_the_last_rows_are_of_the_last_second(tmp_path):
    """Between two rows of 100 steps; ThroughputLogger keeps one ready, a second old at most."""
    code, _, _ = run(
        tmp_path,
        """
        act = lambda: None
        ends = []
        class Kills(keras.callbacks.Callback):
            def on_train_batch_end(self, step, logs=None):
                time.sleep(0.05)
                ends.append(time.time())
                if len(ends) == 170:
                    (folder / "steps.json").write_text(str(ends))
                    term()
                    time.sleep(100)
        fit(Kills(), epochs=3)
    """,
    )
    assert code == -signal.SIGTERM
    ends = json.loads((tmp_path / "steps.json").read_text())
    for name, every in (("throughput", ends), ("utilization", None)):
        times = [json.loads(row)["time_seconds"] for row in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        longest = max(after - before for before, after in pairwise(every or times))
        assert ends[-1] - times[-1] < 1 + longest, name


def test_a_disk_that_hangs_does_not_keep_the_process(tmp_path):
    code, _, _ = run(
        tmp_path,
        """
        from tfopt.callbacks.shared import fit_watch
        fit_watch._FLUSH_SECONDS = 0.5
        def act():
            end_with_fit(keras.callbacks.Callback(), lambda: None)
            end_with_fit(acts, lambda: time.sleep(1000))
            term()
            time.sleep(1000)
        acts = Acts()
        fit()
    """,
    )
    assert code == -signal.SIGTERM


def test_after_fit_the_default_is_back(tmp_path):
    code, printed, _ = run(
        tmp_path,
        """
        def act():
            print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        for _ in range(2):
            fit()
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1))
        term()
        time.sleep(100)
    """,
    )
    assert (code, printed.split("\n")) == (-signal.SIGTERM, ["False", "False", "True -1", ""])


def test_a_handler_of_the_users_is_left_alone(tmp_path):
    code, printed, left = run(
        tmp_path,
        """
        handler = lambda number, frame: sys.exit(7)
        signal.signal(signal.SIGTERM, handler)
        def act():
            print(signal.getsignal(signal.SIGTERM) is handler)
            term()
            time.sleep(100)
        fit()
    """,
    )
    assert (code, printed.strip()) == (7, "True")
    assert left >= LEFT  # Python's exit writes them


def test_a_handler_that_comes_during_fit_decides(tmp_path):
    """As one that checkpoints: it puts back what was there, and fit goes on."""
    code, printed, _ = run(
        tmp_path,
        """
        def act():
            before = signal.getsignal(signal.SIGTERM)
            def handler(number, frame):
                saved.append(1)
                signal.signal(signal.SIGTERM, before)
            signal.signal(signal.SIGTERM, handler)
            time.sleep(2.5)  # two looks of the watch
            sys.setswitchinterval(100)  # the watch hears of the signal when the handler is through
            term()
            time.sleep(2.5)
        saved = []
        fit()
        print(saved, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    """,
    )
    assert (code, printed.split("\n")) == (0, ["[1] True", ""])


def test_a_handler_that_calls_the_one_before_it_ends_the_training(tmp_path):
    code, printed, left = run(
        tmp_path,
        """
        def act():
            before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda number, frame: (print("saved", flush=True), before(number, frame)))
            term()
            time.sleep(100)
        fit()
    """,
    )
    assert (code, printed.strip()) == (-signal.SIGTERM, "saved")
    assert left >= LEFT


def test_a_handler_in_c_is_left_alone(tmp_path):
    """As TensorFlow's distributed runtime installs one, which Python does not see."""
    code, printed, _ = run(
        tmp_path,
        """
        ctypes.CDLL(None).signal(signal.SIGTERM, 1)  # ignored
        def act():
            term()
            time.sleep(2)
        fit()
        term()
        print("alive")
    """,
    )
    assert (code, printed.strip()) == (0, "alive")


def test_a_forked_child_that_is_terminated_leaves_its_parent(tmp_path):
    code, printed, _ = run(
        tmp_path,
        """
        def act():
            child = os.fork()
            if child == 0:
                time.sleep(10)
                os._exit(3)
            time.sleep(0.5)
            os.kill(child, signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            time.sleep(2)
        fit()
        print("done")
    """,
    )
    assert (code, printed.split("\n")) == (0, ["-15", "done", ""])


def test_a_fit_in_another_thread_changes_nothing(tmp_path):
    code, _, left = run(
        tmp_path,
        """
        def act():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            term()
            time.sleep(100)
        thread = threading.Thread(target=fit)
        thread.start()
        thread.join()
    """,
    )
    assert code == -signal.SIGTERM
    assert "ended" not in left
