"""The perceptron and GPT-2: their size, their data, and that they learn."""

import keras
import numpy as np
import pytest

from tfopt.bench.workloads import digits, gpt2
from tfopt.errors import UnsupportedError

TINY = {"blocks": 1, "width": 32, "heads": 2, "vocabulary": 256, "length": 32}


def losses(model, batch, epochs):
    keras.utils.set_random_seed(1)
    return model.fit(*batch, batch_size=16, epochs=epochs, verbose=0).history["loss"]


def test_the_perceptron_has_the_size_it_is_named_for():
    # 784·512 + 512, 512·512 + 512, 512·10 + 10
    assert digits.perceptron().count_params() == 401_920 + 262_656 + 5_130


@pytest.mark.slow
def test_the_perceptron_learns_digits():
    images, labels = digits.perceptron_batch(300)
    assert images.shape == (300, 784)
    assert images.dtype == "float32"
    picture = images[0].reshape(28, 28)
    assert (picture[2:6, 2:6] == picture[2, 2]).all()  # a pixel of the 8×8 is 4×4
    first, *_, last = losses(digits.perceptron(width=64), (images, labels), 5)
    assert last < first / 2


@pytest.mark.slow
def test_gpt2_has_the_size_it_is_named_for(monkeypatch):
    monkeypatch.setattr(gpt2, "_initial", keras.initializers.Zeros)  # 124 million random numbers take their time
    attention = 4 * (768 * 768 + 768)
    perceptron = 768 * 3072 + 3072 + 3072 * 768 + 768
    normalizations = 2 * 768 + 2 * 768
    embeddings = 50_304 * 768 + 1_024 * 768  # of the tokens, which the last layer shares, and of the positions
    assert 12 * (attention + perceptron + normalizations) + 2 * 768 + embeddings == 124_475_904
    assert gpt2.model().count_params() == 124_475_904


def test_the_text_is_pythons_own_source():
    tokens, following = gpt2.batch(3, length=200, seed=4)
    assert tokens.shape == following.shape == (3, 200)
    assert tokens.dtype == "int32"
    np.testing.assert_array_equal(tokens[:, 1:], following[:, :-1])
    assert tokens[0].tobytes() in gpt2.text().tobytes()
    np.testing.assert_array_equal(tokens, gpt2.batch(3, length=200, seed=4)[0])
    assert (tokens != gpt2.batch(3, length=200, seed=5)[0]).any()


def test_the_whole_vocabulary_is_drawn_from_some_of_it_often():
    tokens, counts = np.unique(gpt2.text(), return_counts=True)
    np.testing.assert_array_equal(tokens, np.arange(gpt2.VOCABULARY))
    assert counts.max() > 1000 * np.median(counts)
    assert gpt2.text(256).max() == 255


def test_a_python_without_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(gpt2.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UnsupportedError, match="Found 0 bytes"):
        gpt2.text.__wrapped__()


@pytest.mark.slow
def test_gpt2_learns_text_and_looks_at_no_later_token():
    model = gpt2.model(**TINY)
    model.optimizer.learning_rate = 1e-2
    first, *_, last = losses(model, gpt2.batch(64, length=32, vocabulary=256), 10)
    assert first == pytest.approx(np.log(256), rel=0.3)
    assert last < 0.8 * first
    tokens, _ = gpt2.batch(2, length=32, vocabulary=256, seed=3)
    changed = tokens.copy()
    changed[:, 20] ^= 1
    moved = np.abs(model(tokens) - model(changed)).max(axis=(0, 2))
    assert (moved[:20] < 1e-5).all()
    assert (moved[20:] > 1e-5).all()


def test_gpt2_in_mixed_precision_gives_float32_logits():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = gpt2.model(**TINY)
    assert model.output.dtype == "float32"
    assert {layer.compute_dtype for layer in model.layers if layer.weights} == {"bfloat16"}
