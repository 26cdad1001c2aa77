"""The table of what sources can do is that of the sources, and that of the docs."""

import io
import tarfile

import keras
import numpy as np
import part_sources
import pytest
from snippets import ROOT

from tfopt.errors import UnsupportedError
from tfopt.pipelines import lines, loader, plan_pipeline, tar, tokens
from tfopt.pipelines.as_source import as_source
from tfopt.pipelines.sources.reach import ABILITIES, REACH, abilities, as_markdown, those_with


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.zeros((2, 3)), np.zeros(2)


def _lines(folder):
    (folder / "a.txt").write_text("one\ntwo\n")
    return lines(folder / "a.txt")


def _tar(folder):
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number in range(8):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
    return tar(folder / "a.tar")


MADE = {
    "lines": _lines,
    "tar files": _tar,
    "tokens": lambda folder: tokens([[1, 2], [3]]),
    "`PyDataset`": lambda folder: loader(Batches()),
    "other loaders": lambda folder: loader(lambda: iter([np.zeros(3)] * 2)),
}
NUMBERED = {
    "arrays": ["arrays"],
    ".npy files": ["npy"],
    "images, masks and files": ["images", "folders of images", "images with masks", "files"],
    "tables in memory": ["table"],
    "records of 32 KiB and more": ["large records"],
    "smaller records": ["records"],
    "compressed records": ["compressed records"],
    "larger Parquet files": ["table, by row group"],
    "HDF5": ["hdf5"],
    "tensorflow-datasets": ["tensorflow-datasets"],
    "`tf.data.Dataset`": ["tf.data"],
}


def sources(folder, kind):
    if kind in MADE:
        return [MADE[kind](folder)]
    return [as_source(part_sources.source(folder, name)[0]) for name in NUMBERED[kind]]


def is_served(source):
    """Whether a plan for a service is refused for nothing but the service, and workers can run what it reads."""
    try:
        plan_pipeline(source, batch_size=2, service="grpc://127.0.0.1:9", transform=lambda *_: 0)
    except Exception as error:
        if "Expected a dispatcher" not in str(error):
            return False
    read = source.dataset() if source.shuffled is None else source.shuffled(None)
    read = read if source.decode is None else read.map(source.decode)
    return b"PyFunc" not in read._as_serialized_graph().numpy()


def is_cached(source, folder):
    """Whether a plan with a cache on disk needs no `cache_key`."""
    try:
        plan_pipeline(source, batch_size=2, cache=folder, pad="batch")
    except (ValueError, UnsupportedError):
        return False
    return True


@pytest.mark.parametrize("kind", REACH)
def test_each_source_does_what_the_table_says(tmp_path, kind):
    for source in sources(tmp_path, kind):
        assert abilities(source) == REACH[kind] - {"service"}
        assert is_served(source) is ("service" in REACH[kind])
        assert is_cached(source, tmp_path / "cache") is ("cache" in REACH[kind])


def test_the_docs_have_the_table():
    assert as_markdown() in (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
    assert set().union(*REACH.values()) == set(ABILITIES)


def test_errors_can_name_those_with_an_ability():
    assert those_with("pack") == "tokens"
    assert those_with("part").endswith("larger Parquet files, HDF5 or tensorflow-datasets")
