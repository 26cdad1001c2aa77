"""Real training processes and their watchdogs, with faults injected. Only the intervals are shorter than usual."""

import pytest
from quick import first_quick
from watched_workers import Workers

from tfopt.distribute.watchdog import process
from tfopt.distribute.watchdog.barrier import Start
from tfopt.distribute.watchdog.training_process import ExitStatus

SLEEP = "time.sleep(300)"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
COMMUNICATION_ERROR = """
class UnavailableError(Exception):
    pass
UnavailableError.__module__ = "tensorflow.python.framework.errors_impl"
"""
EPOCH_3 = """
from tfopt.distribute.watchdog.progress import progress
progress.at, progress.loop, progress.epoch, progress.step = "step", "epoch", 3, 7
progress.counted = True
"""


@pytest.fixture
def workers():
    with Workers() as workers:
        yield workers


def assert_lost(ended, lost, why, code=75):
    """All but the lost worker ended with the code and named it, and only it, with the reason."""
    for index, end in ended.items():
        if index != lost:
            assert end.code == code, ended
            assert f"Expected worker {lost} (127.0.0.1:" in end.stderr, ended
            assert end.stderr.endswith(f" This process ends with exit code {code}.\n"), ended
            assert why in end.stderr, ended
            assert end.stderr.count("Expected") == 1, ended


@pytest.mark.slow
def test_they_end_well_in_any_order_and_share_a_seed(workers):
    first = workers.run("time.sleep(0.3)", "", "time.sleep(0.8)")
    second = workers.run("time.sleep(0.3)", "")
    assert [(end.code, end.stderr) for end in (*first.values(), *second.values())] == [(0, "")] * 5
    assert first[0].stdout == first[1].stdout == first[2].stdout
    assert first[0].stdout.startswith("seed ")
    assert first[0].stdout != second[0].stdout


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_worker_ends_the_others(workers, lost):
    ended = workers.run(*(KILL if index == lost else SLEEP for index in range(3)))
    assert ended[lost].code == -9
    assert_lost(ended, lost, "ended without a goodbye")


@pytest.mark.slow
def test_a_stopped_worker_ends_the_others_and_is_killed(workers):
    ended = workers.run(SLEEP, "os.kill(os.getpid(), signal.SIGSTOP)", SLEEP, KILL=5)
    assert_lost(ended, 1, "has been stopped (SIGSTOP)")
    assert ended[1].code == -9
    assert "Expected this worker, worker 1" in ended[1].stderr


@pytest.mark.slow
def test_c_code_that_never_gives_the_gil_back(workers):
    ended = workers.run(SLEEP, "ctypes.PyDLL(None).sleep(300)", DEAF=8)
    assert_lost(ended, 1, "none of its Python threads runs")
    assert ended[1].code == -9


@pytest.mark.slow
def test_a_survivor_that_cannot_end_itself_is_killed(workers):
    ended = workers.run("ctypes.PyDLL(None).sleep(300)", f"time.sleep(1); {KILL}", DEAF=50, KILL=5)
    assert ended[0].code == -9
    assert "Expected worker 1 (" in ended[0].stderr
    assert ended[0].stderr.endswith("restart all workers. It did not end by itself and is killed.\n")


def test_an_exception_is_reported_to_the_others(workers):
    ended = workers.run(SLEEP, "raise ValueError('no such label: ü')", SLEEP)
    assert_lost(ended, 1, "it failed: ValueError: no such label: ü")
    assert ended[1].code == 1
    assert "Traceback" in ended[1].stderr


def test_an_exception_that_would_recur_is_no_reason_to_restart(workers):
    ended = workers.run(SLEEP, "from tfopt.errors import PipelineError; raise PipelineError('No file.')", SLEEP)
    assert_lost(ended, 1, "it failed: PipelineError: No file. What to do: look at that worker's output first", code=1)
    assert ended[1].code == 1


def test_a_long_exception_is_cut(workers):
    ended = workers.run(SLEEP, "raise ValueError('𝄞' * 100_000)")
    assert_lost(ended, 1, "it failed: ValueError: 𝄞𝄞")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "why"),
    [
        ("sys.exit(3)", 3, "it ended with exit code 3. What"),
        ("sys.exit('No label.')", 1, "it ended with exit code 1: No label. What"),
    ],
)
def test_an_exit_code_is_reported(workers, end, code, why):
    ended = workers.run(SLEEP, end)
    assert_lost(ended, 1, why)
    assert ended[1].code == code


@pytest.mark.parametrize("why", ["it failed: Error: Found two. Give one.", "it failed: KeyboardInterrupt: "])
def test_a_reason_that_ends_in_punctuation_is_followed_by_one_full_stop(why):
    start = Start(("here:1", "there:1"), 0, 1, 60.0)
    for index in range(2):
        assert f"Found: {why.rstrip(' :.')}. " in process._shutdown_message(start, index, ExitStatus(why))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["sys.exit(3)", "raise KeyboardInterrupt"])
def test_the_others_get_time_after_an_end_on_purpose(workers, end):
    ended = workers.run("time.sleep(1); print('saved')", end, LEAVE=40)
    assert ended[0].code == 0, ended
    assert "saved" in ended[0].stdout
    assert ended[1].code != 0


def test_a_survivor_without_stderr_ends_too(workers):
    assert workers.run("os.close(2); time.sleep(300)", f"time.sleep(0.5); {KILL}")[0].code == 75


@pytest.mark.slow
def test_an_exit_code_of_a_thread_does_not_count(workers):
    thread = "import threading; thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()"
    assert [end.code for end in workers.run("time.sleep(2.5)", thread).values()] == [0, 0]


def test_what_was_printed_is_not_lost(workers):
    assert "step 1" in workers.run("print('step 1'); time.sleep(300)", f"time.sleep(0.5); {KILL}")[0].stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_watchdog_that_is_lost_ends_all(workers, number):
    ended = workers.run(SLEEP, f"os.kill(watch._process.pid, signal.{number}); {SLEEP}", SILENT=8)
    assert ended[1].code == 75
    assert "Expected this worker's watchdog" in ended[1].stderr
    assert_lost({0: ended[0]}, 1, "broke off" if number == "SIGKILL" else "silent")


@pytest.mark.slow
def test_the_watchdog_is_deaf_to_signals(workers):
    signals = "[os.kill(watch._process.pid, s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]"
    ended = workers.run(f"{signals}; time.sleep(1)", "time.sleep(1)")
    assert [end.code for end in ended.values()] == [0, 0], ended


@pytest.mark.slow
def test_a_forked_child_neither_says_bye_nor_holds_the_pipe(workers):
    fork = "if os.fork() == 0: sys.exit(5)\nos.wait()\n"
    ended = workers.run(fork + "time.sleep(1)", "time.sleep(1)")
    assert [end.code for end in ended.values()] == [0, 0], ended
    orphan = f"if os.fork() == 0: os.close(1); os.close(2); time.sleep(3); os._exit(0)\n{KILL}"
    assert_lost(workers.run(SLEEP, orphan), 1, "ended without a goodbye")


class TestACommunicationError:
    """TensorFlow may raise it in the survivors before the watchdogs know of a loss."""

    @pytest.mark.slow
    def test_waits_until_the_lost_one_is_known(self, workers):
        fails = COMMUNICATION_ERROR + "time.sleep(0.3); raise UnavailableError('Connection reset by peer')"
        ended = workers.run(fails, "os.kill(os.getpid(), signal.SIGSTOP)", fails, KILL=5)
        assert ended[0].code == ended[2].code == 75, ended
        for index in (0, 2):
            assert "UnavailableError" in ended[index].stderr
            assert "Expected worker 1 (" in ended[index].stderr

    @pytest.mark.slow
    @pytest.mark.parametrize(("asking", "left"), [(0, 1), (1, 2), (1, 0)])
    def test_names_one_that_had_left_and_is_no_reason_to_restart(self, workers, asking, left):
        fails = EPOCH_3 + COMMUNICATION_ERROR + "time.sleep(1); raise UnavailableError('Socket closed')"
        leaves = EPOCH_3 + "progress.step = 1"
        ended = workers.run(*({asking: fails, left: leaves}.get(index, "time.sleep(2)") for index in range(3)))
        assert ended[asking].code == 1, ended
        assert f"Expected worker {left} (" in ended[asking].stderr
        assert "it had ended before, by itself and had come to epoch 3, step 1. What" in ended[asking].stderr
        assert "the same way. This worker had come to epoch 3, step 7. This process ends" in ended[asking].stderr

    @pytest.mark.slow
    def test_a_survivor_that_is_stopped_while_it_asks_is_killed(self, workers):
        stopped = "threading.Timer(1, os.kill, (os.getpid(), signal.SIGSTOP)).start()"
        fails = f"{COMMUNICATION_ERROR}import threading; {stopped}; raise UnavailableError('Connection reset by peer')"
        ended = workers.run(fails, f"time.sleep(2.5); {KILL}", STOPPED=50, KILL=2)
        assert ended[0].code == -9
        assert "Expected worker 1 (" in ended[0].stderr

    @pytest.mark.slow
    def test_of_nobody_else_is_its_own(self, workers):
        fails = COMMUNICATION_ERROR + "raise UnavailableError('of my own making')"
        ended = workers.run(SLEEP, fails, SILENT=8)
        assert ended[1].code == 1
        assert_lost(ended, 1, "UnavailableError: of my own making")


@pytest.mark.parametrize(
    "text",
    first_quick(
        [
            "Collective instance 146 expected type 0 and data_type 1 but got type 2 and data_type 1",
            "Shape mismatch in the collective instance 9. Op at device CPU:0 expected shape [14] but [1]",
            "Collective Op a/b is assigned to group_key 1, but that group has size 2",
        ]
    ),
)
def test_a_mismatched_collective_operation_is_no_reason_to_restart(workers, text):
    fails = EPOCH_3 + COMMUNICATION_ERROR + "time.sleep(1); "  # until the others have come as far
    fails += f"raise UnavailableError('Graph\\nCollective ops is aborted by: {text}\\nIt')"
    ended = workers.run(SLEEP, fails, EPOCH_3 + SLEEP)
    assert_lost(ended, 1, f"Found: it failed at epoch 3, step 7: UnavailableError: {text}. What", code=1)
    assert "This worker had come to epoch 3, step 7." in ended[2].stderr
    assert ended[1].code == 1
    assert f"Found: {text}. What to do: give all workers the same model" in ended[1].stderr
    assert ended[1].stderr.endswith("This worker had come to epoch 3, step 7.\n")


class TestADeadlineForProgress:
    @pytest.mark.slow
    @pytest.mark.parametrize("stuck", first_quick([1, 0]))
    def test_ends_a_worker_whose_python_waits(self, workers, stuck):
        moves = EPOCH_3 + "while True: progress.moves += 1; time.sleep(0.1)"
        ended = workers.run(*(EPOCH_3 + SLEEP if index == stuck else moves for index in range(3)), PROGRESS=4)
        assert_lost(ended, stuck, "s, since epoch 3, step 7, and waits in <module> (<string>:")
        assert ended[stuck].code == 75
        assert f"Expected this worker, worker {stuck} (" in ended[stuck].stderr

    @pytest.mark.slow
    def test_spares_one_that_makes_progress_and_is_off_by_default(self, workers):
        moves = EPOCH_3 + "\nfor _ in range(80): progress.moves += 1; time.sleep(0.1)"
        assert [end.code for end in workers.run(moves, moves, PROGRESS=6).values()] == [0, 0]
        assert [end.code for end in workers.run(EPOCH_3 + "time.sleep(3)", EPOCH_3 + "time.sleep(3)").values()] == [
            0,
            0,
        ]


def test_a_second_call_returns_the_same_watch(workers):
    again = "assert Watch.start(types.SimpleNamespace(workers=tuple(workers), index=index)) is watch"
    assert [end.code for end in workers.run(again, again).values()] == [0, 0]
