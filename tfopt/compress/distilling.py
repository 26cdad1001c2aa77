"""`distil`: a student that learns from a teacher's outputs beside the labels, with `fit`."""

from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt import checks
from tfopt.compress.versions.requirements import require_one_device
from tfopt.errors import UnsupportedError, summarize_error
from tfopt.kernels.replacing import renew, replace, replacement
from tfopt.model.batches import Data, as_dataset, first_batch, specs_of
from tfopt.model.layers import is_built, require_compiled, require_model

_CLASSES = (
    keras.losses.categorical_crossentropy,
    keras.losses.categorical_focal_crossentropy,
    keras.losses.sparse_categorical_crossentropy,
)
_BINARY = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)
_LEAST = 1e-7  # of a probability, as in Keras
_ROUNDING = 0.02  # of probabilities in 16 bits


def distil(
    teacher: keras.Model, student: keras.Model, data: Data, *, weight: float = 1.0, temperature: float = 2.0
) -> None:
    """Makes `student.fit` learn from a teacher's outputs as well as from the labels.

    Use it to regain the accuracy that a model lost when it was pruned or given cheaper layers, with the original model
    as the teacher. The student's training loss becomes its own plus `weight` times the distance of its outputs from the
    teacher's. For classes, that is the cross-entropy with the teacher's probabilities, both softened by the
    temperature, times the square of the temperature (Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural
    Network", 2015); for other outputs, half of the mean squared difference. Sample weights, masks and `ignore_class`
    apply to both parts. `evaluate`, `predict`, metrics and saved files stay as they are, and the teacher never changes.
    Each step also runs the teacher forward.

    The effect lasts until `distil` is called again; `weight=0` ends it. Saved and cloned models do not keep it.

    Args:
        teacher: A built model that takes the student's inputs and has outputs of the same shapes: logits where the
            student returns logits, probabilities where it returns probabilities.
        student: A compiled model. Outputs are classes if their loss is Keras' categorical or binary cross-entropy.
        data: One batch `(x, y[, sample_weight])`, or a dataset of them. Both models are tried on the first.
        weight: Weight of the teacher's part of the loss. Default: 1.
        temperature: Above 1, the small probabilities of wrong classes, which show which classes are alike, count more.
            Default: 2.

    Raises:
        TypeError: If a model is not a Keras model.
        ValueError: If the student is not compiled, the teacher not built, both are the same or share weights that the
            student trains, one of them does not take the data, their outputs differ in shape or number, one returns
            logits and the other probabilities, or `weight` or `temperature` is out of range.
        tfopt.errors.PipelineError: If the dataset is empty.
        tfopt.errors.UnsupportedError: If the student's own `compute_loss` takes no `training`, or it trains on several
            replicas.

    Example:
        >>> tfopt.compress.distil(model, smaller, dataset)
        >>> smaller.fit(dataset, epochs=3)
    """
    require_model(teacher)
    require_compiled(student)
    weight = checks.number("weight", weight, "Pass how much the teacher counts beside the labels.", least=0)
    temperature = checks.number("temperature", temperature, "Pass 1 for the probabilities as they are.", above=0)
    if not student._compute_loss_has_training_arg:
        raise UnsupportedError(
            "Expected a compute_loss that takes `training`, so that evaluation can leave the teacher out. Found: "
            f"that of {student.name!r} does not. Add training=True to its arguments."
        )
    require_one_device(student)
    if teacher is student:
        raise ValueError(
            f"Expected a teacher and another model. Received {student.name!r} for both. Clone the model first, with "
            "keras.models.clone_model and set_weights."
        )
    if not is_built(teacher):
        raise ValueError(
            f"Expected a teacher that is trained. Received: {teacher.name!r}, which has no weights yet. Train it first."
        )
    x, y, _ = keras.utils.unpack_x_y_sample_weight(first_batch(student, as_dataset(data)))
    taught, learnt = _outputs_alike(teacher, student, x)
    distilling = _Distilling(teacher, student, weight, temperature)
    distilling.expect_logits_or_probabilities(y, taught, learnt)
    fixed = {id(weight) for weight in teacher.variables}
    shared = [weight.path for weight in student.trainable_variables if id(weight) in fixed]
    if shared:
        raise ValueError(
            f"Expected a teacher that stays as it is. Found {shared[0]!r}, which the student trains too. Clone the "
            "teacher first, with keras.models.clone_model and set_weights, or freeze what both share."
        )
    replace(student, "compute_loss", distilling.compute_loss)
    renew(student)


class _Distilling:
    """Replaces the student's `compute_loss`."""

    def __init__(self, teacher: keras.Model, student: keras.Model, weight: float, temperature: float):
        known = getattr(replacement(student, "compute_loss"), "__self__", None)
        self._own: Any = known._own if isinstance(known, _Distilling) else student.compute_loss
        self._teacher, self._student = teacher, student
        self._weight, self._temperature = weight, temperature

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Returns the student's own loss, and in training adds the teacher's part."""
        own = self._own(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        if not (training and self._weight):
            return own
        taught = _outputs(self._teacher, x)
        for path, loss, share in self._losses(y_pred):
            target = tf.cast(tf.stop_gradient(_at(taught, path)), tf.float32)
            counts = _at(sample_weight, path) if keras.tree.is_nested(sample_weight) else sample_weight
            part = _Apart(loss, self._temperature, self._labels(y, y_pred, path))(
                target, _at(y_pred, path), sample_weight=counts
            )
            own += tf.cast(self._weight * share * part, own.dtype)
        return own

    def _labels(self, y: Any, y_pred: Any, path: tuple[Any, ...]) -> Any:
        """The labels of an output, which Keras also takes by the outputs' names, and of a single output bare."""
        if isinstance(y, dict) and not isinstance(y_pred, dict):
            y = [y[name] for name in self._student.output_names]
        return _at(y, path) if keras.tree.is_nested(y) else y

    def expect_logits_or_probabilities(self, y: Any, taught: Any, learnt: Any) -> None:
        """Refuses a teacher of probabilities for a student of logits, and the reverse, where its outputs show it."""
        compiled = self._student._compile_loss
        if compiled is None or y is None:
            return
        if not compiled.built:
            try:
                compiled.build(y, learnt)
            except Exception:  # noqa: BLE001  of labels that do not fit, of which fit speaks
                return
        for path, loss, _ in self._losses(taught):
            expected, found = _Apart(loss, self._temperature).kinds(_at(taught, path))
            if expected != found:
                raise ValueError(
                    f"Expected {expected} of the teacher, as the student's loss takes. Found: {self._teacher.name!r} "
                    f"returns {found}. Pass a teacher that ends like the student."
                )

    def _losses(self, outputs: Any) -> list[tuple[tuple[Any, ...], Any, float]]:
        """Returns the path of each output that has a loss, with the loss and its weight; all of them if none has."""
        entries = getattr(self._student._compile_loss, "_flat_losses", None) or ()
        found = [(path, loss, 1.0 if weight is None else weight) for path, loss, weight, _ in entries]
        return found or [(path, None, 1.0) for path, _ in keras.tree.flatten_with_path(outputs)]


def _at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


class _Apart(keras.losses.Loss):
    """How far outputs are from a teacher's, measured as suits the loss they are trained with."""

    def __init__(self, loss: Any, temperature: float, labels: Any = None):
        super().__init__(name="distillation", reduction="sum_over_batch_size", dtype="float32")
        self._temperature = temperature
        while isinstance(loss, partial):  # of tfopt.kernels.chunk_cross_entropy
            loss = loss.args[0]
        self._function = getattr(loss, "fn", None)
        options = getattr(loss, "_fn_kwargs", {})
        self._logits, self._axis = bool(options.get("from_logits")), options.get("axis", -1)
        self._labels, self._ignored = labels, options.get("ignore_class")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns a number for each prediction, with a mask of those that the loss does not ignore."""
        y_true, y_pred = (keras.ops.moveaxis(values, self._axis, -1) for values in (y_true, y_pred))
        if self._ignored is None or self._labels is None:
            return self._apart(y_true, y_pred)
        labels = tf.reshape(self._labels, tf.shape(y_pred)[:-1])
        counts = tf.not_equal(labels, tf.cast(self._ignored, labels.dtype))
        # As in Keras' loss, outputs that are ignored may be NaN.
        apart = self._apart(*(tf.where(counts[..., None], values, 0) for values in (y_true, y_pred)))
        apart._keras_mask = counts
        return apart

    def _apart(self, y_true: Any, y_pred: Any) -> Any:
        if self._function in _CLASSES:
            target, output = (self._softened(values, tf.math.log) for values in (y_true, y_pred))
            apart = tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(target), output)
        elif self._function in _BINARY:
            target, output = (self._softened(values, _log_odds) for values in (y_true, y_pred))
            apart = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.sigmoid(target), output), -1)
        else:
            return tf.reduce_mean(tf.square(y_true - y_pred), -1) / 2
        return apart * self._temperature**2

    def kinds(self, outputs: Any) -> tuple[str, str]:
        """What outputs should be, and what they are if that is certain: logits or probabilities."""
        expected = "logits" if self._logits else "probabilities"
        values = np.asarray(tf.cast(outputs, tf.float32))
        between = bool(((values >= 0) & (values <= 1 + _ROUNDING)).all())
        if not values.size:
            return expected, expected
        if self._function in _CLASSES and between and np.allclose(values.sum(self._axis), 1, atol=_ROUNDING):
            return expected, "probabilities"
        is_known = self._function in (*_CLASSES, *_BINARY) and not between and bool(np.isfinite(values).all())
        return expected, "logits" if is_known else expected

    def _softened(self, values: Any, logits_of: Any) -> Any:
        logits = values if self._logits else logits_of(tf.clip_by_value(values, _LEAST, 1 - _LEAST))
        return logits / self._temperature


def _log_odds(probability: Any) -> Any:
    return tf.math.log(probability) - tf.math.log1p(-probability)


def _outputs(model: keras.Model, x: Any) -> Any:
    return model(x, training=False) if model._call_has_training_arg else model(x)


def _outputs_alike(teacher: keras.Model, student: keras.Model, x: Any) -> list[Any]:
    """Returns the outputs of both models on a batch; refuses those that differ in structure or shape."""
    both = []
    for model in (teacher, student):
        try:
            both.append(_outputs(model, x))
        except Exception as error:  # whatever Keras, TensorFlow or the user's call raises
            raise ValueError(
                f"Expected data on which teacher and student can be called. Received: {specs_of(x)}, for which "
                f"{model.name!r} raises: {summarize_error(error)}. Pass one batch, or a dataset of batches, for both."
            ) from error
    found = [keras.tree.map_structure(lambda output: str(tuple(output.shape)), outputs) for outputs in both]
    if found[0] != found[1]:
        raise ValueError(
            "Expected outputs of the same names and shapes from the teacher and the student. Found: "
            f"{_listed(found[0])} of {teacher.name!r}, and {_listed(found[1])} of {student.name!r}. Pass a teacher of "
            "the same classes."
        )
    return both


def _listed(shapes: Any) -> str:
    return str(shapes).replace("'(", "(").replace(")'", ")")
