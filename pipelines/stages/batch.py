"""Batches the examples, here or on the workers of a tf.data service, and fills the last batch."""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.service.client import Part, describe_service, distributed, from_service
from tfopt.pipelines.shared.elements import element_of, without_autograph
from tfopt.pipelines.shared.functions import PADDING_NOTE, pad_batch
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.stages.stage import Flow, ShapeCheck, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Stage):
    """Batches the examples."""

    size: int
    steps: int | None  # batches per epoch
    full: bool  # whether all batches are full once they leave this stage, or the service
    served: bool  # whether the batches come from a service, whose workers each have a last one

    def apply(self, flow: Flow) -> None:
        """Batches the dataset."""
        drop = self.full and not self.served
        flow.dataset = flow.flush().batch(self.size, drop_remainder=drop, name="batch")

    def summary(self) -> dict[str, Any]:
        """Returns the number of steps."""
        return {"steps_per_epoch": self.steps}


@dataclass(frozen=True, slots=True, kw_only=True)
class Service(Stage):
    """Has the workers of a tf.data service run the stages above."""

    options: PipelineOptions
    part: Part | None
    steps: int | None
    full: bool

    def apply(self, flow: Flow) -> None:
        """Replaces the batches by those the service delivers."""
        batches, part = flow.flush(), self.part
        flow.dataset = from_service(batches, self.options, part, full_batches=self.full, steps=self.steps)
        if part is not None:
            flow.endings.append(lambda dataset, settings: distributed(dataset, part))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad(Stage):
    """Fills the last batch, at weight zero."""

    size: int

    def apply(self, flow: Flow) -> None:
        """Maps `pad_batch` over the batches."""
        dataset, size = flow.flush(), self.size
        spec = dataset.element_spec

        @without_autograph
        def padded(*arguments: Any) -> Any:
            return pad_batch(element_of(arguments, spec), size)

        flow.dataset = dataset.map(padded, num_parallel_calls=tf.data.AUTOTUNE, name="pad")


def plan_batch(options: PipelineOptions, facts: Facts, check: ShapeCheck | None) -> Batch:
    """Returns the stage "batch"."""
    divides = facts.count is not None and facts.count % options.batch_size == 0
    # With several processes on a service, all of them trace their steps alike, whatever the size of their part.
    full = options.remainder == "drop" or (facts.part is None and divides)
    if options.remainder == "drop":
        reason = "remainder='drop': every batch is full, and its shape static"
    elif full:
        reason = "every batch is full, and its shape static: the size divides the number of examples"
    elif options.remainder == "pad":
        reason = "remainder='pad': every example is used, a smaller last batch is filled"
    else:
        reason = "remainder='keep': every example is used, the last batch may be smaller"
    steps = facts.steps
    reason += "" if steps is None else f"; {steps:,} steps an epoch"
    if check is not None:
        reason += f"; shapes checked: {', '.join(map(str, check.shapes))}"
    size, served = options.batch_size, options.service is not None
    return Batch(name="batch", setting=f"{size:,}", reason=reason, size=size, steps=steps, full=full, served=served)


def plan_service(options: PipelineOptions, facts: Facts, batch: Batch) -> list[Stage]:
    """Returns the stage "service", if the pipeline uses one.

    Raises:
        PipelineError: If it does not answer.
    """
    if options.service is None:
        return []
    return [
        Service(
            name="service",
            setting=options.service,
            reason=describe_service(options, facts.part),
            options=options,
            part=facts.part,
            steps=batch.steps,
            full=batch.full,
        )
    ]


def plan_padding(options: PipelineOptions) -> list[Stage]:
    """Returns the stage "pad", if it was asked for."""
    if options.remainder != "pad":
        return []
    size = options.batch_size
    return [Pad(name="pad", setting=f"to {size:,}", reason=PADDING_NOTE, size=size)]
