import json

import pytest

from tfopt.errors import PipelineError
from tfopt.pipelines.tfrecords import index as module
from tfopt.pipelines.tfrecords.index import INDEX_NAME, Index, Shard, has_index, read_index, write_index

INDEX = Index(
    shards=(Shard("a", 3, 100, "00ff", "22dd"), Shard("b", 2, 70, "11ee", "33cc")),
    spec={"feature": "value", "dtype": "int32", "shape": [None]},
    compression="GZIP",
    image=True,
    class_names=("Ä", "b"),
)


def test_an_index_is_read_back(tmp_path):
    write_index(str(tmp_path), INDEX)
    assert has_index(str(tmp_path))
    assert read_index(str(tmp_path)) == INDEX
    assert INDEX.count == 5
    assert json.loads((tmp_path / INDEX_NAME).read_text())["shards"][1]["sha256"] == "11ee"


def test_every_altered_byte_and_every_cut_is_found(tmp_path):
    write_index(str(tmp_path), INDEX)
    path = tmp_path / INDEX_NAME
    whole = path.read_bytes()
    for position in range(len(whole)):
        for changed in (whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :], whole[:position]):
            path.write_bytes(changed)
            with pytest.raises(PipelineError, match="damaged or was edited"):
                read_index(str(tmp_path))
            assert has_index(str(tmp_path)) or len(changed) < len(whole), "taken for another program's"


def test_an_index_of_a_newer_version_is_told_from_a_damaged_one(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_VERSION", 2)
    (tmp_path / INDEX_NAME).write_text(module._text(INDEX.to_dict() | {"more": 1}, 2))
    monkeypatch.setattr(module, "_VERSION", 1)
    with pytest.raises(PipelineError, match=r"Found version 2\. Update tfopt"):
        read_index(str(tmp_path))


@pytest.mark.parametrize("contents", [b"[]", b'{"version": 1}', b"\xff", b"3", b""])
def test_another_programs_index_is_none(tmp_path, contents):
    (tmp_path / INDEX_NAME).write_bytes(contents)
    assert not has_index(str(tmp_path))
    with pytest.raises(PipelineError, match="damaged or was edited"):
        read_index(str(tmp_path))
