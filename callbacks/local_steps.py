"""Local SGD: replicas train by themselves for some steps, then average their weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.rounds.averaging import Averaging
from tfopt.callbacks.rounds.local_function import LocalFunction
from tfopt.callbacks.rounds.local_updates import inner, require_local
from tfopt.callbacks.shared.running_fit import Callback, end_with_fit, running_list
from tfopt.checks import integer
from tfopt.errors import UnsupportedError
from tfopt.internals.training import has_keras_own
from tfopt.repairs import UNEVEN_BATCHES

_STRATEGIES = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
# What reads the weights from outside.
_READERS = ("evaluate", "predict", "save", "save_weights", "export")


class LocalSteps(Callback):
    """Lets each replica take several steps on its own between synchronisations (local SGD, DiLoCo).

    Use it if steps wait for a slow network. It is **a different training algorithm**, with a different result: each
    replica updates its own weights with its own gradients, and after `every` steps all take the mean of their weights.
    Compare the loss with that of a run without it. With `every=1`, SGD without momentum and equal batches, it is the
    same training.

    The optimizer's state (moments, averages of weights, accumulated gradients) stays each replica's own within an
    epoch. Before an epoch ends, and before `evaluate`, `predict`, `save`, `save_weights` and `export`, a round ends
    early and the state is averaged too: all replicas are then equal, and training resumes exactly from a checkpoint.
    Logs of single batches are those of the last synchronisation.

    With `outer=keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`, replicas do not take the mean: the outer
    optimizer takes a step from the last common weights, with the mean change as its gradient (DiLoCo, Douillard et al.
    2023, arXiv:2311.08105). Its momentum lasts as long as the callback, and is not saved.

    Args:
        every: Steps in a round. Default 8.
        outer: Any Keras optimizer but LossScaleOptimizer. Default None: the mean.

    Raises:
        TypeError: If `every` is not an integer, or `outer` not an optimizer.
        ValueError: If `every` is below 1.
        tfopt.errors.UnsupportedError: From `fit`, if the model's replicas cannot train by themselves, as with
            shard_optimizer, compress_gradients or synchronized batch normalization.

    Example:
        >>> local = tfopt.callbacks.LocalSteps(every=8)
        >>> model.fit(dataset, callbacks=[local])
        >>> local.synchronizations
        25
    """

    def __init__(self, every: int = 8, *, outer: keras.optimizers.Optimizer | None = None):
        super().__init__()
        self.every = integer("every", every, "Give a number of steps.", least=1)
        if outer is not None and not isinstance(outer, keras.optimizers.Optimizer):
            raise TypeError(
                f"Expected outer to be one of keras.optimizers. Received: {outer!r}. Pass "
                "keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True), or leave it out for the mean."
            )
        if outer is not None and inner(outer) is not outer:
            raise UnsupportedError(
                "Expected outer without loss scaling. Found a LossScaleOptimizer. Pass its inner_optimizer."
            )
        self._outer = outer
        self._function: LocalFunction | None = None
        self._of: tuple[Any, ...] = ()
        self._restore: Callable[[], None] | None = None

    @property
    def synchronizations(self) -> int:
        """How often the replicas have exchanged weights or state in the last fit."""
        return self._function.synchronizations if self._function else 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes over the training steps."""
        model: Any = self.model
        if model.distribute_strategy.num_replicas_in_sync == 1 and self._outer is None:
            return
        _require_known(model)
        require_local(model)
        UNEVEN_BATCHES.install()
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        earlier = model.train_function
        if isinstance(earlier, LocalFunction):  # an exception ended its fit
            earlier.hand_back()
            earlier = model.train_function
        trained = (model, model.optimizer, earlier, [id(variable) for variable in model.trainable_variables])
        if self._function is None or self._of != trained:
            self._function, self._of = LocalFunction(model, self.every, Averaging(model, self._outer)), trained
        self._function.before = earlier
        self._function.begin()
        self._take_over(model, self._function)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts from the weights as they are; other callbacks may have set them."""
        if self._restore and self._function:
            self._function.remember()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Makes the replicas equal before an epoch's validation."""
        if self._restore and self._function:
            self._function.end_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Makes the replicas equal."""
        if self._restore and self._function:
            self._function.end_epoch()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Gives the training steps back to Keras."""
        if self._restore and self._function:
            self._function.synchronize()
            self._restore()
            self._restore = None
            self.model.train_function = self._function.before

    def _take_over(self, model: Any, function: LocalFunction) -> None:
        model.train_function = function
        put: dict[str, Any] = {}
        names = (*_READERS, "make_train_function")
        replaced = {name: model.__dict__[name] for name in names if name in model.__dict__}
        ended: list[bool] = []

        def prepare(name: str) -> None:
            if ended:  # by an exception
                restore()
                function.hand_back()
            elif name in _READERS:
                function.synchronize()

        for name in names:
            put[name] = model.__dict__[name] = _after(partial(prepare, name), getattr(model, name))

        def restore() -> None:
            for name, reader in put.items():
                if model.__dict__.get(name) is reader:
                    model.__dict__.pop(name)
                    model.__dict__.update({name: replaced[name]} if name in replaced else {})

        self._restore = restore
        end_with_fit(self, partial(ended.append, True), at_exit=False)
        running = running_list(self)
        if running and self in running.callbacks:
            # So that callbacks that read the weights at an epoch's end find them equal.
            running.callbacks.remove(self)
            running.callbacks.insert(0, self)


def _after(first: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        first()
        return method(*args, **kwargs)

    return call


def _require_known(model: Any) -> None:
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync > 1 and not isinstance(strategy, _STRATEGIES):
        raise UnsupportedError(
            f"Expected MirroredStrategy or MultiWorkerMirroredStrategy for LocalSteps. Found "
            f"{type(strategy).__name__}. Use tfopt.distribute.strategy()."
        )
    for name in ("make_train_function", "_make_function"):
        if not has_keras_own(model, name):
            raise UnsupportedError(
                f"Expected a model with Keras' own {name} for LocalSteps. Found that {type(model).__name__} overrides "
                "it. Move the change into train_step."
            )
