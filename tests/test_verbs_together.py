"""Every public verb that acts on a model runs with every repair installed, and after every other verb.

A verb has a result, or refuses with an error of its own that says what to do. Training goes on in any case.
"""

import contextlib
import random
import traceback
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import summed_in_one_order
from quick import first_quick

import tfopt
from tfopt import (
    batch,
    callbacks,
    checkpoint,
    compress,
    diagnosis,
    fit,
    kernels,
    measure,
    memory,
    precision,
    repairs,
    xla,
)
from tfopt.errors import TfoptError, UnsupportedError

WORDS, LENGTH, EXAMPLES = 20, 6, 8
PACKAGE = Path(tfopt.__file__).parents[1]


def net():
    """A language model with a part for each verb: attention, batch normalization, blocks and a last product."""
    keras.utils.set_random_seed(5)
    layers = keras.layers
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(WORDS, 8)(inputs)
    hidden = layers.Add()([hidden, layers.MultiHeadAttention(2, 4)(hidden, hidden)])
    hidden = layers.BatchNormalization()(hidden)
    hidden = layers.Dense(8, activation="gelu")(layers.Dense(16, activation="relu")(hidden))
    model = keras.Model(inputs, layers.Dense(WORDS)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], jit_compile=False)
    return model


def dataset():
    words = np.random.default_rng(3).integers(WORDS, size=(2, 2 * EXAMPLES, LENGTH)).astype("int32")
    return tf.data.Dataset.from_tensor_slices(tuple(words)).batch(EXAMPLES, drop_remainder=True)


@dataclass(frozen=True)
class Scene:
    """What a verb acts on."""

    model: keras.Model
    data: tf.data.Dataset
    folder: Path

    def train(self, *with_callbacks):
        """Returns the losses of one epoch."""
        return self.model.fit(self.data, shuffle=False, verbose=0, callbacks=list(with_callbacks)).history["loss"]


def quantize(scene):
    with contextlib.suppress(UnsupportedError):  # whether integers are faster is up to the machine
        compress.quantize(scene.model, scene.data)


def train_with_checkpoints(scene):
    scene.train(callbacks.TrainingCheckpoint(scene.folder / "training", signals=()))
    checkpoint.restore(scene.model, scene.folder / "training")


def train_in_rounds(scene):
    scene.train(callbacks.LocalSteps(every=1))


LOOKS = {
    "precision.check": lambda scene: precision.check(scene.model, scene.data, "mixed_bfloat16", batches=1),
    "precision.alignment": lambda scene: precision.alignment(scene.model, EXAMPLES),
    "xla.explain": lambda scene: xla.explain(scene.model, scene.data),
    "xla.decide": lambda scene: xla.decide(scene.model, scene.data, steps=3),
    "kernels.explain": lambda scene: kernels.explain(scene.model),
    "memory.estimate": lambda scene: memory.estimate(scene.model, next(iter(scene.data))),
    "batch.find": lambda scene: batch.find(scene.model, scene.data, largest=8),
    "measure.step_time": lambda scene: measure.step_time(scene.model, scene.data, 10, warmup=0),
    "measure.fit_time": lambda scene: measure.fit_time(scene.model, scene.data, 10, warmup=0),
    "compress.cost": lambda scene: compress.cost(scene.model, scene.data),
    "compress.prune": lambda scene: compress.prune(scene.model, scene.data),
    "compress.quantize": quantize,
    "diagnosis.diagnose": lambda scene: diagnosis.diagnose(scene.model, scene.data, steps=5),
}
"""Verbs that leave a model as it was, bit for bit."""

SAME = {
    "xla.set_jit": lambda scene: xla.set_jit(scene.model, True),
    "fit.overlap": lambda scene: fit.overlap(scene.model),
    "fit.undo": lambda scene: fit.undo(scene.model),
    "kernels.fuse_batch_norm": lambda scene: kernels.fuse_batch_norm(scene.model),
    "kernels.use_flash_attention": lambda scene: kernels.use_flash_attention(scene.model),
    "kernels.chunk_cross_entropy": lambda scene: kernels.chunk_cross_entropy(scene.model, 2),
    "kernels.undo": lambda scene: kernels.undo(scene.model),
    "memory.recompute": lambda scene: memory.recompute(scene.model),
    "memory.recompute activations": lambda scene: memory.recompute(scene.model, "activations"),
    "memory.undo": lambda scene: memory.undo(scene.model),
    "diagnosis.tune": lambda scene: diagnosis.tune(scene.model, scene.data, ["overlap", "kernels"], steps=5),
}
"""Verbs after which a model trains the same up to rounding."""

OTHERS = {
    "precision.apply bfloat16": lambda scene: precision.apply(scene.model, "mixed_bfloat16"),
    "precision.apply float16": lambda scene: precision.apply(scene.model, "mixed_float16"),
    "precision.apply float32": lambda scene: precision.apply(scene.model, "float32"),
    "batch.accumulate": lambda scene: batch.accumulate(scene.model, 2),
    "compress.distil": lambda scene: compress.distil(net(), scene.model, scene.data),
    "callbacks.TrainingCheckpoint": train_with_checkpoints,
    "callbacks.LocalSteps": train_in_rounds,
    "checkpoint.restore": lambda scene: checkpoint.restore(scene.model, scene.folder / "saved"),
}
"""Verbs that train, or change training."""

VERBS = LOOKS | SAME | OTHERS
QUICK = "precision.apply float16", "batch.accumulate"  # to which repairs matter most
PAIRS = [pair for pair in product(VERBS, VERBS) if pair != QUICK]
random.Random(0).shuffle(PAIRS)  # the slow ones are a sample


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    Scene(net(), dataset(), folder).train(callbacks.TrainingCheckpoint(folder, signals=()))
    return folder


@pytest.fixture
def new_scene(saved, tmp_path):
    """Makes scenes that hold an own model, and a checkpoint of one like it."""
    (tmp_path / "saved").symlink_to(saved)

    def make():
        return Scene(net(), dataset(), tmp_path)

    with summed_in_one_order():
        yield make


def outcome(name, scene):
    """Returns "done", or the name of the error with which the verb refuses, as it is documented."""
    try:
        VERBS[name](scene)
    except (TfoptError, ValueError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        assert raised_in.is_relative_to(PACKAGE), f"{name} fails in {raised_in}"
        return type(error).__name__
    return "done"


@pytest.mark.parametrize("verb", first_quick([QUICK[0], *sorted(VERBS.keys() - {QUICK[0]})], every=4))
def test_every_repair_leaves_outcome_and_training(verb, new_scene):
    stock = new_scene()
    expected = outcome(verb, stock)
    stock.train()
    repairs.install()
    repaired = new_scene()
    assert outcome(verb, repaired) == expected
    repaired.train()
    assert_same_weights(repaired.model, stock.model, exactly=verb in LOOKS)
    if verb not in OTHERS:
        untouched = new_scene()
        untouched.train()
        assert_same_weights(repaired.model, untouched.model, exactly=verb in LOOKS)


@pytest.mark.parametrize(("first", "second"), first_quick([QUICK, *PAIRS], every=40))
def test_every_verb_after_every_other(first, second, new_scene):
    scene = new_scene()
    outcome(first, scene)
    outcome(second, scene)
    if (first, second) == ("batch.accumulate", "precision.apply float16"):
        with pytest.raises(UnsupportedError, match=r"Call tfopt\.batch\.accumulate\(model, 2\) again"):
            scene.train()
        batch.accumulate(scene.model, 2)
    assert np.isfinite(scene.train()).all()


def assert_same_weights(model, other, *, exactly):
    """A float32 sum in another order differs by less than 1e-5 of weights around 1."""
    for weight, expected in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=0 if exactly else 1e-5)
