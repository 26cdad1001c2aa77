"""A prepared dataset of tensorflow-datasets as a source; never downloads or touches the network."""

import difflib
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import file_stamps
from tfopt.pipelines.sources.source import Source

_NAME = re.compile(r"\w+(/[\w.-]+)?(:(\d+|\*)(\.(\d+|\*)){2})?")


def tfds(name: Any, split: str = "train", *, data_dir: str | os.PathLike[str] | None = None) -> Source:
    """Returns a dataset that tensorflow-datasets has prepared as a source of examples.

    Prepare it once, with network access, with `tensorflow_datasets.load(name)` or `tfds build name`.

    Args:
        name: The dataset's name, with config and version if needed, such as "mnist" or "glue/cola:2.0.0"; or a
            `tfds.core.DatasetBuilder`. Default config: the dataset's own. Default version: the highest prepared one.
        split: The part to read, as tensorflow-datasets writes it: "test", "train[:90%]", "train+test".
        data_dir: The folder of prepared datasets. Default: tensorflow-datasets' own, `TFDS_DATA_DIR` or
            ~/tensorflow_datasets.

    Returns:
        A source whose examples are `(input, label)` if the dataset says which is which, else dicts of its features.
        Images are decoded after the shuffle.

    Raises:
        TypeError: If `name` is neither a string nor a builder.
        ValueError: If `name` is malformed, or a `data_dir` is given for a builder.
        PipelineError: If the dataset is not prepared, lacks a file, or has no such split.
        tfopt.errors.UnsupportedError: If tensorflow-datasets does not work with the installed packages.

    Example:
        >>> source = tfds("mnist", "test")  # doctest: +SKIP
        >>> source.count, source.class_names[:3]  # doctest: +SKIP
        (10000, ('0', '1', '2'))
    """
    import tensorflow_datasets

    if not hasattr(tensorflow_datasets, "core"):  # its import goes on without what failed
        raise UnsupportedError(
            "Expected tensorflow-datasets with all its parts. Found that its import failed in part: before TensorFlow "
            "2.20 it needs an older tensorflow-metadata. What to do: pip install 'tensorflow-metadata<1.17'."
        )
    builder = _find_prepared(name, data_dir) if isinstance(name, str) else _expect_prepared(name, data_dir)
    chosen = _expect_split(builder, split)
    features = builder.info.features
    features = dict(features.items()) if hasattr(features, "items") else {}  # examples need not be dicts
    keys = builder.info.supervised_keys or {key: key for key in features}
    images = _images(features)
    read = partial(_read, builder, split, list(images))
    return Source(
        name=f"tfds {builder.info.full_name} [{split}]",
        dataset=read,
        count=chosen.num_examples,
        decode=partial(_decode, images, keys) if images else None,
        shuffled=partial(_shuffled, read),
        encoded=_encoded(images, keys),
        fingerprint=lambda: [str(builder.data_path), split, file_stamps(map(str, chosen.filepaths))],
        class_names=_class_names(features, keys),
        part=lambda index, parts: tfds(
            builder, tensorflow_datasets.even_splits(split, parts, drop_remainder=False)[index]
        ),
    )


def is_builder(given: Any) -> bool:
    """Whether an object is a builder of tensorflow-datasets; does not import it."""
    return any(base.__name__ == "DatasetBuilder" for base in type(given).__mro__)


def _read(builder: Any, split: str, images: list[str], *, shuffle_files: bool = False, **reading: Any) -> Any:
    """Returns the examples, their images still encoded."""
    import tensorflow_datasets

    # Caching, shuffling and prefetching are the pipeline's job. The guard would refuse to shuffle files in order.
    config = tensorflow_datasets.ReadConfig(
        try_autocache=False, skip_prefetch=True, enable_ordering_guard=False, **reading
    )
    return builder.as_dataset(
        split=split,
        shuffle_files=shuffle_files,
        decoders={key: tensorflow_datasets.decode.SkipDecoding() for key in images},
        read_config=config,
        as_supervised=builder.info.supervised_keys is not None,
    )


def _shuffled(read: Any, seed: int | None) -> Any:
    """Shuffles the files; with a seed, in the same order on every iteration."""
    if seed is None:
        return read(shuffle_files=True, shuffle_reshuffle_each_iteration=True)

    def sort(files: Any) -> Any:
        # With shuffle_seed, tf.random.set_seed would change the order.
        return [files[index] for index in np.random.default_rng(seed).permutation(len(files))]

    return read(experimental_interleave_sort_fn=sort)


def _images(features: dict[str, Any]) -> dict[str, Any]:
    """Returns the image features, to be decoded after the shuffle; not those inside sequences and dicts."""
    import tensorflow_datasets

    return {key: feature for key, feature in features.items() if type(feature) is tensorflow_datasets.features.Image}


# Not marked do_not_convert: tensorflow-datasets' decoders may be written for AutoGraph.
def _decode(images: dict[str, Any], keys: Any, *parts: Any) -> Any:
    return _decode_part(images, keys, parts if isinstance(keys, tuple) else parts[0])


def _decode_part(images: dict[str, Any], keys: Any, part: Any) -> Any:
    if isinstance(keys, tuple):
        return tuple(_decode_part(images, *pair) for pair in zip(keys, part, strict=True))
    if isinstance(keys, dict):
        return {name: _decode_part(images, key, part[name]) for name, key in keys.items()}
    return images[keys].decode_example(part) if keys in images else part


def _encoded(images: dict[str, Any], keys: Any) -> Any:
    """Returns the source's `encoded` for pairs of an image of three uint8 channels and something else; None else."""
    if not isinstance(keys, tuple) or len(keys) != 2 or not all(isinstance(key, str) for key in keys):
        return None
    image = images.get(keys[0])
    if image is None or image.shape[-1] != 3 or image.np_dtype != np.uint8 or keys[1] in images:
        return None
    return without_autograph(lambda contents, label: (contents, label))


def _class_names(features: dict[str, Any], keys: Any) -> tuple[str, ...] | None:
    import tensorflow_datasets

    used = keys[1:] if isinstance(keys, tuple) else keys
    labels = [features[key] for key in used if isinstance(key, str)]
    named = [tuple(label.names) for label in labels if isinstance(label, tensorflow_datasets.features.ClassLabel)]
    return named[0] if len(named) == 1 else None


def _expect_split(builder: Any, split: str) -> Any:
    """Returns tensorflow-datasets' description of a split."""
    try:
        chosen = builder.info.splits[split]
        count = chosen.num_examples
    except (ValueError, KeyError, AssertionError) as error:
        raise PipelineError(
            f"Expected a split of {builder.info.full_name}, which has {list(builder.info.splits)}. Received {split!r}: "
            f"{str(error).splitlines()[0]} Pass one of them, or a part such as 'train[:90%]'."
        ) from error
    if count <= 0:
        raise PipelineError(
            f"Expected at least one example in {builder.info.full_name} [{split}]. Found none. Pass another split."
        )
    missing = [str(path) for path in chosen.filepaths if not path.exists()]
    if missing:
        raise PipelineError(
            f"Expected every file of {builder.info.full_name}. Missing: {missing[0]!r} ({len(missing)} in all). Remove "
            f"{str(builder.data_path)!r}, and prepare it again."
        )
    return chosen


def _find_prepared(name: str, data_dir: str | os.PathLike[str] | None) -> Any:
    """Returns the builder of a prepared dataset; only reads files, and runs none of the dataset's own code."""
    from tensorflow_datasets.core import DatasetNotFoundError, read_only_builder
    from tensorflow_datasets.core.utils import file_utils

    # Names with a namespace, such as "huggingface:imdb", would be looked up on the network.
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"Expected a dataset's name, such as 'mnist', 'glue/cola' or 'mnist:3.0.1'. Received: {name!r}. Correct "
            "it, or pass a builder."
        )
    folder = None if data_dir is None else os.path.expanduser(data_dir)
    try:
        return read_only_builder.builder_from_files(name, data_dir=folder)
    except DatasetNotFoundError as error:
        raise _not_prepared(name, [Path(place) for place in file_utils.list_data_dirs(folder)]) from error
    except ValueError as error:
        raise PipelineError(f"Expected the dataset {name!r} in one folder. {str(error).splitlines()[0]}") from error


def _not_prepared(name: str, folders: list[Path]) -> PipelineError:
    import tensorflow_datasets

    bare = re.split("[/:]", name)[0]
    places = [path.parent.relative_to(each) for each in folders for path in each.glob(f"{bare}/**/features.json")]
    prepared = {repr(f"{path.parent.as_posix()}:{path.name}") for path in places}
    known = tensorflow_datasets.list_builders(with_community_datasets=False)
    others = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    near = difflib.get_close_matches(bare, [*known, *others], n=1)
    if prepared:
        remedy = f"There are: {', '.join(sorted(prepared))}. Name one of these, or prepare it"
    elif bare in known:
        remedy = "Prepare it once, with network access"
    else:
        meant = f"Did you mean {near[0]!r}?" if near else "Check the name."
        remedy = f"{meant} Or prepare it once, with network access"
    place = str(folders[0])
    return PipelineError(
        f"Expected the prepared dataset {name!r} in {', '.join(map(repr, map(str, folders)))}. Found none. {remedy}: "
        f"tensorflow_datasets.load({name!r}, data_dir={place!r}), or `tfds build` for your own. Or pass the "
        "`data_dir` that holds it."
    )


def _expect_prepared(builder: Any, data_dir: str | os.PathLike[str] | None) -> Any:
    if not is_builder(builder):
        raise TypeError(
            f"tfds() expects a name or a tfds.core.DatasetBuilder. Received: {type(builder).__name__}. Pass a string, "
            "such as 'mnist'."
        )
    if data_dir is not None:
        raise ValueError("Expected a `data_dir` with a name only. A builder knows its own: leave `data_dir` out.")
    if not builder.data_path.exists() or not builder.info.splits:
        raise PipelineError(
            f"Expected a prepared dataset. Found none in {str(builder.data_path)!r}. Call download_and_prepare() of "
            "the builder first, with network access."
        )
    return builder
