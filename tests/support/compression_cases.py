"""Trainings with compressed gradients, and the same by hand: compressed and summed in NumPy."""

import keras
import numpy as np
import tensorflow as tf
from distributed_cases import Case

from tfopt.distribute import LowRank, shard_optimizer

optimizers = keras.optimizers
REPLICAS = 2


class Compressed(Case):
    """A training whose gradients are sent as products of rank 1; by hand, the optimizer `applied` gets the sums."""

    def __init__(self, optimizer=lambda: optimizers.SGD(0.1), *, applied=None, rounds=1, **options):
        super().__init__(optimizer, **{"dtype": "float64", **options})
        self.method, self.applied, self.rounds = LowRank(1), applied or optimizer, rounds


class CompressedIds(Compressed):
    """Ids that are embedded, whose rows are not compressed."""

    def data(self):
        x, y = super().data()
        return np.abs(x * 10).astype("int64") % 9, y

    def model(self):
        keras.utils.set_random_seed(7)
        layers = [keras.layers.Embedding(9, 4, dtype=self.dtype), keras.layers.Flatten(dtype=self.dtype)]
        model = keras.Sequential([keras.Input((5,), dtype="int64"), *layers, keras.layers.Dense(2, dtype=self.dtype)])
        model.compile(self.optimizer(), self.loss, jit_compile=False)
        return model


def _clipped():
    return optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05)


def _sharded():
    return shard_optimizer(optimizers.Adam(0.01))


def _accumulating():
    return optimizers.SGD(0.1, gradient_accumulation_steps=2, clipnorm=0.1)


CASES = {
    "uneven tail": Compressed(examples=57),
    "clipping": Compressed(_clipped),
    "sharded adam": Compressed(_sharded, applied=lambda: optimizers.Adam(0.01)),
    "accumulation": Compressed(_accumulating, applied=lambda: optimizers.SGD(0.1, clipnorm=0.1), rounds=2),
    "embedding": CompressedIds(),
    "steps per execution, jit": Compressed(steps_per_execution=2, jit_compile=True),
    "eagerly": Compressed(run_eagerly=True, examples=32),
}
# Without a truth, since float16 rounds otherwise.
OVERFLOWS = {
    "overflow": Compressed(
        lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.01)), dtype="mixed_float16", overflow_in=1
    )
}

# Of the slow tests: every case on two devices, and in two processes what they exchange.
FEW = {"here": [*CASES, *OVERFLOWS], "workers": ["clipping", "accumulation", *OVERFLOWS]}


def in_share(share, where):
    """Returns the cases that a share trains on two devices or in two processes."""
    return {name: case for name, case in (CASES | OVERFLOWS).items() if (name in FEW[where]) == (share == "few")}


def by_hand(case):
    """The weights after training one model with gradients that are compressed and summed in NumPy."""
    model, optimizer = case.model(), case.applied()
    weights = model.trainable_variables
    optimizer.build(weights)
    memories = [_memory(case.method, weight, seed) for seed, weight in enumerate(weights)]
    waiting = [[0.0] * len(weights) for _ in range(REPLICAS)]
    data, step = case.data(), 0
    for _ in range(case.epochs):
        for start in range(0, case.examples, case.batch):
            batch, step = [part[start : start + case.batch] for part in data], step + 1
            half = -(-len(batch[0]) // REPLICAS)
            for replica, rows in enumerate((slice(half), slice(half, None))):
                found = _gradients(case, model, *(part[rows] for part in batch))
                share = len(batch[0][rows]) / len(batch[0]) / case.rounds
                waiting[replica] = [w + share * g for w, g in zip(waiting[replica], found, strict=True)]
            if step % case.rounds == 0:
                sums = [_sum(parts, kept) for *parts, kept in zip(*waiting, memories, strict=True)]
                optimizer.apply([tf.constant(total) for total in sums], weights)
                waiting = [[0.0] * len(weights) for _ in range(REPLICAS)]
    return model.get_weights()


def _gradients(case, model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    return [tf.convert_to_tensor(gradient).numpy() for gradient in tape.gradient(loss, model.trainable_variables)]


def _memory(method, weight, seed):
    """What is unsent for each replica, and the right matrix; None for what is summed whole."""
    if "embedding" in weight.path or len(weight.shape) < 2:
        return None
    right = tf.random.stateless_normal([weight.shape[1], method.rank], [seed, 0], dtype="float64").numpy()
    return {"unsent": [np.zeros(weight.shape) for _ in range(REPLICAS)], "right": right}


def _sum(gradients, kept):
    """PowerSGD: Vogels et al. 2019, algorithm 1."""
    if kept is None:
        return sum(gradients)
    due = [gradient + unsent for gradient, unsent in zip(gradients, kept["unsent"], strict=True)]
    left, _ = np.linalg.qr(sum(each @ kept["right"] for each in due))
    rights = [each.T @ left for each in due]
    kept["right"] = sum(rights)
    sent = [left @ right.T for right in rights]
    kept["unsent"] = [each - part for each, part in zip(due, sent, strict=True)]
    return sum(sent)
