"""Which models compute their loss in pieces, which keep Keras' path and why, and what a model is afterwards."""

import logging
import os
import subprocess
import sys
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from language_nets import (
    EXAMPLES,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Subclassed,
    batched,
    compiled,
    cross_entropy,
    dense_net,
    tied_net,
    tokens,
)

from tfopt.batch import accumulate
from tfopt.errors import UnsupportedError
from tfopt.kernels import chunk_cross_entropy, explain, undo
from tfopt.warn import forget_warnings

LAYERS = keras.layers


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training=training)


class OwnCrossEntropy(keras.losses.SparseCategoricalCrossentropy):
    def call(self, y_true, y_pred):
        return 2 * super().call(y_true, y_pred)


class OwnAccuracy(keras.metrics.SparseCategoricalAccuracy):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true, y_pred, sample_weight)


class OwnDense(LAYERS.Dense):
    def call(self, inputs, training=None):
        return super().call(inputs, training=training) * 2


def as_class(kind):
    net = dense_net()
    return compiled(kind(net.inputs, net.outputs))


def two_outputs():
    net = dense_net()
    return compiled(keras.Model(net.inputs, [net.output, LAYERS.Dense(VOCABULARY)(net.layers[-1].input)]))


def patched():
    net = dense_net()
    object.__setattr__(net, "compute_loss", net.compute_loss)
    return net


def head(**options):
    return partial(dense_net, head=partial(LAYERS.Dense, VOCABULARY, **options))


REFUSED = {
    "outputs of softmax (Softmax)": partial(dense_net, head=LAYERS.Softmax),
    "the activation softmax": head(activation="softmax"),
    "an activity regularizer of logits": head(activity_regularizer="l2"),
    "OwnDense's own call": partial(dense_net, head=partial(OwnDense, VOCABULARY)),
    "OwnStep's own train_step": partial(as_class, OwnStep),
    "OwnLoss's own compute_loss": partial(as_class, OwnLoss),
    "outputs of dense_1 (Dense), dense_2 (Dense)": two_outputs,
    "a compute_loss set on the model": patched,
    "run_eagerly=True": partial(dense_net, run_eagerly=True),
    "from_logits=False": partial(dense_net, loss=keras.losses.SparseCategoricalCrossentropy()),
    "the loss sparse_categorical_crossentropy": partial(dense_net, loss="sparse_categorical_crossentropy"),
    "the loss own_cross_entropy": partial(dense_net, loss=OwnCrossEntropy(True, name="own_cross_entropy")),
    "the loss mean_squared_error": partial(dense_net, loss=keras.losses.MeanSquaredError()),
    "2 losses": partial(dense_net, loss=[cross_entropy(), cross_entropy()]),
    "reduction=None": partial(dense_net, loss=cross_entropy(reduction=None)),
    "a loss computed in bfloat16": partial(dense_net, loss=cross_entropy(dtype="bfloat16")),
    "the metric own": partial(dense_net, metrics=[OwnAccuracy("own")]),
    "the metric mean_squared_error": partial(dense_net, metrics=[keras.metrics.MeanSquaredError()]),
    "subclassed and has not been called on data yet": partial(Subclassed, tied=True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_that_cannot_do_it_keeps_keras_path_and_the_reason_is_said(reason, caplog):
    forget_warnings()
    keras.utils.clear_session()  # names count from the beginning
    model = REFUSED[reason]()
    attributes = set(vars(model))
    with caplog.at_level(logging.WARNING, "tfopt"):
        assert chunk_cross_entropy(model) == 0
    (record,) = caplog.records
    assert record.message.startswith("Expected a language model")
    assert f"Found in {model.name!r}: " in record.message
    assert reason in record.message
    assert record.message.endswith("call chunk_cross_entropy again.")
    assert set(vars(model)) == attributes
    assert not explain(model).layers


def changed_after(model, **options):
    """Compiles a model otherwise after it was changed, trains and evaluates a batch, and returns what was found."""
    assert chunk_cross_entropy(model) == 1
    compiled(model, **options)
    (row,) = explain(model).layers
    model.fit(batched(*tokens(batches=1)), verbose=0, shuffle=False)
    model.evaluate(batched(*tokens(batches=1)), verbose=0)
    (traced,) = explain(model).layers
    assert traced.training == traced.inference
    return row.training, traced.training


@pytest.mark.slow
def test_what_is_compiled_later_is_found_when_a_step_is_traced():
    assert changed_after(dense_net(), metrics=["accuracy", "sparse_top_k_categorical_accuracy"]) == (None, ())
    found = ("from_logits=False",)
    assert changed_after(dense_net(), loss=keras.losses.SparseCategoricalCrossentropy()) == (found, found)


@pytest.mark.slow
def test_steps_that_run_eagerly_and_metrics_that_need_logits_are_found_too():
    found = ("the metric own",)
    assert changed_after(dense_net(), metrics=[OwnAccuracy("own")]) == (found, found)
    found = ("run_eagerly=True",)
    assert changed_after(dense_net(), run_eagerly=True) == (found, ("run eagerly", *found))


REPLICAS = """
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from language_nets import dense_net
from tfopt.kernels import chunk_cross_entropy
with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
    print(chunk_cross_entropy(dense_net()))
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    print(chunk_cross_entropy(dense_net()))
"""


@pytest.mark.slow
def test_several_replicas_keep_keras_path():
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", REPLICAS], env=environ, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["1", "0"], run.stderr[-2000:]
    assert ": several replicas." in run.stderr


def test_labels_with_an_axis_of_one_take_keras_path():
    model, (x, y) = dense_net(), tokens(batches=1)
    chunk_cross_entropy(model)
    model.fit(batched(x, y[..., None]), verbose=0, shuffle=False)
    (row,) = explain(model).layers
    assert row.training == ("labels of shape (None, 7, 1) for logits of (None, 7, 50)",)


class Scaled(keras.Model):
    """Divides what its last layer computes, which its graph of layers does not show."""

    def call(self, inputs):
        return super().call(inputs) / 2


@pytest.mark.slow
def test_logits_that_a_model_changes_afterwards_take_keras_path():
    net = dense_net()
    stock, model = (compiled(Scaled(net.inputs, net.outputs)) for _ in range(2))
    assert chunk_cross_entropy(model) == 1
    before = model.get_weights()
    losses = []
    for one in (stock, model):
        one.set_weights(before)
        losses.append(one.fit(batched(*tokens()), verbose=0, shuffle=False).history["loss"])
    (row,) = explain(model).layers
    assert row.training == (f"an output that is not that of {net.layers[-1].path}",)
    assert losses[0] == losses[1]


def test_predictions_and_calls_return_all_logits():
    stock, model = tied_net(), tied_net()
    chunk_cross_entropy(model)
    x = tokens()[0]
    np.testing.assert_array_equal(model.predict(x, verbose=0), stock.predict(x, verbose=0))
    np.testing.assert_array_equal(model(x), stock(x))
    assert model(x).shape == (len(x), LENGTH, VOCABULARY)


@pytest.mark.slow
def test_only_a_traced_step_leaves_out_the_logits():
    def operations(model):
        def step(x, y):
            return model.train_step((x, y))

        graph = tf.function(step, autograph=False).get_concrete_function(*tokens(batches=1)).graph
        known = tf.compat.v1.graph_util.extract_sub_graph(
            graph.as_graph_def(), [output.op.name for output in graph.outputs]
        )
        return [node.op for node in known.node]

    stock, pieces = dense_net(metrics=["accuracy"]), dense_net(metrics=["accuracy"])
    chunk_cross_entropy(pieces)
    assert "SparseSoftmaxCrossEntropyWithLogits" in operations(stock)
    found = operations(pieces)
    assert "SparseSoftmaxCrossEntropyWithLogits" not in found
    assert "ArgMax" not in found
    assert {"While", "StatelessWhile"} & set(found)


def test_models_that_share_a_head_are_undone_one_by_one():
    net = dense_net()
    other = compiled(keras.Model(net.inputs, net.outputs))
    assert chunk_cross_entropy(net) == chunk_cross_entropy(other) == 1
    assert undo(net) == 2
    assert not explain(net).layers
    other.fit(batched(*tokens(batches=1)), verbose=0, shuffle=False)
    (row,) = explain(other).layers
    assert row.training == (f"an output that is not that of {net.layers[-1].path}",)


@pytest.mark.slow
def test_heads_inside_other_models_and_behind_casts_are_found():
    net = dense_net("mixed_bfloat16")
    inner = keras.Sequential([keras.Input((None, WIDTH)), LAYERS.Dense(VOCABULARY), LAYERS.Identity()])
    hidden = net.layers[-1].input
    for logits in (inner(hidden), keras.ops.cast(inner(hidden), "float32")):
        model = compiled(keras.Model(net.inputs, logits))
        assert chunk_cross_entropy(model) == 1
        model.fit(batched(*tokens(batches=1)), verbose=0, shuffle=False)
        (row,) = explain(model).layers
        assert row.layer == inner.layers[0].path
        assert row.training == ()
        undo(model)


@pytest.mark.slow
def test_a_clone_and_a_saved_model_lose_it(tmp_path):
    model = dense_net()
    chunk_cross_entropy(model)
    model.fit(batched(*tokens(batches=1)), verbose=0, shuffle=False)
    model.save(tmp_path / "net.keras")
    for copy in (keras.models.clone_model(model), keras.models.load_model(tmp_path / "net.keras")):
        assert not explain(copy).layers


def test_a_sequence_of_layers_that_is_not_built_yet():
    model = keras.Sequential([LAYERS.Embedding(VOCABULARY, WIDTH), LAYERS.Dense(VOCABULARY)])
    assert chunk_cross_entropy(compiled(model), 2) == 1
    model.fit(batched(*tokens(batches=1)), verbose=0, shuffle=False)
    (row,) = explain(model).layers
    assert row.training == ()


def test_classes_of_whole_examples():
    """Not a language model, but a classifier with many classes."""
    net = keras.Sequential([keras.Input((WIDTH,)), LAYERS.Dense(VOCABULARY)])
    stock = compiled(keras.models.clone_model(net), metrics=["accuracy"])
    pieces = compiled(net, metrics=["accuracy"])
    stock.set_weights(pieces.get_weights())
    chunk_cross_entropy(pieces, 3)
    random = np.random.default_rng(0)
    data = random.normal(size=(3 * EXAMPLES, WIDTH)).astype("float32"), random.integers(VOCABULARY, size=3 * EXAMPLES)
    losses = [model.fit(batched(*data), verbose=0, shuffle=False).history["loss"] for model in (stock, pieces)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("chunks", "error"),
    [(0, ValueError), (-1, ValueError), ("all", TypeError), (True, TypeError), (2.0, TypeError), (None, TypeError)],
)
def test_wrong_numbers_of_pieces(chunks, error):
    with pytest.raises(
        error, match=r"Expected chunks to be .*\. Received: .*\. Pass a number of pieces, or \"auto\"\."
    ):
        chunk_cross_entropy(dense_net(), chunks)


def test_what_is_not_a_model():
    with pytest.raises(TypeError, match=r"Expected a keras\.Model\. Received: .*Pass the model itself"):
        chunk_cross_entropy(LAYERS.Dense(3))


def test_another_patch_on_top_is_not_undone():
    model = dense_net()
    chunk_cross_entropy(model)
    object.__setattr__(model, "compute_loss", lambda **_: 0)
    with pytest.raises(UnsupportedError, match="Remove that patch first"):
        undo(model)


@pytest.mark.slow
def test_a_model_that_accumulates_takes_it_in_either_order():
    x, y = tokens()
    weights = []
    for first in (accumulate, lambda net, _: chunk_cross_entropy(net, 3)):
        net = dense_net()
        first(net, 3)
        assert chunk_cross_entropy(net, 3) == (first is accumulate)
        accumulate(net, 3)
        net.fit(batched(x, y), shuffle=False, verbose=0)
        (row,) = explain(net).layers
        assert row.training == ()
        assert net.optimizer.iterations == 1
        weights.append(net.get_weights())
    large = dense_net()
    large.train_on_batch(x, y)
    for one, other, expected in zip(*weights, large.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_model_that_accumulates_losses_of_some_tokens(weighted):
    x, y = tokens()
    x[::3, 2:] = 0
    options = {"mask_zero": True}
    if weighted:
        options = {"loss": cross_entropy(reduction="mean_with_sample_weight")}
    weights = [(x > 0).astype("float32")] if weighted else []
    large, small = dense_net(**options), dense_net(**options)
    assert chunk_cross_entropy(small, 3) == 1
    accumulate(small, 3)
    small.fit(batched(x, y, *weights), shuffle=False, verbose=0)
    large.train_on_batch(x, y, *weights)
    (row,) = explain(small).layers
    assert row.training == ()
    for one, other in zip(small.get_weights(), large.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_model_that_accumulates_a_step_set_on_it_keeps_keras_path():
    net = dense_net()
    net.train_step = lambda data: keras.Model.train_step(net, data)
    accumulate(net, 3)
    assert chunk_cross_entropy(net) == 0
