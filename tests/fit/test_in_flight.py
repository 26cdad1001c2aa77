"""How far the host may run ahead of the device, on a device that is played."""

import threading
from concurrent.futures import Future

import pytest
import tensorflow as tf
from fitting import dataset, dense_net

from tfopt import fit
from tfopt.fit.launching import InFlight, _end_of, overlap_of


class Device:
    """Ends a step when the host waits for it, and not before."""

    def __init__(self, in_flight):
        self.launched = self.ended = 0
        in_flight._thread = self

    def submit(self, end):
        mark = Future()
        mark.result = lambda: self._end(end())
        return mark

    def _end(self, step):
        assert self.ended < step
        self.ended = step


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 9])
def test_no_more_than_that_are_out(monkeypatch, most):
    monkeypatch.setattr("tfopt.fit.launching._end_of", lambda outputs: lambda: outputs)
    in_flight = InFlight(most, idle=False)
    device, out = Device(in_flight), []
    for step in range(1, 41):
        out.append(step - device.ended)
        in_flight.launched(step)
    assert max(out) == most - (most > 3 and most % 2)  # marks stand at every second of them, or so
    assert min(out[most:]) > (most - 2) // 2  # the device is not left without work


def test_the_waiting_is_done_in_a_thread(monkeypatch):
    went_on, waited_in = threading.Event(), []

    def end_of(outputs):
        def wait():
            assert went_on.wait(20)
            waited_in.append(threading.current_thread())

        return wait

    monkeypatch.setattr("tfopt.fit.launching._end_of", end_of)
    in_flight = InFlight(4, idle=False)
    for _ in range(3):
        in_flight.launched({})
    went_on.set()
    in_flight.launched({})
    assert waited_in
    assert threading.main_thread() not in waited_in


def test_an_error_of_the_device_reaches_the_host(monkeypatch):
    def fails(outputs):
        def wait():
            raise tf.errors.InternalError(None, None, "the device failed")

        return wait

    monkeypatch.setattr("tfopt.fit.launching._end_of", fails)
    in_flight = InFlight(1, idle=False)
    with pytest.raises(tf.errors.InternalError, match="the device failed"):
        in_flight.launched({})


@pytest.mark.parametrize(
    ("outputs", "read"),
    [
        ({"loss": tf.constant(0.5)}, 0.5),
        (tf.ones((4, 3)), [1.0]),
        (tf.zeros((0, 3)), []),
        (tf.ragged.constant([[7], []]), [7]),
        ({}, None),
        ({"loss": 0.5}, None),
    ],
)
def test_the_end_of_a_step_is_seen_by_one_number_of_it(outputs, read):
    found = _end_of(outputs)()
    assert (found if found is None else found.tolist()) == read


def test_every_step_of_fit_evaluate_and_predict_is_counted():
    model = fit.overlap(dense_net())
    counted = overlap_of(model).in_flight = Counted()
    model.fit(dataset(), epochs=2, verbose=0, shuffle=False)
    assert counted.steps == 2 * 3
    model.evaluate(dataset(), verbose=0)
    assert counted.steps == 2 * 3 + 3
    model.predict(dataset(), verbose=0)
    assert counted.steps == 2 * 3 + 3 + 3


class Counted:
    """Stands for an InFlight."""

    steps = 0

    def launched(self, outputs):
        self.steps += 1


@pytest.mark.parametrize("gpus", [0, 1])
def test_only_a_gpu_is_waited_for(monkeypatch, gpus):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["GPU:0"] * gpus)
    in_flight = overlap_of(fit.overlap(dense_net(), steps_in_flight=3)).in_flight
    assert (in_flight._idle, in_flight._every) == (not gpus, 1)


def test_nothing_is_waited_for_on_a_cpu(monkeypatch):
    monkeypatch.setattr("tfopt.fit.launching._end_of", lambda outputs: pytest.fail("waited"))
    in_flight = InFlight(1, idle=True)
    for _ in range(10):
        in_flight.launched({})
