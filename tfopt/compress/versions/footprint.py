"""What a model and another version of it cost, measured side by side."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfopt.internals.training import pythonify_logs
from tfopt.measure import StepTimer, StepTimes, interleave
from tfopt.measure.timers import wait
from tfopt.memory.estimating import size_mib
from tfopt.model.batches import as_dataset, batch_size, one_batch
from tfopt.model.flops import step_flops
from tfopt.model.state import StatePreserver
from tfopt.text import figure

_TURN_MS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a model costs in memory and time, and how good it is."""

    parameters: int
    mib: float
    """MiB of its weights."""
    gflops: float | None
    """Of a training step on one example, in units of 10⁹; None if some are unknown."""
    step: StepTimes | None
    """A training step on the first batch of the data; None if the other version does not train."""
    forward: StepTimes
    """Inference on the same batch."""
    quality: Mapping[str, float]
    """Loss and metrics on the data, as `evaluate` returns them."""

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values, including the raw samples."""
        return asdict(self) | {
            "step": self.step and self.step.to_dict(),
            "forward": self.forward.to_dict(),
            "quality": dict(self.quality),
        }


def compared(before: Footprint, after: Footprint) -> list[tuple[str, str, str]]:
    """Returns the rows of a table of two footprints."""
    pair = (before, after)
    rows: dict[str, list[str]] = {
        "parameters": [f"{one.parameters:,}" for one in pair],
        "MiB": [figure(one.mib) for one in pair],
    }
    if before.step and after.step:
        rows["GFLOPs per example"] = ["unknown" if one.gflops is None else figure(one.gflops) for one in pair]
        rows["ms a training step"] = [figure(one.step.median_ms) for one in pair if one.step]
    rows["ms in inference"] = [figure(one.forward.median_ms) for one in pair]
    rows |= {name: [figure(one.quality[name]) for one in pair] for name in before.quality}
    return [(name, *values) for name, values in rows.items()]  # type: ignore[misc]


def footprints(
    models: tuple[keras.Model, keras.Model], data: Any, *, training: bool = True
) -> tuple[Footprint, Footprint]:
    """Measures two models in turn, and evaluates them; only their metrics change."""
    batch = one_batch(data)
    steps = [StepTimer(model, batch) if training else None for model in models]
    timers: dict[str, Callable[[], StepTimes]] = {}
    for place, (model, step) in enumerate(zip(models, steps, strict=True)):
        if step:
            timers[f"step {place}"] = _paced(step)
        timers[f"forward {place}"] = _paced(_ForwardTimer(model, batch))
    times = interleave(timers)
    qualities = _qualities(models, data, batch)
    before, after = (
        Footprint(
            parameters=model.count_params(),
            mib=size_mib(variable.value for variable in model.variables),
            gflops=_gflops(model, step.graph, batch) if step else None,
            step=times.get(f"step {place}"),
            forward=times[f"forward {place}"],
            quality=quality,
        )
        for place, (model, step, quality) in enumerate(zip(models, steps, qualities, strict=True))
    )
    return before, after


def _paced(timer: Callable[..., StepTimes]) -> Callable[[], StepTimes]:
    """Lets a turn take about a third of a second, between 3 and 50 steps; a large model's step on a CPU takes one."""
    ms = timer(1, warmup=1).median_ms
    steps = min(50, max(3, round(_TURN_MS / ms)))
    return partial(timer, steps, warmup=1, samples=min(steps, 5))


def _qualities(models: Sequence[keras.Model], data: Any, batch: Any) -> list[dict[str, float]]:
    """What `evaluate` returns, in one pass for all models: in another, a dataset may shuffle other batches to them."""
    for model in models:
        model.evaluate(tf.data.Dataset.from_tensors(batch), verbose=0)  # which builds the metrics
        model.reset_metrics()
    logs: list[Any] = []
    for one in as_dataset(data):
        logs = [model.test_function(iter([one])) for model in models]
    return [pythonify_logs(model._get_metrics_result_or_logs(log)) for model, log in zip(models, logs, strict=True)]


def _gflops(model: keras.Model, graph: Any, batch: Any) -> float | None:
    flops = step_flops(model, graph, [], batch_size(model, batch)).per_example
    return flops and flops / 1e9


class _ForwardTimer:
    """Times inference on a batch."""

    def __init__(self, model: keras.Model, batch: Any):
        self._x = keras.utils.unpack_x_y_sample_weight(batch)[0]
        self._size = batch_size(model, batch)
        self._run = tf.function(lambda x: model(x, training=False), jit_compile=model.jit_compile, autograph=False)
        self._state = StatePreserver(model)  # a layer may draw, or keep a state
        with self._state.preserved():
            self._first_seconds = self._time(1) / 1000

    def __call__(self, steps: int, *, warmup: int, samples: int = 1) -> StepTimes:
        with self._state.preserved():
            self._time(warmup)
            milliseconds = tuple(self._time(steps // samples) for _ in range(samples))
        return StepTimes(
            repeats_ms=(milliseconds,),
            steps_per_sample=steps // samples,
            first_step_seconds=self._first_seconds,
            examples_per_step=self._size,
        )

    def _time(self, runs: int) -> float:
        started = time.perf_counter()
        for _ in range(runs):
            self._run(self._x)
        wait()
        return (time.perf_counter() - started) * 1000 / runs
