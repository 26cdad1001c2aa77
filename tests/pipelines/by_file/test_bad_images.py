"""Image files that do not decode: named before training begins, or left out and counted."""

import io
import os
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from unwrapped import unwrapped

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
from tfopt.pipelines.device.device_stage import stage_of
from tfopt.pipelines.sources import image_files


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


def cut(path, share=0.5):
    contents = path.read_bytes()
    path.write_bytes(contents[: int(share * len(contents))])
    return path


def numbers(dataset):
    """Which images a dataset gave, by their mean shade."""
    return [round((float(image.numpy().mean()) - 14.5) / 2) for batch, _ in dataset for image in batch]


@pytest.fixture
def damaged(many):
    """Three of 80 do not decode: cut, empty, and no image; none of them is sampled."""
    cut(many / "a" / "01.jpg")
    (many / "a" / "11.jpg").write_bytes(b"")
    (many / "b" / "71.jpg").write_bytes(b"<html>404</html>")
    return many


WHOLE = [number for number in range(80) if number not in (1, 11, 71)]


@pytest.mark.parametrize("share", [0.5, 0.98])
@pytest.mark.parametrize("crop", [None, RandomCrop(8), CentralCrop(8)])
def test_a_cut_image_is_named_before_training(many, crop, share):
    path = cut(many / "a" / "01.jpg", share)
    with pytest.raises(PipelineError, match=rf"(?s){re.escape(str(path))}.*JPEG that is cut.*on_bad_file='skip'"):
        plan_pipeline(many, batch_size=4, crop=crop)


@pytest.mark.parametrize(("form", "name"), [("PNG", "x.png"), ("GIF", "x.gif"), ("BMP", "x.bmp"), ("WEBP", "x.webp")])
@pytest.mark.parametrize("share", [0.5, 0.98])
def test_cut_images_of_other_formats_are_named(tmp_path, form, name, share):
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / name
    path.write_bytes(encoded(100, form))
    assert images(tmp_path).count == 1
    plan_pipeline(tmp_path, batch_size=1)
    cut(path, share)
    with pytest.raises(PipelineError, match=rf"{re.escape(str(path))}.*{form.replace('WEBP', 'WebP')} that"):
        plan_pipeline(tmp_path, batch_size=1)


def test_the_error_names_all_of_them(damaged):
    with pytest.raises(PipelineError, match=r"(?s)Found 3 that.*01\.jpg.*11\.jpg.*71\.jpg.*verify_images"):
        plan_pipeline(damaged, batch_size=4)


def test_bytes_behind_an_image_are_no_damage(many):
    path = many / "a" / "01.jpg"
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    plan = plan_pipeline(many, batch_size=4, training=False, cache=None)
    assert numbers(plan.build()) == list(range(80))
    assert verify_images(many).passed


@pytest.mark.parametrize("crop", [None, CentralCrop(8)])
@pytest.mark.parametrize("position", [1, 2, 3])
def test_an_image_cut_after_the_plan_is_named_in_the_epoch(many, crop, position):
    dataset = build_pipeline(many, batch_size=4, training=False, cache=None, crop=crop)
    path = cut(many / "a" / f"0{position}.jpg", 0.99)
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(str(path))):
        list(dataset)


def test_mixed_formats_cut_after_the_plan_are_named_too(many):
    (many / "a" / "01.jpg").write_bytes(encoded(2, "PNG"))
    dataset = build_pipeline(many, batch_size=4, training=False, cache=None)
    for path in (many / "a" / "01.jpg", many / "b" / "77.jpg"):
        whole = path.read_bytes()
        for contents in (whole[:-100], b""):
            path.write_bytes(contents)
            with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(str(path))):
                list(dataset)
        path.write_bytes(whole)


@pytest.mark.parametrize("crop", [None, CentralCrop(8)])
def test_an_error_of_the_decoder_says_how_to_find_the_file(many, crop):
    dataset = build_pipeline(many, batch_size=4, training=False, cache=None, crop=crop)
    path = many / "a" / "01.jpg"
    contents = path.read_bytes()
    path.write_bytes(contents[:20] + bytes(len(contents) - 22) + contents[-2:])  # begins and ends as a JPEG does
    with pytest.raises(tf.errors.InvalidArgumentError, match="verify_images_names_the_file"):
        list(dataset)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cache", [None, "memory", "disk"])
def test_skipped_images_are_left_out_counted_and_named(damaged, tmp_path, cache, shuffle):
    cache = str(tmp_path / "caches") if cache == "disk" else cache
    source = images(damaged) if shuffle else damaged
    with pytest.warns(UserWarning, match=r"leaves out 3 of 80 files") as caught:
        plan = plan_pipeline(source, batch_size=7, training=False, shuffle=shuffle, cache=cache, on_bad_file="skip")
    (warning,) = caught
    for name in ("a/01.jpg", "a/11.jpg", "b/71.jpg"):
        assert str(damaged / name) in str(warning.message)
    assert "without 3 of 80 files" in unwrapped(plan)
    assert "77 examples of 2 classes" in unwrapped(plan)
    assert (plan.to_dict()["count"], plan.to_dict()["steps_per_epoch"]) == (77, 11)
    dataset = plan.build()
    assert int(dataset.cardinality()) == 11
    for _ in range(3):
        found = numbers(dataset)
        assert sorted(found) == WHOLE
        assert shuffle or found == WHOLE


def test_the_warning_shows_the_users_line(damaged):
    source = images(damaged)
    for given in (damaged, source):
        with pytest.warns(UserWarning, match="leaves out 3") as caught:
            build_pipeline(given, batch_size=4, on_bad_file="skip")
        assert [os.path.basename(warning.filename) for warning in caught] == ["test_bad_images.py"]


def test_a_cut_image_is_skipped_whatever_its_windows(many):
    """A window above the cut would decode: the example would come and go by chance."""
    cut(many / "a" / "01.jpg", 0.9)
    with pytest.warns(UserWarning, match="1 of 80"):
        dataset = build_pipeline(many, batch_size=79, crop=RandomCrop(4), cache=None, on_bad_file="skip")
    for _ in range(3):
        assert [len(labels) for _, labels in dataset] == [79]


@pytest.mark.slow
def test_what_is_skipped_is_part_of_a_caches_key(many, tmp_path):
    options = {"batch_size": 4, "training": False, "cache": str(tmp_path / "caches"), "on_bad_file": "skip"}
    path = many / "a" / "01.jpg"
    whole = path.read_bytes()
    keys, found = [], []
    for contents in (whole, whole[:500], whole):
        path.write_bytes(contents)
        os.utime(path, ns=(10**9, 10**9 * len(contents)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            plan = plan_pipeline(many, **options)
        keys.append(plan.to_dict()["cache_key"])
        dataset = plan.build()
        found.append([numbers(dataset), numbers(dataset)])
    assert keys[0] == keys[2] != keys[1]
    everything, left = list(range(80)), [number for number in range(80) if number != 1]
    assert found == [[everything] * 2, [left] * 2, [everything] * 2]


def test_the_key_names_the_files_that_are_left(many, tmp_path):
    keys = []
    for number in (1, 2):  # neither is sampled, and both have the same label
        path = many / "a" / f"0{number}.jpg"
        whole = path.read_bytes()
        cut(path)
        with pytest.warns(UserWarning, match="1 of 80"):
            plan = plan_pipeline(many, training=False, cache=str(tmp_path / "caches"), on_bad_file="skip")
        keys.append(plan.to_dict()["cache_key"])
        path.write_bytes(whole)
    assert keys[0] != keys[1]


@pytest.mark.slow
def test_skipped_images_fit_on_the_device_and_under_keras(damaged):
    with pytest.warns(UserWarning, match="3 of 80"):
        dataset = build_pipeline(damaged, batch_size=11, cache="device", training=False, on_bad_file="skip")
    stage = stage_of(dataset)
    assert numbers(stage.batch(element) for element in stage.elements) == WHOLE
    with pytest.warns(UserWarning, match="3 of 80"):
        dataset = build_pipeline(damaged, batch_size=11, on_bad_file="skip")
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 14


def test_parts_divide_what_is_left(damaged):
    with pytest.warns(UserWarning, match="3 of 80"):
        source = plan_pipeline(damaged, batch_size=4, on_bad_file="skip").source
    found = [numbers(build_pipeline(source.part(index, 2), batch_size=3, training=False)) for index in range(2)]
    assert found == [WHOLE[::2], WHOLE[1::2]]


def test_records_are_written_of_what_is_whole(damaged, tmp_path):
    with pytest.raises(PipelineError, match=r"01\.jpg"):
        write_records(images(damaged), tmp_path / "out")
    with pytest.warns(UserWarning, match="3 of 80"):
        source = plan_pipeline(damaged, batch_size=4, on_bad_file="skip").source
    assert write_records(source, tmp_path / "out").count == 77
    found = numbers(build_pipeline(records(tmp_path / "out"), batch_size=7, training=False))
    assert sorted(found) == WHOLE


def test_nothing_left_is_an_error(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jpg").write_bytes(b"no")
    with pytest.raises(PipelineError, match="at least one good file"):
        plan_pipeline(tmp_path, on_bad_file="skip")


def test_other_sources_and_values_are_refused(tmp_path):
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
    report = verify_images(damaged)
    assert isinstance(report, ImagesReport)
    assert (report.files, report.passed) == (80, False)
    assert [(problem.kind, os.path.relpath(problem.file, damaged)) for problem in report.problems] == [
        ("cut", "a/01.jpg"),
        ("empty", "a/11.jpg"),
        ("cut", "b/70.jpg"),
        ("no image", "b/71.jpg"),
    ]
    assert report.to_dict()["problems"][0]["file"].endswith("01.jpg")
    assert str(report).startswith("80 images: 4 problems\n  cut: ")


def test_verify_images_finds_damage_inside(tmp_path):
    (tmp_path / "a").mkdir()
    contents = bytearray(encoded(100, "PNG"))
    contents[len(contents) // 2] ^= 1
    (tmp_path / "a" / "x.png").write_bytes(contents)
    (tmp_path / "a" / "y.png").write_bytes(encoded(100, "PNG"))
    (problem,) = verify_images(images(tmp_path)).problems
    assert (problem.kind, problem.file) == ("altered", str(tmp_path / "a" / "x.png"))
    os.remove(tmp_path / "a" / "x.png")
    assert str(verify_images(tmp_path)) == "1 image: every one decodes"


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


def kept_files(tmp_path):
    return list((tmp_path / "cache" / "tfopt" / "images").iterdir())


def test_files_are_looked_into_once(damaged, opened, tmp_path):
    def plan():
        with pytest.warns(UserWarning, match="leaves out") as caught:
            planned = plan_pipeline(damaged, batch_size=4, on_bad_file="skip")
        return str(caught[0].message), planned.source

    with pytest.raises(PipelineError, match=r"01\.jpg"):
        plan_pipeline(damaged, batch_size=4)
    assert len(opened()) == 80
    first, source = plan()
    assert len(opened()) == 77  # the others were found bad without decoding all files
    again, same = plan()
    assert (again, same.files, same.only_jpeg, opened()) == (first, source.files, True, [])
    with pytest.raises(PipelineError, match=r"01\.jpg"):
        plan_pipeline(damaged, batch_size=4)
    assert opened() == []
    (damaged / "a" / "01.jpg").write_bytes(encoded(2, "JPEG"))
    cut(damaged / "b" / "70.jpg", 0.7)
    assert "b/70.jpg" in plan()[0]
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


@pytest.mark.parametrize("contents", ["", "{", "[]", "{}", "without formats", "of another TensorFlow"])
def test_what_was_kept_may_be_damaged_or_old(many, opened, tmp_path, contents):
    plan_pipeline(many, batch_size=4)
    (kept,) = kept_files(tmp_path)
    whole = kept.read_text()
    changed = {
        "without formats": whole.replace('"JPEG", ', ""),
        "of another TensorFlow": whole.replace(f'"{tf.__version__}"', '"0.0"'),
    }
    kept.write_text(changed.get(contents, contents))
    opened()
    plan_pipeline(many, batch_size=4)
    assert len(opened()) == 80
    assert kept.read_text() == whole


def test_nothing_is_kept_where_nothing_can_be_written(many, opened, tmp_path):
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        plan_pipeline(many, batch_size=4, cache=None)
        assert len(opened()) == 80
