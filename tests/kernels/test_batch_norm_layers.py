"""Which layers run through the fused batch norm, which stay on Keras' path, and what a model is afterwards."""

import json
import os
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state
from plain_attention import rounding
from quick import first_quick
from versions import since_keras

from tfopt.internals.sources import find
from tfopt.kernels import batch_norm, explain, fuse_batch_norm, undo

LAYERS = keras.layers
NOT_ASKED = ("not requested: fuse_batch_norm(model)",)
IN_XLA = ("XLA fuses it by itself",)


class Own(LAYERS.BatchNormalization):
    """Leaves the normalization to Keras."""


class Centred(LAYERS.BatchNormalization):
    """Normalizes by itself."""

    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training, mask=mask) - 1


class OwnMoments(LAYERS.BatchNormalization):
    """Has statistics of its own."""

    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean, variance + 1


def one_layer(layer, shape=(4, 4, 3), dtype=None):
    keras.utils.set_random_seed(3)
    inputs = keras.Input(shape, dtype=dtype)
    return keras.Model(inputs, layer(inputs))


def paths(model):
    (row,) = explain(model).layers
    return row.training, row.inference


@pytest.fixture
def calls(monkeypatch):
    """Whether each kernel that was traced since was one for training."""
    found, fused = [], tf.compat.v1.nn.fused_batch_norm

    def spy(*arguments, **options):
        found.append(options["is_training"])
        return fused(*arguments, **options)

    monkeypatch.setattr(tf.compat.v1.nn, "fused_batch_norm", spy)
    return found


@pytest.mark.slow
def test_a_model_that_was_fitted_runs_through_the_kernel_from_then_on(calls):
    model = small_net(jit_compile=False)
    model.fit(*batch(), verbose=0)
    assert fuse_batch_norm(model) == 1
    assert paths(model) == (None, None)
    assert calls == []
    model.fit(*batch(), verbose=0)
    assert calls == [True]
    assert paths(model) == ((), None)
    model.evaluate(*batch(), verbose=0)
    assert calls == [True, False]
    assert paths(model) == ((), ())
    assert undo(model) == 1
    model.fit(*batch(), verbose=0)
    assert calls == [True, False]
    assert paths(model) == (NOT_ASKED, NOT_ASKED)


def test_a_step_holds_one_kernel_forward_and_one_backward():
    model = small_net(compiled=False)
    fuse_batch_norm(model)

    @tf.function
    def step(images):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(images, training=True))
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    operations = [node.op for node in step.get_concrete_function(batch(8)[0]).graph.as_graph_def().node]
    assert [operations.count(name) for name in ("FusedBatchNormV3", "FusedBatchNormGradV3")] == [1, 1]
    assert "SquaredDifference" not in operations, "Keras' moments were traced too"


@pytest.mark.slow
@pytest.mark.parametrize("policy", first_quick(["float32", "mixed_bfloat16", "mixed_float16"]))
def test_a_training_goes_as_with_keras(policy):
    stock, fused = (small_net(policy, optimizer="sgd", jit_compile=False) for _ in range(2))
    fuse_batch_norm(fused)
    histories = [model.fit(*batch(64), batch_size=16, epochs=3, verbose=0).history for model in (stock, fused)]
    # In each of 12 steps outputs and gradients are rounded once; statistics are float32 sums over 16 × 6 × 6 positions.
    tolerance = rounding(policy.removeprefix("mixed_"), 24) + rounding("float32", 576)
    np.testing.assert_allclose(histories[1]["loss"], histories[0]["loss"], rtol=tolerance)
    for (name, ours), (_, other) in zip(state(fused), state(stock), strict=True):
        np.testing.assert_allclose(ours, other, atol=tolerance, rtol=tolerance, err_msg=name)


@pytest.mark.slow
def test_under_xla_keras_path_stays_bit_for_bit(calls):
    stock, fused = (small_net(jit_compile=True) for _ in range(2))
    assert fuse_batch_norm(fused) == 1
    assert paths(fused) == (IN_XLA, IN_XLA)
    for model in (stock, fused):
        model.fit(*batch(), verbose=0)
    assert calls == []
    assert_same_state(state(stock), state(fused))


@pytest.mark.parametrize(
    ("options", "shape", "dtype", "reason"),
    [
        ({"axis": 2}, (4, 4, 3), None, "axis 2, where the kernel takes the second or the last"),
        ({}, (2, 2, 2, 2, 3), None, "6 axes, where the kernel takes 2 to 5"),
        ({"dtype": "float64"}, (3,), "float64", "float64, where the kernel takes float32, bfloat16, float16"),
        ({"autocast": False}, (3,), "bfloat16", "inputs of bfloat16 in a layer that computes in float32"),
    ],
)
def test_what_the_kernel_is_not_for_computes_as_keras(options, shape, dtype, reason):
    inputs = tf.cast(np.random.default_rng(0).normal(size=(5, *shape)), dtype or "float32")
    stock, fused = (one_layer(LAYERS.BatchNormalization(**options), shape, dtype) for _ in range(2))
    fused.jit_compile = False
    assert fuse_batch_norm(fused) == 1
    assert_same_state(*(trained_once(model, inputs) for model in (stock, fused)))
    assert paths(fused) == ((reason,), None)


def trained_once(model, inputs):
    """What a model that is not compiled gives and holds after a step of training."""
    outputs = model(inputs, training=True)
    return [(outputs.dtype.name, outputs.numpy()), *((variable.name, variable.numpy()) for variable in model.variables)]


def test_a_mask_is_left_to_keras():
    def masked():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((6, 3)), LAYERS.Masking(), LAYERS.BatchNormalization(momentum=0.5)])

    stock, fused = masked(), masked()
    fuse_batch_norm(fused)
    inputs = np.random.default_rng(0).normal(size=(4, 6, 3)).astype("float32")
    inputs[:, 4:] = 0
    assert_same_state(*(trained_once(model, inputs) for model in (stock, fused)))
    assert paths(fused)[0] == ("a mask",)


@pytest.mark.parametrize(
    ("make", "kind"),
    [(np.asarray, "ndarray"), (tf.RaggedTensor.from_tensor, "RaggedTensor"), (keras.Variable, "Variable")],
)
def test_what_is_no_dense_tensor_is_left_to_keras(make, kind):
    stock, fused = (one_layer(LAYERS.BatchNormalization(), (None, 3)) for _ in range(2))
    fuse_batch_norm(fused)
    given = make(np.random.default_rng(0).normal(size=(2, 4, 3)).astype("float32"))
    expected, found = (model.layers[1].call(given, training=True) for model in (stock, fused))
    assert type(found) is type(expected)
    np.testing.assert_array_equal(found.numpy(), expected.numpy())
    assert paths(fused)[0] == (f"a {kind}, where the kernel takes a dense tensor",)


@pytest.mark.parametrize("option", ["synchronized", pytest.param("renorm", marks=since_keras("3.14"))])
def test_what_a_layer_was_made_with_leaves_it_alone(option):
    model = one_layer(LAYERS.BatchNormalization(**{option: True}))
    assert fuse_batch_norm(model) == 0
    assert "call" not in vars(model.layers[1])
    assert paths(model) == ((f"{option}=True",),) * 2


def test_an_option_of_a_later_keras_leaves_every_layer_alone(monkeypatch):
    """Renorm was such a one: a layer of the class that computes something else."""
    monkeypatch.setattr(batch_norm, "_KNOWN", batch_norm._KNOWN - {"momentum"})
    model = one_layer(LAYERS.BatchNormalization())
    assert fuse_batch_norm(model) == 0
    assert paths(model)[0] == ("options of a later Keras (momentum)",)


@pytest.mark.parametrize(("kind", "changed"), [(Own, 1), (Centred, 0), (OwnMoments, 0)])
def test_a_subclass_takes_it_where_keras_normalizes(kind, changed):
    model = one_layer(kind())
    before = model(batch(4)[0][:, :4, :4].repeat(3, -1), training=True)
    assert fuse_batch_norm(model) == changed
    after = model(batch(4)[0][:, :4, :4].repeat(3, -1), training=True)
    np.testing.assert_allclose(after, before, atol=1e-5)
    assert paths(model)[0] == (() if changed else (f"{kind.__name__} normalizes by itself",))


@pytest.mark.parametrize(("shape", "axis"), [((3,), -1), ((4, 3), -1), ((4, 4, 3), -1)])
def test_shapes_may_be_known_at_run_time_alone(shape, axis):
    stock, fused = (one_layer(LAYERS.BatchNormalization(axis, momentum=0.5), shape) for _ in range(2))
    fuse_batch_norm(fused)
    inputs = np.random.default_rng(0).normal(size=(5, *shape)).astype("float32")
    signature = [tf.TensorSpec([None] * inputs.ndim)]
    outputs = [
        tf.function(partial(model.layers[1], training=True), input_signature=signature)(inputs)
        for model in (stock, fused)
    ]
    np.testing.assert_allclose(*outputs, atol=1e-5)
    for one, other in zip(fused.variables, stock.variables, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert paths(fused)[0] == ()


def test_op_determinism_leaves_inference_to_keras():
    model = one_layer(LAYERS.BatchNormalization())
    fuse_batch_norm(model)
    tf.config.experimental.enable_op_determinism()
    try:
        for training in (True, False):
            model(np.ones((2, 4, 4, 3), "float32"), training=training)
    finally:
        getattr(*find("tensorflow.python.framework.config:disable_op_determinism"))()
    assert paths(model) == ((), ("op determinism, which the gradient in inference mode does not give",))


def test_layers_are_found_wherever_they_are():
    inner = keras.Sequential([LAYERS.Conv2D(4, 3), LAYERS.BatchNormalization()])
    shared = LAYERS.BatchNormalization()
    inputs = keras.Input((3, 6, 6, 2))
    outputs = LAYERS.TimeDistributed(inner)(inputs)
    outputs = LAYERS.TimeDistributed(LAYERS.BatchNormalization())(shared(shared(outputs)))
    model = keras.Model(inputs, outputs)
    given = np.random.default_rng(0).normal(size=(2, 3, 6, 6, 2)).astype("float32")
    before, weights = state_after(model, given), [variable.numpy() for variable in model.variables]
    assert fuse_batch_norm(model) == 3
    assert fuse_batch_norm(model) == 0
    after = state_after(model, given, weights)
    assert [row.training for row in explain(model).layers] == [()] * 3
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert undo(model) == 3
    assert undo(model) == 0


def state_after(model, inputs, weights=None):
    """Outputs and variables after a step of training, from given weights or fixed ones."""
    for seed, variable in enumerate(model.variables):
        variable.assign(1 + np.random.default_rng(seed).uniform(size=variable.shape))
    outputs = model(inputs, training=True)
    return [outputs.numpy(), *(variable.numpy() for variable in model.variables)]


def test_files_and_copies_know_nothing_of_it(tmp_path):
    model = small_net(compiled=False)
    model.save(tmp_path / "stock.keras")
    fuse_batch_norm(model)
    model.save(tmp_path / "fused.keras")
    configs = [
        json.loads(zipfile.ZipFile(tmp_path / f"{name}.keras").read("config.json")) for name in ("stock", "fused")
    ]
    assert configs[0] == configs[1]
    for copy in (keras.models.load_model(tmp_path / "fused.keras"), keras.models.clone_model(model)):
        assert {row.training for row in explain(copy).layers} == {NOT_ASKED}
        assert fuse_batch_norm(copy) == 1


def test_an_exported_model_runs(tmp_path):
    model = small_net(jit_compile=False)
    fuse_batch_norm(model)
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(batch(4)[0]), model(batch(4)[0]), atol=1e-6)


def test_models_with_nothing_to_fuse():
    assert fuse_batch_norm(keras.Sequential()) == 0
    assert fuse_batch_norm(keras.Sequential([LAYERS.Dense(3)])) == 0
    unbuilt = keras.Sequential([LAYERS.BatchNormalization()])
    assert fuse_batch_norm(unbuilt) == 1
    assert unbuilt(np.ones((2, 3), "float32"), training=True).shape == (2, 3)
    with pytest.raises(TypeError, match=r"Expected a keras\.Model\. Received: 'resnet'"):
        fuse_batch_norm("resnet")


def test_wrong_arguments_fail_as_in_keras():
    model = one_layer(LAYERS.BatchNormalization())
    fuse_batch_norm(model)
    with pytest.raises(ValueError, match="one dimension less"):
        model.layers[1](np.ones((2, 4, 4, 3), "float32"), mask=np.ones((2, 4, 4, 3), bool))
    with pytest.raises(ValueError, match="incompatible"):
        model.layers[1](np.ones((2, 4, 4, 5), "float32"))


TWO_REPLICAS = """
import numpy as np
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from models import batch, small_net
from versions import since_keras
from tfopt.kernels import explain, fuse_batch_norm

def trained(fused):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = small_net(optimizer="sgd", dropout=0.0, jit_compile=False)
    if fused:
        assert fuse_batch_norm(model) == 1
    model.fit(*batch(64), batch_size=16, epochs=2, verbose=0, shuffle=False)
    return model, [np.stack([part.numpy() for part in getattr(v.value, "values", (v.value,))]) for v in model.variables]

(_, stock), (model, fused) = trained(False), trained(True)
assert explain(model).layers[0].training == (), str(explain(model))
for one, other in zip(stock, fused, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)
print("parts:", [len(part) for part in fused])
"""


@pytest.mark.slow
def test_two_replicas_train_as_with_keras():
    """In a process of its own: logical devices are made before TensorFlow starts."""
    folders = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(folders)}
    run = subprocess.run([sys.executable, "-c", TWO_REPLICAS], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "parts: [2, 2," in run.stdout
