"""Plans an input pipeline: looks at the source, decides the stages and their order, explains, builds."""

from dataclasses import dataclass, replace
from typing import Any, Unpack

from tfopt.pipelines.inspection.facts import Facts, inspect_source
from tfopt.pipelines.shared.options import Choices, PipelineOptions, takes_options
from tfopt.pipelines.sources.as_source import as_source
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.stages.batch import plan_batch, plan_padding, plan_service
from tfopt.pipelines.stages.cache_stage import Cache, plan_cache
from tfopt.pipelines.stages.execution import plan_memory, plan_order
from tfopt.pipelines.stages.function_stages import (
    FunctionStage,
    gather_on_device,
    on_device,
    plan_augment,
    plan_functions,
    plan_gather,
    reads_rows,
)
from tfopt.pipelines.stages.output import plan_device, plan_overlap, plan_prefetch
from tfopt.pipelines.stages.read import plan_reading
from tfopt.pipelines.stages.shuffle import plan_shuffle
from tfopt.pipelines.stages.stage import Flow, ShapeCheck, Stage, shape_check


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A pipeline that is decided and not yet built. Made by `plan_pipeline`.

    Example:
        >>> import numpy as np
        >>> plan = plan_pipeline(np.zeros((100, 4)), batch_size=10)
        >>> [stage.name for stage in plan.stages]
        ['read', 'shuffle', 'cache', 'batch', 'gather', 'prefetch', 'device', 'order', 'memory']
        >>> plan.stage("cache").reason
        'it would save nothing: rows are read where they lie, and nothing is computed'
    """

    source: Source  # where the examples come from
    options: PipelineOptions  # what was asked for
    stages: tuple[Stage, ...]  # in the order in which elements go through them; "order" and "memory" hold for all

    def build(self) -> Any:
        """Returns a new `tf.data.Dataset` of batches; its first iteration is the first epoch.

        If several processes train on a tf.data service, the result is a distributed dataset, for `fit` or a loop of
        your own under the strategy.

        Raises:
            ValueError: If what a cache on disk would hold can no longer be fingerprinted.
        """
        flow = Flow(description=str(self))
        for stage in self.stages:
            stage.apply(flow)
        return flow.finish()

    def stage(self, name: str) -> Stage:
        """Returns the first stage of this name.

        Raises:
            KeyError: If the plan has none.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"Expected a stage {name!r}. Found {', '.join(stage.name for stage in self.stages)}.")

    def __str__(self) -> str:
        kind = "Training" if self.options.training else "Evaluation"
        widths = [max(len(getattr(stage, column)) for stage in self.stages) for column in ("name", "setting")]
        rows = (f"  {s.name:<{widths[0]}}  {s.setting:<{widths[1]}}  {s.reason}" for s in self.stages)
        return "\n".join([f"{kind} pipeline over {self.source.name}", *rows])

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON values; functions by name."""
        summary: dict[str, Any] = {"service": self.options.service}
        for stage in self.stages:
            summary |= stage.summary()
        stages = [stage.to_dict() for stage in self.stages]
        return {**summary, "options": self.options.to_dict(), "stages": stages}


@takes_options
def plan_pipeline(source: Any, **options: Unpack[Choices]) -> PipelinePlan:
    """Plans an input pipeline; `str()` of the plan says what it does and why, `build()` makes it.

    Use it to see the decisions; `build_pipeline` is for those who trust them. Up to 32 examples are read, decoded and
    transformed, so that what could not be trained on fails here.

    Stages: read in parallel, decode, crop, `transform`, cache, shuffle, `augment`, batch, prefetch, copy to the device.
    A random crop, and `transform` behind it, stand behind the cache. Without a cache the shuffle stands where elements
    are smallest, often before decoding.

    Args:
        source: A `Source`; arrays, or tuples and dicts of them; a `tf.data.Dataset` of single examples; the path of a
            folder of images with a subfolder a class, or of one that `write_records` wrote; a path, glob or list of
            paths of TFRecord files; paths of .npy files; that of an HDF5 file with one dataset; "tfds:NAME".
        batch_size: Examples in a batch.
        training: Sets `shuffle` and `remainder`: shuffled and without a smaller last batch, or in order and complete.
        crop: `RandomCrop` or `CentralCrop`. Where nothing is cached before it, only the crop of a JPEG is decoded.
        transform: A deterministic function of an example, called as `Dataset.map` calls its function.
        augment: A random function of a transformed example, run anew in each epoch, or a list of them; `per_batch`
            marks one that takes batches. Where it has a keyword `seed`, it gets an int32 tensor of shape (2,) for
            TensorFlow's stateless operations, unlike for each element and epoch. With cache="device" Keras layers, too:
            they take whole batches, and draw from the pipeline's seeds.
        cache: "memory" keeps the examples; the path of a folder keeps them on disk, for later runs too; "auto" chooses:
            in memory up to a quarter of what is free, else on disk where that is quicker than computing and takes at
            most half of what is free; None does not. "device" copies them to the device once, where they take at most
            half of what is free; batches are made there, and `fit` needs `tfopt.fit.overlap`. With "auto" `overlap`
            finds them there too, up to a quarter of what is free on the GPU; a plain `fit` does not need it.
        cache_after: "decode" caches before `transform`, "transform" behind it; "auto" chooses.
        cache_key: Stands for what cannot be fingerprinted in the name of a cache on disk. Change it whenever the
            examples would.
        cache_limit_gib: What all caches in the folder may take together, in GiB; those used least recently are removed
            for a new one. Default: no limit but the disk's.
        shuffle: Default: True when training.
        seed: With a seed, elements, their order and their augmentation are the same on every run, whatever the
            parallelism and `tf.random.set_seed`, and new in each epoch. Default: random.
        remainder: "drop" leaves out the examples that do not fill a batch, "keep" makes a smaller last batch, "pad"
            fills it and returns sample weights under which loss and gradients are those of the smaller one. Default:
            "drop" when training, else "keep".
        prefetch: Batches prepared ahead; "auto" leaves it to tf.data.
        device: Where batches are copied to before they are asked for: "auto" for the GPU where there is one, a device's
            name, or None. With cache="device", where the examples lie.
        service: "grpc://host:port" of a tf.data service (`python -m tfopt.pipelines.serve`), whose workers do the work
            up to the batch, in any order and without a cache. An error tells when one of them is lost.

    Returns:
        The plan.

    Raises:
        TypeError: An argument is unknown or of the wrong type.
        ValueError: An argument is out of range; or random draws would be frozen, by the cache or by TensorFlow's
            tracing, or `seed` could not make them the same on every run; or what a cache on disk would hold cannot be
            fingerprinted; or examples cannot be cropped or padded; or cache="device" cannot hold or make them; or the
            workers of a tf.data service could not do it.
        UnsupportedError: cache="device" under a distribution strategy; or `service` where several processes train,
            outside of their strategy's scope or with a source that has no parts.
        PipelineError: The tf.data service does not answer; or data is missing, empty, damaged or of unlike shapes,
            there are too few examples for a batch, or a function failed.

    Example:
        >>> import numpy as np
        >>> images, labels = np.zeros((1000, 8, 8, 3), "uint8"), np.zeros(1000, "int32")
        >>> plan_pipeline((images, labels), batch_size=100).build().element_spec[0].shape
        TensorShape([100, 8, 8, 3])
    """
    chosen = PipelineOptions(**options)
    facts = inspect_source(as_source(source), chosen)
    return PipelinePlan(facts.source, chosen, _stages(chosen, facts))


@takes_options
def build_pipeline(source: Any, **options: Unpack[Choices]) -> Any:
    """Returns the `tf.data.Dataset` that `plan_pipeline` plans; it takes the same arguments.

    Example:
        >>> import numpy as np
        >>> dataset = build_pipeline((np.zeros((1000, 8)), np.zeros(1000)), batch_size=100, training=False)
        >>> len(dataset)
        10
    """
    return plan_pipeline(source, **options).build()


def _stages(options: PipelineOptions, facts: Facts) -> tuple[Stage, ...]:
    """Decides which stages the pipeline has, and their order; each stage decides how it is set."""
    check = shape_check(options, facts)
    device = plan_device(options, facts, check)
    cache = plan_cache(options, facts, device.held_only)
    shuffle = plan_shuffle(options, facts, cache.choice)
    reading = plan_reading(options, facts, cache.choice)
    before, behind = plan_functions(options, facts, cache.choice)
    cache, before, behind = _checked(check, cache, before, behind)
    loading = (*reading, *before, cache if cache.choice.folder is not None else cache.without(), *behind)
    augment = plan_augment(options, by_batch=False)
    batch = plan_batch(options, facts, check)
    gather: list[Stage] = []
    if reads_rows(options, facts, cache.choice, shuffle):
        if augment and check is None:
            # One map for both: the row is gathered as part of its augmentation.
            behind = [replace(stage, group=augment[0].group) for stage in behind]
        elif not augment:
            gather, behind = [plan_gather(facts)], []
    if cache.choice.on is not None:
        examples: list[Stage] = [*before, cache, shuffle, *behind]
    elif shuffle.first:
        examples = [shuffle, *behind, cache]
    else:
        examples = [*behind, cache, shuffle]
    of_batches = plan_augment(options, by_batch=True)
    if device.held_only is not None:
        gather = [gather_on_device()]
        of_batches = [on_device(*each) for each in zip(of_batches, device.held_only.obstacles, strict=True)]
    return (
        *reading,
        *examples,
        *augment,
        batch,
        *gather,
        *plan_service(options, facts, batch),
        *of_batches,
        *plan_padding(options),
        plan_prefetch(options),
        device,
        *plan_overlap(options, facts, device, loading),
        plan_order(options, cache.choice),
        plan_memory(options, facts, cache.choice, shuffle, reading),
    )


def _checked(
    check: ShapeCheck | None, cache: Cache, before: list[FunctionStage], behind: list[FunctionStage]
) -> tuple[Cache, list[FunctionStage], list[FunctionStage]]:
    """Has the last of these stages check the shapes of examples."""
    if check is None:
        return cache, before, behind
    if behind:
        return cache, before, [*behind[:-1], replace(behind[-1], check=check)]
    if before:
        return cache, [*before[:-1], replace(before[-1], check=check)], behind
    return replace(cache, check=check), before, behind
