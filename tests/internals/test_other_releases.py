"""Releases of Keras that tfopt does not know: what it finds out about them, and what it then does."""

import json

import other_keras
import pytest

from tfopt import repairs
from tfopt.distribute.data_check.fits import DATA_CHECK
from tfopt.fit import overlapping
from tfopt.internals.sources import find

pytestmark = pytest.mark.campaign  # each tries every patch, in a minute or two
# Installs everything, and trains with overlap and without.
CODE = """
import json
import keras
import numpy as np
import tfopt
from tfopt import fit, repairs
from tfopt.distribute.data_check.fits import DATA_CHECK
from tfopt.errors import UnsupportedError
from tfopt.fit import overlapping
from tfopt.internals import probing

def state(repair):
    try:
        return "needed" if repair.applies() else "needless"
    except UnsupportedError as error:
        return str(error)

def trained(overlapped):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dropout(0.5), layers.Dense(2)])
    model.compile("adam", "mse", jit_compile=False)
    if overlapped:
        fit.overlap(model)
    data = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    history = model.fit(data, data[:, :2], batch_size=8, epochs=2, verbose=0).history
    return history, [weight.tolist() for weight in model.get_weights()]

every = [repair for repair in [*repairs.REPAIRS.values(), overlapping.PATCH, DATA_CHECK] if not repair.is_absent]
unknown = [repair for repair in every if repair.standing() == "unknown"]
probing.verdicts(unknown)
states = {repair.name: state(repair) for repair in every}
names = [name for name, found in states.items() if found in ("needed", "needless") and name in repairs.REPAIRS]
plain = trained(False)
same = trained(True) == plain if states["overlap"] == "needed" else None
repairs.install(*names)
print(json.dumps([[one.name for one in unknown], states, trained(False) == plain, same]))
"""
EVERY = [one for one in (*repairs.REPAIRS.values(), overlapping.PATCH, DATA_CHECK) if not one.is_absent]
TARGETS = [target for one in EVERY for target in one.broken]
# Shown by a training that Keras then computes right; the others refuse it, or are only known to change no number.
SHOWN = [one.name for one in EVERY if one.probe.measure and not one.probe.refuses]


def found_with(folder, tmp_path):
    output = other_keras.run(folder, CODE, XDG_CACHE_HOME=str(tmp_path / "cache"))
    return json.loads(output.splitlines()[-1])


def test_other_text_changes_nothing(tmp_path):
    other_keras.with_other_text(tmp_path / "site", TARGETS)
    unknown, states, repaired, overlapped = found_with(tmp_path / "site", tmp_path)
    assert set(unknown) == {one.name for one in EVERY if any(name.startswith("keras.") for name in one.broken)}
    assert states == dict.fromkeys((one.name for one in EVERY), "needed")
    assert (repaired, overlapped) == (True, True)


def test_what_is_mended_upstream_is_left_alone(tmp_path):
    other_keras.with_all_mended(tmp_path / "site", TARGETS)
    _, states, repaired, overlapped = found_with(tmp_path / "site", tmp_path)
    assert {name: states[name] for name in SHOWN} == dict.fromkeys(SHOWN, "needless")
    assert (repaired, overlapped) == (True, True)


def test_a_method_that_was_moved_costs_what_relies_on_it_alone(tmp_path):
    other_keras.with_a_method_moved(tmp_path / "site", "_maybe_symbolic_build", "_build_symbolically")
    unknown, states, repaired, overlapped = found_with(tmp_path / "site", tmp_path)
    rely = {one.name for one in EVERY if any(name.endswith("._maybe_symbolic_build") for name in one.replace)}
    # And what has to be tried, but can only be with one of them in place.
    tried = [one for one in EVERY if one.name in unknown and one.probe.throughout]
    rely |= {one.name for one in tried if getattr(*find(one.probe.throughout)).name in rely}
    refused = {name for name, state in states.items() if state != "needed"}
    assert refused == {*rely, "overlap"}  # which replaces it in each model
    assert all("_maybe_symbolic_build" in states[name] for name in refused)
    assert (repaired, overlapped) == (True, None)
