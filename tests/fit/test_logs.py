"""Logs that are converted when they are read, and look like a dict of floats from every side."""

import copy
import json
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.fit.logs import LazyLogs, is_settled

FLOATS = {"b": 2.0, "c": 3.0, "loss": 0.5}


@pytest.fixture
def logs():
    return LazyLogs({"loss": tf.constant(0.5), "a": {"c": tf.constant(3), "b": tf.constant(2.0)}})


QUIET = {
    "len": (len, 3),
    "bool": (bool, True),
    "list": (list, ["b", "c", "loss"]),
    "keys": (lambda logs: list(logs.keys()), ["b", "c", "loss"]),
    "reversed": (lambda logs: list(reversed(logs)), ["loss", "c", "b"]),
    "in": (lambda logs: ("loss" in logs, "a" in logs), (True, False)),
    "set": (lambda logs: logs.__setitem__("loss", 1), None),
    "update": (lambda logs: logs.update(d=1), None),
    "delete": (lambda logs: logs.__delitem__("loss"), None),
    "isinstance": (lambda logs: isinstance(logs, dict), True),
}


@pytest.mark.parametrize(("look", "seen"), QUIET.values(), ids=QUIET)
def test_what_needs_no_value_reads_none(logs, look, seen):
    assert look(logs) == seen
    assert not logs.were_read


READING = {
    "item": (lambda logs: logs["loss"], 0.5),
    "get": (lambda logs: logs.get("loss"), 0.5),
    "get, missing": (lambda logs: logs.get("x", 7), 7),
    "items": (lambda logs: list(logs.items()), list(FLOATS.items())),
    "values": (lambda logs: list(logs.values()), list(FLOATS.values())),
    "dict": (dict, FLOATS),
    "double star": (lambda logs: {**logs}, FLOATS),
    "keyword": (lambda logs: "{loss}".format(**logs), "0.5"),
    "percent": (lambda logs: "%(loss)s" % logs, "0.5"),  # noqa: UP031
    "or": (lambda logs: logs | {"x": 1}, FLOATS | {"x": 1}),
    "or, behind": (lambda logs: {"x": 1} | logs, {"x": 1} | FLOATS),
    "equal": (lambda logs: logs == FLOATS, True),
    "equal, behind": (lambda logs: FLOATS == logs, True),  # noqa: SIM300
    "unequal": (lambda logs: logs != FLOATS, False),
    "repr": (repr, repr(FLOATS)),
    "str": (str, str(FLOATS)),
    "json": (json.dumps, json.dumps(FLOATS)),
    "copy": (lambda logs: logs.copy(), FLOATS),
    "copy.copy": (copy.copy, FLOATS),
    "deepcopy": (copy.deepcopy, FLOATS),
    "pickle": (lambda logs: pickle.loads(pickle.dumps(logs)), FLOATS),
    "pop": (lambda logs: logs.pop("loss"), 0.5),
    "popitem": (lambda logs: logs.popitem(), ("loss", 0.5)),
    "setdefault": (lambda logs: logs.setdefault("loss", 9), 0.5),
}


@pytest.mark.parametrize(("look", "seen"), READING.values(), ids=READING)
def test_a_look_at_values_finds_floats(logs, look, seen):
    found = look(logs)
    assert found == seen
    assert type(found) is type(seen)


def test_two_that_nobody_has_read_are_compared_by_value(logs):
    def unread(loss=0.5):
        return LazyLogs({"loss": tf.constant(loss), "b": tf.constant(2.0), "c": tf.constant(3)})

    assert [logs] == [unread()]
    assert {"a": unread()} == {"a": unread()}
    assert (unread() != unread()) is False
    assert unread(0.6) != unread()


@pytest.mark.parametrize(
    ("made", "settled"),
    [
        ({"loss": tf.constant(0.5), "in": {"a": tf.constant("x")}, "rows": tf.ragged.constant([[1]])}, True),
        ({}, True),
        ({"steps": tf.Variable(1)}, False),
        ({"in": {"steps": keras.Variable(1)}}, False),
        ({"loss": 0.5}, False),
        ({"loss": [tf.constant(0.5)]}, False),
        (tf.constant(0.5), False),
        (None, False),
    ],
)
def test_only_what_no_step_changes_is_settled(made, settled):
    assert is_settled(made) == settled


def test_what_becomes_of_the_tensors_changes_nothing():
    tensors = {"loss": tf.constant(0.5)}
    logs = LazyLogs(tensors)
    tensors.clear()  # a list of callbacks of somebody's own may
    assert logs == {"loss": 0.5}


def test_an_update_takes_floats(logs):
    other = {"x": 1}
    other.update(logs)
    assert other == {"x": 1} | FLOATS


def test_what_a_callback_put_there_stays(logs):
    logs["loss"], logs["new"] = -1, 7
    del logs["b"]
    assert logs == {"c": 3.0, "loss": -1, "new": 7}


def test_what_is_no_number_stays_what_keras_makes_of_it():
    logs = LazyLogs({"text": "x", "row": tf.constant([1, 2]), "none": None})
    assert logs["text"] == "x"
    assert isinstance(logs["row"], np.ndarray)
    assert logs["none"] is None


def test_an_error_while_reading_is_raised_each_time():
    class Failing(dict):
        def items(self):
            raise tf.errors.InternalError(None, None, "the device failed")

    logs = LazyLogs({"loss": 1.0})
    logs._tensors = Failing(loss=1.0)
    for _ in range(2):
        with pytest.raises(tf.errors.InternalError, match="the device failed"):
            _ = logs["loss"]
