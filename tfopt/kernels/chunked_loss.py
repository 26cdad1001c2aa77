"""Computes a language model's last product and cross-entropy in pieces, so that all its logits never exist at once."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfopt import checks
from tfopt.errors import UnsupportedError
from tfopt.internals.layers import Cast, Functional, LossFunctionWrapper
from tfopt.internals.scopes import in_stateless_scope, set_keras_mask
from tfopt.internals.training import has_keras_own
from tfopt.kernels.replacing import CALLS_OWN, LayerPath, Traced, layer_path, renew, replace, replacement
from tfopt.kernels.token_pieces import Chunks, LastProduct, in_pieces
from tfopt.model.layers import output_layers, require_model
from tfopt.model.step_calls import NOT_OF_THE_STEP
from tfopt.warn import warn_once

_CROSS_ENTROPY = keras.losses.sparse_categorical_crossentropy
_OF_METRICS = (
    keras.metrics.sparse_categorical_accuracy,
    keras.metrics.sparse_top_k_categorical_accuracy,
    _CROSS_ENTROPY,
)
_EMBEDDING = keras.layers.ReversibleEmbedding
_RELIED_ON = ("train_step", "test_step", "compute_loss", "compute_metrics", "_compute_loss")


def chunk_cross_entropy(model: keras.Model, chunks: Chunks = "auto") -> int:
    """Computes a language model's last product and its loss in pieces, so that its logits never all exist at once.

    Use it before or after `compile` and `fit`, where the logits (tokens × vocabulary) take much of the memory. It
    applies to a model whose one output is a linear `Dense` or a `ReversibleEmbedding` in reverse, compiled with
    `SparseCategoricalCrossentropy(from_logits=True)`. Each piece of the tokens gets its logits, its losses, its part of
    the metrics and of the gradients; sums over pieces are float32. Sample weights, masks, `ignore_class` and the loss's
    reduction are Keras' own. Losses, metrics and gradients differ from Keras' by rounding. `predict` and the model's
    call return all logits, as before.

    Steps that it does not support take Keras' own path: eager ones, those of several replicas, and those with metrics
    that need all logits. Supported are accuracy, `SparseTopKCategoricalAccuracy`, `SparseCategoricalCrossentropy` and
    KerasHub's `Perplexity`. `explain(model)` names the reason. Saved and cloned models lose it: call it again on the
    loaded model.

    Args:
        model: A model, compiled or not.
        chunks: How many pieces. "auto": as many as have 64 MiB of float32 logits each, 8 at most.

    Returns:
        1 if the model changed; 0 if it has that many pieces already, or cannot be changed; the reason is logged once
        (logger `tfopt`).

    Raises:
        TypeError: If `model` is not a Keras model, or `chunks` is neither an integer nor "auto".
        ValueError: If `chunks` is below 1.

    Example:
        >>> tfopt.kernels.chunk_cross_entropy(model)
        1
    """
    require_model(model)
    if chunks != "auto":
        chunks = checks.integer("chunks", chunks, 'Pass a number of pieces, or "auto".', least=1)
    known = _installed(model)
    if known is not None:
        if known.chunks == chunks:
            return 0
        known.chunks = chunks
        renew(model)
        return 1
    try:
        head = _head(model)
        marked = isinstance(replacement(head, "call"), _MarkedHead)  # of a model that shares it
        found = [*_of_head(head), *_of_model(model)]
        if "call" in vars(head) and not marked:
            found.append(f"a call set on {layer_path(head)}")
    except UnsupportedError as error:
        found = [str(error).rstrip(".")]
    if found:
        text = (
            "Expected a language model trained by Keras' own step: one output, of a Dense or ReversibleEmbedding, and "
            f"SparseCategoricalCrossentropy(from_logits=True). Found in {model.name!r}: {', '.join(found)}. It keeps "
            "Keras' own path; change that, and call chunk_cross_entropy again."
        )
        warn_once(f"chunked cross-entropy: {text}", text)
        return 0
    kernel = _ChunkedLoss(model, head, chunks)
    if not marked:
        replace(head, "call", _MarkedHead(head))
    replace(model, "compute_loss", kernel.compute_loss)
    replace(model, "compute_metrics", kernel.compute_metrics)
    renew(model)
    return 1


def explain_layer(layer: keras.Layer, jit: bool) -> LayerPath | None:
    """Says how a model computes its loss; None for anything but a model with this kernel."""
    kernel = _installed(layer)
    if kernel is None:
        return None
    training, inference = kernel.found(training=True), kernel.found(training=False)
    return LayerPath(
        layer=layer_path(kernel.head), kernel="chunked cross-entropy", training=training, inference=inference
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """What a head's logits were computed from, on the logits."""

    head: keras.Layer
    hidden: tf.Tensor


class _MarkedHead:
    """Replaces a head's `call`, and computes the same.

    A traced step drops all that its results do not depend on. So logits may stand in its graph as Keras puts them
    there: if the loss and the metrics are computed without them, they are not computed at all, and if something else
    reads them, it gets the right ones.
    """

    def __init__(self, layer: keras.Layer) -> None:
        self._layer = layer
        self._plain = layer.call

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = self._plain(inputs, *args, **kwargs)
        embeds = isinstance(self._layer, _EMBEDDING) and not (args or (kwargs.get("reverse"),))[0]
        if not embeds and isinstance(outputs, tf.Tensor) and not tf.executing_eagerly():
            outputs._tfopt_mark = _Mark(head=self._layer, hidden=inputs)
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A function of labels and logits in a loss or a metric, which returns a number per token."""

    holder: Any
    name: str
    dtype: str | None
    """What the holder casts labels and logits to."""

    def __call__(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        if self.dtype is not None:
            labels, logits = tf.cast(labels, self.dtype), tf.cast(logits, self.dtype)
        return getattr(self.holder, self.name)(labels, logits, **self.holder._fn_kwargs)

    @contextmanager
    def answered(self, labels: tf.Tensor, values: tf.Tensor, *, of_step: bool = True) -> Iterator[None]:
        """Lets the holder find the values of all tokens, whatever logits it passes."""
        values = tf.reshape(values, tf.shape(labels))
        if not of_step:
            setattr(values, NOT_OF_THE_STEP, True)
        ignored = self.holder._fn_kwargs.get("ignore_class")
        if ignored is not None:
            set_keras_mask(values, tf.not_equal(labels, tf.cast(ignored, labels.dtype)))
        with _set(self.holder, self.name, lambda *_, **__: values):
            yield


class _ChunkedLoss:
    """Replaces one model's `compute_loss` and `compute_metrics`."""

    def __init__(self, model: keras.Model, head: keras.Layer, chunks: Chunks) -> None:
        self.head = head
        self.chunks = chunks
        self.traced = Traced()
        self._model = model
        self._plain_loss = model.compute_loss
        self._plain_metrics = model.compute_metrics

    def found(self, *, training: bool) -> tuple[str, ...] | None:
        """What keeps the model from the kernel: as last traced, otherwise for any batch; None if unknown."""
        return self.traced.last(training, (*_of_head(self.head), *_of_model(self._model)))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Returns what the model's own `compute_loss` does."""
        # Without a note in scopes in which Keras infers shapes, or tfopt looks at every layer's own numbers.
        if in_stateless_scope():
            return self._plain_loss(x, y, y_pred, sample_weight, training=training)
        found = tuple(self._obstacles(y, y_pred))
        self.traced.note(training, found)
        with ExitStack() as stack:
            if not found:
                compiled = self._model._compile_loss
                (entry,) = compiled._flat_losses
                loss = partial(self._loss, entry.loss, training)
                stack.enter_context(_set(compiled, "_flat_losses", [entry._replace(loss=loss)]))
            return self._plain_loss(x, y, y_pred, sample_weight, training=training)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Returns what the model's own `compute_metrics` does."""
        with ExitStack() as stack:
            for reading, values in getattr(y_pred, "_tfopt_values", ()):
                stack.enter_context(reading.answered(y, values))
            return self._plain_metrics(x, y, y_pred, sample_weight)

    def _loss(self, loss: Any, training: bool, y: tf.Tensor, y_pred: tf.Tensor, sample_weight: Any) -> tf.Tensor:
        """What `loss` returns; its gradient does not come from `y_pred`, but from what that was computed from."""
        mark, dtypes = _origin(y_pred)  # type: ignore[misc]
        readings = list(filter(None, map(_reading, (loss, *_metrics(self._model)))))
        weights = _slopes(loss, readings[0], y, y_pred, sample_weight) if training else None
        zero, values = in_pieces(
            tf.reshape(mark.hidden, [-1, mark.hidden.shape[-1]]),
            _last_product(mark.head, dtypes),
            tf.reshape(y, [-1]),
            readings,
            weights,
            chunks=self.chunks,
            wide=tf.as_dtype(loss.dtype),
        )
        y_pred._tfopt_values = tuple(zip(readings[1:], values[1:], strict=True))
        with readings[0].answered(y, values[0]):
            return loss(y, y_pred, sample_weight) + zero

    def _obstacles(self, y: Any, y_pred: Any) -> Iterator[str]:
        if tf.executing_eagerly():
            yield "run eagerly"
        if not isinstance(y_pred, tf.Tensor):
            yield f"outputs in a {type(y_pred).__name__}"
        elif not isinstance(y, tf.Tensor) or not y_pred.shape[:-1].is_compatible_with(y.shape):
            yield f"labels of shape {getattr(y, 'shape', None)} for logits of {y_pred.shape}"
        elif not tf.executing_eagerly() and _origin(y_pred) is None:
            yield f"an output that is not that of {layer_path(self.head)}"
        else:
            for compiled in (self._model._compile_loss, self._model._compile_metrics):
                if compiled is not None and not compiled.built:
                    compiled.build(y, y_pred)
        yield from _of_head(self.head)
        yield from _of_model(self._model)


def _origin(tensor: tf.Tensor) -> tuple[_Mark, tuple[tf.DType, ...]] | None:
    """The mark of the logits that a tensor is, and their dtype with those of the casts after it."""
    dtypes: list[tf.DType] = []
    while not hasattr(tensor, "_tfopt_mark"):
        if tensor.op.type not in ("Cast", "Identity") or not tensor.dtype.is_floating:
            return None
        if tensor.op.type == "Cast":
            dtypes.insert(0, tensor.dtype)
        tensor = tensor.op.inputs[0]
    return tensor._tfopt_mark, (tensor.dtype, *dtypes)


def _last_product(head: keras.Layer, dtypes: tuple[tf.DType, ...]) -> LastProduct:
    transposed, bias, soft_cap = False, None, None
    if isinstance(head, _EMBEDDING):
        transposed, soft_cap = head.tie_weights, head.logit_soft_cap
        kernel = head.embeddings if transposed else head.reverse_embeddings
    else:
        kernel, bias = head.kernel, head.bias
    return LastProduct(
        kernel=keras.ops.convert_to_tensor(kernel),
        transposed=transposed,
        bias=None if bias is None else keras.ops.convert_to_tensor(bias),
        soft_cap=soft_cap,
        dtypes=dtypes,
    )


def _slopes(loss: Any, reading: _Reading, y: tf.Tensor, y_pred: tf.Tensor, sample_weight: Any) -> tf.Tensor:
    """The loss's derivative by each token's loss, which does not depend on these: it is a weighted sum of them."""
    zeros = tf.zeros([tf.size(y)], loss.dtype)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(zeros)
        with reading.answered(y, zeros, of_step=False):
            total = loss(y, y_pred, sample_weight)
    return tape.gradient(total, zeros)


def _reading(holder: Any) -> _Reading | None:
    """Where a loss or a metric reads labels and logits; None if it is not known to do so token by token."""
    kind, options = type(holder), getattr(holder, "_fn_kwargs", {})
    if options.get("axis", -1) != -1 or options.get("from_sorted_ids"):
        return None
    if isinstance(holder, LossFunctionWrapper) and holder.fn is _CROSS_ENTROPY:
        as_keras = kind.__call__ is keras.Loss.__call__ and kind.call is LossFunctionWrapper.call
        return _Reading(holder=holder, name="fn", dtype=holder.dtype) if as_keras else None
    if isinstance(holder, keras.metrics.MeanMetricWrapper) and holder._fn in _OF_METRICS:
        as_keras = kind.update_state is keras.metrics.MeanMetricWrapper.update_state
        return _Reading(holder=holder, name="_fn", dtype=None) if as_keras else None
    if kind.__name__ == "Perplexity" and kind.__module__.startswith("keras_hub."):
        return _reading(holder._crossentropy)
    return None


def _metrics(model: keras.Model) -> list[keras.Metric]:
    """The metrics of labels and outputs, without those that Keras has yet to make from a name."""
    compiled = model._compile_metrics
    if compiled is None:
        return []
    given = (compiled._user_metrics, compiled._user_weighted_metrics)
    metrics = compiled.metrics if compiled.built else keras.tree.flatten(given)
    return [metric for metric in metrics if isinstance(metric, keras.Metric)]


def _head(model: keras.Model) -> keras.Layer:
    """The layer that computes a model's only output, but for casts; raises UnsupportedError without one."""
    graph = model._functional if isinstance(model, keras.Sequential) else model
    found = _makers(graph) if isinstance(graph, Functional) else list(output_layers(model))
    names = ", ".join(sorted(f"{part.name} ({type(part).__name__})" for part in found))
    if len(found) != 1 or not isinstance(found[0], keras.layers.Dense | _EMBEDDING):
        raise UnsupportedError(f"outputs of {names}")
    return found[0]


def _makers(graph: Functional) -> list[Any]:
    """What computes a graph's outputs, through nested models and operations that only cast."""
    made = []
    for tensor in graph.outputs:
        while True:
            operation, node, place = tensor._keras_history
            inner = operation._functional if isinstance(operation, keras.Sequential) else operation
            if isinstance(inner, Functional):
                tensor = inner.outputs[place]
            elif isinstance(operation, keras.layers.Identity | Cast) or (
                isinstance(operation, keras.layers.Activation) and _is_linear(operation)
            ):
                tensor = operation._inbound_nodes[node].input_tensors[0]
            else:
                made.append(operation)
                break
    return made


def _is_linear(layer: Any) -> bool:
    return layer.activation in (None, keras.activations.linear)


def _of_head(head: keras.Layer) -> Iterator[str]:
    """What keeps a layer's products from being computed in pieces."""
    kind = _EMBEDDING if isinstance(head, _EMBEDDING) else keras.layers.Dense
    if type(head).call is not kind.call:
        yield f"{type(head).__name__}'s own call"
    if kind is keras.layers.Dense and not _is_linear(head):
        yield f"the activation {head.activation.__name__}"
    if head.activity_regularizer is not None:
        yield "an activity regularizer of logits"
    if head.quantization_mode is not None:
        yield f"{head.quantization_mode} quantization"


def _of_model(model: keras.Model) -> Iterator[str]:
    """What keeps a model's steps from computing the loss in pieces."""
    for name in _RELIED_ON:
        if not has_keras_own(model, name):
            yield f"{type(model).__name__}'s own {name}"
        elif name in vars(model) and not (replacement(model, name) or hasattr(vars(model)[name], CALLS_OWN)):
            yield f"a {name} set on the model"
    if model.distribute_strategy.num_replicas_in_sync > 1:
        yield "several replicas"
    if not model.compiled:
        return
    if model.run_eagerly:
        yield "run_eagerly=True"
    compiled = model._compile_loss
    built = compiled is not None and compiled.built
    losses = [entry.loss for entry in compiled._flat_losses] if built else keras.tree.flatten(model.loss)
    if len(losses) != 1:
        yield f"{len(losses)} losses"
    else:
        yield from _of_loss(losses[0])
    yield from (f"the metric {metric.name}" for metric in _metrics(model) if _reading(metric) is None)


def _of_loss(loss: Any) -> Iterator[str]:
    if not isinstance(loss, keras.Loss) or _reading(loss) is None:
        yield f"the loss {getattr(loss, 'name', loss)}"
    elif not loss._fn_kwargs.get("from_logits"):
        yield "from_logits=False"
    elif loss.reduction in (None, "none"):
        yield "reduction=None"
    elif loss.dtype not in ("float32", "float64"):
        yield f"a loss computed in {loss.dtype}"


@contextmanager
def _set(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute for a while, past Keras' tracking."""
    before = vars(holder)[name]
    object.__setattr__(holder, name, value)
    try:
        yield
    finally:
        object.__setattr__(holder, name, before)


def _installed(layer: keras.Layer) -> _ChunkedLoss | None:
    kernel = getattr(replacement(layer, "compute_loss"), "__self__", None)
    return kernel if isinstance(kernel, _ChunkedLoss) else None
