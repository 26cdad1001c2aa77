"""The snippets of docs/sources.md and docs/records.md run as they stand, one after the other."""

import pytest
import tensorflow as tf
from snippets import run_snippets


@pytest.mark.slow
def test_the_snippets_of_sources_run(tmp_path, picture, prepare_tfds):
    for number in range(4):
        picture(tmp_path / "photos" / "train" / "ab"[number % 2] / f"{number}.png")
        picture(tmp_path / "photos" / "val" / "b" / f"{number}.png")
    with tf.io.TFRecordWriter(str(tmp_path / "train-0.tfrecord")) as writer:
        for _ in range(6):
            writer.write(b"record")
    prepare_tfds(tmp_path / "prepared", "mnist")
    printed = run_snippets("sources.md", tmp_path, TFDS_DATA_DIR=str(tmp_path / "prepared"))
    for shown in (
        "1000\n",
        "tfds mnist/1.0.0 [train] ('even', 'odd')\n",
        "prepared dataset 'cifar10'",
        "['cls', 'png']",
    ):
        assert shown in printed


@pytest.mark.slow
def test_the_snippets_of_records_run(tmp_path, picture):
    for number in range(6):
        picture(tmp_path / "photos" / "train" / "ab"[number % 2] / f"{number}.png")
    printed = run_snippets("records.md", tmp_path)
    for shown in ("6 ('a', 'b')", "4 files of records: as the index says", "keeps 999 records", "999 "):
        assert shown in printed
