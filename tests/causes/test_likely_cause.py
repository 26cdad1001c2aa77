import pytest

from tfopt.causes.alert_causes import Situation, likely_cause
from tfopt.causes.readings import Readings
from tfopt.hardware import GpuSample


def gpu(**readings):
    return GpuSample(time_seconds=0.0, elapsed_seconds=0.0, **{"index": 0, "uuid": "GPU-a"} | readings)


def cause(*gpus, metric="gpu_utilization_percent", above=False, wait=None, **facts):
    return likely_cause(Situation(metric, above, Readings(gpus=gpus, input_wait_percent=wait), **facts)).text


WAITS = (
    "Likely cause: the training waits for input 63 % of its time. tfopt.pipelines.profile_pipeline(dataset) names the "
    "slow stage; build_pipeline decodes in parallel, caches and prefetches."
)
POWER = (
    "Likely cause: GPU:0 is throttled by power (power_cap, 686 W, 71 °C). Its power limit sets the pace: "
    "nvidia-smi -q -d POWER shows it, and nvidia-smi -pl raises it."
)
HEAT = (
    "Likely cause: GPU:1 is throttled by heat (hw_thermal). Check its cooling: nvidia-smi -q -d TEMPERATURE shows the "
    "limits."
)
HARDWARE = (
    "Likely cause: GPU:0 is throttled by heat or power (hw_slowdown). Check its cooling and power supply: "
    "nvidia-smi -q -d PERFORMANCE shows which it is."
)
OTHERS = (
    "Likely cause: another process is on GPU:0. It holds 12,288 of 143,771 MiB (9 %) of the memory, and may compute "
    "there too. nvidia-smi names it; choose a free GPU with CUDA_VISIBLE_DEVICES."
)
FLOAT32 = (
    "Likely cause: the model computes in float32, and the tensor cores of GPU:0 are idle (0.3 %, while 85 % of its "
    "multiprocessors work). tfopt.precision.check(model, dataset) checks whether it trains as well in 16 bits; "
    'tfopt.precision.apply(model, "auto") switches to them.'
)
KERNELS = (
    ": many short kernels. Use a larger batch; tfopt.batch.find(model, dataset) measures which one fits and pays. "
    "Let XLA fuse kernels: tfopt.xla.set_jit(model, True); "
    "tfopt.xla.decide(model, dataset) measures whether it pays. "
    "Launch steps without waiting: tfopt.fit.overlap(model). "
    "Launch several steps at once: tfopt.fit.overlap(model, steps_per_launch=8)."
)
IDLE = f"Likely cause: GPU:0 is idle 70 % of the time, though not for lack of input{KERNELS}"
SPARSE = f"Likely cause: GPU:0 is in use 97 % of the time, but 30 % of its multiprocessors work{KERNELS}"
FULL = (
    "Likely cause: the memory of GPU:0 is nearly full (138,000 of 143,771 MiB). "
    "tfopt.memory.estimate(model, batch) says what takes it, and tfopt.memory.recompute(model) lets it take less. Or "
    "take a smaller batch, or 16 bits: "
    "tfopt.precision.check(model, dataset) checks whether it trains as well in 16 bits; "
    'tfopt.precision.apply(model, "auto") switches to them.'
)
TAKEN = " TensorFlow takes nearly all of it at the start, needed or not, unless tfopt.memory.set_growth() is on."
NONE = "No cause known to tfopt fits."
TRACE = " tfopt.callbacks.StepProfiler shows what a step does."

BUSY = {"gpu_utilization_percent": 97, "sm_active_percent": 85.0, "tensor_active_percent": 0.3}
IN_FLOAT32 = {"float32": True, "metric": "mfu_percent"}


def test_waiting_for_input():
    assert cause(gpu(gpu_utilization_percent=30), wait=63.2) == WAITS
    assert cause(wait=63.2, metric="examples_per_second") == WAITS  # without a GPU
    assert cause(gpu(gpu_utilization_percent=30), wait=20.0) == WAITS.replace("63", "20")
    assert cause(gpu(gpu_utilization_percent=30), wait=19.9) == IDLE


def test_throttled():
    hot = gpu(throttle_reasons=("power_cap",), gpu_power_watts=686.4, gpu_temperature_celsius=71)
    assert cause(hot) == POWER
    assert cause(
        gpu(), gpu(index=1, throttle_reasons=("sync_boost", "hw_thermal")), metric="step_time_ms", above=True
    ) == (HEAT)
    assert cause(gpu(throttle_reasons=("hw_slowdown",)), metric="sm_clock_mhz") == HARDWARE
    assert cause(gpu(throttle_reasons=("thermal",)), metric="gpu_temperature_celsius", above=True).startswith("Likely")
    assert cause(gpu(throttle_reasons=("applications_clocks", "display_clocks"))).startswith(NONE)


def test_another_process_on_the_device():
    shared = {"gpu_memory_others_mib": 12_288.0, "gpu_memory_total_mib": 143_771.0}
    assert cause(gpu(**shared)) == OTHERS
    assert cause(gpu(**shared), metric="gpu_memory_used_mib", above=True) == OTHERS
    assert cause(gpu(gpu_memory_others_mib=12_288.0)) == OTHERS.replace(" of 143,771 MiB (9 %)", " MiB")
    assert cause(gpu(gpu_memory_others_mib=1023.0, gpu_memory_total_mib=143_771.0)).startswith(NONE)


def test_idle_tensor_cores_in_float32():
    assert cause(gpu(**BUSY), **IN_FLOAT32) == FLOAT32
    for other in ({"tensor_active_percent": 1.0}, {"tensor_active_percent": None}, {"sm_active_percent": None}):
        assert cause(gpu(**BUSY | other), **IN_FLOAT32).startswith(NONE)
    assert cause(gpu(**BUSY), metric="mfu_percent").startswith(NONE)  # 16 bits
    # With hardly any work there is nothing for tensor cores either.
    assert cause(gpu(**BUSY | {"sm_active_percent": 19.0}), **IN_FLOAT32).endswith(KERNELS)


def test_many_short_kernels():
    assert cause(gpu(gpu_utilization_percent=30), wait=3.0) == IDLE
    assert cause(gpu(gpu_utilization_percent=97, sm_active_percent=30.0), metric="sm_active_percent") == SPARSE
    assert cause(gpu(gpu_utilization_percent=97, sm_active_percent=50.0), metric="mfu_percent").startswith(NONE)
    assert "in use 79 %" in cause(gpu(gpu_utilization_percent=79, sm_active_percent=30.0), wait=None)
    assert "is idle 21 %" in cause(gpu(gpu_utilization_percent=79), wait=3.0, metric="mfu_percent")
    assert cause(gpu(gpu_utilization_percent=80), wait=3.0, metric="mfu_percent").startswith(NONE)
    # Idle, and nobody knows whether for lack of input.
    assert cause(gpu(gpu_utilization_percent=30)).startswith(NONE)


def test_memory_nearly_full():
    full = gpu(gpu_memory_used_mib=138_000.0, gpu_memory_total_mib=143_771.0)
    assert cause(full, memory_grows=True) == FULL
    assert cause(full, metric="gpu_memory_used_mib", above=True, memory_grows=True) == FULL
    assert cause(full, metric="gpu_memory_used_mib", above=True) == FULL + TAKEN
    # TensorFlow has taken it all at the start: that is no reason to idle.
    assert cause(full).startswith(NONE)
    part = gpu(gpu_memory_used_mib=136_000.0, gpu_memory_total_mib=143_771.0)
    assert cause(part, memory_grows=True).startswith(NONE)


def test_none_fits_and_what_is_not_known():
    known = gpu(gpu_utilization_percent=97, sm_active_percent=90.0, throttle_reasons=(), gpu_memory_others_mib=0.0)
    assert cause(known, wait=1.0, metric="step_time_ms", above=True) == NONE + TRACE
    assert cause(gpu(gpu_utilization_percent=30), metric="step_time_ms", above=True) == (
        f"{NONE} Unknown here: input_wait_percent, sm_active_percent, throttle_reasons, gpu_memory_others_mib.{TRACE}"
    )


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        (
            "training",
            "no training step has ended for 45 s. The step waits for its batch (tfopt.pipelines."
            "profile_pipeline(dataset) names the slow stage), is being recompiled (tfopt.callbacks.CompilationLogger "
            "tells), or is simply slow; tfopt cannot tell which.",
        ),
        (
            "validation",
            "no training step has ended for 45 s: validation is running. Validate on fewer batches (validation_steps), "
            "or less often (validation_freq).",
        ),
        (
            "between epochs",
            "no training step has ended for 45 s: fit is between two epochs. Check what callbacks do there, such as "
            "writing checkpoints, and do it less often.",
        ),
    ],
)
def test_no_step_ends(phase, text):
    """The figures of the steps before say nothing then."""
    assert cause(gpu(), wait=63.0, stalled_seconds=45.2, phase=phase) == f"Likely cause: {text}"


def test_a_callback_that_fit_is_in_is_named():
    said = cause(
        stalled_seconds=45.2, phase="callback", callback="Saves.on_epoch_end", metric="seconds_since_step", above=True
    )
    assert said.startswith(
        "Likely cause: no training step has ended for 45 s: fit is in a callback (Saves.on_epoch_end). Check what it"
    )


@pytest.mark.parametrize(
    ("metric", "above"),
    [
        ("gpu_utilization_percent", True),
        ("step_time_ms", False),
        ("host_memory_used_mib", True),
        ("gpu_temperature_celsius", False),
        ("gpu_memory_used_mib", False),
    ],
)
def test_of_what_slows_nothing_no_cause_is_made_up(metric, above):
    assert cause(gpu(throttle_reasons=("power_cap",)), wait=90.0, metric=metric, above=above) == NONE + TRACE


def test_the_first_that_fits():
    everything = gpu(throttle_reasons=("power_cap",), gpu_memory_others_mib=12_288.0, gpu_memory_total_mib=143_771.0)
    assert cause(everything, wait=63.0) == WAITS
    assert cause(everything, wait=0.0).startswith("Likely cause: GPU:0 is throttled by power (power_cap).")
