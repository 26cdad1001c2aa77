"""Trainings that a signal interrupts and that go on in a new model, beside ones that were never interrupted."""

import gc
import os
import signal
from dataclasses import dataclass, field

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt import batch as tfopt_batch
from tfopt import fit as tfopt_fit
from tfopt.callbacks import TrainingCheckpoint
from tfopt.pipelines import build_pipeline, mix

EPOCHS, BATCH, EXAMPLES = 4, 8, 50  # of the seven batches, the last has two examples
_random = np.random.default_rng(0)
X = _random.normal(size=(EXAMPLES, 6)).astype("float32")
Y = (X.sum(1) > 0).astype("float32")

layers = keras.layers


class Interrupt(keras.callbacks.Callback):
    """Sends this process SIGTERM in the middle of a training.

    Args:
        moment: "step", "validation" or "epoch" for its end; the epoch; and but for an epoch's end the batch, or the
            next one after which Keras calls callbacks.
    """

    acts_every = 0

    def __init__(self, *moment):
        super().__init__()
        self._moment, self._is_sent = moment, False

    def _reach(self, kind, epoch, *batch):
        if (kind, epoch) == self._moment[:2] and [*self._moment[2:]] <= [*batch] and not self._is_sent:
            self._is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._reach("step", self._epoch, batch)

    def on_test_batch_end(self, batch, logs=None):
        self._reach("validation", self._epoch, batch)

    def on_epoch_end(self, epoch, logs=None):
        self._reach("epoch", epoch)


LAST = -1
MOMENTS = {
    "within an epoch": ("step", 1, 2),
    "soon in an epoch": ("step", 2, 1),
    "at an epoch's last step": ("step", 1, LAST),
    "in the validation": ("validation", 1, 1),
    "in a later validation": ("validation", 2, 1),
    "between epochs": ("epoch", 1),
}


def dense_net(*, dtype="float32", extra=()):
    """Dense layers with what has state: batch normalization, and dropout with its seeds."""
    first = layers.Dense(8, activation="relu", dtype=dtype)
    rest = [layers.BatchNormalization(dtype=dtype), *extra, layers.Dropout(0.3, dtype=dtype)]
    return keras.Sequential([keras.Input((6,)), first, *rest, layers.Dense(1, activation="sigmoid", dtype="float32")])


class Noisy(layers.Layer):
    """Draws from a generator of TensorFlow's, of which Keras does not know."""

    def __init__(self, **options):
        super().__init__(**options)
        self._generator = tf.random.Generator.from_seed(3)

    def call(self, x):
        return x + 0.1 * self._generator.normal(tf.shape(x))


class Unbuilt(keras.Model):
    """Has no variables before its first step."""

    def __init__(self):
        super().__init__()
        self.hidden, self.dropout, self.out = layers.Dense(8), layers.Dropout(0.2), layers.Dense(1, "sigmoid")

    def call(self, x, training=False):
        return self.out(self.dropout(self.hidden(x), training=training))


class OwnStep(keras.Sequential):
    """Its logs are not Keras' metrics."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"own": loss}


class Counting(keras.callbacks.Callback):
    """Has state of its own, and changes the training by it."""

    def __init__(self):
        super().__init__()
        self.steps, self.seen = 0, np.zeros(3)

    def get_state(self):
        return {"steps": self.steps, "nested": [{"seen": self.seen}]}

    def set_state(self, state):
        self.steps, self.seen = state["steps"], state["nested"][0]["seen"]

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        self.seen[self.steps % 3] += 1
        if self.steps % 5 == 0:
            self.model.optimizer.learning_rate = 0.01 / (1 + self.seen[1])


class NoisyEverywhere(layers.Layer):
    """Draws in validation, too, as the sampling of a variational autoencoder does."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x), seed=self.seeds)


class TwoOptimizers(keras.Sequential):
    """Trains with its own, as a GAN does; the one of `compile` is never built."""

    def __init__(self, layers):
        super().__init__(layers)
        self.others = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.9)]

    def train_step(self, data):
        for optimizer in self.others:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
            optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"own": loss}


class Numpy(keras.Sequential):
    """Has a step that no graph can hold."""

    def train_step(self, data):
        assert np.isfinite(data[0].numpy()).all()
        return super().train_step(data)


class CountingValidations(Counting):
    """Counts in another hook, in numbers of NumPy's."""

    def __init__(self):
        super().__init__()
        self.steps = np.float32(0)

    def on_train_batch_end(self, batch, logs=None):
        pass

    def on_test_begin(self, logs=None):
        self.steps += np.float32(0.1)
        self.model.optimizer.learning_rate = 0.01 / float(1 + self.steps)


def parts_of_one_dataset(size=BATCH):
    whole = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(EXAMPLES, seed=2)
    return whole.skip(14).batch(size), whole.take(14).batch(BATCH)


def dataset(seed=2):
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(EXAMPLES, seed=seed).batch(BATCH).prefetch(2)


def shuffled_twice():
    """Groups of rows as files are read: in one order, and then their rows in another."""
    groups = tf.data.Dataset.range(5).shuffle(5, seed=7)
    rows = groups.interleave(lambda at: tf.data.Dataset.from_tensor_slices((X, Y)).shard(5, at), cycle_length=2)
    return rows.shuffle(8, seed=2).batch(BATCH)


def concatenated():
    one, other = (tf.data.Dataset.from_tensor_slices((X[half], Y[half])) for half in (slice(0, 25), slice(25, None)))
    return one.shuffle(25, seed=2).concatenate(other.shuffle(25, seed=3)).batch(BATCH)


def pipeline(**options):
    return build_pipeline((X, Y), batch_size=BATCH, seed=4, remainder="keep", **options)


def mixture(**options):
    """Has 40 steps an epoch, in which the second part is read more than seven times."""
    parts = [((X, Y), 0.25), ((X[:20] + 1, Y[:20]), 0.75)]
    return mix(
        parts, stop="all", batch_size=5, seed=4, remainder="keep", transform=lambda x, y: (2 * x, y), **options
    ).build()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training, made anew for each run."""

    model: object = dense_net
    optimizer: object = lambda: keras.optimizers.Adam(0.01)
    data: object = lambda: (X, Y)
    callbacks: object = list
    prepare: object = lambda model: None
    loss: str = "binary_crossentropy"
    compiled: dict = field(default_factory=dict)
    fitted: dict = field(default_factory=dict)
    steps: int = 7
    """Steps of an epoch."""

    def fit(self, *callbacks, strategy):
        """Trains a new model; returns its variables and its history."""
        keras.backend.clear_session()
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = self.model()
            options = {"metrics": ["accuracy", keras.metrics.AUC(num_thresholds=20)], **self.compiled}
            model.compile(self.optimizer(), self.loss, **({"jit_compile": False} | options))
        self.prepare(model)
        data, validation = self.data(), (X[:20], Y[:20])
        if isinstance(data, tuple) and isinstance(data[0], tf.data.Dataset):
            data, validation = data
        options = {"x": data, "shuffle": False} | self.fitted
        if isinstance(data, tuple):
            options = dict(zip(("x", "y", "sample_weight"), data, strict=False)) | {"batch_size": BATCH} | self.fitted
        if "validation_split" not in options:
            options = {"validation_data": validation, "validation_batch_size": BATCH} | options
        history = model.fit(epochs=EPOCHS, verbose=0, callbacks=[*self.callbacks(), *callbacks], **options)
        variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
        parts = [part for variable in variables for part in getattr(variable.value, "values", [variable])]
        return [part.numpy() for part in parts], history.history

    def interrupted(self, folder, *moment, strategy):
        """Trains until a moment, and goes on in a new model."""
        moment = [self.steps - 1 if part == LAST else part for part in moment]
        with pytest.raises(SystemExit, match="75"):
            self.fit(TrainingCheckpoint(folder), Interrupt(*moment), strategy=strategy)
        gc.collect()  # the exception held fit's iterators, whose threads TensorFlow's collectives may wait for
        return self.fit(TrainingCheckpoint(folder), strategy=strategy)


def plateau():
    return [
        keras.callbacks.EarlyStopping(monitor="loss", patience=2, min_delta=0.05, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=0.3),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    ]


def adam(**options):
    return lambda: keras.optimizers.Adam(0.01, **options)


def scaled():
    return keras.optimizers.LossScaleOptimizer(adam()(), initial_scale=2.0**20, dynamic_growth_steps=3)


def decayed():
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 28), momentum=0.9)


ENDLESS = {"steps_per_epoch": 7}


def launches(model):
    """Overlaps it, with launches that do not divide an epoch."""
    tfopt_fit.overlap(model, steps_per_launch=4)


CASES = {
    "arrays": Case(),
    "plateau": Case(callbacks=plateau),
    "arrays in order": Case(fitted={"shuffle": False}),
    "validation split": Case(fitted={"validation_split": 0.2}, steps=5),
    "class weight": Case(fitted={"class_weight": {0: 1.0, 1: 3.0}}),
    "sample weight": Case(data=lambda: (X, Y, np.linspace(0, 1, EXAMPLES))),
    "dataset": Case(data=dataset),
    "shuffled twice": Case(data=shuffled_twice),
    "shuffles one after the other": Case(data=concatenated),
    "shuffled twice, of unknown length": Case(data=lambda: shuffled_twice().filter(lambda x, y: True)),
    "dataset in order": Case(data=lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)),
    "cached": Case(data=lambda: tf.data.Dataset.from_tensor_slices((X, Y)).cache().shuffle(50, seed=3).batch(BATCH)),
    "shuffled and cached": Case(data=lambda: dataset().cache()),
    "repeated": Case(data=lambda: dataset().repeat(), fitted=ENDLESS),
    "repeated before batches": Case(
        data=lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=3).repeat().batch(BATCH),
        fitted=ENDLESS,
    ),
    "epochs shorter than the data": Case(data=dataset, fitted={"steps_per_epoch": 4}, steps=3),
    "of unknown length": Case(data=lambda: dataset().filter(lambda x, y: True)),
    "random numbers in the data": Case(
        data=lambda: tf.data.Dataset.zip((dataset(), tf.data.Dataset.random(7, rerandomize_each_iteration=True))).map(
            lambda batch, bits: (batch[0] + tf.cast(bits % 7, tf.float32) / 7, batch[1])
        )
    ),
    "pipeline": Case(data=pipeline),
    "pipeline cached": Case(data=lambda: pipeline(cache="memory")),
    "pipeline augmented": Case(
        data=lambda: pipeline(
            augment=lambda x, y, seed: (x + tf.random.stateless_normal(tf.shape(x), seed), y), cache=None
        )
    ),
    "mixture": Case(data=lambda: mixture(cache=None), steps=40),
    "mixture cached": Case(data=lambda: mixture(cache="memory"), steps=40),
    "pipeline on the device": Case(data=lambda: pipeline(cache="device"), prepare=tfopt_fit.overlap),
    "pipeline repeated by steps": Case(data=pipeline, fitted={"steps_per_epoch": 4}, steps=3),
    "pipeline mapped": Case(data=lambda: pipeline(cache="memory").map(lambda x, y: (2 * x, y))),
    "pipeline mapped, of unknown length": Case(data=lambda: pipeline().filter(lambda x, y: True)),
    "pipeline mapped, in order": Case(data=lambda: pipeline(shuffle=False).map(lambda x, y: (2 * x, y))),
    "pipeline repeated": Case(data=lambda: pipeline().repeat(), fitted=ENDLESS),
    "pipeline with class weights": Case(data=pipeline, fitted={"class_weight": {0: 1.0, 1: 3.0}}),
    "pipelines": Case(data=lambda: (pipeline(), pipeline(cache="memory"))),
    "validation of the same pipeline": Case(data=lambda: (pipeline(),) * 2, fitted={"validation_steps": 3}),
    "validation of the same pipeline by steps": Case(
        data=lambda: (pipeline(),) * 2, fitted={"steps_per_epoch": 4}, steps=3
    ),
    "bfloat16": Case(model=lambda: dense_net(dtype="mixed_bfloat16")),
    "float16": Case(model=lambda: dense_net(dtype="mixed_float16"), optimizer=scaled),
    "momentum and schedule": Case(optimizer=decayed),
    "average of weights": Case(optimizer=adam(use_ema=True, ema_momentum=0.9)),
    "averages swapped in": Case(
        optimizer=adam(use_ema=True), callbacks=lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    ),
    "Keras' accumulation": Case(optimizer=adam(gradient_accumulation_steps=3)),
    "accumulation": Case(prepare=lambda model: tfopt_batch.accumulate(model, 3)),
    "AdamW": Case(optimizer=lambda: keras.optimizers.AdamW(0.01, clipnorm=1.0)),
    "Lion": Case(optimizer=lambda: keras.optimizers.Lion(0.001)),
    "several steps a call": Case(compiled={"steps_per_execution": 2}, steps=8),
    "several steps a call, pipeline": Case(data=pipeline, compiled={"steps_per_execution": 2}, steps=8),
    "several steps a call, cached": Case(data=lambda: dataset().cache(), compiled={"steps_per_execution": 2}, steps=8),
    "XLA": Case(compiled={"jit_compile": True}),
    "eager": Case(compiled={"run_eagerly": True}),
    "overlapped": Case(prepare=tfopt_fit.overlap),
    "overlapped dataset": Case(prepare=tfopt_fit.overlap, data=dataset),
    "overlapped and several steps": Case(prepare=tfopt_fit.overlap, compiled={"steps_per_execution": 2}, steps=8),
    "overlapped accumulation": Case(
        prepare=lambda model: (tfopt_batch.accumulate(model, 3), tfopt_fit.overlap(model)), data=pipeline
    ),
    "launches": Case(prepare=launches),
    "launches, dataset": Case(prepare=launches, data=dataset),
    "launches, pipeline": Case(prepare=launches, data=pipeline),
    "launches, pipeline on the device": Case(prepare=launches, data=lambda: pipeline(cache="device")),
    "launches, of unknown length": Case(prepare=launches, data=lambda: dataset().filter(lambda x, y: True)),
    "launches, epochs shorter than the data": Case(
        prepare=launches, data=dataset, fitted={"steps_per_epoch": 4}, steps=3
    ),
    "launches, repeated": Case(prepare=launches, data=lambda: pipeline().repeat(), fitted=ENDLESS),
    "generator of TensorFlow's": Case(model=lambda: dense_net(extra=[Noisy()])),
    "unbuilt": Case(model=Unbuilt),
    "own step": Case(model=lambda: OwnStep(dense_net().layers), compiled={"metrics": None}),
    "state of a callback": Case(callbacks=lambda: [Counting()]),
    "validation shuffled": Case(data=lambda: (dataset(), dataset(3)), fitted={"validation_steps": 3}),
    "validation of arrays by steps": Case(data=dataset, fitted={"validation_steps": 2}),
    "validation of the same dataset": Case(data=parts_of_one_dataset, steps=5),
    "validation of the same dataset by steps": Case(
        data=lambda: parts_of_one_dataset(4), fitted={"steps_per_epoch": 5}, steps=4
    ),
    "noise in the validation": Case(model=lambda: dense_net(extra=[NoisyEverywhere()])),
    "state of a callback that counts validations": Case(callbacks=lambda: [CountingValidations()]),
    "optimizers of its own": Case(model=lambda: TwoOptimizers(dense_net().layers), compiled={"metrics": None}),
    "eager, with NumPy": Case(model=lambda: Numpy(dense_net().layers), compiled={"run_eagerly": True}),
    "eager, generator of TensorFlow's": Case(model=lambda: dense_net(extra=[Noisy()]), compiled={"run_eagerly": True}),
    "of unknown length, several steps a call": Case(
        data=lambda: dataset().filter(lambda x, y: True), compiled={"steps_per_execution": 3}, steps=9
    ),
    "recurrent": Case(
        model=lambda: keras.Sequential(
            [keras.Input((6,)), layers.Reshape((3, 2)), layers.GRU(4, dropout=0.2), layers.Dense(1, "sigmoid")]
        )
    ),
}


def difference(case, folder, moment, strategy=None):
    """What differs between an interrupted training and one that was not; None if they are equal bit for bit."""
    strategy = strategy or tf.distribute.get_strategy()
    variables, history = case.fit(strategy=strategy)
    resumed, its_history = case.interrupted(folder, *moment, strategy=strategy)
    if history != its_history:
        return f"history {history} and {its_history}"
    if len(variables) != len(resumed):
        return f"{len(variables)} and {len(resumed)} variables"
    unequal = [at for at, pair in enumerate(zip(variables, resumed, strict=True)) if not np.array_equal(*pair)]
    return f"variables {unequal}" if unequal else None
