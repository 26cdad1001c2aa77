"""Plans an input pipeline: looks at the source, decides, explains, builds."""

from dataclasses import dataclass
from typing import Any, Unpack

from tfopt.pipelines.build import assemble, count_elements
from tfopt.pipelines.layout import Layout, lay_out
from tfopt.pipelines.options import Choices, PipelineOptions, takes_options
from tfopt.pipelines.refusals import refuse_frozen, refuse_restarting, refuse_unrepeatable
from tfopt.pipelines.sampling import take_sample, trace
from tfopt.pipelines.sources.dataset import as_source
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
        ['read', 'shuffle', 'cache', 'batch', 'gather', 'prefetch', 'order']
    """

    source: Source
    options: PipelineOptions
    layout: Layout
    stages: tuple[Stage, ...]

    def build(self) -> Any:
        """Returns a new `tf.data.Dataset` of batches; its first iteration is the first epoch."""
        return assemble(self.source, self.options, self.layout)

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

    Stages: read in parallel, decode, `transform`, cache, shuffle, `augment`, batch, prefetch. Without a cache the
    shuffle stands where elements are smallest, often before decoding.

    Args:
        source: A `Source`; arrays, or tuples and dicts of them; a `tf.data.Dataset` of single examples; the path of a
            folder of images with a subfolder a class; a path, glob or list of paths of TFRecord files.
        batch_size: Examples in a batch.
        training: Sets `shuffle` and `remainder`: shuffled and without a smaller last batch, or in order and complete.
        transform: A deterministic function of an example, called as `Dataset.map` calls its function.
        augment: A random function of a transformed example, run anew in each epoch. Where it has a keyword `seed`, it
            gets an int32 tensor of shape (2,) for TensorFlow's stateless operations, unlike for each element and epoch.
        cache: "memory" keeps the transformed examples; "auto" does so where it saves work and takes at most a quarter
            of the free memory; None does not.
        shuffle: Default: True when training.
        seed: With a seed, elements, their order and their augmentation are the same on every run, whatever the
            parallelism and `tf.random.set_seed`, and new in each epoch. Default: random.
        remainder: "drop" leaves out the examples that do not fill a batch, "keep" makes a smaller last batch.
            Default: "drop" when training, else "keep".
        prefetch: Batches prepared ahead; "auto" leaves it to tf.data.

    Returns:
        The plan.

    Raises:
        TypeError: An argument is unknown or of the wrong type.
        ValueError: An argument is out of range; or random draws would be frozen, by the cache or by TensorFlow's
            tracing, or `seed` could not make them the same on every run.
        PipelineError: Data is missing, empty, damaged or of unlike shapes, there are too few examples for a batch, or
            a function failed.

    Example:
        >>> import numpy as np
        >>> images, labels = np.zeros((1000, 8, 8, 3), "uint8"), np.zeros(1000, "int32")
        >>> plan_pipeline((images, labels), batch_size=100).build().element_spec[0].shape
        TensorShape([100, 8, 8, 3])
    """
    chosen = PipelineOptions(**options)
    known = as_source(source)
    layout = _decide(known, chosen)
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


def _decide(source: Source, options: PipelineOptions) -> Layout:
    whole = source.dataset()
    count, infinite = count_elements(source, whole)
    traced = trace(source, whole, options)
    refuse_frozen(options, traced.in_source, traced.in_transform)
    refuse_unrepeatable(options, traced.in_source, traced.in_transform, traced.in_augment, traced.takes_seed)
    refuse_restarting("transform", traced.in_transform)
    refuse_restarting("augment", traced.in_augment)
    sample = take_sample(source, options, traced)
    return lay_out(source, options, traced, sample, count=count, infinite=infinite)
