"""The verdict of a report, from readings with known figures."""

import pytest

from tfopt.causes.catalogue import SHORT_KERNELS
from tfopt.causes.readings import Readings
from tfopt.causes.training_verdict import verdict
from tfopt.hardware import GpuSample

BUSY = {"gpu_utilization_percent": 97, "input_wait_percent": 2, "sm_active_percent": 80, "tensor_active_percent": 30}
KERNELS = f"{SHORT_KERNELS.name}. {SHORT_KERNELS.remedy}"


def said(first_step_end=1.0, gpus=1, **values):
    of_gpus = {name: values.pop(name) for name in list(values) if "gpu" in name or "active" in name}
    each = [{name: v[i] if isinstance(v, list) else v for name, v in of_gpus.items()} for i in range(gpus)]
    rows = tuple(GpuSample(0.0, 0.0, index=i, **one) for i, one in enumerate(each) if one)
    text = verdict(Readings(gpus=rows, **values), seconds=100.0, first_step_end=first_step_end)
    return text.replace("\u00a0", " ")


def test_waiting_for_input():
    assert said(gpu_utilization_percent=43, input_wait_percent=38) == (
        "The GPU was busy 43 % of the time and steps waited for input in 38 % of it: the input is the limit. "
        "tfopt.pipelines.profile_pipeline(dataset) names the slow stage; build_pipeline decodes in parallel, "
        "caches and prefetches."
    )
    assert "the input is the limit" in said(host_cpu_percent=90, input_wait_percent=20)
    assert "the input is the limit" not in said(**BUSY | {"input_wait_percent": 19.9})


def test_all_is_well():
    assert said(**BUSY) == (
        "The GPU was busy 97 % of the time and steps waited for input in 2 % of it: the model sets the pace."
    )


def test_several_gpus_with_their_spread():
    text = said(gpus=2, gpu_utilization_percent=[99, 91], input_wait_percent=1)
    assert text.startswith(
        "The 2 GPUs were busy 95 % of the time (91 to 99 %) and steps waited for input in 1 % of it:"
    )
    assert "(" not in said(gpus=2, gpu_utilization_percent=[99, 96], input_wait_percent=1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"gpu_utilization_percent": 79}, f"2 % of it: {KERNELS}"),
        ({"gpu_utilization_percent": 79, "input_wait_percent": None}, "check the input first (tfopt.pipelines.profile"),
        ({"sm_active_percent": 49}, f"2 % of it, yet only 49 % of the multiprocessors worked: {KERNELS}"),
        ({"tensor_active_percent": 0.4}, "yet the tensor cores worked in only 0.4 % of it. tfopt.precision.check"),
        ({"throttled_percent": 20}, "heat or power held the clocks back in 20 % of it. Check its cooling and"),
        ({"input_wait_percent": None}, "whether steps waited for input is unknown: the model sets the pace"),
        ({"sm_active_percent": None, "tensor_active_percent": None}, "the model sets the pace"),
    ],
)
def test_what_held_it_back(values, expected):
    assert expected in said(**BUSY | values)


def test_without_a_gpu_the_host_is_known():
    assert said(host_cpu_percent=71, input_wait_percent=3) == (
        "No GPU was read; the host's CPUs were busy 71 % of the time and steps waited for input in 3 % of it: the "
        "input is not the limit."
    )
    assert said(host_cpu_percent=71).endswith("whether steps waited for input is unknown: nothing more can be said.")
    assert said(input_wait_percent=3).startswith("Neither a GPU nor the host was read; steps waited for input in 3 %")


def test_too_short_to_judge():
    assert said(first_step_end=None) == "No step ended, so there is nothing to judge."
    assert said(first_step_end=51.0).startswith("51 s of 1 min 40 s had passed when the first step")
