"""The stages of a tf.data.Dataset as its user wrote them, and where among them a cache may stand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.hardware import host
from tfopt.pipelines.plan import PipelinePlan, plan_of
from tfopt.pipelines.profiling.stage_names import chain_of_datasets, described_stage, kind_of
from tfopt.pipelines.shared.nondeterminism import find_in_dataset, lineage, runs_python
from tfopt.pipelines.shared.options import function_name
from tfopt.text import readable_bytes

_MEMORY_SHARE = 2  # a cache may take half of the free memory
_LOADERS = "keras.src.utils."  # modules of image_dataset_from_directory and the like
_METHODS = {"paddedbatch": "padded_batch", "flatmap": "flat_map", "options": "with_options"}
_OPENING = ("flatmap", "interleave")


@dataclass(frozen=True, slots=True)
class Stage:
    """A call that makes a dataset of the one before it."""

    kind: str
    """Such as "map", or "loader" for all that one of Keras' own loaders does."""
    call: str
    """As it is written, such as ".map(decode)"."""
    name: str
    """What `profile_pipeline` calls it."""
    dataset: Any
    """What it makes."""
    computes: bool
    """Whether it calls a function."""

    @property
    def draws(self) -> bool:
        """Whether it, or a stage before it, draws random numbers in a function."""
        return any(found.kind in ("random", "assigning") for found in find_in_dataset(self.dataset))


def plan_behind(data: Any) -> PipelinePlan | None:
    """The plan of tfopt.pipelines that data are, or that a dataset was built from."""
    if isinstance(data, PipelinePlan):
        return data
    if not isinstance(data, tf.data.Dataset):
        return None
    return next(filter(None, map(plan_of, lineage(data))), None)


def stages(dataset: tf.data.Dataset) -> list[Stage]:
    """The stages of a dataset, from the source on; what joins several datasets is a source, too."""
    chain = chain_of_datasets(dataset)
    joined = next((place for place, one in enumerate(chain) if len(one._inputs()) != 1), len(chain) - 1)
    written = chain[joined::-1]
    loaded = max((place for place, one in enumerate(written) if _loader(one)), default=None)
    if loaded is None:
        return [_stage(one) for one in written]
    end = loaded + 1
    for kind in ("batch", "prefetch"):  # which each loader ends with
        end += end < len(written) and kind_of(type(written[end]).__name__) == kind
    loader = _loader(written[loaded])
    whole = Stage("loader", f"{loader}(...)", loader, written[end - 1], computes=True)
    return [whole, *(_stage(one) for one in written[end:])]


def batching(dataset: tf.data.Dataset) -> Any:
    """The stage of a dataset that last batches examples; None if there is none."""
    return next((one for one in chain_of_datasets(dataset) if hasattr(one, "_batch_size")), None)


def cached_where(dataset: tf.data.Dataset, limiting: str | None = None) -> tuple[str, str, str] | str:
    """Where a cache keeps what is computed, without any change to what is trained; or why there is no such place.

    Args:
        dataset: The training data.
        limiting: The stage that limits it, as `profile_pipeline` names it, if known.

    Returns:
        The call before which it stands, empty for the end; the calls to put there; and what to know about it.
    """
    found = stages(dataset)
    computing = [place for place, one in enumerate(found) if one.computes]
    if not computing:
        return "nothing is computed in it that a cache could keep"
    steady = [place for place in computing if not found[place].draws]
    slow = next((place for place in computing if found[place].name == limiting), computing[0])
    if slow not in steady:
        return f"{found[slow].call} draws at random, which a cache would freeze"
    place = steady[-1]
    behind = found[place + 1 :]
    cut = max((at for at, one in enumerate(behind) if one.kind == "take"), default=None)
    if cut is not None:  # a cache whose end is never read is never full
        if any(one.kind in ("shuffle", "repeat") or one.draws for one in behind[: cut + 1]):
            return f"a cache before {behind[cut].call} would never be full"
        place, behind = place + 1 + cut, behind[cut + 1 :]
    if any(one.kind == "cache" for one in behind):
        return "it is cached already"
    if int(found[place].dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        return f"a cache behind an endless repeat() would never be full; put repeat() behind {found[place].call}"
    return _calls(found, place, behind)


def _calls(found: Sequence[Stage], place: int, behind: Sequence[Stage]) -> tuple[str, str, str] | str:
    """The calls that cache what the stage at a place makes, reshuffled in each epoch where the original was."""
    last = found[place].dataset
    batch = batching(last)
    examples = int((last if batch is None else batch._inputs()[0]).cardinality())
    code = ".cache()"
    if any(map(_reshuffles, lineage(last))) and not (batch is None and any(_reshuffles(one.dataset) for one in behind)):
        if batch is not None and any(map(_reshuffles, lineage(batch))):
            code = _unbatched(last, batch, examples)
            if not code:
                return f"{found[place].call} takes whole batches of shuffled examples: a cache would keep those"
        else:
            again = _shuffled_again(last)
            if not again:
                return "it would freeze the order of the shuffled files; shuffle their examples, too, to cache them"
            code = f".cache(){again}"
    size = _size(last, int(last.cardinality()))
    free = host().memory_available_mib
    if size is not None and free is not None and size > free * 2**20 / _MEMORY_SHARE:
        return f"a cache would take {readable_bytes(size)} of {readable_bytes(free * 2**20)} of free memory"
    notes = ["if it fits in memory" if size is None else f"takes {readable_bytes(size)} of memory"]
    opaque = [one.call for one in found[: place + 1] if one.kind != "loader" and runs_python(one.dataset)]
    if opaque:
        notes.append(f"and only if Python in {opaque[0]} draws nothing at random")
    return (behind[0].call if behind else ""), code, " ".join(notes)


def _unbatched(last: Any, batch: Any, examples: int) -> str:
    """The calls that cache the examples of batches, shuffle them again and batch them; empty if that is not the same.

    TensorFlow forgets how many come out of unbatch(), and Keras then runs a step too many at the end of an epoch.
    """
    size, drop = int(batch._batch_size), bool(getattr(batch, "_drop_remainder", False))
    shapes = [spec.shape for spec in tf.nest.flatten(last.element_spec)]
    whole = examples % size == 0 or not drop
    if examples < 1 or not whole or kind_of(type(batch).__name__) != "batch":
        return ""
    if not all(shape.rank and shape[1:].is_fully_defined() for shape in shapes):
        return ""
    if int(last.cardinality()) != -(-examples // size):
        return ""
    known = f".apply(tf.data.experimental.assert_cardinality({examples}))"
    again = f".batch({size}{', drop_remainder=True' * drop})"
    seed = _seed(next(filter(_reshuffles, lineage(batch))))
    return f".unbatch(){known}.cache().shuffle({examples}{seed}){again}"


def _reshuffles(dataset: Any) -> bool:
    """Whether a dataset is a shuffle that has another order in each epoch."""
    return kind_of(type(dataset).__name__) == "shuffle" and dataset._reshuffle_each_iteration is not False


def _seed(shuffle: Any) -> str:
    """The argument that gives a shuffle its seed, from an argument or `tf.random.set_seed`; empty without."""
    second = int(shuffle._seed2)  # the first is that of `tf.random.set_seed`, or a constant
    return f", seed={second}" if second or int(shuffle._seed) else ""


def _shuffled_again(last: Any) -> str:
    """The shuffle before a stage, as a call; empty if what it shuffles are not yet the elements of the stage."""
    for one in chain_of_datasets(last):
        if _reshuffles(one):
            return f".shuffle({int(one._buffer_size)}{_seed(one)})"
        if kind_of(type(one).__name__) in _OPENING:
            return ""
    return ""


def _size(last: Any, elements: int) -> float | None:
    """The bytes of what a dataset yields; None if unknown."""
    batch = batching(last)
    total = 0.0
    for spec in tf.nest.flatten(last.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is None or shape.rank is None or spec.dtype == tf.string:
            return None
        sides = shape.as_list()
        if batch is not None and sides and sides[0] is None:
            sides[0] = int(batch._batch_size)
        if None in sides:
            return None
        total += float(tf.TensorShape(sides).num_elements() or 0) * spec.dtype.size
    return total * elements if elements > 0 else None


def _loader(dataset: Any) -> str:
    """Keras' loader that a stage belongs to, by its function; empty if it is none's."""
    function = getattr(getattr(dataset, "_map_func", None), "_func", None)
    module = str(getattr(function, "__module__", ""))
    if not module.startswith(_LOADERS):
        return ""
    kind = module.removeprefix(_LOADERS).removesuffix("_dataset_utils")
    return {"timeseries": "timeseries_dataset_from_array"}.get(kind, f"{kind}_dataset_from_directory")


def _stage(dataset: Any) -> Stage:
    kind = kind_of(type(dataset).__name__)
    name, kind = described_stage(kind, dataset), _METHODS.get(kind, kind)
    numbers = [getattr(dataset, key, None) for key in ("_buffer_size", "_batch_size", "_count")]
    given = next((str(int(number)) for number in numbers if number is not None), "").replace("-1", "")
    function = getattr(getattr(dataset, "_map_func", None), "_func", None)
    if function is not None and name != "generator":
        given = function_name(function).rpartition(".")[2].replace("<lambda>", "lambda ...")
    if not hasattr(tf.data.Dataset, kind):
        kind, given = "apply", "..."
    call = "Dataset.from_generator(...)" if name == "generator" else f".{kind}({given})"
    computes = any(map(_calls_functions, (dataset,) if len(dataset._inputs()) == 1 else lineage(dataset)))
    return Stage(kind, call, name, dataset, computes)


def _calls_functions(dataset: Any) -> bool:
    return any(True for _ in dataset._functions())
