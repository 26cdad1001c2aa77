import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

import tfopt
from tfopt.compress import distil
from tfopt.errors import UnsupportedError

layers = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(12, 5)).astype("float32")
CLASSES = RANDOM.integers(4, size=12)
WEIGHTS = RANDOM.random(12).astype("float32")


def net(units=4, activation=None, seed=0, width=6):
    keras.utils.set_random_seed(seed)
    stack = [keras.Input((5,)), layers.Dense(width, activation="relu"), layers.Dense(units, activation=activation)]
    return keras.Sequential(stack)


def softmax(logits):
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


def cross_entropy(target, output):
    return -(target * np.log(output)).sum(-1)


def binary(target, output):
    return -(target * np.log(output) + (1 - target) * np.log(1 - output)).mean(-1)


LOSSES = {
    "classes, logits": (4, None, keras.losses.SparseCategoricalCrossentropy(from_logits=True), CLASSES),
    "classes, probabilities": (4, "softmax", "sparse_categorical_crossentropy", CLASSES),
    "one-hot": (4, "softmax", keras.losses.CategoricalCrossentropy(), np.eye(4)[CLASSES]),
    "binary, logits": (3, None, keras.losses.BinaryCrossentropy(from_logits=True), RANDOM.integers(2, size=(12, 3))),
    "binary, probabilities": (3, "sigmoid", "binary_crossentropy", RANDOM.integers(2, size=(12, 3))),
    "numbers": (2, None, "mse", RANDOM.normal(size=(12, 2))),
}


def apart(kind, teacher, student, temperature):
    """How far the student's outputs are from the teacher's, for each example, by NumPy."""
    of = {"logits": lambda x: x, "binary, probabilities": lambda p: np.log(p / (1 - p))}.get(kind, np.log)
    of = (lambda x: x) if kind.endswith("logits") else of
    if kind == "numbers":
        return ((teacher - student) ** 2).mean(-1) / 2
    teacher, student = (of(outputs.astype("float64")) / temperature for outputs in (teacher, student))
    if kind.startswith("binary"):
        return temperature**2 * binary(sigmoid(teacher), sigmoid(student))
    return temperature**2 * cross_entropy(softmax(teacher), softmax(student))


def step(student, *data, **options):
    """The loss of a step alone."""
    student.reset_metrics()  # which `train_on_batch` does since Keras 3.15
    return student.train_on_batch(*data, **options)


@pytest.mark.parametrize(
    ("kind", "weighted"), first_quick([(kind, weighted) for weighted in (True, False) for kind in LOSSES], 3)
)
def test_the_loss_is_the_own_one_and_the_teachers_part(kind, weighted):
    units, activation, loss, y = LOSSES[kind]
    teacher, student = net(units, activation, seed=1, width=9), net(units, activation)
    student.compile("sgd", loss)
    data = (X, y, WEIGHTS) if weighted else (X, y)
    own = student.evaluate(*data[:2], sample_weight=WEIGHTS if weighted else None, batch_size=12, verbose=0)
    part = apart(kind, teacher.predict(X, verbose=0), student.predict(X, verbose=0), temperature=3.0)
    distil(teacher, student, data, weight=0.7, temperature=3.0)
    found = step(student, *data)
    assert found == pytest.approx(own + 0.7 * np.mean(part * (WEIGHTS if weighted else 1)), rel=1e-5)


@pytest.mark.parametrize("activation", [None, "softmax"])
def test_positions_of_an_ignored_class_count_for_neither_part(activation):
    def net_of_sequences(seed):
        keras.utils.set_random_seed(seed)
        return keras.Sequential([keras.Input((3, 5)), layers.Dense(4, activation=activation)])

    teacher, student = net_of_sequences(1), net_of_sequences(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=activation is None, ignore_class=-1)
    student.compile("sgd", loss)
    x, y = RANDOM.normal(size=(2, 3, 5)).astype("float32"), np.array([[0, -1, 2], [-1, 3, -1]])
    x[y < 0] = np.nan
    own = student.evaluate(x, y, verbose=0)
    outputs = [model.predict(x, verbose=0)[y >= 0] for model in (teacher, student)]
    kind = "classes, logits" if activation is None else "classes, probabilities"
    distil(teacher, student, (x, y), weight=0.7, temperature=3.0)
    assert step(student, x, y) == pytest.approx(own + 0.7 * np.mean(apart(kind, *outputs, 3.0)), rel=1e-5)


@pytest.mark.parametrize("labels", [lambda a, b: {"b": b, "a": a}, lambda a, b: (a, b)], ids=["by name", "in a tuple"])
def test_labels_of_several_outputs(labels):
    def two(seed):
        keras.utils.set_random_seed(seed)
        inputs = keras.Input((5,))
        return keras.Model(inputs, [layers.Dense(3, name="a")(inputs), layers.Dense(4, name="b")(inputs)])

    teacher, student = two(1), two(0)
    student.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1))
    x, a, b = RANDOM.normal(size=(4, 5)).astype("float32"), np.array([0, 1, -1, 2]), np.array([3, -1, 0, 1])
    own = student.evaluate(x, [a, b], verbose=0)[0]
    outputs = zip(teacher.predict(x, verbose=0), student.predict(x, verbose=0), (a, b), strict=True)
    parts = [np.mean(apart("classes, logits", one[y >= 0], other[y >= 0], 3.0)) for one, other, y in outputs]
    data = tf.data.Dataset.from_tensors((x, labels(a, b)))
    distil(teacher, student, data, weight=0.7, temperature=3.0)
    loss = student.fit(data, verbose=0, shuffle=False).history["loss"][0]
    assert loss == pytest.approx(own + 0.7 * sum(parts), rel=1e-5)


def test_weights_follow_the_gradient_of_both_and_the_teacher_stays():
    teacher, student = net(seed=1), net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    student.compile(keras.optimizers.SGD(0.1), loss)
    before = [weight.numpy() for weight in teacher.weights]
    with tf.GradientTape() as tape:
        output = student(X)
        target = tf.nn.softmax(teacher(X) / 2)
        soft = tf.nn.softmax_cross_entropy_with_logits(target, output / 2)
        total = loss(CLASSES, output) + 4 * tf.reduce_mean(soft)
    gradients = tape.gradient(total, [weight.value for weight in student.trainable_weights])
    expected = [weight - 0.1 * gradient for weight, gradient in zip(student.get_weights(), gradients, strict=True)]
    distil(teacher, student, (X, CLASSES))
    student.fit(X, CLASSES, batch_size=12, verbose=0)
    for weight, value in zip(student.get_weights(), expected, strict=True):
        np.testing.assert_allclose(weight, value, rtol=1e-5, atol=1e-6)
    for weight, value in zip(teacher.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "jit_compile"), [("mixed_bfloat16", True), ("mixed_float16", False)])
def test_it_works_in_16_bits_and_under_xla(policy, jit_compile):
    losses, weights = [], []
    for of in ("float32", policy):
        teacher, student = net(seed=1, width=32), net()
        tfopt.precision.apply(student, of)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        student.compile(keras.optimizers.SGD(0.1), loss, jit_compile=jit_compile)
        distil(teacher, student, (X, CLASSES), weight=5)
        losses.append(student.fit(X, CLASSES, batch_size=12, epochs=3, verbose=0).history["loss"])
        weights.append(student.get_weights())
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert losses[0][2] < losses[0][0]
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=0.01)


def two(seed):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((5,))
    return keras.Model(inputs, {"kind": layers.Dense(4)(inputs), "size": layers.Dense(1)(inputs)})


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("order", [("kind", "size"), ("size", "kind"), ("kind",)])
def test_outputs_follow_their_own_losses_and_weights(order):
    teacher, student = two(1), two(0)
    losses = {"kind": LOSSES["classes, logits"][2], "size": "mse"}
    shares = {"kind": 0.5, "size": 3.0}
    of = {name: losses[name] if name in order else None for name in (*order, *({"size", "kind"} - set(order)))}
    student.compile("sgd", of, loss_weights={name: shares[name] if name in order else None for name in of})
    y = {"kind": CLASSES, "size": X[:, :1]}
    own = student.evaluate(X, y, batch_size=12, verbose=0, return_dict=True)["loss"]
    taught, learnt = teacher.predict(X, verbose=0), student.predict(X, verbose=0)
    parts = {
        "kind": apart("classes, logits", taught["kind"], learnt["kind"], 2.0).mean(),
        "size": apart("numbers", taught["size"], learnt["size"], 2.0).mean(),
    }
    distil(teacher, student, (X, y))
    found = step(student, X, y, return_dict=True)["loss"]
    assert found == pytest.approx(own + sum(shares[name] * parts[name] for name in order), rel=1e-5)


def test_classes_along_another_axis():
    def net(seed):
        keras.utils.set_random_seed(seed)
        return keras.Sequential([keras.Input((5,)), layers.Dense(12), layers.Reshape((4, 3)), layers.Softmax(axis=1)])

    teacher, student = net(1), net(0)
    student.compile("sgd", keras.losses.CategoricalCrossentropy(axis=1))
    y = np.eye(4)[RANDOM.integers(4, size=(12, 3))].transpose(0, 2, 1)
    own = student.evaluate(X, y, batch_size=12, verbose=0)
    taught, learnt = (one.predict(X, verbose=0).transpose(0, 2, 1) for one in (teacher, student))
    distil(teacher, student, (X, y), temperature=3.0)
    part = apart("classes, probabilities", taught, learnt, 3.0).mean()
    assert step(student, X, y) == pytest.approx(own + part, rel=1e-5)


def test_evaluation_and_files_stay_as_they_are(tmp_path):
    teacher, student = net(seed=1), net()
    student.compile("sgd", LOSSES["classes, logits"][2])
    before = student.evaluate(X, CLASSES, verbose=0)
    distil(teacher, student, (X, CLASSES))
    assert student.evaluate(X, CLASSES, verbose=0) == before
    student.save(tmp_path / "student.keras")
    loaded = keras.models.load_model(tmp_path / "student.keras")
    assert loaded.count_params() == student.count_params()
    assert step(loaded, X, CLASSES) == pytest.approx(before, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["distil", "chunk_cross_entropy"])
def test_it_works_with_a_loss_in_chunks(first):
    weights = []
    for chunked in (False, True):
        student = net()
        student.compile(keras.optimizers.SGD(0.1), LOSSES["classes, logits"][2])
        calls = [lambda student=student: distil(net(seed=1), student, (X, CLASSES))]
        calls += [lambda student=student: tfopt.kernels.chunk_cross_entropy(student)] * chunked
        for call in calls if first == "distil" else reversed(calls):
            call()
        student.fit(X, CLASSES, batch_size=6, epochs=2, shuffle=False, verbose=0)
        weights.append(student.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_second_call_replaces_the_first_and_zero_ends_it():
    teacher, student = net(seed=1), net()
    student.compile(keras.optimizers.SGD(0.0), LOSSES["classes, logits"][2])
    own = step(student, X, CLASSES)
    distil(teacher, student, (X, CLASSES))
    once = step(student, X, CLASSES)
    distil(teacher, student, (X, CLASSES), weight=2)
    assert step(student, X, CLASSES) - own == pytest.approx(2 * (once - own), rel=1e-4)
    distil(teacher, student, (X, CLASSES), weight=0)
    assert step(student, X, CLASSES) == own


@pytest.mark.parametrize(
    ("kind", "activation", "says"),
    [
        ("classes, logits", "softmax", "Expected logits .* returns probabilities"),
        ("classes, probabilities", None, "Expected probabilities .* returns logits"),
        ("binary, probabilities", None, "Expected probabilities .* returns logits"),
    ],
)
def test_logits_and_probabilities_are_not_confused(kind, activation, says):
    units, own, loss, y = LOSSES[kind]
    student = net(units, own)
    student.compile("sgd", loss)
    with pytest.raises(ValueError, match=says):
        distil(net(units, activation, seed=1), student, (X, y))


def test_models_that_do_not_fit_are_refused():
    student = net()
    with pytest.raises(ValueError, match="not compiled"):
        distil(net(), student, (X, CLASSES))
    student.compile("sgd", "mse")
    with pytest.raises(ValueError, match="for both"):
        distil(student, student, (X, CLASSES))
    with pytest.raises(
        ValueError, match=r"Found: \(12, 7\) of .* and \(12, 4\) of .*Pass a teacher of the same classes"
    ):
        distil(net(7), student, (X, CLASSES))
    named = two(0)
    named.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"same names and shapes"):
        distil(keras.Model(named.inputs, list(named.output.values())), named, (X, {"kind": X[:, :4], "size": X[:, :1]}))
    with pytest.raises(ValueError, match="'unbuilt', which has no weights yet"):
        distil(keras.Sequential([layers.Dense(4)], name="unbuilt"), student, (X, CLASSES))
    with pytest.raises(ValueError, match="which the student trains too"):
        distil(keras.Sequential([keras.Input((5,)), student.layers[0], layers.Dense(4)]), student, (X, CLASSES))
    with pytest.raises(ValueError, match=r"Received: float32 \(12, 3\), for which 'seq.*' raises: in Sequential"):
        distil(net(), student, (X[:, :3], CLASSES))
    with pytest.raises(ValueError, match="weight to be at least 0"):
        distil(net(), student, (X, CLASSES), weight=-1)
    with pytest.raises(ValueError, match="temperature to be above 0"):
        distil(net(), student, (X, CLASSES), temperature=0)

    class Own(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return keras.ops.mean(y_pred)

    own = Own([keras.Input((5,)), layers.Dense(4)])
    own.compile("sgd")
    with pytest.raises(UnsupportedError, match="compute_loss that takes `training`"):
        distil(net(), own, (X, CLASSES))
    with pytest.raises(TypeError, match=r"Expected a keras\.Model"):
        distil("teacher", student, (X, CLASSES))
