"""Puts a tf.data service between the batches of a pipeline and what follows them in the training process."""

from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.layout import Layout
from tfopt.pipelines.service.parts import Part
from tfopt.pipelines.service.relay import relay_to
from tfopt.pipelines.shared.options import PipelineOptions

_PREFIX = "grpc://"


def dispatcher_of(options: PipelineOptions) -> str:
    """Returns the "host:port" of the service that was asked for."""
    return str(options.service).removeprefix(_PREFIX)


def describe_service(options: PipelineOptions, part: Part | None) -> str:
    """Returns what the plan says of the service.

    Args:
        options: The pipeline's options.
        part: What this process reads, None for all.

    Raises:
        PipelineError: It does not answer.
    """
    workers = len(relay_to(dispatcher_of(options)).workers())
    there = f"{workers} worker{'s' * (workers != 1)} there" if workers else "no worker there yet"
    return (
        f"{there}: what stands above runs on them, each example on one of them once an epoch; a worker or dispatcher "
        f"that is lost ends the epoch with an error{'' if part is None else f'; {part}'}"
    )


def from_service(dataset: Any, options: PipelineOptions, layout: Layout) -> Any:
    """Returns the batches of a dataset as the workers of a service prepare them, each example once an epoch.

    Each worker's last batch may be smaller, and is filled here out of the others'.

    Args:
        dataset: The batches; full ones, but for the last.
        options: The pipeline's options.
        layout: What was decided.

    Raises:
        PipelineError: The service does not answer, or does not take the dataset.
    """
    settings = tf.data.Options()
    settings.deterministic = False
    # Random operations without a fixed seed have a state, which is not to be shipped.
    settings.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    address = _PREFIX + relay_to(dispatcher_of(options)).address
    distribute = tf.data.experimental.service.distribute("distributed_epoch", address)
    try:
        served = dataset.prefetch(tf.data.AUTOTUNE).with_options(settings).apply(distribute)
    except (tf.errors.OpError, ValueError) as error:
        raise PipelineError(
            f"Expected the tf.data service at {options.service} to take the pipeline. Found: {error}. What to do: pass "
            "functions of TensorFlow operations alone, without variables and tables; run the same version of "
            "TensorFlow there."
        ) from error
    part = layout.part
    served = served.rebatch(options.batch_size if part is None else part.size, drop_remainder=layout.static_batch)
    batches = layout.steps(options) if part is None else part.batches
    if batches is not None:
        # `take` ends the epoch without waiting until the service has noticed; too few are an error at its end.
        served = served.take(batches).apply(tf.data.experimental.assert_cardinality(batches))
    return served
