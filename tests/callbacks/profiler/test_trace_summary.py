import json
import sys
import time
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from quick import first_quick
from traces import batches, tiny_model, write_gpu_trace, write_host_trace

from tfopt.callbacks.profiler import trace as trace_module
from tfopt.callbacks.profiler.trace_summary import summarize_trace
from tfopt.callbacks.step_profiler import StepProfiler
from tfopt.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:.*ran out of data")

STEP_COLUMNS = [
    *("stepnum", "deviceComputeTimeMs", "deviceToDeviceTimeMs", "deviceCollectivesTimeMs", "hostComputeTimeMs"),
    *("kernelLaunchTimeMs", "infeedTimeMs", "outfeedTimeMs", "compileTimeMs", "otherTimeMs", "tooltip", "stepTimeMs"),
]
OPERATION_COLUMNS = ["rank", "host_or_device", "type", "operation", "occurrences", "total_time", "total_self_time"]
STEPS = [
    ("train 3", 6.0, 0.0, 1.0, 0.5, 0.5, 1.0, 0.0, 0.0, 1.0, "", 10.0),
    ("train 4", 10.0, 0.0, 1.0, 1.5, 1.5, 11.0, 0.0, 0.0, 5.0, "", 30.0),
]
OPERATIONS = [
    (1, "Host", "IDLE", "IDLE", 0, 90.0, 90.0),
    (2, "Host", "Dataset", "Iterator::Root", 4, 9.0, 8.0),
    (3, "Device", "IDLE", "IDLE", 0, 90.0, 90.0),
    (4, "Device", "MatMul", "dense/MatMul", 2, 3000.0, 3000.0),
    (5, "Device", "Conv2D", "conv/Conv2D", 2, 8000.0, 5000.0),
]


def table(columns, rows, **properties):
    """A table as XProf's tools give it."""
    cells = [{"c": [{"v": value} for value in row]} for row in rows]
    return {"cols": [{"id": column} for column in columns], "rows": cells, "p": properties}


@pytest.fixture
def folder(tmp_path):
    write_host_trace(tmp_path / "host.xplane.pb", [(3, 0, 10_000, 1000), (4, 11_000, 30_000, 11_000)])
    return tmp_path


@pytest.fixture
def recorded(monkeypatch):
    """XProf, which gives recorded tables."""

    def give(steps=STEPS, operations=OPERATIONS, columns=STEP_COLUMNS, hardware="GPU"):
        tools = {
            "input_pipeline_analyzer": [table([], []), table(columns, steps, hardware_type=hardware)],
            "framework_op_stats": [table(OPERATION_COLUMNS, operations), table(OPERATION_COLUMNS, [])],
        }
        replace(monkeypatch, lambda paths, tool, options: (json.dumps(tools[tool]).encode(), "application/json"))

    return give


def replace(monkeypatch, tool_data):
    module = SimpleNamespace(xspace_to_tool_data=tool_data)
    monkeypatch.setitem(sys.modules, "xprof.convert.raw_to_tool_data", module)


def test_shares_are_of_the_time_of_all_steps(folder, recorded):
    recorded()
    summary = summarize_trace(folder)
    assert (summary.hardware, summary.steps, summary.step_time_ms) == ("GPU", 2, 20.0)
    assert (summary.input_percent, summary.output_percent) == (30.0, 0.0)
    assert (summary.host_compute_percent, summary.kernel_launch_percent) == (5.0, 5.0)
    assert (summary.device_compute_percent, summary.device_collectives_percent) == (40.0, 5.0)
    assert (summary.device_to_device_percent, summary.compilation_percent) == (0.0, 0.0)
    assert summary.other_percent == 15.0


def test_a_step_of_an_execution_is_counted_by_itself(folder, recorded):
    recorded()
    summary = summarize_trace(folder, steps_per_execution=4)
    assert (summary.steps, summary.step_time_ms, summary.input_percent) == (8, 5.0, 30.0)


# A step of 10 ms, during which XProf sees the host compute but for 1 ms.
ONE_STEP = [("train 3", 0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 1.0, "", 10.0)]


def test_waiting_for_a_batch_in_another_thread_is_input(folder, recorded):
    recorded(steps=ONE_STEP, hardware="CPU_ONLY")
    write_host_trace(folder / "host.xplane.pb", [(3, 0, 10_000, 5000), (4, 10_000, 10_000, 9000)])
    summary = summarize_trace(folder)
    assert (summary.input_percent, summary.host_compute_percent, summary.other_percent) == (50.0, 40.0, 10.0)
    assert summary.step_time_ms == 10.0


def test_a_thread_that_prefetches_to_the_device_may_wait(folder, recorded):
    recorded(steps=ONE_STEP, hardware="CPU_ONLY")
    write_host_trace(folder / "host.xplane.pb", [(3, 0, 10_000, 500)], elsewhere=[(0, 9000), (9500, 100)])
    summary = summarize_trace(folder)
    assert (summary.input_percent, summary.host_compute_percent, summary.other_percent) == (5.0, 85.0, 10.0)


def test_waiting_while_the_device_works_costs_nothing(folder, recorded):
    recorded(steps=[("train 3", 4.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0, 1.0, "", 10.0)])
    write_host_trace(folder / "host.xplane.pb", [(3, 0, 10_000, 6000)], kernels=[(0, 3000), (1000, 1000), (8000, 1000)])
    summary = summarize_trace(folder)
    assert (summary.input_percent, summary.device_compute_percent) == (30.0, 40.0)
    assert (summary.host_compute_percent, summary.other_percent) == (20.0, 10.0)


def test_steps_that_xprof_takes_from_the_device_lack_the_waiting_before_them(folder, recorded):
    recorded(steps=[("train 3", 8.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, "", 8.5)])
    write_host_trace(folder / "host.xplane.pb", [(3, 0, 20_000, 9000)], kernels=[(9300, 6000), (15_800, 2000)])
    summary = summarize_trace(folder)
    assert (summary.step_time_ms, summary.input_percent, summary.device_compute_percent) == (20.0, 45.0, 40.0)
    assert (summary.host_compute_percent, summary.other_percent) == (0.0, 15.0)


@pytest.mark.parametrize("marks", [[], [(3, 0, 10_000, 0)], [(4, 0, 10_000, 1000)]])
def test_where_the_trace_shows_no_waiting_input_is_unknown(folder, recorded, marks):
    recorded(steps=ONE_STEP, hardware="CPU_ONLY")
    write_host_trace(folder / "host.xplane.pb", marks)
    summary = summarize_trace(folder)
    assert (summary.input_percent, summary.host_compute_percent, summary.other_percent) == (None, 90.0, 10.0)


def test_the_operations_are_the_devices(folder, recorded):
    recorded()
    conv, product = summarize_trace(folder).operations
    assert (conv.name, conv.kind, conv.place, conv.calls) == ("conv/Conv2D", "Conv2D", "Device", 2)
    assert (conv.time_ms, conv.percent) == (5.0, 62.5)
    assert (product.time_ms, product.percent) == (3.0, 37.5)


def test_without_a_device_its_shares_are_unknown_and_the_operations_the_hosts(folder, recorded):
    recorded(hardware="CPU_ONLY", operations=[row for row in OPERATIONS if row[1] == "Host"])
    summary = summarize_trace(folder)
    assert (summary.device_compute_percent, summary.kernel_launch_percent) == (None, None)
    assert (summary.device_to_device_percent, summary.device_collectives_percent) == (None, None)
    assert [(operation.name, operation.percent) for operation in summary.operations] == [("Iterator::Root", 100.0)]


def test_ten_operations_at_most(folder, recorded):
    recorded(operations=[(rank, "Host", "Mul", f"mul_{rank}", 1, 1.0 + rank, 1.0 + rank) for rank in range(12)])
    operations = summarize_trace(folder).operations
    assert [operation.name for operation in operations] == [f"mul_{rank}" for rank in range(11, 1, -1)]
    assert sum(operation.percent for operation in operations) == pytest.approx(100 * 75 / 78)


def test_a_trace_without_marked_steps(folder, recorded):
    recorded(steps=[], operations=[])
    summary = summarize_trace(folder)
    assert (summary.steps, summary.step_time_ms, summary.input_percent, summary.operations) == (0, None, None, ())
    assert str(summary) == f"0 steps that XProf can read (GPU), in {folder}"


def test_a_share_that_this_xprof_does_not_have_is_unknown(folder, recorded):
    recorded(columns=["other" if column == "infeedTimeMs" else column for column in STEP_COLUMNS])
    assert summarize_trace(folder).input_percent is None


def test_it_reads_well(folder, recorded):
    recorded()
    assert str(summarize_trace(folder)) == (
        f"2 steps of 20 ms on average (GPU), in {folder}\n"
        "  input               30.0 %\n"
        "  output               0.0 %\n"
        "  host compute         5.0 %\n"
        "  kernel launch        5.0 %\n"
        "  device compute      40.0 %\n"
        "  device to device     0.0 %\n"
        "  device collectives   5.0 %\n"
        "  compilation          0.0 %\n"
        "  other               15.0 %\n"
        "\n"
        "Operations of the device that take the most time:\n"
        "  operation     type    calls     ms   share\n"
        "  conv/Conv2D   Conv2D      2  5.000  62.5 %\n"
        "  dense/MatMul  MatMul      2  3.000  37.5 %"
    )


def test_without_xprof_it_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "xprof.convert.raw_to_tool_data", None)
    with pytest.raises(UnsupportedError, match=r"Expected the package xprof.* pip install 'tfopt\[profile\]'"):
        summarize_trace(folder)


@pytest.mark.parametrize("text", [None, b"", b"{", RuntimeError("Error parsing message")])
def test_whatever_xprof_makes_of_a_trace_it_is_named(folder, monkeypatch, text):
    def tool_data(paths, tool, options):
        if isinstance(text, Exception):
            raise text
        return text, "application/json"

    replace(monkeypatch, tool_data)
    with pytest.raises(
        UnsupportedError,
        match=r"that XProf can read in .*\. Found that its tool .* Record it again",
    ):
        summarize_trace(folder)


@pytest.mark.parametrize("share", [0, 0.5])
def test_a_trace_that_a_full_disk_cut_off(tmp_path, share):
    pytest.importorskip("xprof")
    path = tmp_path / "host.xplane.pb"
    write_gpu_trace(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UnsupportedError, match=r"Expected a trace .* it is incomplete, as after a full disk"):
        summarize_trace(tmp_path)


@pytest.mark.parametrize("name", ["", "none"])
def test_a_folder_without_a_trace(tmp_path, name):
    with pytest.raises(ValueError, match=r"Expected a folder with a trace .* Received: .* Name the folder of one"):
        summarize_trace(tmp_path / name)


@pytest.mark.parametrize(("steps", "counted"), first_quick([(5, 5), (1, 1), (6, 4), (8, 6)]))
def test_xprof_reads_the_steps(tmp_path, steps, counted):
    """Of six and more it leaves out the first and the last."""
    pytest.importorskip("xprof")
    profiler = StepProfiler(tmp_path, start_step=2, steps=steps)
    tiny_model().fit(batches(12), verbose=0, shuffle=False, callbacks=[profiler])
    summary = profiler.summary()
    shares = [value for name, value in summary.to_dict().items() if name.endswith("_percent") and value is not None]
    assert (summary.steps, summary.hardware) == (
        counted,
        "CPU_ONLY" if not tf.config.list_physical_devices("GPU") else "GPU",
    )
    assert sum(shares) == pytest.approx(100, abs=1)
    assert len(summary.operations) == 10


def sleeping(seconds, waits=None):
    """Batches for `tiny_model` that each take some time, in turn with the steps; `waits` gets the seconds they took."""

    def sleep(example):
        began = time.perf_counter()
        time.sleep(seconds)
        if waits is not None:
            waits.append(time.perf_counter() - began)
        return example

    def slow(x, y):
        return tf.ensure_shape(tf.numpy_function(sleep, [x], tf.float32), x.shape), y

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return batches(14).map(slow).with_options(options)


class SlowSteps(keras.callbacks.Callback):
    """Takes some time in each step, and measures the steps."""

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds
        self.steps = []

    def on_train_batch_begin(self, batch, logs=None):
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self._seconds)
        self.steps.append(time.perf_counter() - self._began)


@pytest.mark.parametrize("executed", first_quick([{}, {"run_eagerly": True}, {"jit_compile": True}]))
def test_the_share_of_waiting_for_a_dataset_that_sleeps(tmp_path, executed):
    pytest.importorskip("xprof")
    waits, steps = [], SlowSteps(0.02)
    profiler = StepProfiler(tmp_path, start_step=3, steps=10)
    tiny_model(**executed).fit(sleeping(0.03, waits), verbose=0, shuffle=False, callbacks=[steps, profiler])
    summary = profiler.summary()
    true = 100 * sum(waits[4:12]) / sum(steps.steps[4:12])
    assert summary.input_percent == pytest.approx(true, abs=20)  # where the machine is busy, sleeps are longer
    assert sum(value for name, value in summary.to_dict().items() if name.endswith("percent") and value) == (
        pytest.approx(100, abs=1)
    )


@pytest.mark.slow
def test_batches_that_the_steps_of_one_execution_take_meanwhile_are_no_waiting(tmp_path):
    pytest.importorskip("xprof")
    profiler = StepProfiler(tmp_path, start_step=2, steps=8)
    tiny_model(steps_per_execution=2).fit(sleeping(0.01), verbose=0, shuffle=False, callbacks=[profiler])
    assert profiler.summary().input_percent is None


def test_xprof_reads_a_gpu(tmp_path):
    """From a made-up trace: it shows that the columns are those looked for, not what a real one holds."""
    pytest.importorskip("xprof")
    write_gpu_trace(tmp_path / "host.xplane.pb")
    summary = summarize_trace(tmp_path)
    assert (summary.hardware, summary.steps, summary.step_time_ms) == ("GPU", 4, 8.5)
    assert summary.device_compute_percent == pytest.approx(100 * 8 / 8.5)
    assert summary.kernel_launch_percent == 0.0
    operations = [(operation.name, operation.kind, operation.calls) for operation in summary.operations]
    assert operations == [("dense/MatMul", "MatMul", 4), ("conv/Conv2D", "Conv2D", 4)]
    assert summary.operations[0].percent == pytest.approx(75)


def looping():
    """A model whose step holds a loop."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Reshape((4, 1)), keras.layers.LSTM(1, use_cudnn=False)])
    model.compile("sgd", "mse", jit_compile=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [looping, lambda: tiny_model(steps_per_execution=2, jit_compile=False)])
def test_xprof_reads_the_steps_where_these_hold_loops(tmp_path, make, monkeypatch):
    pytest.importorskip("xprof")
    model = make()

    def steps(name):
        profiler = StepProfiler(tmp_path / name, start_step=2, steps=4)
        model.fit(batches(12), verbose=0, shuffle=False, callbacks=[profiler])
        return profiler.summary().steps

    assert steps("ours") == 4
    # As TensorFlow wrote it.
    monkeypatch.setattr(trace_module, "_hide_loops", lambda path: None)
    assert steps("stock") == 0
