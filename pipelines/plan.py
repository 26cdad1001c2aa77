"""Plans an input pipeline: looks at the source, decides the stages and their order, explains, builds."""

import difflib
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar, Unpack

import tensorflow as tf

from tfopt import checks
from tfopt.model.batches import PLACE
from tfopt.pipelines.as_source import as_source
from tfopt.pipelines.inspection.facts import Facts, inspect_loader, inspect_source
from tfopt.pipelines.shared.epochs import Epoch, Place, Position, drawn_seed, reduced
from tfopt.pipelines.shared.options import Choices, PipelineOptions
from tfopt.pipelines.sources.parts import own_seed
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.sources.split import take_split
from tfopt.pipelines.stages.arrangement import plan_stages
from tfopt.pipelines.stages.batch_stages import Workers, left_out
from tfopt.pipelines.stages.from_position import batch_of, described_position, expect_repeatable, run_through
from tfopt.pipelines.stages.loader_stages import choose_options, plan_loader
from tfopt.pipelines.stages.stage import Flow, Stage
from tfopt.pipelines.text.tokens import tokens
from tfopt.repairs.fit_data import mark_order_decided
from tfopt.text import Shown, described
from tfopt.warn import warn_once

P = ParamSpec("P")
R = TypeVar("R")

_PLAN = "_tfopt_plan"  # an attribute of datasets
_RENAMED = {"drop_remainder": 'remainder="drop" or remainder="keep"', "validation_split": "split"}


@dataclass(frozen=True, slots=True, repr=False)
class PipelinePlan(Shown):
    """A pipeline whose stages are decided but not built yet, made by `plan_pipeline`.

    Example:
        >>> import numpy as np
        >>> plan = plan_pipeline(np.zeros((100, 4)), batch_size=10)
        >>> [stage.name for stage in plan.stages]
        ['read', 'shuffle', 'cache', 'batch', 'decode', 'prefetch', 'device', 'order', 'memory']
        >>> plan.stage("cache").reason
        'it would save nothing: rows are read where they lie, and nothing is computed'
    """

    source: Source  # where the examples come from
    options: PipelineOptions  # what was asked for, and the `remainder` that suits the data
    stages: tuple[Stage, ...]  # in the order in which elements go through them; "order" and "memory" hold for all
    position: Position  # where it begins, which `at` moves

    def build(self) -> Any:
        """Returns a new `tf.data.Dataset` of batches.

        Each iteration of it is an epoch, in an order and with draws of its own. An epoch begins when its first batch is
        read: an iterator that is opened and not read is none, and one that is left early is followed by the next epoch.

        If several processes train together, the result is a distributed dataset of each one's part, for `fit`,
        `evaluate`, `predict` or a loop of your own under the strategy.

        Raises:
            ValueError: If a cache on disk could be stale unnoticed, by what functions do now.
        """
        return self._built()

    def first_epoch(self) -> Any:
        """Returns the dataset of the first epoch alone, whose stages are not inside functions: for a profile."""
        return self._built(Epoch.first(self.position.seed or 0))

    def _built(self, epoch: Epoch | None = None) -> Any:
        given = self.position.seed
        part = next((stage.part for stage in self.stages if isinstance(stage, Workers)), None)
        seed = reduced((own_seed(drawn_seed(), part) if given is None else given) or 0)
        place = Place(replace(self.position, seed=seed), given=given is not None)
        flow = Flow(str(self), place, is_served=self.options.service is not None, epoch=epoch)
        run_through(flow, self.stages)
        dataset = flow.flush()
        settings = [*(each.options() for each in flow.outside), flow.settings]
        dataset = dataset.with_options(functools.reduce(tf.data.Options.merge, settings))
        for ending in flow.endings:
            dataset = ending(dataset, flow.settings)
        setattr(dataset, _PLAN, self)  # for `plan_of` and `place_of`; datasets derived from this one have none
        setattr(dataset, PLACE, place)
        # Training on a pipeline for evaluation, whose order stays the same, deserves Keras' warning.
        return mark_order_decided(dataset) if self.options.training or self.options.shuffle else dataset

    def at(self, epoch: int = 0, batch: int = 0) -> "PipelinePlan":
        """Returns the plan of the same pipeline from a position on, to resume an interrupted training.

        The first iteration of its dataset yields the rest of that epoch, and the next ones the whole epochs after it,
        bit for bit as without the interruption. `len()` of the dataset stays that of a whole epoch. If the source can
        be read by position and nothing is cached, what comes before the position is not read. Otherwise what comes
        before it in the same epoch is read and dropped.

        The position is counted from the start of the dataset, also if this plan has been moved before.

        Args:
            epoch: Epochs that come before. Default: 0.
            batch: Batches of the epoch that come before; if those are all, the first iteration is empty. Default: 0.

        Raises:
            TypeError: If a number is not an integer.
            ValueError: If one is negative, or the epoch has fewer than `batch` batches.
            UnsupportedError: If the batches may differ from run to run: something is drawn without a seed, the source
                keeps no order, or a tf.data service makes the batches.

        Example:
            >>> import numpy as np
            >>> plan = plan_pipeline(np.arange(6), batch_size=2, seed=1)
            >>> dataset, moved = plan.build(), plan.at(epoch=1, batch=2).build()
            >>> first, second = ([batch.tolist() for batch in dataset.as_numpy_iterator()] for _ in range(2))
            >>> [batch.tolist() for batch in moved.as_numpy_iterator()] == second[2:]
            True
        """
        epoch = checks.integer("epoch", epoch, "Pass the number of epochs that were read.", least=0)
        steps = batch_of(self.stages).steps
        most = math.inf if steps is None else steps
        batch = checks.integer("batch", batch, "Pass how many were read of the epoch's batches.", least=0, most=most)
        expect_repeatable(self.stages)
        return replace(self, position=replace(self.position, epoch=epoch, batch=batch))

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
        rows = [(stage.name, stage.setting, stage.reason) for stage in self.stages]
        if not self.position.is_start:
            rows.insert(0, described_position(self.position, self.stages))
        return "\n".join([f"{kind} pipeline over {self.source.name}", *described(rows)])

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON values; functions by name."""
        summary: dict[str, Any] = {"service": self.options.service}
        for stage in self.stages:
            summary |= stage.summary()
        if not self.position.is_start:
            summary["position"] = {"epoch": self.position.epoch, "batch": self.position.batch}
        stages = [stage.to_dict() for stage in self.stages]
        return {**summary, "options": self.options.to_dict(), "stages": stages}


def plan_of(dataset: Any) -> PipelinePlan | None:
    """Returns the plan of a dataset that `build` returned; None for any other, also one derived from it, as by .map.

    Example:
        >>> import numpy as np
        >>> dataset = plan_pipeline(np.arange(6), batch_size=2).build()
        >>> plan_of(dataset).options.batch_size, plan_of(dataset.take(1))
        (2, None)
    """
    return getattr(dataset, _PLAN, None)


def place_of(dataset: Any) -> Place:
    """Returns where the next iteration begins of a dataset that `build` returned."""
    place: Place = getattr(dataset, PLACE)
    return place


def _takes_options(function: Callable[P, R]) -> Callable[P, R]:
    """Shows the options in the signature of a function `(source, **options)`, and suggests names for unknown ones."""
    options = inspect.signature(PipelineOptions).parameters
    stated = inspect.signature(function)

    @functools.wraps(function)
    def checked(*given: P.args, **keywords: P.kwargs) -> R:
        if len(given) > 1:
            raise TypeError(
                f"Expected one source, and options by name. Found {len(given)} arguments without a name. Pass arrays "
                f"that belong together as one tuple: {function.__name__}((x, y), batch_size=...)."
            )
        for name in keywords:
            if name != "source" and name not in options:
                raise unknown_option(name, list(options))
        return function(*given, **keywords)

    shown = stated.replace(parameters=[stated.parameters["source"], *options.values()])
    object.__setattr__(checked, "__signature__", shown)
    return checked


@_takes_options
def plan_pipeline(source: Any, **options: Unpack[Choices]) -> PipelinePlan:
    """Plans an input pipeline; `str()` of the plan says what it does and why, `build()` makes it.

    Use it to see the decisions before `build_pipeline` makes them. It reads, decodes and transforms up to 32 examples,
    so that bad data fails here rather than in training.

    Stages: read, decode, crop, `transform`, cache, shuffle, `augment`, batch, prefetch, copy to the device. A random
    crop, and the `transform` after it, follow the cache. Without a cache, the shuffle comes where elements are
    smallest, often before decoding.

    Args:
        source: A `Source`; arrays, or tuples and dicts of them; a `tf.data.Dataset` of single examples; the path of a
            folder of images with a subfolder a class, or of one that `write_records` wrote; a path, glob or list of
            paths of TFRecord files; paths of .npy, .csv, .parquet or .tar files; a data frame; the path of an HDF5 file
            with one dataset; "tfds:NAME"; documents of token ids, as a list of lists or a `tf.RaggedTensor`; or what
            yields whole batches: a `keras.utils.PyDataset`, a PyTorch or Grain loader, or a generator function
            (`loader`).
        batch_size: Examples in a batch.
        training: Whether to train on the batches. Sets `shuffle`, and with it `remainder`.
        crop: `RandomCrop` or `CentralCrop`. If nothing is cached before it, only the crop of a JPEG is decoded.
        crop_with: Masks, further images and boxes that are cropped with the image: keys of a dict, positions in a
            tuple, or paths such as "1/boxes". Boxes are normalised (ymin, xmin, ymax, xmax). Parts that look like one
            and are not named are refused; a dict says False for those to leave as they are: {"features": False}.
        transform: A deterministic function of an example, called as `Dataset.map` calls its function; `per_batch` marks
            one that takes many examples at once.
        augment: A random function of a transformed example that runs again in each epoch, or a list of them;
            `per_batch` marks one that takes batches. A keyword `seed` gets an int32 tensor of shape (2,) for
            TensorFlow's stateless operations, different for each element and epoch. With cache="device" also Keras
            layers, which take whole batches and draw from the pipeline's seeds.
        cache: "memory" keeps the examples in memory; the path of a folder keeps them on disk, for later runs too;
            None keeps nothing. "auto" uses up to a quarter of the free memory, or else, without a seed, up to half of
            the free disk if reading is three times as fast as computing. "device" keeps them on the device, in up to
            half of its free memory; batches are made there, and `fit` needs `tfopt.fit.overlap`. With "auto" `overlap`
            finds them there too, in up to a quarter of the GPU's free memory, and a plain `fit` works as well.
        cache_after: "decode" caches before `transform`, "transform" after it; "auto" chooses.
        cache_key: Stands, in the key of a cache on disk, for what functions do that is not in their graph, and for a
            source without a fingerprint. Change it whenever the examples would change.
        cache_limit_gib: What all caches in the folder may take together, in GiB; a new one replaces the least recently
            used. Default: limited by the disk alone.
        shuffle: Default: True when training.
        balance: The share of each class in every batch, by its name or label, such as {"cat": 0.5, "dog": 0.5};
            "classes" gives all the same. Needs examples (x, label) that can be read by position. An epoch has as many
            examples as before: those of a small class come several times, and others of a large one in each epoch, all
            of a class equally often over the epochs. Nothing is cached, and the labels are read once, now. Default: as
            often as the data have them.
        seed: Makes elements, their order and their augmentation the same on every run, regardless of parallelism and
            `tf.random.set_seed`, and different in each epoch. Default: random.
        split: The share of examples to validate on, such as 0.1: training=False takes them, training=True the others.
            Drawn at random before anything is shuffled; the same for all values of the other options.
        pack: Tokens in a row, for documents of tokens, or a dataset of vectors of ids, which is read at once: they are
            packed into rows, each token once, and an example is ({"tokens", "segments", "positions"}, labels, weights),
            (pack,) each. Segments number the documents of a row from 1, positions the tokens of each from 0; labels are
            the next tokens. Weights are 0 for padding, as labels and segments are, and for the last token of each
            document, which has no next one.
        pad: "batch" pads examples of different shapes with zeros to the largest of their batch. Default: examples of
            different shapes are refused.
        bucket: Groups examples of similar length (their first axis), and pads each batch to one of at most eight
            lengths, so that XLA compiles at most eight times. The groups depend on the shuffle. Implies pad="batch".
        remainder: "drop" leaves out the examples that do not fill a batch, "keep" makes a smaller last batch, "pad"
            fills it and returns sample weights that keep loss and gradients those of the smaller one. Default: "drop"
            when training on examples that are shuffled as a whole, if at most 5 % are left out (different ones in each
            epoch); else "keep".
        prefetch: Batches prepared ahead; "auto" leaves it to tf.data.
        device: Where batches are copied to ahead of use: "auto" for the GPU if there is one, a device's name, or None.
            With cache="device", where the examples are kept.
        service: "grpc://host:port" of a tf.data service (`python -m tfopt.pipelines.serve`), whose workers do the work
            up to the batch, in any order and without a cache. Losing a worker raises an error.
        on_bad_file: What becomes of image files that do not decode, and of `files` that are missing or empty. "raise"
            names one; it looks at the first and last bytes of each image, and decodes those in doubt. "skip" decodes
            all images once, now, leaves the bad files out, and names them in one warning; the number of examples is
            that of the others.

    Returns:
        The plan.

    Raises:
        TypeError: If an argument is unknown or of the wrong type.
        ValueError: If an argument is out of range; the cache or TensorFlow's tracing would freeze random draws, or
            `seed` could not control them; a cache on disk could be stale unnoticed; examples cannot be cropped, padded
            or kept on the device; or a tf.data service could not run the pipeline.
        UnsupportedError: If cache="device" is used under a distribution strategy; several processes train together and
            this is outside of their strategy's scope, their source cannot be divided, or they `balance`; or an option
            needs single examples, or some at any position, and the source has none.
        PipelineError: If data is missing, empty, damaged or of different shapes, there are too few examples for a
            batch, a function fails, or the tf.data service does not answer.

    Example:
        >>> import numpy as np
        >>> images, labels = np.zeros((1000, 8, 8, 3), "uint8"), np.zeros(1000, "int32")
        >>> plan_pipeline((images, labels), batch_size=100).build().element_spec[0].shape
        TensorShape([100, 8, 8, 3])
    """
    asked = PipelineOptions(**options)
    # What is packed is read whole: which documents share a row depends on the lengths of all.
    documents = asked.pack is not None and isinstance(source, tf.data.Dataset)
    examples = as_source(tokens(source) if documents else source, asked.on_bad_file)
    if examples.batched:
        return _of_batches(examples, asked, options)
    # Documents are divided before they are packed: each row holds several.
    packed = (examples, asked) if asked.pack is None else _packed(examples, asked.pack, asked)
    facts = inspect_source(*packed)
    chosen = replace(asked, remainder=facts.last_batch[0])
    if asked.remainder is None:
        warn_left_out(chosen, facts)
    return PipelinePlan(facts.source, chosen, plan_stages(chosen, facts), Position(own_seed(asked.seed, facts.part)))


def warn_left_out(options: PipelineOptions, facts: Facts) -> None:
    """Logs once how many examples the default of `remainder` leaves out."""
    if found := left_out(options, facts):
        warn_once(
            "examples left out",
            f"Of {facts.source.name}, {found}, so that all batches are full. remainder='keep' trains on all of them, "
            "and remainder='drop' says that you know.",
        )


@_takes_options
def build_pipeline(source: Any, **options: Unpack[Choices]) -> Any:
    """Returns the `tf.data.Dataset` that `plan_pipeline` would plan, for the same arguments.

    Example:
        >>> import numpy as np
        >>> dataset = build_pipeline((np.zeros((1000, 8)), np.zeros(1000)), batch_size=100, training=False)
        >>> len(dataset)
        10
    """
    return plan_pipeline(source, **options).build()


def _of_batches(source: Source, asked: PipelineOptions, given: Choices) -> PipelinePlan:
    """Returns the plan of a source that makes whole batches."""
    options = choose_options(source, asked, given)
    facts = inspect_loader(source, options)
    return PipelinePlan(source, options, plan_loader(options, facts), Position(options.seed))


def _packed(source: Source, size: int, options: PipelineOptions) -> tuple[Source, PipelineOptions]:
    """Returns the documents that `split` chooses in rows of `size` tokens, and the options without it."""
    part = source if options.split is None else take_split(source, options.split, training=options.training)
    if part.packed is None:
        raise ValueError(
            f"Expected documents of tokens for pack={size}. Received: {source.name}. Pass a list of lists of token "
            "ids, a tf.data.Dataset of vectors of ids, tokens(...) of an array or a .npy file, or tokens(lines(paths), "
            "tokenize=...)."
        )
    rows = part.packed(size, slice(None))
    return replace(rows, note=f"{part.note}; {rows.note}"), replace(options, split=None)


def unknown_option(name: str, options: list[str]) -> TypeError:
    """Returns the error about an option that is not among these, with the nearest one."""
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    meant = _RENAMED.get(name, near[0] if near else "")
    hint = f"Did you mean {meant}?" if meant else "Leave it out."
    return TypeError(f"Expected options among {', '.join(options)}. Found {name!r}. {hint}")
