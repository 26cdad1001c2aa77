"""Trainings in which replicas train by themselves for some steps, and the same computed another way."""

import keras
import numpy as np
import tensorflow as tf
from distributed_cases import Case, Embedded, OwnStep

optimizers = keras.optimizers
REPLICAS = 2


class Local(Case):
    """A training in rounds of `every` steps."""

    def __init__(self, *args, every=3, outer=None, overlapped=False, **options):
        super().__init__(*args, **options)
        self.every, self.outer, self.overlapped = every, outer, overlapped


class Pair(OwnStep):
    """A custom training step, also for `train_on_batch`, which adds sample weights."""

    def train_step(self, data):
        return super().train_step(data[:2])


class LocalEmbedding(Local, Embedded):
    """Ids and masks, in rounds."""


def _schedule():
    return optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)


def _momentum():
    return optimizers.SGD(0.1, momentum=0.9)


def _batch_norm(policy):
    return keras.layers.BatchNormalization(momentum=0.9, dtype=policy)


def _nesterov():
    return optimizers.SGD(0.7, momentum=0.9, nesterov=True)


def _weights(random, examples):
    return random.random(examples)


# 57 examples in batches of 16: three whole ones, and one of 5 and 4 examples.
CASES = {
    "sgd": Local(dtype="float64"),
    "every step": Local(every=1, dtype="float64"),
    "momentum, uneven tail": Local(_momentum, examples=57, dtype="float64"),
    "outer": Local(_momentum, examples=57, dtype="float64", outer=_nesterov),
    "adamw, schedule, clipping": Local(
        lambda: optimizers.AdamW(_schedule(), weight_decay=0.1, clipnorm=0.05), dtype="float64"
    ),
    "global_clipnorm, accumulation": Local(
        lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.05), dtype="float64"
    ),
    "accumulation, leftovers": Local(
        lambda: optimizers.SGD(0.1, gradient_accumulation_steps=3), examples=57, dtype="float64"
    ),
    "moving averages": Local(
        lambda: optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.9), dtype="float64"
    ),
    "batch norm": Local(layers=(_batch_norm,), dtype="float64"),
    "sample weights, uneven tail": Local(weights=_weights, examples=57, dtype="float64"),
    "mask": LocalEmbedding(lambda: optimizers.Adam(0.01), dtype="float64"),
    "steps per execution": Local(_momentum, every=2, examples=57, dtype="float64", steps_per_execution=3),
    "own step": Local(model=Pair, dtype="float64"),
    "overlap": Local(_momentum, overlapped=True, dtype="float64"),
    "jit": Local(_momentum, jit_compile=True, dtype="float64"),
    "eagerly": Local(_momentum, run_eagerly=True, examples=32, dtype="float64"),
    "float16": Local(lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.01)), dtype="mixed_float16"),
    "float16, overflow in the second": Local(
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)), dtype="mixed_float16", overflow_in=1
    ),
    "bfloat16": Local(_momentum, dtype="mixed_bfloat16"),
}
# Of the slow tests: each way through LocalSteps; in two processes, those whose state or sums need the other one.
FEW = {
    "here": [
        "sgd",
        "every step",
        "outer",
        "accumulation, leftovers",
        "batch norm",
        "steps per execution",
        "overlap",
        "eagerly",
        "float16, overflow in the second",
    ],
    "workers": ["sgd", "every step", "outer", "batch norm", "float16, overflow in the second"],
}


def in_share(share, where):
    """Returns the names of the cases that a share trains in a place: of "truth", those of either other place."""
    if where == "truth":
        return list(dict.fromkeys([*in_share(share, "here"), *in_share(share, "workers")]))
    possible = [
        name for name, case in CASES.items() if where == "here" or not case.overlapped
    ]  # overlap refuses workers
    return [name for name in possible if (name in FEW[where]) == (share == "few")]


def batches(case):
    """The examples of each step, and in it of each replica, which gets half of a batch."""
    data, found = case.data(), []
    for start in range(0, case.examples, case.batch):
        whole = [part[start : start + case.batch] for part in data]
        half = -(-len(whole[0]) // REPLICAS)
        found.append([[part[:half] for part in whole], [part[half:] for part in whole]])
    return found


def separately(case):
    """Trains a model for each replica on one device, and averages their weights with NumPy.

    Returns the outcome as `local_training` does, with the loss scales of both before the first one's is taken.
    """
    keras.config.set_floatx("float64" if case.dtype == "float64" else "float32")
    models = [case.model() for _ in range(REPLICAS)]
    for model in models:
        model.optimizer.build(model.trainable_variables)
    anchor, velocity = models[0].get_weights(), [0.0] * len(models[0].get_weights())
    found = {"loss": [], "scales": []}
    for _ in range(case.epochs):
        steps, total, count = batches(case), 0.0, 0.0
        for at, parts in enumerate(steps, start=1):
            for model, part in zip(models, parts, strict=True):
                model.train_on_batch(*part)
                total += float(model._loss_tracker.total)
                count += float(model._loss_tracker.count)
            if at % case.every == 0 or at == len(steps):
                mean = _mean([model.get_weights() for model in models])
                if case.outer:  # Nesterov's momentum, as in DiLoCo
                    change = [old - new for old, new in zip(anchor, mean, strict=True)]
                    velocity = [0.9 * v + c for v, c in zip(velocity, change, strict=True)]
                    mean = [a - 0.7 * (c + 0.9 * v) for a, c, v in zip(anchor, change, velocity, strict=True)]
                anchor = mean
                for model in models:
                    model.set_weights(mean)
        found["loss"].append(total / max(count, 1.0))  # an own step tracks none
        found["scales"].append([_scale(model) for model in models])
        _average_state([model.optimizer for model in models])
        if getattr(models[0].optimizer, "gradient_accumulation_steps", None) == 3:  # one of four batches is left over
            for model in models:
                sums = model.optimizer._accumulated_gradients
                for weight, total in zip(model.trainable_variables, sums, strict=True):
                    weight.assign(weight - 0.1 * total)
                    total.assign(total * 0)
                model.optimizer._iterations.assign(-(-model.optimizer._iterations // 3) * 3)
            anchor = models[0].get_weights()
    for model in models:
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        inner.finalize_variable_values(model.trainable_variables)
    iterations = int(models[0].optimizer.iterations.numpy())
    return found | {"weights": models[0].get_weights(), "iterations": iterations, "scale": _scale(models[0])}


def _scale(model):
    scale = getattr(model.optimizer, "dynamic_scale", None)
    return None if scale is None else float(scale.numpy())


def _mean(lists):
    return [np.mean(arrays, axis=0) for arrays in zip(*lists, strict=True)]


def _average_state(optimizers):
    inner = [getattr(one, "inner_optimizer", one) for one in optimizers]
    for same in zip(*(one.variables for one in inner), strict=True):
        mean = np.mean([variable.numpy() for variable in same], axis=0)
        first = tf.as_dtype(same[0].dtype).is_integer or not same[0].shape
        for variable in same:
            variable.assign(same[0].numpy() if first else mean)
    for one in optimizers[1:]:
        for name in ("dynamic_scale", "step_counter"):
            if hasattr(one, name):
                getattr(one, name).assign(getattr(optimizers[0], name))


def by_hand(case):
    """Local SGD of the net with two layers, in NumPy alone."""
    start = case.model().get_weights()
    replicas = [[weight.copy() for weight in start] for _ in range(REPLICAS)]
    for _ in range(case.epochs):
        steps = batches(case)
        for at, parts in enumerate(steps, start=1):
            for weights, part in zip(replicas, parts, strict=True):
                for weight, gradient in zip(weights, _gradients(weights, *part), strict=True):
                    weight -= 0.1 * gradient
            if at % case.every == 0 or at == len(steps):
                mean = _mean(replicas)
                replicas = [[weight.copy() for weight in mean] for _ in replicas]
    return replicas[0]


def _gradients(weights, x, y):
    first, first_bias, second, second_bias = weights
    hidden = np.tanh(x @ first + first_bias)
    wrong = 2 * (hidden @ second + second_bias - y) / y.size
    back = (wrong @ second.T) * (1 - hidden**2)
    return x.T @ back, back.sum(0), hidden.T @ wrong, wrong.sum(0)
