import os
import re
import socket

import numpy as np
import pytest
import tensorflow as tf
from unwrapped import unwrapped

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, plan_pipeline
from tfopt.pipelines.by_file.images import images


def shades(dataset):
    return [
        (int(image[1, 1, 0]), int(label))
        for batch, labels in dataset
        for image, label in zip(batch, labels, strict=True)
    ]


def test_classes_are_the_subfolders_in_order(photos):
    dataset = build_pipeline(photos, batch_size=5, training=False)
    image, label = dataset.element_spec
    assert (image.dtype, image.shape.as_list()) == (tf.uint8, [None, 6, 5, 3])
    assert label.dtype == tf.int32
    assert shades(dataset) == [(index, index // 4) for index in range(12)]


def by_position(source, positions):
    return [(path.numpy(), int(label)) for path, label in source.at(tf.data.Dataset.from_tensor_slices(positions))]


@pytest.mark.parametrize("chunk", [2, 1024])
def test_paths_are_read_by_their_positions(photos, monkeypatch, chunk):
    monkeypatch.setattr("tfopt.pipelines.by_file.file_source._GATHERED", chunk)
    source = images(photos)
    for some in (source, source.part(1, 3), source.checked("raise"), source.checked("raise").part(0, 2)):
        raw = [(path.numpy(), int(label)) for path, label in some.dataset()]
        positions = np.random.default_rng(0).permutation(some.count)
        assert by_position(some, positions) == [raw[position] for position in positions]
        assert by_position(some, np.array([1, 1, 0])) == [raw[1], raw[1], raw[0]]
    with pytest.raises(tf.errors.InvalidArgumentError):
        by_position(source, np.array([12]))


def test_files_in_subfolders_belong_to_the_class_and_hidden_ones_to_none(photos, picture):
    picture(photos / "a" / "more" / "x.png", shade=99)
    (photos / "a" / ".hidden").write_text("no image")
    (photos / ".cache").mkdir()
    source = images(photos)
    assert source.count == 13
    assert (99, 0) in shades(build_pipeline(source, training=False))


def refused(folder, *texts):
    with pytest.raises(PipelineError, match=".*".join(map(re.escape, texts))):
        plan_pipeline(folder, batch_size=2)


def test_folders_that_hold_nothing_are_refused(tmp_path, photos):
    (tmp_path / "empty").mkdir()
    (photos / "d").mkdir()
    with pytest.raises(PipelineError, match="There is no folder"):
        images(tmp_path / "nothing")
    refused(tmp_path / "empty", "one subfolder per class", "It holds none")
    refused(photos, str(photos / "d"), "holds no files")


def test_what_lies_in_the_wrong_place_is_named_and_other_files_are_passed_over(photos, picture):
    (photos / "LICENSE.txt").write_text("text")
    assert images(photos).count == 12
    for content, found in ((b"plain text", "b'plain te'"), (b"", "an empty file")):
        (photos / "b" / "z.txt").write_bytes(content)
        refused(photos, str(photos / "b" / "z.txt"), found)
    refused(photos, picture(photos / "stray.png"), "is in no class folder")


def test_splits_in_place_of_classes_are_refused(tmp_path, picture):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            picture(tmp_path / "data" / split / name / "x.png")
    refused(tmp_path / "data", "['train', 'val']", f"such as {str(tmp_path / 'data' / 'train')!r}", "`classes`")
    assert images(tmp_path / "data" / "train").class_names == ("cat", "dog")
    assert images(tmp_path / "data", classes=["train", "val"]).count == 4
    picture(tmp_path / "data" / "val" / "x.png")
    assert images(tmp_path / "data").class_names == ("train", "val")


@pytest.mark.parametrize("folder", [None, 3, b"photos"])
def test_other_arguments_are_refused(folder):
    with pytest.raises(TypeError, match=rf"a folder, pairs.*\. Received: {type(folder).__name__}\. Pass"):
        images(folder)


def test_a_sampled_image_that_does_not_decode_is_named(photos, flip):
    path = photos / "b" / "05.png"
    flip(path, path.stat().st_size - 30)
    refused(photos, "stage decode", str(path))


def resized(image, label):
    return tf.image.resize(image, (4, 4)), label


def cropped(image, label):
    return tf.image.random_crop(image, (4, 4, 3)), label


def test_mixed_sizes_name_both_files_and_the_remedy_which_works(photos, picture):
    odd = picture(photos / "b" / "odd.png", size=(7, 9))
    refused(photos, str(photos / "a" / "00.png"), "(6, 5, 3)", odd, "(7, 9, 3)", "tf.image.resize")
    for functions in ({"transform": resized}, {"augment": cropped}):
        plan = plan_pipeline(photos, batch_size=2, remainder="keep", **functions)
        assert "shapes checked" not in unwrapped(plan)
        assert plan.build().element_spec[0].shape.as_list() == [None, 4, 4, 3]
        assert sum(len(labels) for _, labels in plan.build()) == 13


@pytest.fixture
def many(tmp_path, picture):
    """More images than are sampled, the second of them not among those."""
    for index in range(70):
        picture(tmp_path / "many" / "a" / f"{index:02}.png", shade=index)
    return tmp_path / "many"


@pytest.mark.parametrize("cache", [None, "memory"])
def test_what_changed_since_or_was_not_sampled_is_named_in_the_epoch(many, picture, cache):
    dataset = build_pipeline(many, batch_size=2, cache=cache)
    path = many / "a" / "01.png"
    path.write_bytes(b"no longer an image")
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=rf"Not a whole JPEG, PNG, GIF, BMP or WebP image:\] \[{re.escape(str(path))}",
    ):
        list(dataset)
    picture(path, size=(7, 9))
    found = rf"{re.escape(str(path))} has shape \(7, 9, 3\), unlike the first, \(6, 5, 3\)"
    with pytest.raises(tf.errors.InvalidArgumentError, match=found):
        list(build_pipeline(many, batch_size=2, cache=cache))


def test_the_sample_is_spread_over_the_files(many, picture):
    odd = picture(many / "a" / "69.png", size=(7, 9))
    refused(many, odd, "(7, 9, 3)")


def test_a_link_to_nothing_is_a_bad_file(photos, tmp_path, picture):
    os.symlink(photos / "gone.png", photos / "a" / "link.png")
    os.symlink("self", photos / "b" / "self")
    refused(photos, "Found 2 that it does not")
    refused(photos, str(photos / "a" / "link.png"), "No such file")
    refused(photos, str(photos / "b" / "self"), "Too many levels")
    with pytest.warns(UserWarning, match=r"leaves out 2 of 14 files(.|\n)*a/link\.png"):
        plan = plan_pipeline(photos, batch_size=2, training=False, on_bad_file="skip")
    assert plan.to_dict()["count"] == 12
    picture(tmp_path / "flat" / "x.png")
    os.symlink(tmp_path / "gone.png", tmp_path / "flat" / "link.png")
    refused(tmp_path / "flat", str(tmp_path / "flat" / "link.png"), "No such file")


def test_a_folder_of_images_alone_gives_names(tmp_path, picture):
    for shade in range(3):
        picture(tmp_path / "flat" / f"{shade}.png", shade=shade)
    (tmp_path / "flat" / "LICENSE.txt").write_text("text")
    ((found, names),) = build_pipeline(tmp_path / "flat", batch_size=3, training=False)
    assert (found[:, 1, 1, 0].numpy().tolist(), names.numpy().tolist()) == ([0, 1, 2], [b"0.png", b"1.png", b"2.png"])
    assert images(tmp_path / "flat").class_names is None
    with pytest.raises(PipelineError, match="one subfolder per class"):
        images(tmp_path / "flat", classes=["a"])


def test_a_class_whose_link_leads_nowhere_is_not_left_out(photos, tmp_path):
    os.symlink(tmp_path / "unmounted", photos / "aardvark")
    refused(photos, "Expected class folders", "the link 'aardvark'", "unmounted", "not there")


@pytest.mark.parametrize("name", ["", "a", "a/more"])
def test_an_unreadable_folder_is_named(photos, picture, monkeypatch, name):
    # Permissions do not bind the user root, so the operating system's answer is given here.
    picture(photos / "a" / "more" / "x.png")
    scan = os.scandir

    def scandir(folder):
        if str(folder) == str(photos / name):
            raise PermissionError(13, "Permission denied", folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    refused(photos, f"Expected to read {str(photos / name)!r}", "Permission denied")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "socket", "link to a device"])
def test_what_is_no_file_is_refused_unopened(photos, monkeypatch, kind):
    monkeypatch.chdir(photos / "b")  # the path of a socket is short
    if kind == "pipe":
        os.mkfifo("x.png")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("x.png")
    else:
        os.symlink("/dev/zero", "x.png")
    refused(photos, str(photos / "b" / "x.png"), "a pipe, a socket or a device", "Move it")


def test_linked_files_and_folders_are_followed(photos, picture, tmp_path):
    path = picture(tmp_path / "more" / "x.png", shade=99)
    os.symlink(tmp_path / "more", photos / "a" / "one")
    os.symlink(tmp_path / "more", photos / "a" / "two")
    os.symlink(path, photos / "a" / "x.png")
    assert shades(build_pipeline(photos, batch_size=16, training=False, remainder="keep")).count((99, 0)) == 3


@pytest.mark.timeout(20)
def test_a_circle_of_links_is_named(photos):
    os.symlink(photos, photos / "b" / "loop")
    refused(photos, str(photos / "b" / "loop" / "b"), f"leads back to {str(photos / 'b')!r}", "Remove the link")


def test_the_plan_and_the_source_show_the_class_names(photos, picture):
    assert images(photos).class_names == ("a", "b", "c")
    assert "12 examples of 3 classes: a, b, c" in unwrapped(plan_pipeline(photos, batch_size=2))
    for number in range(20):
        picture(photos / f"d{number:02}" / "x.png")
    assert "of 23 classes: a, b, c, d00, d01, d02, d03, …, d19" in unwrapped(plan_pipeline(photos, batch_size=2))


def test_given_classes_set_the_labels(photos):
    source = images(photos, classes=["c", "gone", "b", "a"])
    assert source.class_names == ("c", "gone", "b", "a")
    found = shades(build_pipeline(source, training=False))
    assert sorted(found) == [(index, (3, 2, 0)[index // 4]) for index in range(12)]
    with pytest.raises(PipelineError, match=r"Expected only the classes \['a', 'c'\].*Found the folder 'b'\. Add it"):
        images(photos, classes=("a", "c"))


def test_a_name_that_is_no_utf8_is_shown(photos):
    os.rename(photos / "b" / "05.png", os.fsencode(photos / "b") + b"/\xff.png")
    refused(photos, "file names in UTF-8. Found", r"b/\udcff.png'", "Rename the file.")
