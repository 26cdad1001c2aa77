"""Training with recomputed activations, beside training as Keras does it."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import recomputed_nets as nets
import tensorflow as tf
from models import WithoutCall, assert_same_state, state
from quick import campaign, first_quick
from recomputed_nets import IDS, VALUES, Block, Small, assert_same, compared, layers, made, small, trained

import tfopt
from tfopt.errors import UnsupportedError
from tfopt.memory import recompute, undo

# With a bound on what differs: gradients of several uses of a tensor add up in another order.
NETS = [(nets.functional, 0), (nets.branched, 1e-5), (nets.sequential, 0), (nets.subclassed, 0), (nets.recurrent, 0)]


@pytest.fixture(autouse=True)
def _as_traced():
    with nets.as_traced():
        yield


@pytest.mark.slow
@pytest.mark.parametrize(("make", "tolerance"), first_quick(NETS))
def test_trains_the_same(make, tolerance):
    model = compared(make, tolerance=tolerance)
    for block in (layer for layer in model._flatten_layers() if isinstance(layer, Block)):
        *_, forward, backward = block.traced
        assert forward == backward


@pytest.mark.slow
def test_a_model_without_a_call_trains_the_same():
    states = []
    for recomputed in (False, True):
        keras.utils.set_random_seed(3)
        model = WithoutCall()
        model.compile("adam", jit_compile=False)
        assert not recomputed or recompute(model) > 1
        model.fit(VALUES, batch_size=8, epochs=2, shuffle=False, verbose=0)
        states.append(state(model))
    assert_same_state(*states)


@pytest.mark.parametrize(
    ("make", "policy", "rounding"),
    [
        *first_quick(
            [
                (nets.functional, "float32", 1e-4),
                (nets.branched, "mixed_bfloat16", 0.05),
                (nets.subclassed, "mixed_bfloat16", 0.05),
                (nets.sequential, "mixed_float16", 0.01),
            ],
            0,
        ),
        *campaign([(nets.recurrent, "mixed_float16", 0.01)]),
    ],
)
def test_trains_the_same_in_any_precision_under_xla(make, policy, rounding):
    keras.config.set_dtype_policy(policy)
    compared(make, jit_compile=True, tolerance=rounding)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GPT2Backbone", "BertBackbone"])
def test_trains_backbones_of_keras_hub_the_same(kind):
    hub = pytest.importorskip("keras_hub")

    def make():
        sizes = {"num_layers": 3, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16, "max_sequence_length": 6}
        backbone = getattr(hub.models, kind)(vocabulary_size=20, **sizes)
        ids = keras.Input((6,), dtype="int32")
        inputs = {name: ids % 2 if name == "segment_ids" else ids for name in backbone.input}
        outputs = backbone(inputs | {"padding_mask": ids > 3})
        if kind == "BertBackbone":
            outputs = outputs["sequence_output"] + outputs["pooled_output"][:, None]
        return keras.Model(ids, layers.Dense(20, activation="softmax")(outputs))

    model = compared(make)
    assert undo(model) == 3


@pytest.mark.slow
@pytest.mark.parametrize("policy", first_quick(["mixed_float16", "mixed_bfloat16"]))
def test_trains_the_same_in_16_bits(policy):
    keras.config.set_dtype_policy(policy)
    model = compared(small)
    assert (type(model.optimizer).__name__ == "LossScaleOptimizer") == (policy == "mixed_float16")


@pytest.mark.slow
@pytest.mark.parametrize("prepare", first_quick([tfopt.fit.overlap, tfopt.kernels.fuse_batch_norm], 2))
def test_works_with_what_else_changes_a_model(prepare):
    def prepared(model):
        prepare(model)
        return model

    compared(small, prepare=prepared)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["alone", "in a graph", "in a class"])
def test_added_losses_of_a_segmented_sequential_count(where):
    def make():
        penalised = [layers.Dense(8, activity_regularizer="l2") for _ in range(6)]
        chain = keras.Sequential([keras.Input((6,)), *penalised, layers.Dense(2)])
        if where == "alone":
            return chain
        inputs = keras.Input((6,))
        if where == "in a graph":
            return keras.Model(inputs, chain(inputs))
        return Wrapping(chain)

    losses = []
    for choose in (lambda model: None, recompute):
        keras.utils.set_random_seed(0)
        model = make()
        model.compile("sgd", "mse", jit_compile=False)
        model(np.zeros((1, 6), "float32"))
        choose(model)
        losses.append(model.fit(np.ones((8, 6)), np.ones((8, 2)), epochs=2, verbose=0).history["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


class Wrapping(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs):
        return self.inner(inputs)


@pytest.mark.slow
def test_accumulates_gradients():
    steps = {"gradient_accumulation_steps": 2}
    expected = trained(made(small, optimizer=keras.optimizers.SGD(0.1, **steps)))
    model = made(small, optimizer=keras.optimizers.SGD(0.1, **steps))
    recompute(model)
    assert_same(trained(model), expected)


@pytest.mark.slow
def test_runs_blocks_twice_in_training_only_until_undone():
    model = made(small)
    blocks = model.layers[1:3]

    def runs(method, *args):
        before = [block.runs for block in blocks]
        method(*args, verbose=0) if method in (model.evaluate, model.predict) else method(*args)
        return [block.runs - start for block, start in zip(blocks, before, strict=True)]

    batch = VALUES, IDS[:, 0]
    model.train_on_batch(*batch)
    expected = model.predict(VALUES, verbose=0)
    assert recompute(model) == 2
    assert runs(model.evaluate, *batch) == [1, 1]
    assert runs(model.predict, VALUES) == [1, 1]
    assert_same([model.predict(VALUES, verbose=0)], [expected])
    assert runs(model, VALUES) == [1, 1]
    assert runs(model.train_on_batch, *batch) == [2, 2]
    assert recompute(model, [blocks[1]]) == 1
    assert runs(model.train_on_batch, *batch) == [1, 2]
    assert undo(model) == 1
    assert runs(model.train_on_batch, *batch) == [1, 1]
    assert undo(model) == 0
    assert not {"call", "quantized_call", "_tfopt_recomputed"} & vars(blocks[1]).keys()


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_runs_blocks_twice_in_each_of_several_steps_per_execution(jit_compile):
    """Keras' loop over the steps is no loop of a layer."""
    model = made(small, steps_per_execution=2, jit_compile=jit_compile)
    model.fit(VALUES, IDS[:, 0], batch_size=4, verbose=0)
    for recomputed in (False, True):
        if recomputed:
            assert recompute(model) == 2
        else:
            model.make_train_function(force=True)
        before = [block.runs for block in model.layers[1:3]]
        model.fit(VALUES, IDS[:, 0], batch_size=4, verbose=0)
        runs = {block.runs - start for block, start in zip(model.layers[1:3], before, strict=True)}
        assert runs == {2 if recomputed else 1}


def test_draws_the_same_mask():
    """d sum(mask · (x + w)) / dw is the mask."""

    class Masked(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dropout = layers.Dropout(0.5)

        def build(self, shape):
            self.added = self.add_weight(shape=shape[1:])

        def call(self, inputs, training=None):
            return self.dropout(inputs + self.added)

    model = keras.Sequential([keras.Input((100,)), Masked()])
    recompute(model, ["masked"])

    @tf.function
    def step(inputs):
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
        return outputs, tape.gradient(outputs, model.layers[0].added.value)

    for _ in range(2):
        outputs, gradient = step(tf.ones((1, 100)))
        assert_same([gradient.numpy()], [np.where(outputs[0] != 0, 2.0, 0.0)])
        assert 20 < np.count_nonzero(gradient) < 80


def test_moves_averages_and_seeds_once_a_step():
    layer = layers.BatchNormalization(momentum=0.75)
    dropout = layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((6,)), keras.Sequential([layer, dropout]), layers.Dense(20)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    recompute(model, [model.layers[0]])
    model.train_on_batch(VALUES, IDS[:, 0])
    assert_same([layer.moving_mean.numpy()], [0.25 * VALUES.astype("float64").mean(0)], 1e-7)
    assert dropout.seed_generator.state.numpy()[1] == 1


@pytest.mark.slow
def test_keeps_the_gradient_of_what_a_block_leaves_elsewhere():
    def leaving(layer, outputs):
        layer.left = keras.ops.tanh(outputs)
        return outputs

    class Reading(keras.Model):
        def __init__(self):
            super().__init__()
            self.block, self.head = Small(leaving), layers.Dense(20, activation="softmax")

        def call(self, inputs):
            return self.head(self.block(inputs) * self.block.left)

    def make():
        model = Reading()
        model(VALUES)
        return model

    compared(make, lambda model: [model.block], tolerance=1e-6)


def test_takes_any_structure_and_dtype():
    class Many(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(6)

        def build(self, shape):
            self.dense.build(shape["x"])

        def call(self, inputs, factors=(), *, mode):
            outputs = self.dense(inputs["x"]) * factors[0]
            return {
                "outputs": outputs,
                "large": outputs > 0,
                "count": inputs["ids"] + 1,
                "same": inputs["x"],
                "mode": mode,
            }

    class Taking(keras.Model):
        def __init__(self):
            super().__init__()
            self.many, self.head = Many(), layers.Dense(20, activation="softmax")

        def call(self, inputs):
            ids = tf.cast(inputs > 0, tf.int32)
            found = self.many({"x": inputs, "ids": ids}, factors=[keras.ops.tanh(inputs), None], mode="mine")
            assert found["mode"] == "mine"
            return self.head(
                tf.where(found["large"], found["outputs"], found["same"]) * tf.cast(found["count"], tf.float32)
            )

    def make():
        model = Taking()
        model(VALUES)
        return model

    compared(make, lambda model: [model.many], tolerance=1e-6)


def test_gradients_of_a_function_called_under_a_tape_outside():
    model = made(small)
    gradients = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        for variable in model.non_trainable_variables:
            variable.assign(tf.zeros_like(variable))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.function(lambda x: model(x, training=True))(tf.constant(VALUES)) ** 2)
        gradients.append([gradient.numpy() for gradient in tape.gradient(loss, model.trainable_variables)])
        recompute(model)
    assert_same(*gradients, tolerance=1e-6)


def drawing(layer, outputs):
    return outputs + tf.random.normal(tf.shape(outputs))


def drawing_inside(layer, outputs):
    return tf.function(drawing)(layer, outputs)


def counting(layer, outputs):
    if not hasattr(layer, "counter"):
        with tf.init_scope():
            layer.counter = tf.Variable(0.0)
    return outputs + layer.counter.assign_add(1.0)


def assigning_in_a_loop(layer, outputs):
    def body(step):
        layer.own.assign(layer.own + 1.0)
        return step + 1

    tf.while_loop(lambda step: step < 3, body, [tf.constant(0)])
    return outputs


def assigning_a_weight(layer, outputs):
    layer.scale.assign(layer.scale / 2)
    return outputs


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (drawing, "operation RandomStandardNormal in layer 'small"),
        (drawing_inside, "operation RandomStandardNormal in layer 'small"),
        (counting, "operation AssignAddVariableOp in layer 'small"),
        (assigning_in_a_loop, r"layer 'small\w*' assigns to '.*/own' inside a loop"),
        (assigning_a_weight, r"layer 'small\w*' assigns to '.*/scale'"),
    ],
)
def test_refuses_what_would_differ_the_second_time(function, found):
    model = made(lambda: small(function))
    recompute(model, [model.layers[1]])
    with pytest.raises(UnsupportedError, match=rf"Expected layers .* Found .*{found}.* [Ll]eave it out of `layers`"):
        model.train_on_batch(VALUES, IDS[:, 0])


def test_refuses_to_lose_a_gradient():
    class Sharing(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.block = layers.Dense(6), Small(lambda layer, outputs: outputs * layer.shared)

        def call(self, inputs):
            self.block.shared = self.first(inputs)
            return self.block(inputs)

    model = made(Sharing)
    model(VALUES)
    recompute(model, [model.block])
    with pytest.raises(
        UnsupportedError, match=r"Found that layer 'small.*' also uses '.*', .* Pass it to the layer's call"
    ):
        model.train_on_batch(VALUES, IDS[:, 0])


def reading_its_state(layer, outputs):
    layer.own.assign(keras.ops.mean(outputs))
    return outputs * layer.own  # no gradient flows through a variable's value


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        reading_its_state,
        lambda layer, outputs: outputs * keras.random.normal((6,)),
        lambda layer, outputs: outputs * np.random.normal(size=6).astype("float32"),
    ],
)
def test_draws_and_reads_the_same_again(function):
    compared(lambda: small(function), lambda model: [model.layers[1]], tolerance=1e-6)


TWO_REPLICAS = """
import keras
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import recomputed_nets as nets

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

def make():
    with strategy.scope():
        return nets.small()

with strategy.scope(), nets.as_traced():
    model = nets.compared(make)
print("replicas:", model.distribute_strategy.num_replicas_in_sync, "runs:", model.layers[1].runs)
"""


def test_variables_may_change_between_a_block_and_its_gradient():
    """A second run reads what the first one read."""

    def change(model):
        for block in model.layers[1:3]:
            block.scale.assign(2 * block.scale)
            block.own.assign_add(1.0)

    def gradients(recomputed):
        model = made(functools.partial(small, *2 * [lambda block, outputs: outputs * (1 + block.own)]))
        if recomputed:
            recompute(model)

        @tf.function
        def step(values):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(values, training=True)[:, 0])
            change(model)
            return tape.gradient(loss, model.trainable_variables)

        return [gradient.numpy() for gradient in step(tf.constant(VALUES))]

    assert_same(gradients(recomputed=True), gradients(recomputed=False))


@pytest.mark.parametrize("place", first_quick(["loop", "branch in a loop", "branch"], 1))
def test_layers_in_loops_and_branches_train_the_same(place):
    def function(block, outputs):
        def branch(x):
            return keras.ops.cond(keras.ops.sum(x) > 0, lambda: block.dense(x), lambda: x)

        if place == "branch":
            return branch(outputs)
        each = block.dense if place == "loop" else branch
        return keras.ops.fori_loop(0, 2, lambda _, x: x + each(x), outputs)

    compared(lambda: small(function), lambda model: [model.layers[1].dense], tolerance=1e-6)


@pytest.mark.slow
def test_trains_the_same_on_two_replicas():
    """In a process of its own: logical devices are made before TensorFlow starts."""
    folders = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(folders)}
    run = subprocess.run([sys.executable, "-c", TWO_REPLICAS], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "replicas: 2" in run.stdout
