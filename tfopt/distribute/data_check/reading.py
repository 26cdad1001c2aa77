"""What a worker finds out about the data passed to `fit`, of which it reads a few examples at most."""

from dataclasses import asdict, dataclass, field
from typing import Any

import tensorflow as tf

from tfopt.distribute.data_check.samples import Rows, sample, sample_source
from tfopt.internals.runtime import global_seed
from tfopt.internals.training import ArrayDataAdapter, PyDatasetAdapter
from tfopt.pipelines.shared.frozen_draws import nodes
from tfopt.pipelines.shared.nondeterminism import lineage
from tfopt.pipelines.sources.parts import IN_PARTS, Part

# What must be the same in all workers if TensorFlow divides the dataset among them: attributes, by class.
_AGREED = {
    "_ShardDataset": ("shard", ("_num_shards", "_index")),
    "_ShuffleDataset": ("shuffle with the seeds", ("_seed", "_seed2")),
    "_SkipDataset": ("skip", ("_count",)),
    "_TakeDataset": ("take", ("_count",)),
    "_RangeDataset": ("range", ("_start", "_stop", "_step")),
}
_ROWS = {"_TensorSliceDataset", "_TensorDataset"}
_KEEPING = {"_PrefetchDataset", "_OptionsDataset", "CacheDataset", "_ShuffleDataset", "_AssertCardinalityDataset"}
_MAPPING = {"_MapDataset", "_ParallelMapDataset"}
_BATCHING = {"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset"}
_READING = {"_FlatMapDataset", "_InterleaveDataset", "_ParallelInterleaveDataset", "ParallelInterleaveDataset"}
_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset")
_FIRST_BATCH = "_tfopt_first_batch"  # an attribute of Keras' adapter: the sample of its first batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a worker says of its data."""

    steps: int | None
    """Per epoch, if known."""
    examples: int | None = None
    """Per epoch, in this worker's data before they are divided, if known."""
    certain: bool = True
    """Whether a step sees as many examples as the dataset counts: a `map` of batches may change that."""
    divided: bool = True
    """Whether each worker gets a part of the same data."""
    by_pipeline: bool = False
    """Whether build_pipeline divides them, and not TensorFlow."""
    whole: bool = True
    """Whether an epoch ends with the data."""
    endless: bool = False
    """Whether the data may be without an end."""
    in_threads: bool = False
    """Whether Keras reads a PyDataset in several threads or processes."""
    repeatable: bool = True
    """Whether the same call would return the same rows; if not, another worker's may differ rightly."""
    parts: list[tuple[bool, Rows]] = field(default_factory=list)
    """Of a mixture: what `repeatable` and `rows` say of each part."""
    stages: list[tuple[str, list[int]]] = field(default_factory=list)
    """Stages of the dataset that decide which examples it has, and in which order."""
    rows: Rows = field(default_factory=list)
    batch_size: int | None = None
    """Of the dataset's own batches, if known."""
    in_step: int = 0
    """Examples that this worker's replicas get in the first step."""
    first: str = ""
    """Hash of the first batch that this worker's replicas get."""

    @property
    def sources(self) -> list[tuple[bool, Rows]]:
        """What `repeatable` and `rows` say, of each part if it is a mixture."""
        return self.parts or [(self.repeatable, self.rows)]

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self)


def keep_first_batch(adapter: Any, batch: Any) -> None:
    """Remembers what the first batch of a PyDataset looks like when Keras reads it to learn the shapes."""
    if not hasattr(adapter, _FIRST_BATCH):
        setattr(adapter, _FIRST_BATCH, sample(batch))


def read(iterator: Any) -> Reading:
    """Returns what is known about the data of Keras' epoch iterator."""
    adapter = iterator.data_adapter
    steps = None if iterator.num_batches is None else int(iterator.num_batches)
    whole = not iterator.steps_per_epoch
    if isinstance(adapter, ArrayDataAdapter):
        # Keras shuffles positions with TensorFlow's global seed.
        seed = global_seed()
        stages = [("fit's shuffle with the seed", [] if seed is None else [seed])] if adapter._shuffle else []
        return Reading(
            steps=steps, examples=int(adapter._num_samples), whole=whole, stages=stages, rows=sample(adapter._inputs)
        )
    if isinstance(adapter, PyDatasetAdapter):
        return Reading(
            steps=steps,
            whole=whole,
            endless=adapter.num_batches is None,
            in_threads=adapter.enqueuer is not None,
            repeatable=False,
            rows=getattr(adapter, _FIRST_BATCH, []),
        )
    dataset = getattr(adapter, "_dataset", None)
    if dataset is None:  # a generator, of which nothing is known
        return Reading(steps=steps, whole=whole, endless=True)
    return _of_dataset(dataset, steps, whole)


def read_again(iterator: Any) -> list[tuple[bool, Rows]]:
    """Returns the sources of `read` once more, of data that may not be repeatable."""
    adapter = iterator.data_adapter
    if isinstance(adapter, PyDatasetAdapter):
        return [(False, sample(adapter._standardize_batch(adapter.py_dataset[0])))]
    return _of_part(getattr(adapter._dataset, IN_PARTS), None).sources


def _of_part(part: Part, steps: int | None) -> Reading:
    """Describes the source that build_pipeline divides, not this worker's part. The pipeline itself counts that."""
    sources = part.mixes or (part,)
    read = [(each.source.fingerprint is not None, sample_source(each.source, each.whole)) for each in sources]
    return Reading(
        steps=steps,
        examples=part.whole,
        by_pipeline=True,
        whole=False,
        repeatable=all(repeatable for repeatable, _ in read),
        stages=[
            ("batch_size", [part.size * part.parts]),
            *(("shuffle", [int(each.block < each.size)]) for each in sources),
        ],
        parts=read,
    )


def _of_dataset(dataset: Any, steps: int | None, whole: bool) -> Reading:
    if hasattr(dataset, IN_PARTS):
        return _of_part(getattr(dataset, IN_PARTS), steps)
    original = getattr(dataset, "_original_dataset", dataset)
    if not isinstance(original, tf.data.Dataset):  # each worker's own function made it
        parts = getattr(original, "_datasets", [])
        examples, _, certain = _examples(parts[0]) if len(parts) == 1 else (None, None, True)
        return Reading(steps=steps, examples=examples if certain else None, divided=False, whole=whole)
    policy = original.options().experimental_distribute.auto_shard_policy
    examples, batch_size, certain = _examples(original)
    cardinality = int(original.cardinality())
    stages, rows = _source(original)
    return Reading(
        steps=steps,
        examples=examples,
        certain=certain,
        batch_size=batch_size,
        divided=policy != tf.data.experimental.AutoShardPolicy.OFF,
        whole=whole,
        endless=cardinality == tf.data.INFINITE_CARDINALITY or (cardinality < 0 and not whole),
        stages=stages,
        rows=rows,
    )


def _examples(dataset: Any) -> tuple[int | None, int | None, bool]:
    """Returns a dataset's number of examples and batch size, if known, and whether steps are sure to see as many."""
    batches, stage, certain = int(dataset.cardinality()), dataset, True
    while type(stage).__name__ in _KEEPING | _MAPPING:
        certain = certain and type(stage).__name__ in _KEEPING
        stage = stage._inputs()[0]
    if type(stage).__name__ not in _BATCHING or batches < 0:
        return None, None, certain
    elements = int(stage._inputs()[0].cardinality())
    size = int(stage._batch_size)
    drops = bool(stage._drop_remainder)
    if elements < 0 or batches != (elements // size if drops else -(-elements // size)):
        return None, None, certain
    return elements // size * size if drops else elements, size, certain


def _source(dataset: Any) -> tuple[list[tuple[str, list[int]]], Rows]:
    """Returns the stages that decide which examples a dataset has, and rows of the arrays it begins with."""
    stages: list[tuple[str, list[int]]] = []
    rows: Rows = []
    line = list(lineage(dataset))  # from the last stage to the first
    is_reading = [_reads_files(stage) for stage in line]
    ordered = False  # whether the order of a stage decides which examples a worker gets
    for stage, reads in zip(line, is_reading, strict=True):
        kind = type(stage).__name__
        # Each worker gets its part of each batch, or of the files: only the order of what comes before matters.
        ordered = ordered or (reads if any(is_reading) else kind in _BATCHING)
        if kind in _ROWS:
            rows += sample(stage._tensors)
        elif kind in _AGREED and (kind != "_ShuffleDataset" or ordered):
            name, attributes = _AGREED[kind]
            stages.append((name, [int(getattr(stage, attribute)) for attribute in attributes]))
    return stages, rows


def _reads_files(stage: Any) -> bool:
    """Whether TensorFlow would divide the files that a stage reads."""
    if type(stage).__name__.lstrip("_").startswith(_READERS):
        return True
    if type(stage).__name__ not in _READING:
        return False
    return any(node.op.startswith(_READERS) for node in nodes(stage._map_func.function))
