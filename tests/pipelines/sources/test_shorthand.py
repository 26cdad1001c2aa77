import re

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import arrays
from tfopt.pipelines.sources.shorthand import as_source


def test_each_shorthand(photos, record_files):
    paths = record_files(2)
    assert as_source(np.zeros(3)).name == "arrays"
    assert as_source(tf.zeros(3)).name == "arrays"
    assert as_source((np.zeros(3), np.zeros(3))).name == "arrays"
    assert as_source({"x": np.zeros(3)}).name == "arrays"
    assert as_source(tf.data.Dataset.range(3)).name == "dataset"
    assert as_source(photos).name == as_source(str(photos)).name == f"images in {photos}"
    for given in (paths, tuple(paths), str(photos.parent / "part-*.tfrecord")):
        assert as_source(given).name == "records in 2 files"
    assert as_source(paths[0]).name == "records in 1 file"
    source = arrays(np.zeros(3))
    assert as_source(source) is source


@pytest.mark.parametrize("given", [None, 3, [], [np.zeros(3)], [1, 2]])
def test_anything_else_is_answered_with_what_is_accepted(given):
    accepted = r"tfopt\.pipelines\.Source.*arrays.*tf\.data\.Dataset.*folder of images.*TFRecord"
    with pytest.raises(TypeError, match=rf"{accepted}.*Received: {type(given).__name__}"):
        as_source(given)


def test_a_path_that_does_not_exist(tmp_path):
    missing = str(tmp_path / "nothing")
    with pytest.raises(PipelineError, match=f"Nothing matches '{re.escape(missing)}'"):
        as_source(missing)
