"""Image files that do not decode: named before training begins, or left out and counted."""

import io
import json
import os
import re

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from unwrapped import unwrapped
from versions import since_tensorflow

from tfopt.errors import PipelineError
from tfopt.pipelines import (
    CentralCrop,
    ImagesReport,
    RandomCrop,
    arrays,
    build_pipeline,
    images,
    plan_pipeline,
    records,
    verify_images,
    write_records,
)
from tfopt.pipelines.sources import image_files

PLAIN = {"batch_size": 4, "training": False, "cache": None}
WHOLE = [number for number in range(80) if number not in (1, 11, 71)]


def encoded(shade, form, size=(40, 48)):
    """An image of one shade, with enough detail that half of its bytes are half of its rows."""
    noise = np.random.default_rng(0).integers(0, 30, (*size, 3))
    stream = io.BytesIO()
    Image.fromarray((noise + shade).astype(np.uint8)).save(stream, form, quality=90)
    return stream.getvalue()


@pytest.fixture
def many(tmp_path):
    """A folder of 2 classes with 40 images each, more than are sampled; shades are 2 × their number."""
    for number in range(80):
        path = tmp_path / "many" / "ab"[number // 40] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(2 * number, "JPEG"))
    return tmp_path / "many"


@pytest.fixture
def damaged(many):
    """Three of 80 do not decode: cut, empty, and no image; none of them is sampled."""
    cut(many / "a" / "01.jpg")
    (many / "a" / "11.jpg").write_bytes(b"")
    (many / "b" / "71.jpg").write_bytes(b"<html>404</html>")
    return many


@pytest.fixture
def one(tmp_path):
    """Writes the one image of a class; returns its path."""

    def write(name, contents):
        (tmp_path / "one" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "one" / "a" / name).write_bytes(contents)
        return tmp_path / "one" / "a" / name

    return write


def cut(path, share=0.5):
    contents = path.read_bytes()
    path.write_bytes(contents[: int(share * len(contents))])
    return path


def skipping(source, **options):
    """The plan without bad files, and the warning of them."""
    with pytest.warns(UserWarning, match="leaves out") as caught:
        plan = plan_pipeline(source, **{"batch_size": 4, "on_bad_file": "skip"} | options)
    (warning,) = caught
    assert os.path.basename(warning.filename) == "test_bad_images.py"
    return plan, str(warning.message)


def numbers(dataset):
    """Which images a dataset gave, by their mean shade."""
    return [round((float(image.numpy().mean()) - 14.5) / 2) for batch, _ in dataset for image in batch]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "BMP", pytest.param("WebP", marks=since_tensorflow("2.20"))])
@pytest.mark.parametrize(("share", "crop"), [(0.5, None), (0.98, RandomCrop(8))])
def test_a_cut_image_is_named_before_training(one, form, share, crop):
    path = one("x", encoded(100, form))
    plan_pipeline(path.parents[1], batch_size=1, crop=crop)
    cut(path, share)
    with pytest.raises(PipelineError, match=rf"(?s){re.escape(str(path))}.*{form} that.*on_bad_file='skip'"):
        plan_pipeline(path.parents[1], batch_size=1, crop=crop)


def test_the_error_names_all_of_them(damaged):
    with pytest.raises(PipelineError, match=r"(?s)Found 3 that.*01\.jpg.*that is cut.*11\.jpg.*71\.jpg.*verify_images"):
        plan_pipeline(damaged, batch_size=4)


def test_bytes_behind_an_image_are_no_damage(many):
    path = many / "a" / "01.jpg"
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    assert numbers(plan_pipeline(many, **PLAIN).build()) == list(range(80))
    assert verify_images(many).passed


@pytest.mark.parametrize("crop", [None, CentralCrop(8)])
def test_an_image_spoilt_after_the_plan_is_named_in_the_epoch(many, crop):
    dataset = build_pipeline(many, **PLAIN, crop=crop)
    path = many / "a" / "02.jpg"
    whole = path.read_bytes()
    as_a_jpeg = whole[:20] + bytes(len(whole) - 22) + whole[-2:]  # begins and ends as one
    for contents, found in ((whole[:-20], re.escape(str(path))), (as_a_jpeg, "verify_images_names_the_file")):
        path.write_bytes(contents)
        with pytest.raises(tf.errors.InvalidArgumentError, match=found):
            list(dataset)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cache", [None, "memory", "disk"])
def test_skipped_images_are_left_out_counted_and_named(damaged, tmp_path, cache, shuffle):
    cache = str(tmp_path / "caches") if cache == "disk" else cache
    source = images(damaged) if shuffle else damaged
    plan, warning = skipping(source, batch_size=7, training=False, shuffle=shuffle, cache=cache)
    assert "leaves out 3 of 80 files" in warning
    assert all(str(damaged / name) in warning for name in ("a/01.jpg", "a/11.jpg", "b/71.jpg"))
    assert all(said in unwrapped(plan) for said in ("77 examples of 2 classes", "without 3 of 80 files"))
    assert (plan.to_dict()["count"], plan.to_dict()["steps_per_epoch"]) == (77, 11)
    dataset = plan.build()
    assert int(dataset.cardinality()) == 11
    for _ in range(3):
        found = numbers(dataset)
        assert sorted(found) == WHOLE
        assert shuffle or found == WHOLE


def test_the_key_names_the_files_that_are_left(many, tmp_path):
    keys = set()
    for number in (1, 2):  # neither is sampled, and both have the same label
        path = many / "a" / f"0{number}.jpg"
        whole = path.read_bytes()
        cut(path)
        keys.add(skipping(many, training=False, cache=str(tmp_path / "caches"))[0].to_dict()["cache_key"])
        path.write_bytes(whole)
    assert len(keys) == 2


def test_what_is_left_is_divided_and_written(damaged, tmp_path):
    source = skipping(damaged)[0].source
    found = [numbers(build_pipeline(source.part(index, 2), batch_size=3, training=False)) for index in range(2)]
    assert found == [WHOLE[::2], WHOLE[1::2]]
    with pytest.raises(PipelineError, match=r"01\.jpg"):
        write_records(images(damaged), tmp_path / "out")
    assert write_records(source, tmp_path / "out").count == 77
    assert sorted(numbers(build_pipeline(records(tmp_path / "out"), batch_size=7, training=False))) == WHOLE


def test_what_cannot_be_skipped_or_verified_is_refused(one):
    with pytest.raises(PipelineError, match="at least one good file"):
        plan_pipeline(one("x.jpg", b"no").parents[1], on_bad_file="skip")
    with pytest.raises(ValueError, match="on_bad_record"):
        plan_pipeline(np.zeros((8, 2)), batch_size=2, on_bad_file="skip")
    with pytest.raises(ValueError, match="value for `on_bad_file`: 'raise' or 'skip'"):
        plan_pipeline(np.zeros((8, 2)), batch_size=2, on_bad_file="ignore")
    with pytest.raises(TypeError, match=r"images.*Received"):
        verify_images(arrays(np.zeros(3)))
    with pytest.raises(TypeError, match="Received: int"):
        verify_images(3)


def test_verify_images_reports_every_file(damaged):
    (damaged / "b" / "70.jpg").write_bytes(b"\x89PNG\r\n\x1a\n")
    inside = bytearray(encoded(100, "PNG"))
    inside[len(inside) // 2] ^= 1
    (damaged / "b" / "72.png").write_bytes(inside)
    report = verify_images(images(damaged))
    assert isinstance(report, ImagesReport)
    assert (report.files, report.passed) == (81, False)
    assert [(problem.kind, os.path.relpath(problem.file, damaged)) for problem in report.problems] == [
        ("cut", "a/01.jpg"),
        ("empty", "a/11.jpg"),
        ("cut", "b/70.jpg"),
        ("no image", "b/71.jpg"),
        ("altered", "b/72.png"),
    ]
    assert report.to_dict()["problems"][0]["file"].endswith("01.jpg")
    assert str(report).startswith("81 images: 5 problems\n  cut: ")


@pytest.fixture
def opened(monkeypatch):
    """What is found of any number of files is kept; returns the names of those that were looked into, and clears."""
    monkeypatch.setattr(image_files, "_KEPT_FROM", 1)
    names, read_from = [], image_files.read_from

    def noted(path, read):
        names.append(os.path.basename(path))
        return read_from(path, read)

    monkeypatch.setattr(image_files, "read_from", noted)

    def since():
        found = sorted(names)
        names.clear()
        return found

    return since


def test_files_are_looked_into_once(damaged, opened):
    for looked_into in (80, 0):
        with pytest.raises(PipelineError, match=r"01\.jpg"):
            plan_pipeline(damaged, batch_size=4)
        assert len(opened()) == looked_into
    first, warning = skipping(damaged)
    assert len(opened()) == 77  # the others were found bad without decoding all files
    again, same = skipping(damaged)
    assert (again.source.files, again.source.only_jpeg, same) == (first.source.files, True, warning)
    assert opened() == []
    (damaged / "a" / "01.jpg").write_bytes(encoded(2, "JPEG"))
    cut(damaged / "b" / "70.jpg", 0.7)
    assert "b/70.jpg" in skipping(damaged)[1]
    assert opened() == ["01.jpg", "70.jpg"]
    assert not verify_images(damaged).passed
    assert len(opened()) == 80


def test_a_file_cut_in_place_with_its_time_set_back_is_looked_into(many, opened):
    plan_pipeline(many, batch_size=4)
    path = many / "a" / "01.jpg"
    status, contents = path.stat(), path.read_bytes()
    path.write_bytes(contents[: len(contents) // 2].ljust(len(contents), b"\0"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(PipelineError, match=re.escape(str(path))):
        plan_pipeline(many, batch_size=4)


def test_what_was_kept_may_be_damaged_or_old(many, opened, tmp_path):
    plan_pipeline(many, batch_size=4)
    (kept,) = (tmp_path / "cache" / "tfopt" / "images").iterdir()
    whole = kept.read_text()
    without_formats = whole.replace('"JPEG", ', "")
    of_another_tensorflow = whole.replace(f'"{tf.__version__}"', '"0.0"')
    for contents in ("", "{", "[]", "{}", without_formats, of_another_tensorflow):
        assert contents != whole
        kept.write_text(contents)
        opened()
        plan_pipeline(many, batch_size=4)
        assert len(opened()) == 80
        assert kept.read_text() == whole


def test_what_an_earlier_version_kept_is_read(many, opened, tmp_path):
    def entry(path):
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        is_bad = path.name == "03.jpg"
        return ["JPEG", True, ["altered", "as told before"] if is_bad else None, ["orientation"], is_bad, stamp]

    with pytest.raises(PipelineError, match="cut"):  # which shows where it is kept
        plan_pipeline(cut(many / "a" / "00.jpg").parents[1])
    (kept,) = (tmp_path / "cache" / "tfopt" / "images").iterdir()
    files = {str(path): entry(path) for path in many.glob("*/*.jpg")}
    kept.write_text(json.dumps({"format": [3, tf.__version__], "files": files}))
    opened()
    with pytest.raises(PipelineError, match=r"Found 1 that it does not:\n  altered: .*03\.jpg: as told before"):
        plan_pipeline(many, batch_size=4)
    assert opened() == []


def test_nothing_is_kept_where_nothing_can_be_written(many, opened, tmp_path):
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        plan_pipeline(many, batch_size=4, cache=None)
        assert len(opened()) == 80
