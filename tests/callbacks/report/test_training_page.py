"""The charts and the page of a report, from timelines with known figures."""

import re
from dataclasses import replace

import pytest

from tfopt.callbacks.report.timeline import BoundedList, Event, Timeline
from tfopt.callbacks.report.training_charts import QUANTITIES, chart
from tfopt.callbacks.report.training_page import Epoch, Record, readings_since, report

BUSY = {"gpu_utilization_percent": 97, "input_wait_percent": 2, "sm_active_percent": 80, "tensor_active_percent": 30}
ENVIRONMENT = {
    "tfopt": "0.1",
    "packages": {"tensorflow": "2.21.0", "keras": "3.15.1"},
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
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", markup).replace("\u00a0", " "))


def test_a_panel_for_each_known_quantity_in_its_unit():
    read = timeline(gpu_power_watts=600, process_memory_mib=2048, step_time_ms=38.5)
    markup = chart(read, seconds=100.0, epoch_ends=[])
    assert re.findall(r'class="quantity"><strong>(.*?)<', markup) == ["Step time", "GPU power", "Host memory"]
    found = text_of(markup)
    assert "mean 2.00 GiB" in found
    assert ">1.5</text>" in markup.split("Host memory")[-1], "its axis too"
    assert "median 38.5 ms" in found
    assert chart(Timeline(), seconds=1.0, epoch_ends=[]) is None


def test_a_line_for_each_gpu_up_to_eight_then_their_median():
    few = chart(timeline(gpus=8, gpu_power_watts=list(range(8))), seconds=100.0, epoch_ends=[])
    assert "GPU 7" in few
    assert "lowest to highest" not in few.split("</figcaption>")[1]
    many = chart(timeline(gpus=9, gpu_power_watts=list(range(9))), seconds=100.0, epoch_ends=[])
    assert "median of 9 GPUs" in many
    assert "GPU 7" not in many
    line, shade = re.search(r'class="line only" d="M0 (\d+)', many), re.search(r'class="shade" d="M0 (\d+)L', many)
    assert (int(line[1]), int(shade[1])) == (200, 0)  # 4 and 8 of 8 watts


def test_a_step_that_took_a_hundred_times_as_long_leaves_the_others_readable():
    read = timeline(step_time_ms=40.0)
    read.add("step_time_ms", None, 100.0, 8000.0)
    found = chart(read, seconds=101.0, epoch_ends=[])
    assert "median 40.0 ms, highest 8,000 ms, beyond the chart" in text_of(found)
    assert re.search(r'class="line only" d="M0 200L', found)  # half of the panel


def test_many_epochs_are_marked_now_and_then():
    read = timeline(step_time_ms=40.0)
    few = chart(read, seconds=100.0, epoch_ends=[float(at) for at in range(30)])
    assert few.count('<svg class="division"') == 30
    many = chart(read, seconds=100.0, epoch_ends=[at / 10 for at in range(61)])
    assert many.count('<svg class="division"') == 21
    assert "end of every 3rd epoch" in many


@pytest.mark.parametrize("kind", ["alert", "compilation"])
def test_events_too_close_to_be_told_apart_are_one_mark(kind):
    read = timeline(step_time_ms=40.0)
    for at in (10.0, 10.1, 50.0):
        read.events[kind].add(Event(at, "x"))
    mark = {"alert": "alarm", "compilation": "note"}[kind]
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
    return Record(name="resnet50", ended=ended, timeline=read, epochs=kept, **fields)


def test_the_page_holds_it_all():
    read = timeline(**BUSY)
    read.events["compilation"].add(Event(3.0, "one_step_on_data: 2 s, the first"))
    read.events["alert"].add(Event(7.0, "Expected <b>"))
    page = text_of(report(record(read)))
    assert "Training of resnet50 The GPU was busy 97 %" in page
    assert (
        "3 epochs in 1 min 30 s on 2 × NVIDIA H200; TensorFlow 2.21.0, Keras 3.15.1. 1 alert and 1 compilation." in page
    )
    assert "3.0 s compilation one_step_on_data: 2 s, the first 7.0 s alert Expected &lt;b&gt;" in page
    assert "Epoch Took loss 1 10 s 1.5" in page
    assert "packages.keras 3.15.1" in page
    assert "had not ended" not in page
    assert "had not ended" in text_of(report(record(read, ended=False)))


def test_the_lead_says_how_it_was_trained():
    def lead(read, **known):
        return text_of(report(replace(record(read), **known)))

    whole = lead(timeline(**BUSY, mfu_percent=41.234), optimizer="AdamW", batch_size=1024.0)
    assert "on 2 × NVIDIA H200; AdamW, batch size 1,024, model FLOPs utilisation 41.2 %; TensorFlow 2.21.0" in whole
    assert "on 2 × NVIDIA H200; SGD; TensorFlow 2.21.0" in lead(timeline(**BUSY), optimizer="SGD", batch_size=0.0)
    early = timeline(seconds=1, mfu_percent=1.0)
    early.add("mfu_percent", None, 50.0, 40.0)
    assert "H200; model FLOPs utilisation 40 %;" in lead(early), "what came before the first step's end does not count"


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
    shown, folded = page.split("All logged keys", 1)
    assert "step_time_ms" in shown
    assert "53,000" in shown
    assert "gpu_power_watts" not in shown
    assert "612.5" in folded


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


def test_quantities_are_those_that_are_read():
    from tfopt.hardware import GpuSample

    steps = {"step_time_ms", "examples_per_second", "input_wait_percent"}
    assert {quantity.name for quantity in QUANTITIES} <= {*GpuSample.__dataclass_fields__, *steps}
