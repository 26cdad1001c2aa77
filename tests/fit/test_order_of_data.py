"""A copy ahead changes no order: epoch after epoch, the batches are those that stock `fit` takes without the copy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt import fit
from tfopt.fit import overlapping
from tfopt.pipelines import build_pipeline
from tfopt.pipelines.device.copying import copy_ahead

ROWS = np.arange(12)
SILENT = {"verbose": 0, "shuffle": False}


class Noting(keras.Model):
    """Trains nothing, and notes the rows of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def train_step(self, rows):
        return self.note(rows)

    def test_step(self, rows):
        return self.note(rows)

    def note(self, rows):
        tf.numpy_function(lambda taken: self.seen.append(taken.tolist()), [rows], [])
        return {"loss": 0.0}


class Stop(keras.callbacks.Callback):
    """Ends the second epoch after its first batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = self.epoch == 1

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


def with_validation(model, data, seen):
    model.fit(data(), validation_data=data(), epochs=4, **SILENT)


def validated_on_the_same(model, data, seen):
    same = data()
    model.fit(same, validation_data=same, steps_per_epoch=len(same), epochs=4, **SILENT)


def twice(model, data, seen):
    same = data()
    for _ in range(2):
        model.fit(same, epochs=2, **SILENT)
    model.evaluate(same, verbose=0)


def across_epochs(model, data, seen):
    model.fit(data(), steps_per_epoch=2, epochs=4, **SILENT)


def interrupted(model, data, seen):
    same = data()
    model.fit(same, epochs=4, callbacks=[Stop()], **SILENT)
    model.fit(same, epochs=2, **SILENT)


def by_hand(model, data, seen):
    same = data()
    for _ in range(2):
        seen += [rows.numpy().tolist() for rows in same]
    next(iter(same))
    for pair in zip(same, same, strict=True):
        seen += [rows.numpy().tolist() for rows in pair]
    early, late = iter(same), iter(same)
    seen += [next(late).numpy().tolist(), next(early).numpy().tolist()]
    model.fit(same, epochs=2, **SILENT)


def shuffled(**_):
    return tf.data.Dataset.from_tensor_slices(ROWS).shuffle(12, seed=5).batch(3)


def under_a_global_seed(**_):
    return tf.data.Dataset.from_tensor_slices(ROWS).shuffle(12).batch(3)


def piped(**options):
    return build_pipeline(ROWS, batch_size=3, seed=5, **({"device": None} | options))


def taken(use, data, *, overlapped=False):
    keras.utils.set_random_seed(3)
    model = Noting()
    model.compile(jit_compile=False)
    if overlapped:
        fit.overlap(model)
    use(model, data, model.seen)
    return model.seen


def copied(make):
    return lambda: copy_ahead(make(), "/cpu:0", None)


def copied_by_the_plan(make):
    return lambda: make(device="/cpu:0")


def as_it_is(make):
    return make


WAYS = [
    (under_a_global_seed, as_it_is, True),
    (piped, copied_by_the_plan, False),
    (piped, copied_by_the_plan, True),
    (piped, as_it_is, True),
    (shuffled, as_it_is, True),
    (shuffled, copied, False),
    (under_a_global_seed, copied, False),
]
USES = [with_validation, validated_on_the_same, twice, across_epochs, interrupted, by_hand]
QUICK = [(*way, use) for way in WAYS[:2] for use in USES[:2]]
REST = [row for row in ((*way, use) for way in WAYS for use in USES) if row not in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "change", "overlapped", "use"), first_quick([*QUICK, *REST], len(QUICK), every=5))
def test_each_epoch_has_the_batches_of_stock_fit_without_the_copy(monkeypatch, use, make, change, overlapped):
    expected = taken(use, make)
    assert expected[:4] != expected[8:12], "one order for all epochs"
    monkeypatch.setattr(overlapping, "choose_device", lambda asked, spec: ("/cpu:0", "played"))
    assert taken(use, change(make), overlapped=overlapped) == expected


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "change", "overlapped"), first_quick(WAYS, 2))
@pytest.mark.parametrize("use", [with_validation, by_hand])
def test_on_a_gpu_the_order_is_stock_fits_too(use, make, change, overlapped):
    expected = taken(use, make)
    on_gpu = {copied: lambda: copy_ahead(make(), "/gpu:0", None), copied_by_the_plan: lambda: make(device="auto")}
    assert taken(use, on_gpu.get(change, make), overlapped=overlapped) == expected
