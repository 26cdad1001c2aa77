import atexit
import functools
import gc
import json
import logging
import multiprocessing
import sys
import threading
from types import ModuleType

import keras
import pytest
import tensorflow as tf
from quick import first_quick
from traces import batches, marked_steps, tiny_model

from tfopt.callbacks import step_profiler
from tfopt.callbacks.profiler import trace as trace_module
from tfopt.callbacks.step_profiler import StepProfiler
from tfopt.internals.runtime import is_profiling
from tfopt.warn import forget_warnings

pytestmark = pytest.mark.filterwarnings("ignore:.*ran out of data")


@pytest.fixture(autouse=True)
def _left_as_found():
    forget_warnings()
    trace_module._nvtx.cache_clear()
    yield
    gc.collect()
    trace_module._nvtx.cache_clear()
    assert not is_profiling()
    assert not trace_module.is_writing()


@pytest.fixture
def warned(caplog):
    """The warnings that were logged so far."""
    caplog.set_level(logging.WARNING, "tfopt")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "tfopt"]


@functools.cache
def shared_model():
    return tiny_model()


def fit(*callbacks, model=None, steps=8, **arguments):
    (model or shared_model()).fit(batches(steps), verbose=0, shuffle=False, callbacks=list(callbacks), **arguments)


def after_step(number, action):
    """A callback that does something when a step has ended."""
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: action() if step == number else None)


def fail():
    raise RuntimeError("on purpose")


@pytest.fixture
def recordings(monkeypatch):
    """Stand-ins for recordings, which have only a folder."""
    made = []

    class Recorded:
        def __init__(self, log_dir, written):
            made.append(self)
            self._written = lambda: written.append(log_dir / str(made.index(self)))

        def end(self):
            pass

        give_up = end

        def finish(self, seconds):
            self._written()
            return True

    monkeypatch.setattr(step_profiler, "start_trace", Recorded)
    return made


def test_the_chosen_steps_are_traced_across_epochs(tmp_path, warned):
    profiler = StepProfiler(tmp_path / "logs", start_step=3, steps=2)
    fit(profiler, steps=4, epochs=2)
    (folder,) = profiler.traces
    assert folder.parent == tmp_path / "logs" / "plugins" / "profile"
    assert marked_steps(folder) == [3, 4]
    assert warned() == []


def test_by_default_ten_steps_run_before_ten_that_are_traced(tmp_path):
    profiler = StepProfiler(tmp_path)
    fit(profiler, steps=24)
    assert marked_steps(profiler.traces[0]) == [*range(10, 20)]


@pytest.mark.parametrize(
    ("start", "steps", "marks"), first_quick([(5, 6, [4, 8]), (4, 1, [4]), (0, 5, [0, 4]), (11, 1, [8])])
)
def test_whole_executions_are_traced(tmp_path, start, steps, marks):
    profiler = StepProfiler(tmp_path, start, steps)
    fit(profiler, model=tiny_model(steps_per_execution=4), steps=12)
    assert marked_steps(profiler.traces[0]) == marks


def test_a_request_from_another_thread_begins_a_trace(tmp_path, warned):
    profiler = StepProfiler(tmp_path, None, steps=2)

    def alert():
        thread = threading.Thread(target=profiler.request, args=("an alert",))
        thread.start()
        thread.join()

    fit(profiler, after_step(2, alert))
    assert marked_steps(profiler.traces[0]) == [3, 4]
    assert warned() == []


def test_a_request_before_fit_begins_with_the_first_step(tmp_path):
    profiler = StepProfiler(tmp_path, None, steps=1)
    profiler.request()
    fit(profiler)
    assert marked_steps(profiler.traces[0]) == [0]
    fit(profiler)
    assert profiler.traces == []


def test_a_trace_begins_after_a_time(tmp_path, set_clock):
    now = [50.0]
    set_clock(lambda: now[0], StepProfiler)
    profiler = StepProfiler(tmp_path, None, steps=1, start_after_seconds=10)
    fit(after_step(3, lambda: now.__setitem__(0, 59.9)), after_step(5, lambda: now.__setitem__(0, 60.0)), profiler)
    assert marked_steps(profiler.traces[0]) == [6]


def test_each_cause_begins_a_trace_of_its_own(tmp_path, recordings):
    profiler = StepProfiler(tmp_path, start_step=4, steps=2)
    fit(profiler, after_step(0, profiler.request), after_step(6, profiler.request), steps=12)
    assert [path.name for path in profiler.traces] == ["0", "1", "2"]


def test_traces_of_one_second_have_a_folder_each(tmp_path):
    path, seen = tmp_path / "2026_05_04_13_22_10" / "host.xplane.pb", []
    for _ in range(3):
        seen.append(trace_module._free(path))
        seen[-1].parent.mkdir()
        seen[-1].touch()
    assert [free.parent.name for free in seen] == [f"2026_05_04_13_22_10{number}" for number in ("", "-2", "-3")]
    assert trace_module._free(path.with_name("another.xplane.pb")).parent == path.parent


def test_causes_that_meet_begin_one_trace(tmp_path, recordings):
    profiler = StepProfiler(tmp_path, start_step=4, steps=2, start_after_seconds=0)
    fit(profiler, after_step(3, profiler.request))
    # After 0 s at step 0; the step's and the request's together.
    assert len(recordings) == 2


def test_a_trace_waits_while_another_is_written(tmp_path, recordings, monkeypatch):
    asked = []
    monkeypatch.setattr(step_profiler, "is_writing", lambda: asked.append(0) or len(asked) < 4)
    profiler = StepProfiler(tmp_path, start_step=2, steps=1)
    seen = []
    monkeypatch.setattr(step_profiler, "StepMark", lambda step: seen.append(step))
    fit(profiler)
    assert (len(asked), seen[0]) == (4, 5)


@pytest.fixture
def disk(monkeypatch):
    """A disk that hangs until it is told to go on."""
    free, goes_on = trace_module._free, threading.Event()
    monkeypatch.setattr(trace_module, "_free", lambda path: goes_on.wait(60) and free(path))
    return goes_on


def test_no_fit_waits_for_a_disk_that_hangs(tmp_path, disk, monkeypatch, warned):
    monkeypatch.setattr(step_profiler, "PATIENCE_SECONDS", 0.01)
    profiler, other = StepProfiler(tmp_path, start_step=2, steps=2), StepProfiler(tmp_path, start_step=2, steps=2)
    fit(profiler)
    late = profiler.traces
    assert late == []
    (text,) = warned()
    assert f"Expected to write a trace to {tmp_path} within 0.01 s. Found it unfinished." in text
    fit(other)  # which traces nothing meanwhile
    fit(profiler)
    tf.profiler.experimental.start(str(tmp_path / "theirs"))
    tf.profiler.experimental.stop(save=False)
    (unwritten,) = [trace for trace in trace_module._traces if trace.is_being_written]
    disk.set()
    assert unwritten.finish()
    assert marked_steps(late[0]) == [2, 3]
    assert (profiler.traces, other.traces) == ([], [])


def test_the_summary_waits_for_a_slow_disk(tmp_path, disk, monkeypatch, warned):
    monkeypatch.setattr(step_profiler, "PATIENCE_SECONDS", 0.01)
    pytest.importorskip("xprof")
    profiler = StepProfiler(tmp_path, start_step=2, steps=2)
    fit(profiler)
    threading.Timer(0.1, disk.set).start()
    assert profiler.summary().folder == str(profiler.traces[0])


def test_it_waits_once_and_then_nothing_more_is_recorded(tmp_path, monkeypatch):
    waits, recorded = [], []
    monkeypatch.setattr(step_profiler, "wait", lambda: waits.append(is_profiling()))
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: recorded.append(is_profiling()))
    fit(StepProfiler(tmp_path, start_step=2, steps=3), look)
    assert waits == [True]
    assert recorded == [False, False, True, True, False, False, False, False]


def test_fit_does_not_wait_for_the_writing_before_its_end(tmp_path, disk):
    profiler = StepProfiler(tmp_path, start_step=0, steps=1)
    fit(profiler, after_step(7, disk.set))
    assert marked_steps(profiler.traces[0]) == [0]


def test_a_trace_that_fit_is_too_short_for_is_kept(tmp_path):
    profiler = StepProfiler(tmp_path, start_step=6, steps=10)
    fit(profiler)
    assert marked_steps(profiler.traces[0]) == [6, 7]


def test_a_trace_that_never_began_is_warned_of(tmp_path, warned):
    profiler = StepProfiler(tmp_path / "logs", start_step=20, start_after_seconds=3600)
    fit(profiler)
    (text,) = warned()
    assert "Expected to begin a trace at step 20 and after 3600 s of fit. Found that it ended after 8 steps" in text
    assert profiler.traces == []
    assert profiler.summary() is None
    assert not (tmp_path / "logs").exists()


def test_where_another_profiler_runs_it_gives_up_with_one_warning(tmp_path, warned):
    tf.profiler.experimental.start(str(tmp_path / "theirs"))
    try:
        fit(StepProfiler(tmp_path / "one", start_step=2))
        fit(StepProfiler(tmp_path / "two", start_step=3, start_after_seconds=0))
        assert is_profiling()
    finally:
        tf.profiler.experimental.stop()
    (text,) = warned()
    assert "Found: Another profiler is running. The training goes on without the trace. Only one profiler can" in text
    assert [*tmp_path.iterdir()] == [tmp_path / "theirs"]


def test_a_trace_that_somebody_else_ends_is_survived(tmp_path, warned):
    profiler = StepProfiler(tmp_path, start_step=2, steps=4)
    fit(after_step(3, lambda: tf.profiler.experimental.stop(save=False)), profiler)
    assert "No profiler is running" in warned()[0]
    assert profiler.traces == []


def test_a_disk_that_vanishes_is_survived(tmp_path, warned):
    folder = tmp_path / "logs"
    profiler = StepProfiler(folder, start_step=2, steps=3)
    fit(profiler, after_step(3, lambda: folder.write_text("in its place")))
    (text,) = warned()
    assert f"Expected to write a trace to {folder}. Found: " in text
    assert "Free the disk or choose another log_dir." in text
    assert profiler.summary() is None
    folder.unlink()
    fit(profiler)
    assert marked_steps(profiler.traces[0]) == [2, 3, 4]


def test_a_full_disk_leaves_no_part_of_a_trace(tmp_path, monkeypatch, warned):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_module, "_hide_loops", full)
    profiler = StepProfiler(tmp_path, start_step=2, steps=3)
    fit(profiler)
    assert "No space left on device" in warned()[0]
    assert profiler.traces == []
    assert [*tmp_path.rglob("*.*")] == []


def test_a_device_that_fails_is_for_fit_to_tell(tmp_path, warned, monkeypatch):
    monkeypatch.setattr(step_profiler, "wait", fail)
    profiler = StepProfiler(tmp_path, start_step=2, steps=1)
    fit(profiler)
    assert "Expected to wait for the traced steps. Found: on purpose." in warned()[0]
    assert marked_steps(profiler.traces[0]) == [2]


def test_an_exception_ends_the_trace(tmp_path):
    profiler = StepProfiler(tmp_path, start_step=2, steps=4)
    with pytest.raises(RuntimeError) as caught:
        fit(profiler, after_step(3, fail))
    # The traceback, which a notebook keeps, holds on to all that fit has made.
    assert caught.tb is not None
    recorded = []
    fit(profiler, after_step(0, lambda: recorded.append(is_profiling())), steps=4)
    assert recorded == [False]
    assert [marked_steps(folder) for folder in profiler.traces] == [[2, 3]]
    assert not is_profiling()


def test_at_exit_a_trace_that_still_runs_is_written(tmp_path, monkeypatch):
    registered = []
    monkeypatch.setattr(atexit, "register", registered.append)
    written = []
    trace_module.Trace(tmp_path, written)
    registered[0]()
    assert written[0].is_dir()


@pytest.mark.slow
def test_a_fork_in_the_middle_of_a_trace(tmp_path):
    profiler = StepProfiler(tmp_path, start_step=2, steps=3)
    codes = []

    def fork():
        child = multiprocessing.get_context("fork").Process(target=lambda: (profiler._collect(), gc.collect()))
        child.start()
        child.join(20)
        codes.append(child.exitcode)
        child.kill()

    fit(profiler, after_step(3, fork))
    assert codes == [0]
    assert marked_steps(profiler.traces[0]) == [2, 3, 4]


class Nvtx(ModuleType):
    """Stands in for the package nvtx."""

    def __init__(self):
        super().__init__("nvtx")
        self.calls = []

    def start_range(self, message):
        self.calls.append(("start", message))
        return message

    def end_range(self, begun):
        self.calls.append(("end", begun))


def test_with_nvtx_each_traced_step_is_a_range(tmp_path, monkeypatch):
    nvtx = Nvtx()
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    fit(StepProfiler(tmp_path, start_step=3, steps=2))
    steps = ["train step 3", "train step 4"]
    assert nvtx.calls == [(what, step) for step in steps for what in ("start", "end")]


def test_the_summary_is_written_beside_the_trace(tmp_path, warned):
    pytest.importorskip("xprof")
    profiler = StepProfiler(tmp_path, start_step=4, steps=8)
    fit(profiler, model=tiny_model(steps_per_execution=2), steps=16)
    summary = profiler.summary()
    assert json.loads((profiler.traces[0] / "summary.json").read_text()) == summary.to_dict()
    assert (summary.steps, summary.folder) == (8, str(profiler.traces[0]))
    assert 0 < summary.step_time_ms < 1000


def test_a_summary_that_cannot_be_written_is_handed_out_all_the_same(tmp_path, warned, monkeypatch):
    pytest.importorskip("xprof")
    profiler = StepProfiler(tmp_path, start_step=4, steps=2)
    fit(profiler)

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step_profiler, "write_atomic", full)
    assert profiler.summary().steps == 2
    assert "No space left on device" in warned()[0]
