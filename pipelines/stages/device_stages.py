"""The stages that bring batches to a device, or keep the examples there: device and overlap."""

import math
from dataclasses import dataclass
from typing import Any

from tfopt.model.batches import DEVICE_STAGE
from tfopt.pipelines.device.copying import copy_ahead
from tfopt.pipelines.device.device_stage import DeviceStage, NotAttached
from tfopt.pipelines.device.placing import OnDevice, Placement
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.stages.stage import Flow, Stage

_CHUNK_BYTES = 16 * 2**20  # of examples on their way to the device


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyToDevice(Stage):
    """Copies batches to a device before they are asked for."""

    device: str | None
    held: OnDevice | str | None  # as in Placement
    steps: int | None

    def apply(self, flow: Flow) -> None:
        """Has the flow end in a copy, unless batches are made on the device."""
        device, made_there = self.device, isinstance(self.held, OnDevice) and self.held.only
        if device is not None and not made_there:
            flow.endings.append(lambda dataset, settings: copy_ahead(dataset, device, self.steps))

    def summary(self) -> dict[str, Any]:
        """Returns the device."""
        return {"device": self.device, "on_device": isinstance(self.held, OnDevice)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap(Stage):
    """Attaches what makes batches on the device, for `tfopt.fit.overlap` to find."""

    held: OnDevice
    loading: tuple[Stage, ...]  # the stages that make examples, without a shuffle
    options: PipelineOptions
    facts: Facts

    def apply(self, flow: Flow) -> None:
        """Has the flow end in the device stage."""
        flow.endings.append(lambda dataset, settings: self._attached(dataset, settings, flow))

    def _attached(self, dataset: Any, settings: Any, whole: Flow) -> Any:
        count = self.facts.used or 0
        flow = Flow(whole.description, whole.place)
        for stage in self.loading:
            stage.apply(flow)
        examples = flow.flush()
        # No larger than the count: `batch` allocates a whole one at once.
        size = min(count, math.ceil(_CHUNK_BYTES / max(self.facts.sample.example_bytes, 1)))
        stage_of_device = DeviceStage(
            chunks=examples.batch(size).prefetch(1).with_options(settings),
            spec=examples.element_spec,
            element_spec=dataset.element_spec,
            count=count,
            options=self.options,
            held=self.held,
            settings=settings,
            steps=self.facts.steps or 0,
            place=whole.place,
        )
        batches = NotAttached(dataset) if self.held.only else dataset
        setattr(batches, DEVICE_STAGE, stage_of_device)  # for `stage_of`; datasets derived from this one have none
        return batches


def plan_device(placement: Placement, facts: Facts) -> CopyToDevice:
    """Returns the stage "device", which also says whether all examples are kept there."""
    return CopyToDevice(
        name="device",
        setting=placement.device or "none",
        reason=placement.reason,
        device=placement.device,
        held=placement.held,
        steps=facts.steps,
    )


def plan_overlap(
    options: PipelineOptions, facts: Facts, held: OnDevice | str | None, loading: tuple[Stage, ...]
) -> list[Stage]:
    """Returns the stage "overlap", what `tfopt.fit.overlap` makes of the pipeline; none if it changes nothing."""
    if held is None:
        return []
    if isinstance(held, str):
        reason = f"the examples are not kept on the device: {held}"
        return [Stage(name="overlap", setting="as above", reason=reason)]
    if held.only:
        setting = "needed"
        reason = "tfopt.fit.overlap(model) makes the batches; without it `fit` is refused"
    else:
        setting = "on the device"
        reason = f"with tfopt.fit.overlap the examples lie on {held.device}: {held.reason}; "
        reason += "a plain `fit` goes as above, and so does overlap if that memory is taken by then"
    return [
        Overlap(
            name="overlap",
            setting=setting,
            reason=reason,
            held=held,
            loading=loading,
            options=options,
            facts=facts,
        )
    ]
