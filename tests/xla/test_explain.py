import json
import random
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state
from quick import first_quick

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.xla import explain, explaining, jit, set_jit
from tfopt.xla.comparing import Errors, ResultComparison
from tfopt.xla.obstacles import obstacles_of


class Computes(keras.layers.Layer):
    """A layer that computes a given function."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def opaque(inputs):
    return tf.ensure_shape(tf.py_function(lambda x: x, [inputs], inputs.dtype), inputs.shape)


def numpy_function(inputs):
    return inputs + tf.stop_gradient(tf.ensure_shape(tf.numpy_function(abs, [inputs], inputs.dtype), inputs.shape))


def printing(inputs):
    tf.print("a step")
    return inputs


def cropped(inputs):
    examples = tf.shape(inputs)[0]
    return tf.image.crop_and_resize(inputs, tf.zeros((examples, 4)), tf.range(examples), (8, 8))


def through_jpeg(inputs):
    return inputs + tf.cast(tf.reduce_sum(tf.io.decode_jpeg(tf.io.encode_jpeg(tf.cast(inputs[0], "uint8")))), "float32")


def in_a_loop(inputs):
    return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, opaque(x)), [0, inputs])[1]


def net(*layers, **compile_options):
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Flatten(), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": "sgd", "loss": loss} | compile_options)
    return model


@pytest.mark.parametrize(
    ("function", "operations", "remedy"),
    first_quick(
        [
            (opaque, {"EagerPyFunc"}, "Write it with TensorFlow or keras.ops"),
            (numpy_function, {"PyFunc"}, "Write it with TensorFlow or keras.ops"),
            (printing, {"StringFormat", "PrintV2"}, "Remove the print"),
            (
                lambda x: tf.image.resize(x, (8, 8), "bicubic"),
                {"ResizeBicubic", "ResizeBicubicGrad"},
                "Resize bilinearly",
            ),
            (cropped, {"CropAndResize", "CropAndResizeGradImage", "CropAndResizeGradBoxes"}, "slice and resize"),
            (through_jpeg, {"EncodeJpeg", "DecodeJpeg"}, "Read and decode"),
            (in_a_loop, {"EagerPyFunc"}, "Write it with"),
            (tf.function(opaque), {"EagerPyFunc"}, "Write it with"),
            (
                lambda x: x + tf.cast(tf.strings.length(tf.strings.as_string(x[..., :1])), x.dtype),
                None,
                "Turn strings into",
            ),
        ],
        4,
    ),
)
def test_operations_are_named_with_their_layer_and_fail_on_stock_keras(function, operations, remedy):
    model = net(keras.layers.Conv2D(1, 1), keras.Sequential([Computes(function, name="culprit")], name="block"))
    found = explain(model, batch())
    assert not found.supported
    assert {obstacle.layer for obstacle in found.obstacles} == {f"{model.name}/block/culprit"}
    assert {obstacle.kind for obstacle in found.obstacles} == {"operation"}
    assert operations is None or {obstacle.operation for obstacle in found.obstacles} <= operations
    assert all(re.fullmatch(rf"{re.escape(__file__)}:\d+", obstacle.line) for obstacle in found.obstacles)
    assert any(remedy in obstacle.remedy for obstacle in found.obstacles)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised, jit(model, True):
        model.train_on_batch(*batch())
    assert any(obstacle.operation in str(raised.value) for obstacle in found.obstacles)


def line(function, text):
    """File and line of a text in a function's source, read from the file."""
    first = function.__code__.co_firstlineno
    source = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(n for n in range(first, first + 20) if text in source[n - 1])}"


@pytest.mark.parametrize(
    ("function", "at", "operation"),
    [
        (printing, (printing, "tf.print"), "PrintV2"),
        (cropped, (cropped, "crop_and_resize"), "CropAndResizeGradImage"),  # a gradient
        (in_a_loop, (opaque, "py_function"), "EagerPyFunc"),
        (tf.function(opaque), (opaque, "py_function"), "EagerPyFunc"),
    ],
)
def test_operations_are_named_with_the_line_that_made_them(function, at, operation):
    model = net(keras.layers.Conv2D(1, 1), Computes(function))
    found = {obstacle.operation: obstacle for obstacle in explain(model, batch()).obstacles}
    assert found[operation].line == line(*at)
    assert f" at {line(*at)})" in str(found[operation])


def test_operations_of_keras_layers_have_no_line_of_the_caller():
    (obstacle,) = explain(net(keras.layers.Resizing(4, 4, interpolation="bicubic")), batch()).obstacles[:1]
    assert (obstacle.operation, obstacle.line) == ("ResizeBicubic", None)


def masked_ones(inputs):
    ones = tf.ones_like(tf.boolean_mask(inputs, inputs > 0))
    return inputs + tf.reduce_sum(ones)


@pytest.mark.parametrize("data", [batch(), None])
def test_an_operation_that_xla_gets_wrong_is_named(data):
    """Without tfopt the loss under XLA is another one; NumPy says which is right."""
    model = net(Computes(masked_ones, name="culprit"))
    (obstacle,) = explain(model, data).obstacles
    assert (obstacle.kind, obstacle.operation, obstacle.line) == (
        "results",
        "OnesLike",
        line(masked_ones, "tf.ones_like"),
    )
    assert obstacle.layer == f"{model.name}/culprit"
    assert str(explain(model, data)).startswith("XLA gives wrong results for this model on a ")
    x = batch()[0]
    outputs = {}
    for on in (False, True):
        model.compile(jit_compile=on)  # set_jit refuses
        outputs[on] = model.predict(x, verbose=0)
    weights, bias = (weight.numpy() for weight in model.layers[-1].weights)
    expected = (x + np.sum(x > 0)).reshape(len(x), -1) @ weights + bias
    assert np.linalg.norm(outputs[False] - expected) < 0.01 * np.linalg.norm(expected)
    assert np.linalg.norm(outputs[True] - expected) > 0.3 * np.linalg.norm(expected)


def test_every_culprit_is_named_not_the_first_one():
    model = net(Computes(opaque, name="one"), keras.layers.Conv2D(1, 1), Computes(printing, name="two"))
    layers = [obstacle.layer for obstacle in explain(model, batch()).obstacles]
    assert layers == [f"{model.name}/one", f"{model.name}/two", f"{model.name}/two"]


def test_layers_are_told_apart_by_more_than_their_scopes():
    """The first layer `culprit` is traced in a scope `culprit_1`, which is another layer's name."""
    model = net(Computes(lambda x: x, name="culprit_1"), Computes(opaque, name="culprit"))
    (obstacle,) = explain(model, batch()).obstacles
    assert obstacle.layer == f"{model.name}/culprit"
    assert str(obstacle).startswith(f"XLA has no kernel for EagerPyFunc in layer {model.name}/culprit (")


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.image.resize(x, (8, 8)) + tf.reduce_mean(tf.boolean_mask(x, x > 0)),
        lambda x: tf.debugging.check_numerics(x, "not finite") + tf.random.normal(tf.shape(x)),
    ],
)
def test_what_xla_can_compile_is_no_obstacle(function):
    model = net(Computes(function), jit_compile=True)
    found = explain(model, batch())
    assert found.supported
    assert found.obstacles == ()
    model.train_on_batch(*batch())


def test_outside_every_layer():
    class Printing(keras.Sequential):
        def train_step(self, data):
            tf.print("a step")
            return super().train_step(data)

    model = Printing([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    obstacles = explain(model, batch()).obstacles
    assert {(obstacle.operation, obstacle.layer) for obstacle in obstacles} == {
        ("StringFormat", None),
        ("PrintV2", None),
    }
    assert "outside every layer" in str(obstacles[0])
    assert explain(model).supported  # without data the training step is not looked at
    assert "loss, metrics and optimizer need data" in explain(model).examined


@pytest.mark.parametrize(
    ("layer", "remedy"),
    [
        (lambda: keras.layers.RandomRotation(0.1), "to the input pipeline: dataset.map"),
        (lambda: keras.Sequential([keras.layers.RandomCrop(8, 8)]), "to the input pipeline: dataset.map"),
    ],
)
def test_layers_that_keras_keeps_off_are_named_once(layer, remedy):
    model = net(layer())
    (obstacle,) = explain(model, batch()).obstacles
    assert (obstacle.kind, obstacle.operation) == ("layer", None)
    assert remedy in obstacle.remedy


def test_layers_with_a_choice_of_kernels_and_layers_of_ones_own():
    model = keras.Sequential([keras.Input((4, 2)), keras.layers.Bidirectional(keras.layers.LSTM(3)), Computes(abs)])
    model.compile("sgd", "mse")
    lstms = model.layers[0].forward_layer, model.layers[0].backward_layer
    for layer in (*lstms, model.layers[1]):
        layer.supports_jit = False  # as it is of an LSTM where cuDNN's kernel is in reach
    forward, backward, own = explain(model).obstacles
    assert (forward.layer, backward.layer) == tuple(layer.path for layer in lstms)
    assert "use_cudnn=False" in forward.remedy
    assert "supports_jit = False" in own.remedy


def test_text_in_a_model():
    text = keras.layers.TextVectorization(output_sequence_length=4, vocabulary=["a", "b"])
    model = keras.Sequential([keras.Input((), dtype="string"), text, keras.layers.Embedding(8, 2)])
    model.add(keras.layers.GlobalAveragePooling1D())
    model.compile("sgd", "mse")
    (obstacle,) = explain(model).obstacles  # the lookup inside it is no obstacle of its own
    assert obstacle.layer == text.path
    assert "input pipeline" in obstacle.remedy


@pytest.mark.slow
def test_settings():
    eager = explain(small_net(run_eagerly=True), batch())
    assert [obstacle.kind for obstacle in eager.obstacles] == ["run_eagerly"]
    assert (eager.auto, eager.auto_reason) == (False, "the model runs eagerly")

    class Plain(keras.Sequential):
        def train_step(self, data):
            return {"loss": data[0].numpy().sum()}

    model = Plain([keras.Input((8, 8, 1)), keras.layers.Dense(10)])
    model.compile("sgd", "mse", run_eagerly=True)
    kinds = {obstacle.kind: obstacle for obstacle in explain(model, batch()).obstacles}
    assert kinds.keys() == {"run_eagerly", "compilation"}
    assert "TensorFlow cannot trace the training step" in kinds["compilation"].found


@pytest.mark.slow
def test_determinism(monkeypatch):
    monkeypatch.setattr("tfopt.xla.obstacles.is_op_determinism_enabled", lambda: True)
    (obstacle,) = explain(small_net(), batch()).obstacles
    assert obstacle.kind == "determinism"


@pytest.mark.slow
def test_strategies(monkeypatch):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = net(Computes(opaque, name="culprit"))
    (obstacle,) = explain(model, batch()).obstacles
    assert obstacle.layer == f"{model.name}/culprit"
    extended = model._distribute_strategy.extended
    monkeypatch.setattr(type(extended), "worker_devices", property(lambda self: ("GPU:0", "GPU:1")))
    found = explain(model, batch())
    assert [obstacle.kind for obstacle in found.obstacles] == ["replicas"]
    assert found.examined == "its settings and layers"


def test_what_xla_refuses_at_last_is_told_in_its_words():
    """It has a kernel for the operation, and no use for these numbers."""

    def counted(inputs):
        return inputs + tf.cast(tf.size(tf.range(tf.cast(tf.reduce_max(inputs), "int32") - 1000)), inputs.dtype)

    (obstacle,) = explain(net(Computes(counted)), batch()).obstacles
    assert obstacle.kind == "compilation"
    assert "Requires start <= limit" in obstacle.found


@pytest.mark.slow
def test_a_shape_that_depends_on_values_is_compiled_for_each_batch():
    def noise(inputs):
        return inputs + tf.reduce_sum(tf.zeros([tf.cast(tf.reduce_max(inputs) ** 2, "int32")]))

    model = net(Computes(noise))
    (obstacle,) = explain(model, batch()).obstacles
    assert (obstacle.kind, "the values of tensor 0 of the batch" in obstacle.found) == ("recompilation", True)
    with pytest.raises(UnsupportedError, match="Expected a model that XLA compiles once for all batches"):
        set_jit(model, True, data=batch())


@pytest.mark.parametrize(
    ("gpu", "model", "reason"),
    [
        (False, small_net, "TensorFlow sees no GPU"),
        (True, small_net, "there is a GPU"),
        (True, lambda: net(keras.layers.RandomRotation(0.1)), "RandomRotation"),
        (True, lambda: net(Computes(opaque)), "only at layers, not at their operations"),
    ],
)
def test_what_keras_does_by_itself(monkeypatch, gpu, model, reason):
    model = model()
    devices = [*tf.config.list_physical_devices("CPU"), *[tf.config.PhysicalDevice("GPU:0", "GPU")] * gpu]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: devices)
    found = explain(model)
    model.compile("sgd", "mse", jit_compile="auto")
    assert found.auto == model.jit_compile
    assert reason in found.auto_reason


def test_in_a_strategys_scope_keras_leaves_it_off(monkeypatch):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = small_net()
    monkeypatch.setattr(
        explaining.tf.config, "list_physical_devices", lambda *_: [tf.config.PhysicalDevice("G", "GPU")]
    )
    found = explain(model)
    assert (found.auto, found.auto_reason) == (False, "the model was built in a strategy's scope")


@pytest.mark.slow
@pytest.mark.parametrize("data", [batch(), None])
def test_the_model_comes_back_bit_for_bit(data):
    model = small_net(jit_compile=False)
    model.fit(*batch(), verbose=0)
    before, functions = state(model), (model.train_function, model.jit_compile)
    tf.random.set_seed(1)
    random.seed(1)
    expected = tf.random.normal([3]).numpy()
    tf.random.set_seed(1)
    python = random.getstate()
    explain(model, data)
    assert_same_state(before, state(model))
    assert (model.train_function, model.jit_compile) == functions
    assert np.array_equal(tf.random.normal([3]).numpy(), expected)  # TensorFlow's own look at its device draws one
    assert random.getstate() == python
    assert keras.layers.Layer._open_name_scope.__module__.startswith("keras.")


def test_a_model_not_built_yet_is_built():
    model = keras.Sequential([keras.layers.Flatten(), Computes(opaque, name="culprit"), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    (obstacle,) = explain(model, batch()).obstacles
    assert obstacle.layer == f"{model.name}/culprit"
    assert model.optimizer.iterations.numpy() == 0


@pytest.mark.slow
def test_inputs_of_many_kinds():
    layers = keras.layers
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((3,), dtype="int32", name="b")}
    outputs = layers.Dense(2)(
        layers.Concatenate()([inputs["a"], layers.Flatten()(layers.Embedding(5, 2)(inputs["b"]))])
    )
    model = keras.Model(inputs, [outputs, Computes(opaque, name="culprit")(outputs)])
    model.compile("sgd", ["mse", "mse"])
    x = {"a": np.zeros((4, 4), "float32"), "b": np.zeros((4, 3), "int32")}
    for data in (
        None,
        (x, (np.zeros((4, 2)), np.zeros((4, 2)))),
        tf.data.Dataset.from_tensors((x, (np.ones((4, 2)),) * 2)),
    ):
        assert [obstacle.operation for obstacle in explain(model, data).obstacles] == ["EagerPyFunc"]


def test_as_text_and_json():
    found = explain(net(Computes(opaque, name="culprit")), batch())
    lines = str(found).splitlines()
    assert lines[0].startswith("XLA cannot compile this model on a ")
    assert lines[1].startswith("- XLA has no kernel for EagerPyFunc in layer ")
    assert lines[2].startswith('jit_compile="auto" is ')
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["supported"] is False
    assert plain["obstacles"][0]["operation"] == "EagerPyFunc"


def subclassed():
    class Model(keras.Model):
        def call(self, inputs):
            return inputs

    model = Model()
    model.compile("sgd", "mse")
    return model


def empty():
    model = keras.Sequential()
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("model", "data", "error", "message"),
    [
        (lambda: None, None, TypeError, r"Expected a keras\.Model"),
        (lambda: small_net(compiled=False), None, ValueError, r"not compiled\. Call model\.compile"),
        (empty, None, ValueError, r"Expected a model with layers.*Add layers first"),
        (subclassed, None, ValueError, "since the input shape of .* is not fixed.*Pass a dataset or one batch"),
        (small_net, [1, 2], TypeError, r"Expected a tf\.data\.Dataset"),
        (small_net, tf.data.Dataset.from_tensors(batch()).take(0), PipelineError, "Found none"),
        (
            small_net,
            (np.zeros((4, 7, 7, 1)), np.zeros(4)),
            ValueError,
            "Expected a batch.*Pass the data that fit receives",
        ),
        (small_net, (np.zeros((4, 8, 8, 1)), np.zeros((4, 3))), ValueError, "Expected a batch.*Pass the data"),
    ],
)
def test_bad_input(model, data, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        explain(model(), data)


def test_unknown_dimensions_need_data():
    model = keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"inputs of shape \[\(None, 4\)\]"):
        explain(model)
    assert explain(model, (np.zeros((2, 5, 4)), np.zeros((2, 5, 2)))).supported


@pytest.mark.slow
def test_numbers_that_are_none_do_not_matter():
    images, labels = batch()
    assert explain(small_net(), (images * np.nan, labels)).supported


@pytest.mark.parametrize(
    ("step", "extra", "part"),
    [
        (lambda x, n, y: tf.reduce_sum(x) + tf.reduce_sum(tf.zeros([n])), tf.constant(5, tf.int64), 1),
        (
            lambda x, n, y: tf.reduce_sum(x) + tf.reduce_sum(tf.zeros(n)) + tf.cast(y[0], "float32"),
            tf.constant([3, 4], tf.int64),
            1,
        ),
        (
            lambda x, n, y: tf.reduce_sum(x[: tf.argmax(n)]) + tf.cast(y[0], "float32"),
            tf.constant([1, 3, 2, 2], tf.int64),
            1,
        ),
        (lambda x, n, y: tf.reduce_sum(x) + tf.cast(tf.size(n), "float32"), tf.zeros((0, 3)), None),
    ],
)
def test_the_tensor_whose_values_are_a_shape_is_told_from_others_of_its_shape(step, extra, part):
    weight = tf.Variable(5, dtype=tf.int64)  # one of int32 lies on the host, where XLA on a GPU does not reach it

    def training(data):
        (x, n), y = data
        return step(x, n, y) + tf.cast(weight, "float32")

    found = obstacles_of(training, ((tf.ones((2, 3)), extra), tf.constant([1, 2], tf.int64)))
    assert [f"tensor {part} of the batch" in obstacle.found for obstacle in found] == ([] if part is None else [True])


def test_a_step_that_only_fails_while_it_is_recorded_is_not_refused(monkeypatch):
    def fails(model, batch, tolerance):
        raise tf.errors.InternalError(None, None, "a bug of XLA")

    monkeypatch.setattr(explaining, "compare_results", fails)
    found = explain(net(), batch())
    assert found.supported
    assert "Its results cannot be compared with those without XLA: " in str(found)
    assert "a bug of XLA" in found.results
    assert found.distance is None


@pytest.mark.slow
def test_what_xla_refuses_only_when_it_generates_code():
    """TensorFlow 2.21 on a CPU: the gradient of pooling after a normalisation in groups, in 16 bits."""
    pooled = [keras.layers.SeparableConv2D(8, 3), keras.layers.GroupNormalization(4), keras.layers.MaxPooling2D()]
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = net(*pooled, keras.layers.Conv2DTranspose(4, 3, strides=2))
    found = explain(model, batch())
    failed = False
    try:
        with jit(model, True):
            model.train_on_batch(*batch())
    except tf.errors.OpError:
        failed = True
    assert found.supported is not failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "errors", "said"),
    [
        ("float32", None, "is the first that differs, by 0.8 of its norm (up to 0.1 would count as rounding). "),
        ("mixed_bfloat16", None, "In 16 bits the result without XLA may be the inexact one"),
        ("mixed_bfloat16", Errors(0.8, 0.02), "; from float32 it differs by 0.8 with XLA, by 0.02 without. Write "),
        ("mixed_bfloat16", Errors(0.02, 0.8), "by 0.02 with XLA, by 0.8 without. So XLA is not to blame."),
    ],
)
def test_what_is_said_of_results_that_differ(monkeypatch, policy, errors, said):
    compared = ResultComparison(tolerance=0.1, distance=0.8, where="the gradient of a/bias", layer="a", errors=errors)
    monkeypatch.setattr(explaining, "compare_results", lambda model, batch, tolerance: compared)
    found = explain(small_net(policy), batch())
    assert said in str(found)
    assert found.supported == ("not to blame" in said)
    assert ("may be the inexact one" in str(found)) == ("inexact" in said)
    assert found.distance == 0.8
