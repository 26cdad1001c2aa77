"""Runs a pipeline alone and measures what passes through it."""

import time
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.profiling.nodes import Node, NodeSampler

# The first batch mostly shows the start. For more of them, a run may take this many times as long.
_FEWEST_BATCHES = 4
_LONGEST = 3
_FIRST_PASS_SHARE = 0.7  # of the time; a first pass that took less leaves enough for later ones


@dataclass(frozen=True, slots=True)
class Run:
    """What one iterator did.

    Args:
        nodes: The nodes seen, from the last one that elements pass to the sources.
        batches: How many elements came out.
        examples: How many examples they held.
        seconds: How long it ran, the start included.
        examples_per_second: From the first batch on, if there was another.
        cpu_seconds: Processor time that this process took.
        ended: Whether the data came to its end.
        later: Whether it went over the data again, after a first pass.
    """

    nodes: Node
    batches: int
    examples: int
    seconds: float
    examples_per_second: float
    cpu_seconds: float
    ended: bool
    later: bool

    @property
    def batch_size(self) -> float:
        """Examples in a batch, on average."""
        return self.examples / self.batches


def run_passes(dataset: Any, seconds: float) -> Run:
    """Runs a first pass over a dataset, and measures later ones in its place where the time allows.

    Args:
        dataset: A `tf.data.Dataset` of batches.
        seconds: How long.

    Raises:
        PipelineError: It gives no batch or no example, or fails.
    """
    dataset = _with_model(dataset)
    first = _run(dataset, seconds, later=False)
    if first.batches == 0:
        raise PipelineError(
            "Expected a dataset of at least one batch. Found none: it is empty, or has fewer examples than a batch. "
            "Check the source and the batch size."
        )
    if first.examples == 0:
        raise PipelineError(
            f"Expected batches of examples. Found {first.batches:,} batches without any: the first dimension of their "
            "first tensor is 0. Check what the dataset's functions return."
        )
    if not first.ended or first.seconds > _FIRST_PASS_SHARE * seconds:
        return first
    return _run(dataset.repeat(), seconds - first.seconds, later=True)


def run_unfused(dataset: Any, seconds: float) -> Run:
    """Runs a pipeline with each stage in a node of its own, which tells the costs of fused ones apart.

    Args:
        dataset: A `tf.data.Dataset` of batches.
        seconds: How long.

    Raises:
        PipelineError: It fails.
    """
    options = tf.data.Options()
    options.experimental_optimization.map_and_batch_fusion = False
    options.experimental_optimization.shuffle_and_repeat_fusion = False
    return _run(_with_model(dataset).with_options(options), seconds, later=False)


def _with_model(dataset: Any) -> Any:
    """TensorFlow keeps figures only of pipelines that it tunes."""
    if dataset.options().autotune.enabled is not False:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = True
    return dataset.with_options(options)


def _run(dataset: Any, seconds: float, *, later: bool) -> Run:
    try:
        return _measure(dataset, seconds, later=later)
    except tf.errors.OpError as error:
        raise PipelineError(
            f"Expected a pipeline that runs. Found that it fails while it is profiled: {error.message} "
            "Iterate over it without the profiler to see the same, and mend what it names."
        ) from error


def _measure(dataset: Any, seconds: float, *, later: bool) -> Run:
    start, cpu_start = time.perf_counter(), time.process_time()
    iterator = iter(dataset)
    counted: list[tuple[float, int]] = []
    with NodeSampler(iterator) as sampler:
        for batch in iterator:
            counted.append((time.perf_counter(), _examples_in(batch)))
            taken = counted[-1][0] - start
            if taken >= seconds and (len(counted) >= _FEWEST_BATCHES or taken >= _LONGEST * seconds):
                break
        else:
            seconds = float("inf")
    cpu_seconds = time.process_time() - cpu_start
    return _summary(sampler.tree(), counted, start, cpu_seconds, ended=seconds == float("inf"), later=later)


def _summary(
    nodes: Node, counted: list[tuple[float, int]], start: float, cpu_seconds: float, *, ended: bool, later: bool
) -> Run:
    examples = sum(number for _, number in counted)
    taken = counted[-1][0] - start if counted else 0.0
    # The start is left out: making the iterator, and filling a shuffle.
    steady = len(counted) > 1 and counted[-1][0] > counted[0][0]
    since, before = counted[0] if steady else (start, 0)
    speed = (examples - before) / (counted[-1][0] - since) if counted else 0.0
    return Run(nodes, len(counted), examples, taken, speed, cpu_seconds, ended, later)


def _examples_in(batch: Any) -> int:
    """Returns the first dimension of an element's first tensor; 1 for a scalar."""
    first = tf.nest.flatten(batch)[0]
    shape = first.dense_shape if isinstance(first, tf.SparseTensor) else first.shape
    return int(shape[0]) if len(shape) else 1
