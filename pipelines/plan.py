"""Plans an input pipeline: looks at the source, decides, explains, builds."""

from dataclasses import dataclass, replace
from typing import Any, Unpack

from tfopt.pipelines.build import assemble, count_elements
from tfopt.pipelines.keys import cache_key
from tfopt.pipelines.layout import Layout, lay_out
from tfopt.pipelines.refusals import refuse_frozen, refuse_restarting, refuse_unrepeatable
from tfopt.pipelines.sampling import take_sample, trace
from tfopt.pipelines.service.client import describe_service, refuse_unserved
from tfopt.pipelines.service.parts import Part, take_part
from tfopt.pipelines.shared.last_batch import expect_paddable
from tfopt.pipelines.shared.options import Choices, PipelineOptions, takes_options
from tfopt.pipelines.sources.as_source import as_source
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.stages import Stage, describe, summary, table


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A pipeline that is decided and not yet built. Made by `plan_pipeline`.

    Args:
        source: Where the examples come from.
        options: What was asked for.
        layout: What was decided.
        stages: The same for the reader: the stages in order, each with its setting and its reason.

    Example:
        >>> import numpy as np
        >>> plan = plan_pipeline(np.zeros((100, 4)), batch_size=10)
        >>> [stage.name for stage in plan.stages]
        ['read', 'shuffle', 'cache', 'batch', 'gather', 'prefetch', 'device', 'order', 'memory']
    """

    source: Source
    options: PipelineOptions
    layout: Layout
    stages: tuple[Stage, ...]

    def build(self) -> Any:
        """Returns a new `tf.data.Dataset` of batches; its first iteration is the first epoch.

        Where several processes train on a tf.data service, what it returns is distributed already, for `fit` or a loop
        of your own under the strategy.

        Raises:
            ValueError: What a cache on disk would hold can no longer be fingerprinted.
        """
        layout = self.layout
        if layout.key is not None:
            # The functions are traced now, and may have changed since the plan was made.
            key = cache_key(self.source, self.options, layout.cache, layout.sample, layout.count)
            layout = replace(layout, key=key)
        return assemble(self.source, self.options, layout, str(self))

    def __str__(self) -> str:
        kind = "Training" if self.options.training else "Evaluation"
        return f"{kind} pipeline over {self.source.name}\n{table(self.stages)}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON values; functions by name."""
        return {
            **summary(self.source, self.options, self.layout),
            "options": self.options.to_dict(),
            "stages": [stage.to_dict() for stage in self.stages],
        }


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
    known, part = as_source(source), None
    if chosen.service is not None:
        known, part = take_part(known, chosen)
    layout = _decide(known, chosen, part)
    return PipelinePlan(known, chosen, layout, describe(known, chosen, layout))


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


def _decide(source: Source, options: PipelineOptions, part: Part | None) -> Layout:
    whole = source.dataset()
    count, infinite = count_elements(source, whole)
    traced = trace(source, whole, options)
    refuse_frozen(options, traced.in_source, traced.in_transform)
    refuse_unrepeatable(options, traced.in_source, traced.in_transform, traced.in_augment)
    refuse_restarting("transform", traced.in_transform)
    for findings in traced.in_augment:
        refuse_restarting("augment", findings)
    if options.remainder == "pad":
        expect_paddable(traced.augmented.element_spec)
    sample = take_sample(source, options, traced)
    served = None
    if options.service is not None:
        sent = count if part is None else part.whole  # of arrays a process sends all, whatever it reads of them
        refuse_unserved(
            source,
            options,
            in_source=traced.in_source,
            in_transform=traced.in_transform,
            in_augment=traced.in_augment,
            decoded_bytes=sample.decoded_bytes * (sent or 0),
            infinite=infinite,
        )
        served = describe_service(options, part)
    return lay_out(source, options, traced, sample, count=count, infinite=infinite, served=served, part=part)
