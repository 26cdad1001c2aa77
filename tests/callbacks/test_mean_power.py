import pytest

from tfopt.callbacks.utilization_logger import MeanPower


def mean(*readings, start_after=0):
    power = MeanPower()
    for number, (elapsed, joules, watts) in enumerate(readings):
        if number == start_after:
            power.start()
        power.add(elapsed, joules=joules, watts=watts)
    return power.watts()


def test_the_counter_is_what_counts():
    assert mean((0.0, 1000.0, 1.0), (4.0, 2000.0, 1.0), (10.0, 4000.0, 1.0)) == 300.0


def test_it_starts_from_the_last_reading_before():
    assert mean((0.0, 0.0, 1.0), (10.0, 1000.0, 1.0), (12.0, 2000.0, 1.0), start_after=2) == 500.0


def test_without_a_counter_power_is_integrated():
    assert mean((0.0, None, 100.0), (1.0, None, 300.0), (4.0, None, 300.0)) == (200 + 900) / 4


def test_a_gap_in_the_power_readings_is_left_out():
    assert (
        mean((0.0, None, 100.0), (1.0, None, 100.0), (2.0, None, None), (9.0, None, 500.0), (10.0, None, 500.0)) == 300
    )


def test_a_gap_in_the_counters_readings_does_no_harm():
    assert mean((0.0, 0.0, None), (5.0, None, 9.0), (10.0, 2000.0, None)) == 200.0


def test_without_a_second_reading_it_is_the_last_power():
    assert mean((0.0, 1000.0, 250.0)) == 250.0
    assert mean((0.0, 1000.0, 250.0), (1.0, 1250.0, 400.0), start_after=2) == 250.0


def test_a_stopped_start_takes_the_last_power():
    power = MeanPower()
    power.add(0.0, joules=0.0, watts=100.0)
    power.add(1.0, joules=300.0, watts=400.0)
    power.start()
    assert power.watts() == 400.0


@pytest.mark.parametrize(
    "readings",
    [
        [],
        [(0.0, None, None)],
        [(0.0, 1000.0, 300.0), (1.0, 0.0, 300.0)],  # the driver was reloaded
        [(0.0, 1000.0, 300.0), (1.0, 0.0, 300.0), (2.0, 5000.0, 300.0)],
        [(0.0, 1000.0, 300.0), (1.0, 1300.0, 300.0), (2.0, None, None)],  # the GPU is lost
    ],
)
def test_unknown(readings):
    assert mean(*readings) is None


def test_a_counter_that_went_back_counts_again_from_the_next_start():
    power = MeanPower()
    for elapsed, joules in ((0.0, 1000.0), (1.0, 0.0)):
        power.add(elapsed, joules=joules, watts=None)
    power.start()
    power.add(3.0, joules=600.0, watts=None)
    assert power.watts() == 300.0
