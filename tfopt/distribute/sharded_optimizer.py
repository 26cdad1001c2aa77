"""Optimizer state sharded over the replicas (ZeRO stage 1): each keeps and updates an equal part of it."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.text import Shown

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion")
# Why the others do not work on a part of a weight.
_WHOLE = {
    "Lamb": "divides the norm of each whole weight by that of its whole update",
    "Muon": "orthogonalizes whole matrices",
    "Adafactor": "keeps means of whole rows and columns instead of moments, and so has little to shard",
    "ScheduleFreeAdamW": "keeps a copy of the weights, which it starts from whole",
}


@dataclass(frozen=True, slots=True, repr=False)
class Sharding(Shown):
    """What sharding an optimizer's state saves in memory and costs in traffic, per replica."""

    replicas: int
    """Number of replicas that the state is divided among."""
    state_bytes: int
    """Bytes of optimizer state that each replica keeps, without scalars such as the step count."""
    unsharded_state_bytes: int
    """Bytes that each would keep without sharding."""
    sent_bytes: int
    """Bytes that each replica sends per update over a ring: the gradients' all-reduce and the weights' all-gather."""
    unsharded_sent_bytes: int
    """Bytes that each would send without sharding: the all-reduce alone."""

    def __str__(self) -> str:
        return (
            f"optimizer state divided by {self.replicas}: {self.state_bytes:,} bytes per replica instead of "
            f"{self.unsharded_state_bytes:,}; {self.sent_bytes:,} bytes sent per update instead of "
            f"{self.unsharded_sent_bytes:,}"
        )

    def to_dict(self) -> dict[str, int]:
        """The fields, for JSON."""
        return asdict(self)


def shard_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Divides an optimizer's state among the replicas, so that each keeps only its part (ZeRO stage 1).

    Use it if Adam's moments take memory that the model or the batch needs: with n replicas, each keeps 1/n of them. The
    weights are those of the unsharded training. Each replica sums the gradients with the others, updates its part of
    each weight, and gathers the parts of the others, which takes half as much traffic again. Gradients and weights stay
    whole on each replica; to shard them too (ZeRO stages 2 and 3), use PyTorch's FSDP, or Keras on JAX.

    Embeddings are trained as on Keras' other backends: the gradients of an id that occurs several times in a batch are
    summed before they are clipped and squared, which plain Keras does not do on TensorFlow.

    Clipping, loss scaling, weight decay, accumulation and averages of weights work as without sharding; accumulated
    gradients and averages stay whole. Keras saves and loads the state whole, so that any number of replicas, and a
    plain optimizer, can read it. To save or load it, all workers must take part.

    Args:
        optimizer: An SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, Nadam, Ftrl or Lion, or a
            LossScaleOptimizer around one, made in the strategy's scope and not built yet.

    Returns:
        The same optimizer. Its `sharding` (of a LossScaleOptimizer, `inner_optimizer.sharding`) says how many bytes it
        keeps and sends once it is built.

    Raises:
        TypeError: If `optimizer` is not a keras.optimizers.Optimizer.
        ValueError: If its state has been created already.
        tfopt.errors.UnsupportedError: If it does not treat each element of a weight by itself, like Lamb and Muon.

    Example:
        >>> with strategy.scope():
        ...     model.compile(tfopt.distribute.shard_optimizer(keras.optimizers.Adam()), "mse")
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"Expected a keras.optimizers.Optimizer. Received {type(optimizer).__name__}: {optimizer!r}.")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        shard_optimizer(optimizer.inner_optimizer)
        return optimizer
    if isinstance(optimizer, _Sharded):
        return optimizer
    kind: Any = type(optimizer)
    if kind not in [getattr(keras.optimizers, name) for name in _ELEMENTWISE]:
        why = _WHOLE.get(kind.__name__, "may compute with whole weights")
        raise UnsupportedError(
            f"Expected an optimizer that updates each element of a weight by itself. Found {kind.__name__}, which "
            f"{why}. Use {', '.join(_ELEMENTWISE[:-1])} or {_ELEMENTWISE[-1]}, or train without shard_optimizer."
        )
    if optimizer.built:
        raise ValueError(
            f"Expected an optimizer that has no state yet. Received {optimizer.name!r}, which is built. Call "
            "shard_optimizer before compile and before optimizer.build."
        )
    optimizer.__class__ = _sharded(kind)
    return optimizer


@functools.cache
def _sharded(kind: Any) -> type:
    """An optimizer's sharded class, which Keras' files know by the plain one's name, so that either can read them."""
    return type(kind.__name__, (kind, _Sharded), {"__module__": "keras.optimizers"})


class _Sharded(keras.optimizers.Optimizer):
    """What differs in a sharded optimizer. It stands between Keras' class and the base of all optimizers."""

    _slices_new_variables = False

    def build(self, variables: Sequence[keras.Variable]) -> None:
        strategy = self._distribution_strategy
        if strategy is not tf.distribute.get_strategy():
            raise UnsupportedError(
                "Expected the optimizer to be made and built under the strategy that trains. Found another strategy, "
                "or none. Make it, call shard_optimizer and build it inside `with strategy.scope():`."
            )
        super().build(variables)  # averages of weights and accumulated gradients
        self._slices_new_variables = strategy.num_replicas_in_sync > 1

    def add_variable(self, shape: Sequence[int], *args: Any, **kwargs: Any) -> keras.Variable:
        if not self._slices_new_variables:
            return super().add_variable(shape, *args, **kwargs)
        strategy = self._distribution_strategy
        length = _length(shape, strategy.num_replicas_in_sync)
        variable = super().add_variable((length,), *args, **kwargs)
        variable.__class__ = _Slice
        variable.whole_shape, variable.strategy = tuple(shape), strategy
        return variable

    def _get_variable_index(self, variable: Any) -> int:
        return super()._get_variable_index(variable.whole if isinstance(variable, _Part) else variable)

    def _backend_apply_gradients(self, grads: Iterable[Any], trainable_variables: Iterable[Any]) -> None:
        # An Embedding's gradient lists an id once for each use; Keras would clip and square each apart.
        super()._backend_apply_gradients([tf.convert_to_tensor(gradient) for gradient in grads], trainable_variables)

    def _backend_update_step(
        self, grads: Iterable[Any], trainable_variables: Iterable[Any], learning_rate: Any
    ) -> None:
        if self._distribution_strategy.num_replicas_in_sync == 1:
            super()._backend_update_step(grads, trainable_variables, learning_rate)
            return
        context = tf.distribute.get_replica_context()
        variables = [one.value if isinstance(one, keras.Variable) else one for one in trainable_variables]
        reduced = self._all_reduce_sum_gradients(zip(grads, variables, strict=True))
        parts = context.merge_call(self._update_parts, args=(reduced, learning_rate, context.replica_id_in_sync_group))
        context.merge_call(_assign, args=(variables, _gathered(context, parts, variables)))

    def _update_parts(self, strategy: Any, reduced: Any, learning_rate: Any, replica: Any) -> list[Any]:
        """Updates each replica's slices, and returns its parts of the new weights."""

        def update(variable: Any, gradient: Any, rate: Any, at: Any) -> tf.Tensor:
            replicas = strategy.num_replicas_in_sync
            part = _Part(variable, _own(variable, variable.shape, at, replicas))
            self.update_step(_own(gradient, variable.shape, at, replicas), part, rate)
            return part.value

        return [
            strategy.extended.update(variable, update, args=(gradient, learning_rate, replica))
            for gradient, variable in reduced
        ]

    @property
    def sharding(self) -> Sharding:
        """How many bytes of state each replica keeps, and sends per update, with and without sharding.

        Raises:
            ValueError: If the optimizer is not built yet.
        """
        if not self.built:
            raise ValueError(
                f"Expected an optimizer with state. Found {self.name!r}, which is not built. Call "
                "optimizer.build(model.trainable_variables), or train first."
            )
        replicas = self._distribution_strategy.num_replicas_in_sync
        kept = whole = 0
        for variable in self.variables:
            shape = variable.whole_shape if isinstance(variable, _Slice) else variable.shape
            if len(shape):  # not the step count and the learning rate
                kept += _bytes(variable.shape, variable.dtype)
                whole += _bytes(shape, variable.dtype)
        # Over a ring each replica passes on n-1 n-ths: twice for the gradients' sum, once to gather the weights.
        weights = self._trainable_variables
        around = sum(_bytes(weight.shape, weight.dtype) for weight in weights) * (replicas - 1)
        parts = sum(_bytes((_length(weight.shape, replicas),), weight.dtype) for weight in weights)
        plain = 2 * around // replicas
        return Sharding(replicas, kept, whole, plain + parts * (replicas - 1), plain)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        if self.built and save_type == "checkpoint" and self._distribution_strategy.num_replicas_in_sync > 1:
            raise UnsupportedError(
                "Expected a checkpoint in Keras' format. Found tf.train.Checkpoint, which would save only the first "
                "replica's part of a sharded optimizer's state. Use model.save or model.save_weights."
            )
        return super()._trackable_children(save_type, **kwargs)


class _Part:
    """A replica's part of a weight, in place of the variable for `update_step`."""

    def __init__(self, whole: tf.Variable, value: tf.Tensor) -> None:
        self.whole, self.value = whole, value
        self.dtype, self.shape = whole.dtype, value.shape

    def assign(self, value: tf.Tensor) -> None:
        self.value = value

    def assign_add(self, value: tf.Tensor) -> None:
        self.value += value

    def assign_sub(self, value: tf.Tensor) -> None:
        self.value -= value

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.value, dtype, name=name)


class _Slice(keras.Variable):
    """A variable of which each replica holds a part; outside training it reads and writes as the whole."""

    whole_shape: tuple[int, ...]
    strategy: tf.distribute.Strategy

    def numpy(self) -> np.ndarray:
        parts = dict(self._parts())
        if len(parts) == self.strategy.num_replicas_in_sync:
            flat = np.concatenate([parts[replica].numpy() for replica in sorted(parts)])
        else:
            values = self.strategy.experimental_distribute_values_from_function(
                lambda context: parts[context.replica_id_in_sync_group].read_value()
            )
            flat = _gather(self.strategy)(values).numpy()
        return flat[: int(np.prod(self.whole_shape))].reshape(self.whole_shape)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any) -> None:
        whole = np.asarray(value)
        if whole.shape != self.whole_shape:
            raise ValueError(
                f"Expected a value of the full shape {self.whole_shape} of {self.path!r}. Received shape {whole.shape}."
            )
        for replica, part in self._parts():
            part.assign(_own(tf.cast(whole, self.dtype), whole.shape, replica, self.strategy.num_replicas_in_sync))

    def _parts(self) -> list[tuple[int, tf.Variable]]:
        """The parts in this process, with their replicas' numbers."""
        numbers = self.strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        of = self.strategy.experimental_local_results
        return list(zip(of(numbers), of(self.value), strict=True))


@functools.cache
def _gather(strategy: tf.distribute.Strategy) -> Any:
    """Joins all replicas' values; traced once, since TensorFlow traces each eager gather."""
    return tf.function(lambda values: strategy.gather(values, axis=0), autograph=False, reduce_retracing=True)


def _own(value: Any, shape: Sequence[int], replica: Any, replicas: int) -> tf.Tensor:
    """A replica's part of a tensor or variable, flat; the last part is filled up with zeros."""
    size, length = int(np.prod(shape)), _length(shape, replicas)
    flat = tf.pad(tf.reshape(tf.convert_to_tensor(value), [size]), [[0, length * replicas - size]])
    return tf.slice(flat, [tf.cast(replica, tf.int32) * length], [length])


def _length(shape: Sequence[int], replicas: int) -> int:
    """How many elements of a weight each replica has."""
    return -(-int(np.prod(shape)) // replicas)


def _gathered(context: Any, parts: list[tf.Tensor], variables: list[tf.Variable]) -> list[tf.Tensor]:
    """The new weights, from all replicas' parts: one all-gather for each dtype."""
    weights: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(part.dtype for part in parts):  # in the same order in all processes
        these = [at for at, part in enumerate(parts) if part.dtype == dtype]
        lengths = [parts[at].shape[0] for at in these]
        with tf.device(variables[0].device):  # inside a branch a tensor has no device, and the all-gather needs one
            sent = tf.identity(tf.concat([parts[at] for at in these], 0))
        rows = tf.reshape(context.all_gather(sent, axis=0), [-1, sum(lengths)])
        for at, columns in zip(these, tf.split(rows, lengths, axis=1), strict=True):
            shape = variables[at].shape
            weights[at] = tf.reshape(tf.reshape(columns, [-1])[: shape.num_elements()], shape)
    return [weights[at] for at in range(len(parts))]


def _assign(strategy: Any, variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        strategy.extended.update(variable, lambda to, new: to.assign(new), args=(value,), group=False)


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    return int(np.prod(shape)) * tf.as_dtype(dtype).size
