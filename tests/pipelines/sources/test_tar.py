"""Shards of WebDataset: every part as tarfile reads it, in order, and what is wrong with a shard named."""

import gzip
import io
import os
import tarfile

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tfopt.errors import PipelineError
from tfopt.pipelines import RandomCrop, build_pipeline, plan_pipeline, tar

COUNT = 20


def image(number):
    contents = io.BytesIO()
    Image.fromarray(np.full((6, 5, 3), number, np.uint8)).save(contents, "PNG")
    return contents.getvalue()


def member(name, contents=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(contents)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, io.BytesIO(contents)


def write(path, members):
    with tarfile.open(path, "w") as archive:
        for each in members:
            archive.addfile(*each)
    return str(path)


@pytest.fixture
def shards(tmp_path):
    """Two shards of 10 examples each, with the same keys: an image with its number, it as a class, and a text."""
    for shard in range(2):
        members = [member("a", type=tarfile.DIRTYPE), member("a/.DS_Store", b"?"), member("a/README", b"?")]
        for number in range(10 * shard, 10 * shard + 10):
            key = f"a/{'long' * 30}{number % 10}"  # of which tar keeps the name in a block of its own
            text = b"" if number % 2 else b"text"
            members += [member(f"{key}.PNG", image(number)), member(f"{key}.cls", b"%d\n" % number)]
            members += [member(f"{key}.seg.txt", text)]
        write(tmp_path / f"{shard}.tar", members)
    return tmp_path


def numbers(dataset):
    return [int(number) for _, labels in dataset for number in labels]


def test_parts_are_the_bytes_that_tarfile_reads(shards):
    source = tar(str(shards / "*.tar"))
    assert (source.name, source.count) == ("examples in 2 tar files", COUNT)
    (found,) = build_pipeline(source, batch_size=COUNT, training=False).as_numpy_iterator()
    assert sorted(found) == ["cls", "png", "seg.txt"]
    expected = {name: [] for name in found}
    for path in sorted(shards.iterdir()):
        with tarfile.open(path) as archive:
            for each in archive:
                extension = os.path.basename(each.name).partition(".")[2].lower()
                if extension in expected and each.isfile():
                    expected[extension].append(archive.extractfile(each).read())
    assert {name: values.tolist() for name, values in found.items()} == expected


def test_images_and_labels_in_order_shuffled_split_and_from_a_position(shards):
    source = tar([shards / "0.tar", shards / "1.tar"], image="png")
    images, labels = next(iter(build_pipeline(source, batch_size=COUNT, training=False)))
    assert (labels.dtype, labels.numpy().tolist()) == (tf.int32, list(range(COUNT)))
    np.testing.assert_array_equal(images, np.tile(np.arange(COUNT)[:, None, None, None], (1, 6, 5, 3)))
    plan = plan_pipeline(source, batch_size=4, seed=1, cache=None)
    dataset = plan.build()
    epochs = [numbers(dataset) for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(COUNT))] * 2
    assert epochs[0] != epochs[1]
    assert max(epochs[0][:4]) >= 10 > min(epochs[0][:4])  # from both shards
    moved = plan.at(epoch=1, batch=2)
    assert "examples before it are not read" in str(moved)
    assert numbers(moved.build()) == epochs[1][8:]
    halves = [numbers(build_pipeline(source, batch_size=4, split=0.2, training=each)) for each in (True, False)]
    assert sorted([*halves[0], *halves[1]]) == list(range(COUNT))
    parts = [source.part(index, 3) for index in range(3)]
    assert [numbers(build_pipeline(part, training=False)) for part in parts] == [
        list(range(index, COUNT, 3)) for index in range(3)
    ]


def test_a_crop_decodes_its_window_of_the_same_images(shards):
    source = tar(str(shards / "*.tar"), image="png")
    dataset = build_pipeline(source, batch_size=4, crop=RandomCrop(4), seed=1, remainder="keep")
    for images, labels in dataset:
        np.testing.assert_array_equal(images, np.broadcast_to(labels[:, None, None, None], (len(labels), 4, 4, 3)))


def test_a_cache_knows_the_files(shards):
    source = tar(str(shards / "*.tar"), image="png")
    before = source.fingerprint()
    assert tar(str(shards / "*.tar"), image="png").fingerprint() == before
    assert len({str(each.fingerprint()) for each in (source, source.part(0, 2), tar(str(shards / "*.tar")))}) == 3
    batches = iter(build_pipeline(source, batch_size=2, training=False, prefetch=0, cache=None))
    os.utime(shards / "0.tar", ns=(1, 1))
    assert source.fingerprint() != before
    with pytest.raises(PipelineError, match=r"Expected '.*0\.tar' as it was .* It has changed since"):
        build_pipeline(source, batch_size=2)
    with open(shards / "1.tar", "ab") as file:
        file.write(bytes(512))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"1\.tar"):
        list(batches)


PAIR = (member("a.jpg", b"x"), member("a.cls", b"1"))


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([], "at least one example"),
        ([member("README", b"?")], "at least one example"),
        ([*PAIR, member("b.jpg", b"x")], r"the parts jpg, cls of each example\. 'b' in '.*x\.tar' has jpg\. Write"),
        ([*PAIR, member("b.png", b"x"), member("b.cls", b"1")], "'b' in .* has cls, png"),
        ([*PAIR, member("a.JPG", b"y")], r"each member of '.*' once, as a file\. 'a\.JPG' is there twice"),
        ([*PAIR, member("b.jpg", type=tarfile.SYMTYPE, linkname="a.jpg")], "'b.jpg' is a link, or no plain file"),
        ([PAIR[0], member("a.cls", b"cat")], r"class numbers in the parts 'cls' of '.*'. Found: .*cat"),
        ([PAIR[0], member("a.cls", b"9999999999")], "class numbers in the parts 'cls'"),
    ],
)
def test_what_is_wrong_in_a_shard_is_named(tmp_path, members, text):
    for _, contents in members:
        contents.seek(0)
    path = write(tmp_path / "x.tar", members)
    with pytest.raises(PipelineError, match=text):
        tar(path, image="jpg")


def test_without_an_image_all_examples_have_the_same_parts(tmp_path):
    members = [member("a.txt", b"x"), member("b.txt", b"x"), member("b.json", b"{}")]
    with pytest.raises(PipelineError, match=r"the parts txt of each example\. 'b' in .* has json, txt"):
        tar(write(tmp_path / "x.tar", members))


def test_what_is_no_whole_tar_file_is_refused(shards, tmp_path):
    whole = (shards / "0.tar").read_bytes()
    with tarfile.open(shards / "0.tar") as archive:
        last = archive.getmembers()[-1]
    damaged = bytearray(whole)
    damaged[last.offset + 148] ^= 1  # in the checksum of its header
    cases = {b"": "empty file", b"no tar file": "truncated header", bytes(damaged): "cut or damaged inside"}
    cases |= {whole[:length]: r"cut or damaged inside|unexpected end" for length in (last.offset, last.offset + 100)}
    with tarfile.open(shards / "0.tar") as archive:
        first = next(each for each in archive if each.isfile() and each.name.endswith("PNG"))
    cases[whole[: first.offset_data + 10]] = "unexpected end of data"
    for contents, text in cases.items():
        (tmp_path / "cut.tar").write_bytes(contents)
        with pytest.raises(PipelineError, match=rf"Expected a whole tar file at '.*cut\.tar'. .*({text})"):
            tar(tmp_path / "cut.tar")
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(whole))
    with pytest.raises(PipelineError, match=r"not compressed\. '.*x\.tar\.gz' is\. Decompress it once"):
        tar(tmp_path / "x.tar.gz")
    with pytest.raises(PipelineError, match=r"Expected tar files\. Nothing matches"):
        tar(str(tmp_path / "none*.tar"))
    with pytest.raises(TypeError, match=r"the path of tar files\. Received: int"):
        tar([3])
    with pytest.raises(PipelineError, match=r"Pass tfopt\.pipelines\.fetch\('s3://"):
        tar("s3://bucket/x.tar")


def test_bytes_that_are_no_image_name_the_example(tmp_path):
    path = write(tmp_path / "x.tar", [member("a.jpg", b"text"), member("a.cls", b"1")])
    with pytest.raises(PipelineError, match=r"Not a whole JPEG.*example 0 of the tar files"):
        plan_pipeline(tar(path, image="jpg"), batch_size=1)
