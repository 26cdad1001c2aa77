"""A model's whole state, restored bit for bit after something trained it for measurement."""

import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.hardware import gpu_memory
from tfopt.internals.patches import patched
from tfopt.internals.scopes import global_seeds
from tfopt.internals.sources import find
from tfopt.model.layers import is_built, is_keras_own
from tfopt.model.undoing import undone_if_failed

_ABSENT = object()
_CALLS_ON_HOST = 2
_SPARE_SHARE = 0.1  # of the GPU's memory, for fragmentation


def trace_train_step(
    model: keras.Model, batch: Any, *, jit_compile: bool | None = None
) -> tuple[Callable[..., Any], tf.Graph]:
    """Traces the training step of a compiled model as `fit` runs it, which creates every variable that training needs.

    Returns the step, a function of the batch (not compiled if the model runs eagerly), and its graph. It runs under XLA
    as the model was compiled, unless `jit_compile` says otherwise.

    Raises:
        tfopt.errors.UnsupportedError: If the model runs eagerly and its step cannot be traced.
    """
    strategy = model.distribute_strategy
    if model._distribute_strategy is not None:  # under a strategy Keras' fit too builds before it traces
        local = tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], batch)
        with strategy.scope():
            model._symbolic_build(data_batch=local)

    @tf.autograph.experimental.do_not_convert
    def step(batch: Any) -> Any:
        return strategy.run(model.train_step, args=(batch,))

    function = tf.function(step, jit_compile=model.jit_compile if jit_compile is None else jit_compile)
    try:
        with undone_if_failed(model):
            concrete = function.get_concrete_function(batch)
    except Exception as error:
        if not model.run_eagerly:
            raise
        raise UnsupportedError(
            "Expected a training step that TensorFlow can trace, so that all it changes can be restored. Found one "
            f"that only runs eagerly: {error}. Measure the model without run_eagerly=True."
        ) from error
    # The concrete function, because looking it up on each call takes longer than the step of a small model.
    return (step if model.run_eagerly else concrete), concrete.graph


def traced_steps(model: keras.Model) -> list[Any]:
    """Returns the concrete functions of the training step that `fit` has traced; none if it runs eagerly."""
    function: Any = getattr(model, "train_function", None)
    while hasattr(function, "stock"):  # of tfopt.fit.overlap, and of each CompilationLogger
        function = function.stock
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    step = inspect.unwrap(variables.get("one_step_on_data", _is_graph), stop=_is_graph)
    return step._list_all_concrete_functions() if _is_graph(step) else []


def _is_graph(function: Any) -> bool:
    return isinstance(function, tf.types.experimental.PolymorphicFunction)


@contextmanager
def python_random_kept() -> Iterator[None]:
    """Restores the state of Python's random numbers, from which Keras draws the seeds of a new layer."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def preserved(model: keras.Model, *, also: Iterable[tf.Variable] = ()) -> AbstractContextManager[None]:
    """Restores a built model after a block of code: weights, optimizer slots, iterations, metrics, seeds, fit's state.

    The optimizer that the model was compiled with is built first, unless it is built already.

    Args:
        model: Built, so that its variables exist, as must be those of other optimizers that it holds.
        also: More variables to restore, which the training step touches and Keras does not know of.

    Raises:
        ValueError: If the model, or another optimizer that it holds, is not built.

    Example:
        >>> with tfopt.measure.preserved(model):
        ...     model.fit(dataset)
    """
    if not is_built(model):
        raise ValueError(
            f"Expected a built model, whose variables exist. Received: {model.name!r}, which is not built. Call it on "
            "a batch first."
        )
    if model.compiled and model.optimizer is not None and not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    # Those of a model compiled inside, such as a GAN's discriminator, may belong to no step of this one.
    unbuilt = [where for optimizer, where in optimizers_of(model, inner=False).items() if not optimizer.built]
    if unbuilt:
        raise ValueError(
            f"Expected optimizers whose variables exist. Found {unbuilt[0]}, which is not built. Call its build with "
            "the weights that it updates."
        )
    return StatePreserver(model, also=also).preserved()


class StatePreserver:
    """Preserves the state of one model repeatedly, as `preserved` does once.

    The first two times the state goes to host memory: the first step compiles, and only the second shows what a step
    needs. From then on it stays on its GPU if it fits there beside the step, since moving GPT-2's 1.5 GB takes about a
    second each way.
    """

    def __init__(self, model: keras.Model, *, also: Iterable[tf.Variable] = ()):
        self._model = model
        self._also = tuple(also)
        self._calls = 0
        self._needs: dict[str, int] = {}
        """Peak bytes of a step beyond those in use before it, by device."""

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores the model to its state at the beginning of the block."""
        parts = _parts(self._model, self._also)
        devices = self._devices_with_room(parts)
        # read_value copies nothing on a GPU: the variable gets a new buffer when it is written to.
        values = [part.read_value() if part.device in devices else part.numpy() for part in parts]
        attributes = {
            name: self._model.__dict__.get(name, _ABSENT) for name in ("train_function", "stop_training", "history")
        }
        before = {device: gpu_memory.in_use_bytes(device) for device in _gpus(parts)}
        try:
            yield
        finally:
            self._calls += 1
            if not devices:
                self._needs = {device: gpu_memory.peak_bytes(device) - used for device, used in before.items()}
            for part, value in zip(parts, values, strict=True):
                part.assign(value)
            for name, attribute in attributes.items():
                if attribute is not _ABSENT:
                    setattr(self._model, name, attribute)
                elif name in self._model.__dict__:
                    delattr(self._model, name)

    def _devices_with_room(self, parts: list[Any]) -> set[str]:
        """The model's GPUs if each has room for a second copy of the state and a step, else none."""
        if self._calls < _CALLS_ON_HOST:
            return set()
        sizes = _gpus(parts)
        for device, size in sizes.items():
            limit = gpu_memory.limit_bytes(device)
            if limit is None or device not in self._needs:
                return set()
            free = limit - gpu_memory.in_use_bytes(device) - self._needs[device]
            if size + _SPARE_SHARE * limit > free:
                return set()
        return set(sizes)


def _gpus(parts: list[Any]) -> dict[str, int]:
    """Bytes of the variables by GPU."""
    sizes: dict[str, int] = {}
    for part in parts:
        if "GPU" in part.device:
            sizes[part.device] = sizes.get(part.device, 0) + part.shape.num_elements() * part.dtype.size
    return sizes


def _parts(model: keras.Model, also: Iterable[tf.Variable]) -> list[Any]:
    """Every tf.Variable to restore, once; a mirrored variable as its variables on the replicas."""
    keras_variables = [*model.variables, *model.metrics_variables]
    for optimizer in optimizers_of(model):
        keras_variables += optimizer.variables
    # Layers and functions without a seed of their own advance Keras' global one.
    generator = global_seeds()
    if generator is not None:
        keras_variables.append(generator.state)
    variables = [*(variable.value for variable in keras_variables), *also]
    return list(
        {id(part): part for variable in variables for part in getattr(variable, "values", (variable,))}.values()
    )


def optimizers_of(model: keras.Model, *, inner: bool = True) -> dict[keras.optimizers.Optimizer, str]:
    """The optimizers that a model holds, and by default the models in it, and where: "'d_optimizer' of 'gan'"."""
    found: dict[keras.optimizers.Optimizer, str] = {}
    holders = model._flatten_layers() if inner else [model]
    for holder in [layer for layer in holders if isinstance(layer, keras.Model)]:
        for name, value in vars(holder).items():
            if not name.startswith("_self_"):  # TensorFlow's tracking records
                inside = value.values() if isinstance(value, dict) else value
                for one in inside if isinstance(value, (dict, list, tuple)) else [value]:
                    if isinstance(one, keras.optimizers.Optimizer):
                        found.setdefault(one, f"{name!r} of {holder.name!r}")
    return found


def optimizer_names(optimizers: Iterable[keras.optimizers.Optimizer]) -> list[str]:
    """Names that the operations of optimizers bear; of a LossScaleOptimizer also the name of the one inside."""
    return [
        name
        for one in optimizers
        for name in (one.name, getattr(getattr(one, "inner_optimizer", one), "name", one.name))
    ]


STEP_FUNCTIONS = ("train_function", "test_function", "predict_function")
"""Attributes in which Keras keeps a model's traced step functions."""


def rebuild_step_function(model: keras.Model, name: str) -> None:
    """Rebuilds a step function, which Keras would otherwise reuse as first traced; works during `fit` too."""
    if getattr(model, name) is not None:
        setattr(model, name, None)  # not `make_…(force=True)`: a user's override need not accept that
        getattr(model, f"make_{name}")()


@contextmanager
def without_dropout(model: keras.Model) -> Iterator[None]:
    """Switches off random draws in Keras' layers, so that two computations of a model can be compared.

    XLA, or another dtype, draws different numbers from the same seed. Either dropout mask is right, but trainings with
    different masks cannot be compared.
    """
    # Keras' own layers only: a rate of 0 may mean anything to a custom layer.
    layers = [layer for layer in model._flatten_layers() if is_keras_own(layer) and hasattr(layer, "seed_generator")]
    names = ("rate", "dropout", "recurrent_dropout", "stddev")
    rates = [(layer, name, getattr(layer, name)) for layer in layers for name in names if hasattr(layer, name)]
    try:
        for layer, name, _ in rates:
            setattr(layer, name, 0.0)
        yield
    finally:
        for layer, name, rate in rates:
            setattr(layer, name, rate)


@contextmanager
def layers_in_float32(model: keras.Model) -> Iterator[None]:
    """Lets 16-bit layers compute in float32, from the same weights, as a reference for what they compute in 16 bits.

    Trace a new function inside the block: those traced before keep their dtypes.
    """
    before = {layer: layer._dtype_policy for layer in model._flatten_layers()}
    try:
        for layer in before:
            if layer.compute_dtype in ("float16", "bfloat16"):
                layer._dtype_policy = keras.DTypePolicy("float32")
        yield
    finally:
        for layer, policy in before.items():
            layer._dtype_policy = policy


@contextmanager
def draws_in_float32() -> Iterator[None]:
    """Lets `keras.random` draw its 16-bit numbers in float32 and cast them, so that every dtype draws the same.

    A layer of the user's that draws in its own dtype, such as stochastic depth, otherwise drops other examples.
    """

    def in_float32(draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        def drawn(*args: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
            if dtype not in ("float16", "bfloat16"):
                return draw(*args, dtype=dtype, **kwargs)
            return tf.cast(draw(*args, dtype="float32", **kwargs), dtype)

        return drawn

    with ExitStack() as stack:
        for name in ("normal", "uniform", "truncated_normal"):
            stack.enter_context(
                patched(*find(f"keras.src.backend.tensorflow.random:{name}"), in_float32, by="draws_in_float32")
            )
        yield


@contextmanager
def same_draws() -> Iterator[None]:
    """Gives the operations of tf.random seeds in the order of their creation, so that each trace draws the same."""
    drawn = 0

    def in_order(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_seed(op_seed: Any) -> Any:
            nonlocal drawn
            drawn += 1
            return original(op_seed) if op_seed is not None else (4187, drawn)

        return get_seed

    with patched(*find("tensorflow.python.framework.random_seed:get_seed"), in_order, by="same_draws"):
        yield
