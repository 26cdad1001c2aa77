"""Trainings in which a sharded optimizer must leave the weights of the plain one."""

import keras
import tensorflow as tf
from distributed_cases import Case, Embedded

optimizers = keras.optimizers


def _excluding(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def _schedule():
    return optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)


class Summed(optimizers.Adam):
    """Adam that sums the gradients of a repeated id before it squares them."""

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.convert_to_tensor(gradient) for gradient in grads], trainable_variables)


# Weights of 30, 6, 12 and 2 elements; 57 examples leave an uneven tail.
KINDS = {
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.01),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(0.1),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "Lion": lambda: optimizers.Lion(0.01),
}
CASES = {name: Case(make, examples=57) for name, make in KINDS.items()} | {
    "float64": Case(KINDS["Adam"], examples=57, dtype="float64"),
    "global_clipnorm, accumulation, leftovers": Case(
        lambda: optimizers.Adam(_schedule(), gradient_accumulation_steps=3, global_clipnorm=0.05), examples=57
    ),
    "clipnorm, weight decay but of biases": Case(
        lambda: _excluding(optimizers.AdamW(_schedule(), weight_decay=0.1, clipnorm=0.05)), examples=57
    ),
    "clipvalue, amsgrad, averages": Case(
        lambda: optimizers.Adam(0.01, amsgrad=True, clipvalue=0.01, use_ema=True, ema_momentum=0.9), examples=57
    ),
    "accumulation, averages, weight decay": Case(
        lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1, use_ema=True, gradient_accumulation_steps=2)
    ),
    "float16, overflow in the second": Case(
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)), dtype="mixed_float16", overflow_in=1
    ),
    "float16, accumulation": Case(
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01, gradient_accumulation_steps=2, clipnorm=1.0)),
        dtype="mixed_float16",
    ),
    "bfloat16, steps per execution": Case(KINDS["Adam"], dtype="mixed_bfloat16", steps_per_execution=3, examples=57),
    "jit": Case(KINDS["Adam"], jit_compile=True, examples=57),
    "eagerly": Case(KINDS["Adam"], run_eagerly=True, examples=32),
    "embedding": Embedded(lambda: optimizers.Adam(0.01), examples=57),
}
CASES["embedding"].plain = lambda: Summed(0.01)
# Of the slow tests: each way to clip, scale and average, and the kinds that update otherwise than Adam; Adam in both.
FEW = {
    "here": [
        "SGD",
        "Adam",
        "Ftrl",
        "global_clipnorm, accumulation, leftovers",
        "clipnorm, weight decay but of biases",
        "float16, overflow in the second",
        "jit",
        "embedding",
    ],
    "worker": ["Adam", "clipvalue, amsgrad, averages", "float16, accumulation"],
}


def in_share(share, where):
    """Returns the cases that a share trains on two devices or in two processes."""
    return {name: case for name, case in CASES.items() if (name in FEW[where]) == (share == "few")}


class _Saved:
    """A model with an optimizer that has every kind of state, and its data."""

    case = Case(examples=57)

    def __call__(self, shard=lambda optimizer: optimizer):
        self.case.optimizer = lambda: shard(optimizers.Adam(0.01, gradient_accumulation_steps=2, use_ema=True))
        return self.case.model()

    def dataset(self):
        return self.case.dataset()


SAVED = _Saved()
