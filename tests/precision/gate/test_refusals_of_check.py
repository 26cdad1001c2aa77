"""What the gate refuses, and that it says what was expected, what was found and what to do."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, small_net, state
from precision_nets import X, Y, cross_entropy, functional
from versions import since_keras

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.precision import apply, check

layers = keras.layers


def net(**options):
    return functional(lambda x: layers.Dense(3, name="head")(layers.Dense(8, name="body")(x)), **options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "mixed_float15"}, ValueError, "Expected a dtype policy: .*Received: 'mixed_float15'. Did you mean"),
        ({"policy": {"bodi": "mixed_float16"}}, ValueError, "'bodi', which matches no layer. Did you mean 'body'"),
        ({"policy": {"body": "mixed_float15"}}, ValueError, "Received: 'mixed_float15'"),
        ({"policy": "float16"}, UnsupportedError, "Expected a policy that keeps weights in float32.*Use float32"),
        *(({"policy": wrong}, TypeError, "Expected a dtype policy: a name") for wrong in (5, None, [], {"body": None})),
        ({"batches": 0}, ValueError, "Expected batches to be an integer of at least 1. Received: batches=0"),
        ({"batches": True}, ValueError, "Received: batches=True"),
        ({"batches": 1.5}, ValueError, r"Received: batches=1\.5"),
    ],
)
def test_arguments(arguments, error, message):
    model = net()
    before = state(model)
    with pytest.raises(error, match=message):
        check(model, (X, Y), **arguments)
    assert_same_state(before, state(model))
    assert {layer.dtype_policy.name for layer in model._flatten_layers()} == {"float32"}


def test_models():
    with pytest.raises(TypeError, match=r"Expected a keras\.Model\. Received: .*Dense.*Pass the model itself"):
        check(layers.Dense(3), (X, Y))
    with pytest.raises(ValueError, match=r"not compiled\. Call model\.compile"):
        check(small_net(compiled=False), (X, Y))


@since_keras("3.14")  # which first takes a model without layers
def test_a_model_without_layers():
    with pytest.raises(ValueError, match=r"layers that compute in floating point\. Received: 'net', which has none"):
        check(functional(lambda x: x, loss="mse"), (X, X))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (X, TypeError, "Expected a tf.data.Dataset of batches or one batch"),
        (
            (X, X, X, X),
            TypeError,
            r"Received: tuple of 4\..* tf\.data\.Dataset\.from_tensors\(batch\) if the model has its own",
        ),
        ((X[:, :5], Y), ValueError, r"Received: \('float32 \(32, 5\)', 'int32 \(32,\)'\)\. Found: .*expected shape"),
        ((X, np.zeros((32, 2, 7), "float32")), ValueError, "Expected batches .* that the model and its loss accept"),
        ((X,), ValueError, "Expected batches .* that the model and its loss accept"),
        ((X, Y.astype(str)), ValueError, r"Received: .*string.*\. Found: .*\. Pass what model\.fit takes"),
        ((X[:0], Y[:0]), PipelineError, r"at least one example\. Found: .*\(0, 8\).*\. Check the dataset's source"),
        pytest.param(
            (X, Y + 3),
            ValueError,
            r"Found: Received a label value of 5 which is outside .*Pass what model\.fit takes",
            marks=pytest.mark.no_gpu,  # there the loss is NaN instead
        ),
    ],
)
def test_data(data, error, message):
    with pytest.raises(error, match=message):
        check(net(), data)


def test_an_empty_dataset():
    with pytest.raises(PipelineError, match=r"Expected a dataset of at least one batch\. Found none"):
        check(net(), tf.data.Dataset.from_tensor_slices((X, Y)).take(0).batch(4))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_batch_that_is_not_finite_is_no_matter_of_precision(value):
    dataset = tf.data.Dataset.from_tensors((X, Y)).concatenate(
        tf.data.Dataset.from_tensors((np.where(X > 2, value, X).astype("float32"), Y))
    )
    with pytest.raises(
        PipelineError, match=r"NaN or infinity in x of batch 1; the loss or a gradient is NaN .* Clean the data"
    ):
        check(net(), dataset)


def test_a_sparse_batch_that_is_not_finite():
    sparse = tf.sparse.from_dense(np.where(X > 2, np.nan, X))
    with pytest.raises(PipelineError, match=r"NaN or infinity in x of batch 0; .* Clean the data"):
        check(net(), (sparse, Y))


def test_weights_that_are_not_finite():
    model = net()
    model.get_layer("body").kernel.assign(np.full((8, 8), np.nan))
    before = state(model)
    with pytest.raises(ValueError, match=r"in body/kernel; the loss or a gradient is NaN .* Load weights from before"):
        check(model, (X, Y))
    assert_same_state(before, state(model))


class Root(layers.Layer):
    def call(self, x):
        return keras.ops.sqrt(x)


def test_a_model_that_is_not_finite_in_float32():
    model = functional(lambda x: layers.Dense(3)(Root(name="root")(layers.Dense(8, name="body")(x))))
    with pytest.raises(
        ValueError, match=r"already in float32, from 'root' on\. Fix this first; no dtype policy will help"
    ):
        check(model, (X, Y))


class OnlyFloat32(layers.Layer):
    def call(self, x):
        return tf.linalg.matmul(x, tf.ones([8, 8]))


def test_a_layer_that_does_not_take_the_dtype():
    model = functional(lambda x: layers.Dense(3)(OnlyFloat32(name="strict")(layers.Dense(8)(x))))
    before = [layer._dtype_policy for layer in model._flatten_layers()]
    with pytest.raises(UnsupportedError, match=r"Found: 'strict': in OnlyFloat32\.call\(\)\..* a policy per layer"):
        check(model, (X, Y), "mixed_float16")
    assert all(layer._dtype_policy is its for layer, its in zip(model._flatten_layers(), before, strict=True))


@since_keras("3.14")  # before it, no model trains with such a loss
def test_stock_keras_cannot_sum_an_activity_regularizer_with_another_loss():
    """Loud in Keras itself, so the gate says so, too."""
    keras.config.set_dtype_policy("mixed_float16")
    body = layers.Dense(8, activity_regularizer="l1", name="body")
    model = functional(lambda x: layers.Dense(3, dtype="float32")(body(x)))
    with pytest.raises(
        TypeError, match=r"a list containing a tensor of dtype|float16 that does not match type float32"
    ):
        model.fit(X, Y, verbose=0)
    keras.config.set_dtype_policy("float32")
    body = layers.Dense(8, activity_regularizer="l1", name="body")
    with pytest.raises(UnsupportedError, match="Found: body adds a 16-bit loss, which Keras cannot sum"):
        check(functional(lambda x: layers.Dense(3)(body(x))), (X, Y), "mixed_float16")


class Checked(layers.Layer):
    def call(self, x):
        return tf.debugging.check_numerics(x * 1e4 * 1e4, "too large") * 1e-4 * 1e-4


def test_a_check_that_only_the_policy_fails_is_no_fault_of_the_data():
    model = functional(lambda x: layers.Dense(3)(Checked()(layers.Dense(8)(x))))
    before = state(model)
    with pytest.raises(
        UnsupportedError, match=r"computes under mixed_float16\. Found: .*too large.*Exclude the layers"
    ):
        check(model, (X, Y), "mixed_float16")
    assert_same_state(before, state(model))
    assert check(model, (X, Y), "mixed_bfloat16").passed


def quantized():
    model = net()
    apply(model, "float8")
    return model


def pure():
    keras.config.set_dtype_policy("bfloat16")
    model = net()
    keras.config.set_dtype_policy("float32")
    return model


@pytest.mark.parametrize("make", [quantized, pure])
def test_a_model_that_cannot_compute_in_float32(make):
    with pytest.raises(UnsupportedError, match=r"can compute in float32, .* Found 'net' with .*\. Check a model made"):
        check(make(), (X, Y), {})


def test_a_target_that_is_none():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, {"a": layers.Dense(3, name="a")(inputs), "b": layers.Dense(1, name="b")(inputs)})
    model.compile("adam", {"a": cross_entropy(), "b": None})
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        model.fit(X, {"a": Y, "b": None}, verbose=0)  # Keras takes it
    assert check(model, (X, {"a": Y, "b": None}), "mixed_float16").passed


def test_a_loss_for_each_example_counts_with_its_mean():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    model = net(loss=loss)
    report = check(model, (X, Y), "mixed_float16")
    assert report.passed, str(report)
    assert report.reference_loss == pytest.approx(model.evaluate(X, Y, verbose=0), rel=1e-4)
    gradient = next(layer.weight_gradient for layer in report.layers if layer.path == "head")
    whole = check(net(), (X, Y), "mixed_float16")
    expected = next(layer.weight_gradient for layer in whole.layers if layer.path == "head")
    assert gradient.norm == pytest.approx(len(X) * expected.norm, rel=1e-3)  # of the sum, as in training
