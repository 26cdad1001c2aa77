import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tfopt.bench.workloads import digits, photos
from tfopt.measure import step_time


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return photos.folder(8)


def test_the_digits_are_split_once_and_for_all():
    train, test = digits.data()
    assert (len(train.images), len(test.images)) == (1437, 360)
    assert train.images.min() == 0.0
    assert train.images.max() == 1.0
    assert set(test.labels) == set(range(10))
    everything = np.concatenate([train.images, test.images]).reshape(1797, -1)
    assert len(np.unique(everything, axis=0)) > 1790  # no example in both


def test_a_digits_batch_may_be_larger_than_the_data():
    images, labels = digits.batch(2000)
    assert images.shape == (2000, 8, 8, 1)
    assert labels.shape == (2000,)


def test_photos_are_jpegs_of_both_photographs(folder):
    names = sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*"))
    assert names == [f"china/{n:05}.jpg" for n in (0, 2, 4, 6)] + [f"flower/{n:05}.jpg" for n in (1, 3, 5, 7)]
    for path in folder.glob("*/*"):
        with Image.open(path) as image:
            assert image.format == "JPEG"
            assert 240 < image.width < 640
            assert 200 < image.height < 530


def test_photos_are_written_once(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*")}
    assert photos.folder(8) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/*")} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_photos_that_were_lost_are_written_again(folder):
    next(folder.glob("*/*")).unlink()
    assert len(list(photos.folder(8).glob("*/*"))) == 8


def test_a_user_without_a_home(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert photos._home() == Path(tempfile.gettempdir())


def test_a_run_that_dies_while_writing_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write = photos._write

    def dies(target, count):
        write(target, count // 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(photos, "_write", dies)
    with pytest.raises(KeyboardInterrupt):
        photos.folder(8)
    assert list((tmp_path / "tfopt").iterdir()) == []
    monkeypatch.setattr(photos, "_write", write)
    assert len(list(photos.folder(8).glob("*/*"))) == 8


def test_another_process_may_be_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write = photos._write

    def second(target, count):
        write(target, count)
        monkeypatch.setattr(photos, "_write", write)
        photos.folder(count)  # the other process publishes while this one writes

    monkeypatch.setattr(photos, "_write", second)
    assert len(list(photos.folder(8).glob("*/*"))) == 8
    assert len(list((tmp_path / "tfopt").iterdir())) == 1


@pytest.mark.slow
def test_resnet50_trains_on_photographs(folder):
    images, labels = photos.batch(4, count=8, pixels=32)
    assert images.dtype == "uint8"
    assert set(labels.numpy()) <= {0, 1}
    assert step_time(photos.resnet50(size=32), (images, labels), steps=1, warmup=0).examples_per_step == 4
