"""Switches XLA on and off for a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras

from tfopt.errors import UnsupportedError
from tfopt.model.batches import Data
from tfopt.model.layers import require_compiled
from tfopt.model.state import STEP_FUNCTIONS, rebuild_step_function
from tfopt.xla.explaining import explain, known_wrong
from tfopt.xla.obstacles import Obstacle, standing_obstacles


def set_jit(model: keras.Model, on: bool, *, data: Data | None = None) -> None:
    """Switches XLA on or off for a compiled model from its next step on, whether or not it was fitted before.

    Use it instead of `model.jit_compile = on`, which does nothing after the first `fit` and is lost when the model is
    saved. Weights, optimizer and metrics stay. The outermost model decides for the models inside it.

    Args:
        model: A compiled model.
        on: Whether `fit`, `evaluate` and `predict` run under XLA.
        data: A dataset, whose first batch is used, or one batch (x, y[, sample_weight]). XLA is then switched on only
            if it computes the same on this batch, as `tfopt.xla.explain` compares it: layers' outputs, loss, gradients
            and weights after four steps, to within 1 %, without dropout. If a layer computes in 16 bits, it is to
            within 10 %, or twice as far from float32 as without XLA. That costs a compilation. Without data nothing is
            compared, so XLA may give different results. But if the model's input shapes are fixed, its forward pass and
            gradient are traced, in less time than Keras takes to trace the next step, and operations known to be wrong
            under XLA (docs/repairs.md, D22) are refused.

    Raises:
        TypeError: If `on` is not a bool.
        ValueError: If the model is not compiled, or cannot take the batch.
        tfopt.errors.UnsupportedError: If `on` is True and a layer does not support XLA, the model runs eagerly or on
            several replicas, op determinism is on, an operation is known to be wrong under XLA, or keras.remat would
            compute something else the second time, as with dropout. With data also if an operation fails, results
            differ, or they cannot be compared. The model stays as it is.
        tfopt.errors.PipelineError: If the dataset is empty.

    Example:
        >>> tfopt.xla.set_jit(model, True, data=dataset)
        >>> model.fit(dataset)
    """
    require_compiled(model)
    if not isinstance(on, bool):
        raise TypeError(f"Expected True or False. Received: {on!r}. tfopt.xla.decide(model, data) can choose for you.")
    standing = standing_obstacles(model) if on else ()
    if standing:
        raise UnsupportedError(
            f"Expected a model that XLA can compile. Found: {' '.join(map(str, standing))} Or leave XLA off for it."
        )
    if on and data is not None:
        found = explain(model, data)
        _require_same_results(found.obstacles)
        if found.distance is None:
            raise UnsupportedError(
                f"Expected a model whose results with and without XLA can be compared. Found: {found.results} "
                "Leave XLA off, or switch it on without data, which compares nothing."
            )
    elif on:
        _require_same_results(known_wrong(model))
    model.jit_compile = on
    # A loaded model is compiled with this, which Keras sets only in compile().
    model._compile_config.config["jit_compile"] = on
    for name in STEP_FUNCTIONS:
        rebuild_step_function(model, name)


def _require_same_results(obstacles: tuple[Obstacle, ...]) -> None:
    if obstacles:
        expected = {"results": "computes the same under XLA", "recompilation": "XLA compiles once for all batches"}
        model, found = expected.get(obstacles[0].kind, "XLA can compile"), " ".join(map(str, obstacles))
        raise UnsupportedError(f"Expected a model that {model}. Found: {found}")


@contextmanager
def jit(model: keras.Model, on: bool) -> Iterator[None]:
    """Switches XLA on or off inside a block and restores the model's setting afterwards, even after an exception.

    Use it for one `fit` or `evaluate` that must run with or without XLA. Functions compiled before the block are reused
    after it, so leaving it compiles nothing. A `model.compile(...)` inside the block stays in effect, as does anything
    else that rebuilds the step, such as `tfopt.batch.accumulate` or `tfopt.precision.apply`.

    Args:
        model: A compiled model.
        on: Whether `fit`, `evaluate` and `predict` run under XLA inside the block.

    Raises:
        TypeError, ValueError, tfopt.errors.UnsupportedError: As `set_jit`.

    Example:
        >>> with tfopt.xla.jit(model, False):
        ...     model.evaluate(ragged_dataset)
    """
    require_compiled(model)
    compilation = model._compile_config
    before, saved = model.jit_compile, compilation.config["jit_compile"]
    functions = {name: getattr(model, name) for name in STEP_FUNCTIONS}
    set_jit(model, on)
    during = {name: getattr(model, name) for name in STEP_FUNCTIONS}
    try:
        yield
    finally:
        # After another compile() in the block, the old functions would train with the old optimizer and loss.
        if model._compile_config is compilation:
            model.jit_compile, compilation.config["jit_compile"] = before, saved
            for name, function in functions.items():
                # One rebuilt in the block, as by tfopt.batch.accumulate, computes something different.
                if function is None or getattr(model, name) is not during[name]:
                    rebuild_step_function(model, name)
                else:
                    setattr(model, name, function)
