import math

from tfopt.causes.readings import RunningMeans
from tfopt.hardware import GpuSample


def gpu(index=0, **readings):
    return GpuSample(time_seconds=0.0, elapsed_seconds=0.0, index=index, **readings)


def added(*readings, means=None):
    means = means or RunningMeans()
    for reading in readings:
        means.add_gpu(reading, reading.throttle_reasons)
    return means


def test_means_since_a_moment():
    means = added(gpu(gpu_power_watts=100.0))
    moment = means.moment()
    added(gpu(gpu_power_watts=500.0), gpu(gpu_power_watts=700.0, sm_active_percent=30.0), means=means)
    (since,) = means.since(moment).gpus
    assert (since.index, since.gpu_power_watts, since.sm_active_percent) == (0, 600.0, 30.0)
    (ever,) = means.since({}).gpus
    assert ever.gpu_power_watts == 1300 / 3


def test_of_what_was_not_read_since_the_last_reading_stands():
    means = added(gpu(gpu_power_watts=100.0, sm_active_percent=10.0), gpu(gpu_power_watts=200.0))
    means.add_input_wait(10.0)
    means.add_input_wait(30.0)
    (since,) = means.since(means.moment()).gpus
    assert (since.gpu_power_watts, since.sm_active_percent) == (200.0, None), "the last one did not tell"
    assert means.since(means.moment()).input_wait_percent == 30.0
    means.add_input_wait(None)
    assert means.since(means.moment()).input_wait_percent is None


def test_each_gpu_by_itself():
    means = added(gpu(0, gpu_power_watts=100.0), gpu(1, gpu_power_watts=300.0))
    assert [(one.index, one.gpu_power_watts) for one in means.since({}).gpus] == [(0, 100.0), (1, 300.0)]
    assert RunningMeans().since({}).gpus == ()


def test_the_throttle_reason_that_was_seen_most_if_in_a_quarter_of_the_readings():
    def most(*reasons):
        return added(*(gpu(throttle_reasons=one) for one in reasons)).since({}).gpus[0].throttle_reasons

    assert most(("thermal",), ("thermal", "power_cap"), ("power_cap",), ("power_cap",)) == ("power_cap",)
    assert most((), ("thermal",), (), ()) == ("thermal",)
    assert most((), ("thermal",), (), (), ()) == ()
    assert most(None, ("thermal",), None, (), (), None) == ("thermal",), "unknown is not none"
    assert most(None, None) is None
    assert most(("sync_boost",)) == (), "slows nothing down"


def test_what_is_not_finite_is_unknown():
    (found,) = added(gpu(gpu_power_watts=math.nan), gpu(gpu_power_watts=math.inf)).since({}).gpus
    assert found.gpu_power_watts is None


def test_a_gpu_that_is_found_late_counts_from_then_on():
    means = RunningMeans()
    means.add_gpu(GpuSample(0.0, 600.0), None)  # the driver did not answer
    for elapsed, watts in ((601.0, 100.0), (602.0, 300.0)):
        means.add_gpu(GpuSample(0.0, elapsed, index=0, gpu_power_watts=watts), None)
    assert [gpu.gpu_power_watts for gpu in means.since({}).gpus] == [200.0]


def test_memory_is_bounded():
    means = added(gpu())
    kept = len(means.moment())
    added(*(gpu(gpu_power_watts=float(watts)) for watts in range(1000)), means=means)
    assert len(means.moment()) == kept


def test_a_reading_counts_for_the_time_since_the_previous_one():
    def at(elapsed, index, **readings):
        return GpuSample(0.0, elapsed, index=index, **readings)

    means = RunningMeans()
    # Samples after 1, 2 and 9 s: the step that held Python for 7 s was one at full power.
    for elapsed, watts in ((1.0, 100.0), (2.0, 100.0), (9.0, 600.0)):
        for index in (0, 1):
            means.add_gpu(at(elapsed, index, gpu_power_watts=watts + index), () if watts < 600 else ("thermal",))
    found = means.since({}).gpus
    assert [gpu.gpu_power_watts for gpu in found] == [(2 * 100 + 7 * 600) / 9, (2 * 101 + 7 * 601) / 9]
    assert found[0].throttle_reasons == ("thermal",), "7 s of 9"
    means.add_input_wait(0.0, seconds=1.0)
    means.add_input_wait(90.0, seconds=8.0)
    assert means.since({}).input_wait_percent == 80.0
