"""A batch weighs in its round what its loss divides by, which need not be its first tensor's length."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.batch import accumulate
from tfopt.errors import UnsupportedError

random = np.random.default_rng(0)
SIZES = (1, 9, 4, 2)  # nodes of a graph, or tokens of a packed row, in each batch
NODES = [random.normal(size=(size, 3)).astype("float32") + size for size in SIZES]
OTHERS = [random.normal(size=(size, 2)).astype("float32") for size in SIZES]


class Nodes(keras.Model):
    """Predicts something of each node of graphs, and of each graph."""

    def __init__(self, both=False):
        super().__init__()
        self.dense, self.both = keras.layers.Dense(2, kernel_initializer="ones"), both

    def call(self, inputs):
        of_nodes = self.dense(inputs["nodes"])
        of_graphs = keras.ops.mean(of_nodes, axis=0, keepdims=True)  # a graph in each batch
        return {"nodes": of_nodes, "graphs": of_graphs} if self.both else of_nodes


def mean(y, y_pred):
    return keras.ops.mean((y - y_pred) ** 2)


def graphs(at):
    return {"graphs": np.ones((len(at), 1), "float32"), "nodes": np.concatenate([NODES[i] for i in at])}


def packed(at):
    return np.concatenate([NODES[i] for i in at])[None]


def of_nodes(at):
    return np.concatenate([OTHERS[i] for i in at])


CASES = {
    "graphs": (Nodes, "mse", graphs, of_nodes),
    "graphs, a function that averages": (Nodes, mean, graphs, of_nodes),
    "packed rows": (lambda: keras.Sequential([keras.layers.Dense(2)]), "mse", packed, lambda at: of_nodes(at)[None]),
    "packed rows, a function that averages": (
        lambda: keras.Sequential([keras.layers.Dense(2)]),
        mean,
        packed,
        lambda at: of_nodes(at)[None],
    ),
}


def trained(make, loss, x, y, batches, steps, **options):
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False, **options)
    accumulate(model, steps)

    def batch(at):
        return x(at), y(at)

    specs = keras.tree.map_structure(
        lambda part: tf.TensorSpec([*[None] * (part.ndim - 1), part.shape[-1]], part.dtype), batch([0])
    )
    data = tf.data.Dataset.from_generator(lambda: map(batch, batches), output_signature=specs)
    model.fit(data.apply(tf.data.experimental.assert_cardinality(len(batches))), shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_batches_weigh_what_their_loss_divides_by(name):
    found = trained(*CASES[name], [[0], [1], [2], [3]], 4)
    for one, other in zip(found, trained(*CASES[name], [[0, 1, 2, 3]], 1), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_losses_in_which_batches_weigh_differently_are_refused_at_the_end_of_the_epoch():
    def both(at):
        return {"nodes": of_nodes(at), "graphs": np.zeros((len(at), 2), "float32")}

    batches = [[0], [1], [2], [3]]
    with pytest.raises(UnsupportedError, match="one per node and one per graph"):
        trained(lambda: Nodes(both=True), {"nodes": "mse", "graphs": "mse"}, graphs, both, batches, 4)
