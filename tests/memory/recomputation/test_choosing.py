"""What recompute takes of a model, what it refuses, and how a model comes back."""

import keras
import numpy as np
import pytest
import recomputed_nets as nets
import tensorflow as tf
from quick import first_quick
from recomputed_nets import IDS, VALUES, Small, assert_same, layers, made, small
from versions import since_keras

import tfopt
from tfopt.errors import UnsupportedError
from tfopt.memory import recompute, undo

cuts_graphs = since_keras("3.14")  # whose keras.Function may begin in the middle of a graph


class Attending(layers.Layer):
    """Holds layers, but is only a part of what repeats."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(6)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, inputs):
        return self.inner(inputs)


def dense(count, size=6):
    return keras.Sequential([keras.Input((size,)), *[layers.Dense(size, activation="relu") for _ in range(count)]])


def shared():
    """One block, called four times."""
    block, inputs = Small(), keras.Input((6,))
    outputs = inputs
    for _ in range(4):
        outputs = block(outputs)
    return keras.Model(inputs, outputs)


def parts_of_blocks():
    """Custom attention in residual blocks of plain layers: the blocks are segments of the graph."""
    inputs = outputs = keras.Input((6,))
    for _ in range(4):
        outputs = outputs + Attending()(layers.LayerNormalization()(outputs))
        outputs = outputs + layers.Dense(6)(layers.Dense(24, activation="gelu")(layers.LayerNormalization()(outputs)))
    return keras.Model(inputs, outputs)


def in_a_task():
    """A backbone inside a model with a head and layers before."""
    inputs = keras.Input((6,))
    before = keras.Sequential([keras.Input((6,)), layers.Rescaling(2.0)])
    return keras.Model(inputs, layers.Dense(2)(small(None, None, None)(before(inputs))))


class Stages(keras.Model):
    """Blocks in the lists of two stages, and blocks that are models of one make."""

    def __init__(self):
        super().__init__()
        self.first, self.second = [Small() for _ in range(2)], [dense(2) for _ in range(3)]

    def call(self, inputs):
        for block in (*self.first, *self.second):
            inputs = block(inputs)
        return inputs


def stages():
    model = Stages()
    model(VALUES)
    return model


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (small, 2),
        (nets.subclassed, 2),
        (in_a_task, 3),
        (stages, 5),
        (shared, 1),
        pytest.param(lambda: dense(64), 7, marks=cuts_graphs),
    ],
)
def test_takes_blocks_that_repeat_or_segments(make, count):
    model = make()
    assert recompute(model) == count
    assert undo(model) == count


def test_takes_no_layers_that_only_hold_others():
    """As in KerasHub's Flux, whose blocks use the layers of their attention without calling it."""

    class Holding(layers.Layer):
        def __init__(self):
            super().__init__()
            self.held = [Attending() for _ in range(4)]

        def build(self, shape):
            for one in self.held:
                one.build(shape)

        def call(self, inputs):
            return inputs + sum(one.inner(inputs) for one in self.held)

    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(6)(Holding()(layers.Dense(6)(inputs))))
    with pytest.raises(ValueError, match="which has neither"):
        recompute(model)


@cuts_graphs
def test_takes_no_parts_of_blocks():
    model = parts_of_blocks()
    recompute(model)
    assert not any("call" in vars(layer) for layer in model._flatten_layers())
    assert "_run_through_graph" in vars(model)


def skipping():
    """Down and up again, each level beside what comes from below."""
    inputs = outputs = keras.Input((32, 32, 3))
    skipped = []
    for size in (8, 16, 32):
        outputs = layers.Conv2D(size, 3, padding="same")(layers.Conv2D(size, 3, padding="same")(outputs))
        skipped.append(outputs)
        outputs = layers.MaxPooling2D()(outputs)
    for size in (32, 16, 8):
        outputs = layers.Concatenate()([layers.UpSampling2D()(outputs), skipped.pop()])
        outputs = layers.Conv2D(size, 3, padding="same")(layers.Conv2D(size, 3, padding="same")(outputs))
    return keras.Model(inputs, outputs)


@pytest.mark.slow
def test_divides_a_graph_with_long_connections():
    model = skipping()
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype("float32")
    gradients = []
    for _ in range(2):

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(images, training=True) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        gradients.append([gradient.numpy() for gradient in step()])
        recompute(model)
    assert undo(model) > 1
    assert_same(*gradients, tolerance=1e-6)


def test_takes_names_paths_and_layers():
    model = in_a_task()
    task, inner = model.layers[2], model.layers[2].layers
    model.layers[3].name = "head"
    chosen = [inner[1].name, f"{task.name}/{inner[2].name}", inner[3], "head", inner[1]]
    assert recompute(model, iter(chosen)) == 4
    assert recompute(model, [task]) == 1
    assert undo(model) == 1


@pytest.mark.parametrize(
    ("chosen", "error", "text"),
    [
        (
            "block",
            TypeError,
            "Expected layers to be 'auto', 'activations' or a list .* Received: 'block'. Put a single one into a list.",
        ),
        (7, TypeError, "Expected layers to be 'auto', 'activations' or a list .* Received: 7"),
        ([7], TypeError, "Expected names, paths or layers. Received: 7. Pass layer.name"),
        ([], ValueError, "Expected layers to name at least one layer. Received: none"),
        (["bloc"], ValueError, "Expected layers that 'net' computes. Received: 'bloc', .* Did you mean 'block'?"),
        (["inputs"], ValueError, "Expected layers that 'net' computes. Received: 'inputs', which it does not compute"),
        (["net"], ValueError, "Expected layers that 'net' computes. Received: 'net', which it does not compute"),
        (
            [layers.Dense(6, name="other")],
            ValueError,
            "Received: <Dense name=other, .*>, which it does not compute. model.summary",
        ),
        (["norm"], ValueError, "Received: 'norm', the name of block/norm, other/norm. Pass a path"),
        (["block/norm", "block"], ValueError, "none of which lies inside another. Received: 'block/norm' and 'block'"),
        (
            "auto",
            ValueError,
            "Expected a model in which blocks repeat.* Received: 'net', which has neither.* Pass the names",
        ),
    ],
)
def test_refuses_wrong_layers(chosen, error, text):
    blocks = [keras.Sequential([layers.LayerNormalization(name="norm")], name=name) for name in ("block", "other")]
    inputs = keras.Input((6,), name="inputs")
    model = keras.Model(inputs, layers.Concatenate()([block(inputs) for block in blocks]), name="net")
    with pytest.raises(error, match=text):
        recompute(model, chosen)
    assert undo(model) == 0


def test_refuses_models_that_it_cannot_change():
    with pytest.raises(TypeError, match=r"Expected a keras.Model. Received: 3"):
        recompute(3)
    with pytest.raises(TypeError, match=r"Expected a keras.Model. Received: 3"):
        undo(3)
    with pytest.raises(ValueError, match=r"Expected a built model. Received: 'stages.*Call the model on one batch"):
        recompute(Stages())
    with pytest.raises(UnsupportedError, match=r"Found 'functional.*' with run_eagerly=True. Compile it"):
        recompute(made(small, run_eagerly=True))


@pytest.mark.slow
def test_saved_models_are_as_before(tmp_path):
    model = nets.sequential()
    before = model.get_config()
    recompute(model)
    assert model.get_config() == before
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert undo(loaded) == 0
    expected = loaded.predict(IDS, verbose=0)
    assert_same([model.predict(IDS, verbose=0)], [expected])
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    assert_same([exported.serve(IDS.astype("float32")).numpy()], [expected], 1e-6)


@cuts_graphs
def test_kernels_below_stay():
    model = made(small)
    norms = [layer for layer in model._flatten_layers() if isinstance(layer, layers.BatchNormalization)]
    tfopt.kernels.fuse_batch_norm(model)
    fused = [norm.call for norm in norms]
    assert recompute(model, norms) == 2
    with pytest.raises(UnsupportedError, match="Found another patch on top"):
        tfopt.kernels.undo(model)
    assert undo(model) == 2
    assert [norm.call for norm in norms] == fused
    assert tfopt.kernels.undo(model) == 2


def test_a_patch_on_top_is_left_alone():
    model = made(small)
    recompute(model)
    first, second = model.layers[1:3]
    mine = object.__setattr__(second, "call", lambda inputs: inputs) or second.call
    for change in (undo, recompute):
        with pytest.raises(
            UnsupportedError, match=r"Expected 'call' of layer 'small.*' as tfopt.memory left it. Found"
        ):
            change(model)
    assert second.call is mine
    assert "call" in vars(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", first_quick([lambda: small(None, None, None), lambda: keras.Sequential([dense(16), layers.Dense(20)])])
)
def test_computes_again_what_the_budget_asks_for(make):
    model = made(make)
    batch = keras.KerasTensor((4096, 6)), keras.KerasTensor((4096,), "int32")
    every = recompute(model)
    least = tfopt.memory.estimate(model, batch).total_mib
    undo(model)
    plain = tfopt.memory.estimate(model, batch).total_mib
    assert recompute(model, budget_mib=plain, batch=batch) == 0
    few = recompute(model, budget_mib=0.99 * plain, batch=batch)
    assert 0 < few < every
    assert tfopt.memory.estimate(model, batch).total_mib <= 0.99 * plain
    assert recompute(model, budget_mib=least, batch=batch) == undo(model)
    with pytest.raises(
        ValueError, match=r"Expected a budget that .* Received: 0.001 MiB, where it takes .* even if all"
    ):
        recompute(model, budget_mib=0.001, batch=batch)
    assert undo(model) == 0


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_leaves_an_earlier_recompute():
    model = made(small)
    chosen = [model.layers[1]]
    recompute(model, chosen)
    before = vars(chosen[0])["call"]
    with pytest.raises(ValueError, match="Expected a budget that"):
        recompute(model, budget_mib=0.001, batch=(VALUES, IDS[:, 0]))
    assert vars(chosen[0])["call"] is before
    assert [layer for layer in model._flatten_layers() if "call" in vars(layer)] == chosen
    assert undo(model) == 1
    assert "call" not in vars(chosen[0])


def test_refuses_wrong_budgets():
    with pytest.raises(ValueError, match=r"Expected budget_mib along with a batch.* Received: none. Pass budget_mib"):
        recompute(small(), batch=(VALUES, IDS))
    with pytest.raises(ValueError, match=r"Expected a batch along with budget_mib.* Received: none. Pass"):
        recompute(small(), budget_mib=1000)
    with pytest.raises(ValueError, match=r"Expected budget_mib to be above 0. Received: -1. Give the MiB"):
        recompute(small(), budget_mib=-1)
    with pytest.raises(ValueError, match=r"Expected a compiled model"):
        recompute(small(), budget_mib=1000, batch=(VALUES, IDS))
