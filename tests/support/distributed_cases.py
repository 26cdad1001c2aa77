"""Small trainings whose results must agree on one device, on two replicas and in two processes."""

import keras
import numpy as np
import tensorflow as tf

EXAMPLES = 64


class Case:
    """A training: how its model is made and compiled, and its data."""

    def __init__(
        self,
        optimizer=lambda: keras.optimizers.SGD(0.1),
        *,
        layers=(),
        dtype="float32",
        examples=EXAMPLES,
        batch=16,
        model=keras.Sequential,
        weights=None,
        loss="mse",
        overflow_in=None,
        epochs=2,
        everything=False,
        same=True,
        metrics=lambda: [],
        **compile_options,
    ):
        self.optimizer, self.layers, self.dtype, self.examples = optimizer, layers, dtype, examples
        self.weights, self.loss, self.overflow_in, self.epochs = weights, loss, overflow_in, epochs
        self.everything, self.same, self.batch, self.kind = everything, same, batch, model
        self.metrics = metrics
        self.compile_options = {"jit_compile": False, **compile_options}

    def data(self):
        random = np.random.default_rng(3)
        x = random.normal(size=(self.examples, 5))
        y = x @ random.normal(size=(5, 2)) + 0.1 * random.normal(size=(self.examples, 2))
        if self.overflow_in is not None:  # the replica's half of the second batch
            half = self.batch // 2
            start = self.batch + self.overflow_in * half
            y[start : start + half] = 1e4
        parts = (x, y) if self.weights is None else (x, y, self.weights(random, self.examples))
        return tuple(part.astype("float64" if self.dtype == "float64" else "float32") for part in parts)

    def dataset(self):
        return tf.data.Dataset.from_tensor_slices(self.data()).batch(self.batch)

    def model(self):
        keras.utils.set_random_seed(7)
        policy = keras.DTypePolicy(self.dtype)
        layers = [keras.Input((5,)), keras.layers.Dense(6, activation="tanh", dtype=policy)]
        layers += [layer(policy) for layer in self.layers]
        model = self.kind([*layers, keras.layers.Dense(2, dtype=policy)])
        loss = self.loss() if callable(self.loss) else self.loss
        model.compile(
            self.optimizer(),
            loss,
            metrics=["mae", *self.metrics()],
            weighted_metrics=[] if self.weights else None,
            **self.compile_options,
        )
        return model


class OwnStep(keras.Sequential):
    """A custom training step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(x, y, y_pred)


class Embedded(Case):
    """Sequences with a mask."""

    def data(self):
        random = np.random.default_rng(3)
        lengths = random.integers(1, 6, size=self.examples)
        x = random.integers(1, 9, size=(self.examples, 6)) * (np.arange(6) < lengths[:, None])
        return x, random.normal(size=(self.examples, 6, 2))

    def model(self):
        keras.utils.set_random_seed(7)
        with_mask = keras.layers.Embedding(9, 4, mask_zero=True, dtype=self.dtype)
        model = keras.Sequential([keras.Input((6,), dtype="int64"), with_mask, keras.layers.Dense(2, dtype=self.dtype)])
        model.compile(self.optimizer(), self.loss, metrics=["mae"], **self.compile_options)
        return model


class Filtered(Case):
    """Data whose length is not known before they end."""

    def dataset(self):
        data = tf.data.Dataset.from_tensor_slices(self.data())
        return data.filter(lambda x, y: x[0] > -1).batch(self.batch)


def _schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)


def _weights(random, examples):
    return random.random(examples) * np.where(np.arange(examples) % 16 < 8, 1.0, 5.0)  # different in the two halves


def _sync(policy):
    return keras.layers.BatchNormalization(synchronized=True, dtype=policy)


def _one_number(y, y_pred):
    return keras.ops.mean((y - y_pred) ** 2)


def _batch_norm(policy):
    return keras.layers.BatchNormalization(dtype=policy)


sgd, optimizers = keras.optimizers.SGD, keras.optimizers
DOUBLE = {"dtype": "float64"}
SAME = {
    "momentum, uneven tail": Case(lambda: sgd(0.1, momentum=0.9), examples=57, **DOUBLE),
    "one example left": Case(examples=65, everything=True, **DOUBLE),
    "batch norm, one example left": Case(layers=(_batch_norm,), examples=65, epochs=1, same=False, **DOUBLE),
    "adamw, schedule": Case(lambda: optimizers.AdamW(_schedule(), weight_decay=0.1), **DOUBLE),
    "clipnorm": Case(lambda: sgd(0.1, clipnorm=0.05), examples=57, **DOUBLE),
    "global_clipnorm": Case(lambda: sgd(0.1, global_clipnorm=0.05), **DOUBLE),
    "accumulation, schedule": Case(lambda: sgd(_schedule(), gradient_accumulation_steps=2), **DOUBLE),
    "accumulation, adam, clipping, leftovers": Case(
        lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3, global_clipnorm=0.05), examples=57, **DOUBLE
    ),
    "filtered, adam": Filtered(lambda: optimizers.Adam(_schedule()), **DOUBLE),
    "synchronised batch norm, uneven tail": Case(layers=(_sync,), examples=57, **DOUBLE),
    "sample weights, uneven tail": Case(weights=_weights, examples=57, **DOUBLE),
    "mean with sample weight": Case(
        weights=_weights, examples=57, loss=lambda: keras.losses.MeanSquaredError("mean_with_sample_weight"), **DOUBLE
    ),
    "mask, uneven tail": Embedded(examples=57, **DOUBLE),
    "steps per execution": Case(examples=57, steps_per_execution=3, everything=True, **DOUBLE),
    "jit": Case(lambda: optimizers.Adam(0.01), jit_compile=True, examples=57, **DOUBLE),
    "a step of one's own, batches that never split evenly": Case(batch=15, model=OwnStep, **DOUBLE),
    "eagerly, uneven tail": Case(examples=57, epochs=1, run_eagerly=True, **DOUBLE),
    "metrics of several numbers": Case(
        examples=57, metrics=lambda: [keras.metrics.R2Score(None), keras.metrics.F1Score(threshold=0.5)], **DOUBLE
    ),
    "float32 sgd": Case(examples=57),
    "float32 adam": Case(lambda: optimizers.Adam(0.01), examples=57),
    "float16": Case(lambda: optimizers.LossScaleOptimizer(sgd(0.01)), dtype="mixed_float16"),
    "moving averages": Case(lambda: sgd(0.1, use_ema=True, ema_momentum=0.9), **DOUBLE),
    "accumulation, moving averages": Case(
        lambda: sgd(0.1, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2), **DOUBLE
    ),
    "float16, accumulation": Case(
        lambda: optimizers.LossScaleOptimizer(sgd(0.01, gradient_accumulation_steps=2, clipnorm=1.0)),
        dtype="mixed_float16",
        epochs=1,
    ),
    "overflow in the first": Case(
        lambda: optimizers.LossScaleOptimizer(sgd(0.01)), dtype="mixed_float16", overflow_in=0
    ),
    "overflow in the second": Case(
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)), dtype="mixed_float16", overflow_in=1
    ),
}
# For several processes, which need not repeat all: each repair and each precision.
OF_WORKERS = [
    "one example left",
    "global_clipnorm",
    "accumulation, schedule",
    "accumulation, adam, clipping, leftovers",
    "filtered, adam",
    "synchronised batch norm, uneven tail",
    "mean with sample weight",
    "mask, uneven tail",
    "steps per execution",
    "jit",
    "batch norm, one example left",
    "metrics of several numbers",
    "float32 sgd",
    "float32 adam",
    "float16, accumulation",
    "overflow in the second",
]

# For the slow tests: each repair, each way to train, and what only several processes or one alone would get wrong.
FEW = {
    "here": [
        "one example left",
        "accumulation, adam, clipping, leftovers",
        "batch norm, one example left",
        "accumulation, schedule",
        "filtered, adam",
        "synchronised batch norm, uneven tail",
        "mean with sample weight",
        "mask, uneven tail",
        "steps per execution",
        "jit",
        "a step of one's own, batches that never split evenly",
        "metrics of several numbers",
        "float16, accumulation",
        "overflow in the first",
        "overflow in the second",
    ],
    "workers": [
        "one example left",
        "accumulation, adam, clipping, leftovers",
        "overflow in the second",
        "batch norm, one example left",
        "filtered, adam",
        "mean with sample weight",
        "mask, uneven tail",
        "steps per execution",
        "float16, accumulation",
    ],
    "alone": ["accumulation, schedule", "filtered, adam"],
}

REFUSED = {
    "jit, synchronised batch norm": Case(layers=(_sync,), jit_compile=True, epochs=1),
    "jit, mask": Embedded(jit_compile=True, epochs=1),
    "one number for the batch": Case(loss=lambda: _one_number, epochs=1),
    "overwritten by averages": Case(
        lambda: sgd(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3), epochs=1
    ),
}

# Those that show what is wrong in plain Keras.
STOCK = {
    "here": [
        "one example left",
        "global_clipnorm",
        "accumulation, schedule",
        "mask, uneven tail",
        "a step of one's own, batches that never split evenly",
        "mean with sample weight",
        "batch norm, one example left",
        "steps per execution",
        "jit",
        "overflow in the second",
    ],
    "workers": ["mean with sample weight"],
    "alone": ["accumulation, schedule", "filtered, adam"],
}


def in_share(share, where, names):
    """Returns those of the names that a share trains in a place."""
    return [name for name in names if (name in FEW[where]) == (share == "few")]


def trained_by_hand(strategy):
    """The weights after a custom training loop with Keras' optimizer."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, dtype="float32")])
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.05)
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 16
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    train = tf.function(lambda x, y: strategy.run(step, args=(x, y)), autograph=False)
    for x, y in strategy.experimental_distribute_dataset(Case().dataset()):
        train(x, y)
    return [weight.tolist() for weight in model.get_weights()]


def trained(name, strategy):
    """Trains a case under a strategy: its weights, history and counters, and for some evaluation and prediction."""
    case = (SAME | REFUSED)[name]
    keras.config.set_floatx("float64" if case.dtype == "float64" else "float32")  # of losses and metrics
    with strategy.scope():
        model = case.model()
    history = model.fit(case.dataset(), epochs=case.epochs, verbose=0).history
    found = {"history": {key: np.asarray(values).tolist() for key, values in history.items()}}
    if case.everything:
        found["evaluated"] = model.evaluate(case.dataset(), verbose=0, return_dict=True)
        predicted = model.predict(case.dataset().map(lambda *parts: parts[0]), verbose=0)
        found["predicted"] = np.asarray(predicted).tolist()
        found["predicted at once"] = model.predict_on_batch(case.data()[0][:15]).tolist()
    optimizer = model.optimizer
    scale = getattr(optimizer, "dynamic_scale", None)
    return {
        **found,
        "weights": [weight.tolist() for weight in model.get_weights()],
        "iterations": int(optimizer.iterations.numpy()),
        "scale": None if scale is None else float(scale.value.numpy()),
    }
