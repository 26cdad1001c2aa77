"""The charts and the page of a report, from timelines with known figures."""

import re
from dataclasses import replace

import pytest

from tfopt.callbacks.report.timeline import BoundedList, Event, Series, Timeline
from tfopt.callbacks.report.training_charts import chart
from tfopt.callbacks.report.training_page import Epoch, Record, readings_since, report
from tfopt.causes.between_gpus import Replicas

BUSY = {"gpu_utilization_percent": 97, "input_wait_percent": 2, "sm_active_percent": 80, "tensor_active_percent": 30}
ENVIRONMENT = {
    "tfopt": "0.1",
    "packages": {"tensorflow": "2.21.0", "keras": "3.15.1"},
    "driver": "570.86.15",
    "gpus": [{"name": "NVIDIA H200"}] * 2,
    "host": {"cpu_model": "EPYC"},
}


def timeline(seconds=100, gpus=1, **values):
    """Each quantity at one value a second; of several GPUs each at another: a list."""
    found = Timeline()
    for at in range(seconds):
        for name, value in values.items():
            of_gpu = "gpu" in name or "active" in name or "throttled" in name
            for device in range(gpus) if of_gpu else [None]:
                found.add(name, device, float(at), value[device] if isinstance(value, list) else value)
    return found


def test_what_came_before_the_end_of_the_first_step_does_not_count():
    read = timeline(seconds=20, gpu_utilization_percent=0, input_wait_percent=0)
    for at in range(20, 100):
        read.add("gpu_utilization_percent", 0, float(at), 90.0)
    since = readings_since(read, 19.5)
    assert [gpu.gpu_utilization_percent for gpu in since.gpus] == [90.0]
    assert "busy 90" in report(record(read, first_step_end=19.5))


def test_the_means_of_each_gpu():
    read = timeline(gpus=2, sm_active_percent=[80, 40], throttled_percent=[100, 0], host_cpu_percent=7)
    found = readings_since(read, 0.0)
    assert [(gpu.index, gpu.sm_active_percent, gpu.gpu_utilization_percent) for gpu in found.gpus] == [
        (0, 80.0, None),
        (1, 40.0, None),
    ]
    assert (found.throttled_percent, found.host_cpu_percent, found.input_wait_percent) == (50.0, 7.0, None)


def text_of(markup):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", markup.replace("<wbr>", "")).replace("\u00a0", " "))


def test_what_is_always_zero_is_no_panel():
    idle = timeline(gpus=2, throttled_percent=[0, 0], nvlink_mib_per_second=0, gpu_utilization_percent=0)
    assert re.findall(r'class="quantity"><strong>(.*?)<', chart(idle, seconds=9.0, epoch_ends=[])) == [
        "GPU utilisation"
    ]
    throttled = timeline(gpus=2, throttled_percent=[0, 100])
    assert "Throttled" in chart(throttled, seconds=9.0, epoch_ends=[])


def test_flops_without_a_known_peak_are_a_number_not_a_share():
    unknown = report(record(timeline(model_tflops_per_second=0.25)))
    assert "Model FLOPs of all replicas mean 0.25 TFLOP/s" in text_of(unknown)
    assert "Model FLOPs, peak unknown 0.25 TFLOP/s" in text_of(unknown)
    known = text_of(report(record(timeline(model_tflops_per_second=250.0, mfu_percent=25.3))))
    assert "Model FLOPs utilisation 25.3 %" in known
    assert "TFLOP/s" not in known


def test_energy_is_the_last_value_in_a_unit_that_suits_it():
    read = Timeline()
    for at in range(11):
        read.add("gpu_energy_kwh", None, float(at), at / 100)
    page = text_of(report(record(read)))
    assert "Energy of all GPUs since the first reading 100 Wh" in page
    assert "Energy 100 Wh" in page
    read.add("gpu_energy_kwh", None, 11.0, 2.5)
    page = text_of(report(record(read)))
    assert "Energy of all GPUs since the first reading 2.50 kWh" in page
    assert "Energy 2.50 kWh" in page
    read.add("gpu_energy_kwh", None, 12.0, None)  # a GPU was lost
    assert "Energy 2.50 kWh" not in text_of(report(record(read)))


def test_a_line_for_each_gpu_up_to_four_then_their_median():
    few = chart(timeline(gpus=4, gpu_power_watts=list(range(4))), seconds=100.0, epoch_ends=[])
    assert "GPU 3" in few
    assert "median of" not in few
    assert "lowest to highest" not in few.split("</figcaption>")[1]
    many = chart(timeline(gpus=8, gpu_power_watts=list(range(8))), seconds=100.0, epoch_ends=[])
    assert "The line is the median of 8 GPUs." in many
    assert "lowest to highest" in many
    assert "GPU 7" not in many
    line, shade = re.search(r'class="line only" d="M0 (\d+)', many), re.search(r'class="shade" d="M0 (\d+)L', many)
    assert (int(line[1]), int(shade[1])) == (225, 50)  # 3.5 and 7 of 8 watts


def test_the_median_and_the_range_are_of_the_gpus_that_are_known():
    read = Timeline()
    for at, watts in enumerate([(1, 2, 3, 4, None), (None, 7, None, None, None), (None,) * 5, (8, 0, 4, 4, 4)]):
        for device, value in enumerate(watts):
            read.series["gpu_power_watts"].setdefault(device, Series()).add(float(at), value)
    found = chart(read, seconds=4.0, epoch_ends=[])
    assert 'class="line only" d="M0 275L500 50"' in found, "2.5 and 7 of 8 watts"
    assert 'class="line dots only" d="M1500 200L1500 200"' in found
    assert 'class="shade" d="M0 200L500 50 500 50 0 350zM1500 0L1500 400z"' in found


def test_a_step_that_took_a_hundred_times_as_long_leaves_the_others_readable():
    read = timeline(step_time_ms=40.0)
    read.add("step_time_ms", None, 100.0, 8000.0)
    found = chart(read, seconds=101.0, epoch_ends=[], step_time_ms=40.0)
    assert "median 40.0 ms, highest 8,000 ms, beyond the chart" in text_of(found)
    assert re.search(r'class="line only" d="M0 200L', found)  # half of the panel


def test_many_epochs_are_marked_now_and_then():
    read = timeline(step_time_ms=40.0)
    few = chart(read, seconds=100.0, epoch_ends=[float(at) for at in range(20)])
    assert few.count('<svg class="division"') == 20
    many = chart(read, seconds=100.0, epoch_ends=[at / 10 for at in range(61)])
    assert many.count('<svg class="division"') == 16
    assert "end of every 4th epoch" in many


@pytest.mark.parametrize("kind", ["alert", "compilation", "hardware error"])
def test_events_too_close_to_be_told_apart_are_one_mark(kind):
    read = timeline(step_time_ms=40.0)
    for at in (10.0, 10.1, 50.0):
        read.events[kind].add(Event(at, "x"))
    mark = {"alert": "alarm", "compilation": "note", "hardware error": "alarm"}[kind]
    places = re.findall(rf'<svg class="{mark}" x="([\d.]+)%', chart(read, seconds=100.0, epoch_ends=[]))
    assert places == ["10.00", "50.00"]
    for at in range(500):
        read.events[kind].add(Event(50 + at / 10, "x"))
    assert chart(read, seconds=100.0, epoch_ends=[]).count(f'<svg class="{mark}"') == 31


def record(read, epochs=3, ended=True, first_step_end=1.0, **logs):
    kept = BoundedList(1000)
    for number in range(epochs):
        end = number * 10.0 + 10
        kept.add(Epoch(number=number + 1, begin=number * 10.0, end=end, logs={"loss": 1.5, **logs}))
    fields = {
        "seconds": 90.0,
        "written": "2026-11-21 20:10 UTC",
        "first_step_end": first_step_end,
        "environment": ENVIRONMENT,
    }
    return Record(name="resnet50", ended=ended, timeline=read, learning=Timeline(), epochs=kept, **fields)


def test_the_page_holds_it_all():
    read = timeline(**BUSY)
    read.events["compilation"].add(Event(3.0, "one_step_on_data: 2 s, the first"))
    read.events["alert"].add(Event(7.0, "Expected <b>"))
    page = text_of(report(record(read)))
    assert "Training of resnet50 The GPU was busy 97 %" in page
    assert "3 epochs in 1 min 30 s. 1 alert, 1 compilation." in page
    assert "2 × NVIDIA H200, driver 570.86.15, TensorFlow 2.21.0, Keras 3.15.1." in page
    assert "3.0 s compilation one_step_on_data: 2 s, the first 7.0 s alert Expected &lt;b&gt;" in page
    assert "Epoch Took loss 1 10 s 1.5" in page
    assert "packages.keras 3.15.1" in page
    assert "had not ended" not in page
    assert "had not ended when this page was written." in text_of(report(record(read, ended=False)))
    hung = text_of(report(replace(record(read, ended=False), idle_seconds=8.0)))
    assert "had not ended when this page was written, 8.0 s after its last step." in hung


def test_the_lead_says_how_it_was_trained():
    setup = ("AdamW", "mixed_bfloat16", "XLA on", "8 replicas")
    whole = text_of(report(replace(record(timeline(**BUSY)), setup=setup, batch_size=1024.0)))
    assert "Keras 3.15.1, AdamW, batch size 1,024, mixed_bfloat16, XLA on, 8 replicas." in whole
    plain = record(timeline(**BUSY))
    host = replace(plain, setup=("SGD",), batch_size=0.0, environment={"host": {"cpu_model": "EPYC"}})
    assert "EPYC, no GPU, TensorFlow None, Keras None, SGD." in text_of(report(host))


def test_a_table_of_each_gpu_shows_the_one_that_differs():
    read = timeline(gpus=8, gpu_utilization_percent=99, sm_active_percent=[45] * 5 + [80] + [45] * 2, mfu_percent=9)
    page = text_of(report(record(read))).split("Mean of each GPU")[1]
    assert "Quantity Unit GPU 0 GPU 1 GPU 2 GPU 3 GPU 4 GPU 5 GPU 6 GPU 7" in page
    assert "Multiprocessors % 45.0 45.0 45.0 45.0 45.0 80.0 45.0 45.0 " in page
    assert "Mean of each GPU" not in report(record(timeline(**BUSY))), "of one it says nothing"


def test_a_gpu_that_the_others_wait_for_has_its_own_line():
    clocks = [1980.0] * 5 + [1410.0] + [1980.0] * 2
    read = timeline(gpus=8, gpu_utilization_percent=99, gpu_power_watts=600, step_time_ms=38.0)
    for device, clock in enumerate(clocks):
        for at in range(100):
            read.add("sm_clock_mhz", device, float(at), clock)
    training = record(read)
    slow = report(replace(training, replicas=Replicas(8, 8, "MirroredStrategy")))
    assert "the other GPUs wait for GPU:5" in slow
    assert slow.count(">GPU 5</text>") == 2
    assert slow.count(">median</text>") == 2, "in the panels of GPUs only"
    assert ">GPU 5</text>" not in report(training), "without a strategy nobody waits"


def test_gpus_that_no_replica_uses_are_left_out():
    read = timeline(gpus=8, gpu_utilization_percent=[97] + [0] * 7, gpu_power_watts=[600] + [80] * 7)
    page = text_of(report(replace(record(read), replicas=Replicas(1, 1, None))))
    assert "Without GPU:1 to GPU:7, which no replica uses." in page
    assert "GPU busy 97.0 %" in page
    assert "mean 600 W" in page
    assert "median of" not in page


def test_the_key_figures_leave_out_the_first_step():
    early = timeline(seconds=1, mfu_percent=1.0, step_time_ms=9000.0)
    early.add("mfu_percent", None, 50.0, 40.0)
    early.add("step_time_ms", None, 50.0, 38.4)
    page = report(replace(record(early), step_time_ms=38.4))
    found = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?) <small>", page))
    assert "mean 40.0 %" in text_of(page), "as on the charts"
    assert "median 38.4 ms" in text_of(page)
    assert found == {"Median step": "38.4", "Model FLOPs utilisation": "40.0"}


def test_many_events_unfold():
    read = timeline(**BUSY)
    for at in range(41):
        read.events["alert"].add(Event(float(at), "x"))
    assert "<summary>41 events</summary>" in report(record(read))


def test_log_keys_that_are_no_texts():
    training = record(timeline(), epochs=0)
    training.epochs.add(Epoch(number=1, begin=0.0, end=10.0, logs={7: 1.5, ("a", 1): 2.5}))
    assert "Epoch Took 7 (&#39;a&#39;, 1) 1 10 s 1.5 2.5" in text_of(report(training))


def test_keys_with_units_unfold():
    page = report(record(timeline(), gpu_power_watts=612.5, step_time_ms=38.2, examples_per_second=53_000.4))
    shown, folded = page.replace("<wbr>", "").split("All logged keys", 1)
    assert "step_time_ms" in shown
    assert "53,000" in shown
    assert "gpu_power_watts" not in shown
    assert "612.5" in folded


def test_the_table_fits_a_screen_and_the_rest_unfolds():
    metrics = {f"{prefix}metric{number}": 0.5 for number in range(30) for prefix in ("", "val_")}
    training = record(timeline(), step_time_ms=38.2, examples_per_second=53_000.4, val_loss=1.7, **metrics)
    heads = [re.sub("<[^>]*>", "", head) for head in re.findall(r"<thead>(.*?)</thead>", report(training), re.DOTALL)]
    shown, folded = (head.split() for head in heads if "loss" in head)
    pairs = ["loss", "val_loss", "metric0", "val_metric0", "metric1", "val_metric1"]
    assert shown == ["Epoch", "Took", *pairs, "step_time_ms", "examples_per_second"]
    assert len(folded) == 2 + 2 + 60 + 2
    assert "22 more metrics: see the table of all logged keys below." in text_of(report(training))


def test_a_loss_that_is_no_number_comes_first():
    training = record(timeline(**BUSY), epochs=7)
    for number in (8, 9):
        training.epochs.add(Epoch(number=number, begin=70.0, end=80.0, logs={"loss": float("nan")}))
    page = text_of(report(training))
    assert "Training of resnet50 The loss has not been a number since epoch 8. The GPU was busy" in page


def test_of_many_epochs_some_are_shown_with_the_last():
    page = report(record(timeline(), epochs=500))
    rows = re.findall(r'<th scope="row" class="r">(\d+)</th>', page.split("All logged keys")[0])
    assert len(rows) == 20
    assert (rows[0], rows[-1]) == ("1", "500")
    assert "20 of 500, evenly over the training." in page


def test_a_training_that_ended_at_once():
    page = text_of(report(record(Timeline(), epochs=0)))
    assert "Nothing was read: the training ended before the first sample." in page
    assert "Epochs No epoch has ended." in page
    assert "0 epochs in" in page
