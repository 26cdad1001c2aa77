"""The loss in pieces: what only a GPU can show."""

import keras
import numpy as np
import pytest

from tfopt import precision
from tfopt.bench.workloads import gpt2
from tfopt.hardware.gpu_memory import first_gpu, in_use_bytes, peak_bytes, reset_peak
from tfopt.kernels import chunk_cross_entropy, explain, use_flash_attention

pytestmark = pytest.mark.gpu

EXAMPLES, LENGTH, VOCABULARY = 8, 512, 50304


def trained(in_pieces, jit_compile):
    """Losses of three steps, and the most bytes that the third took beyond those in use before it."""
    keras.utils.set_random_seed(0)
    with precision.policy("mixed_bfloat16"):
        model = gpt2.model(blocks=2, width=256, heads=4, vocabulary=VOCABULARY, length=LENGTH, jit_compile=jit_compile)
    use_flash_attention(model)
    if in_pieces:
        assert chunk_cross_entropy(model) == 1
    batch = np.random.default_rng(0).integers(VOCABULARY, size=(2, EXAMPLES, LENGTH)).astype("int32")
    losses = [float(model.train_on_batch(*batch)) for _ in range(2)]
    gpu = first_gpu()
    before = in_use_bytes(gpu)
    reset_peak(gpu)
    losses.append(float(model.train_on_batch(*batch)))
    if in_pieces:
        assert [row.training for row in explain(model).layers if row.kernel == "chunked cross-entropy"] == [()]
    return losses, peak_bytes(gpu) - before


@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_step_takes_less_memory_and_trains_the_same(jit_compile):
    (stock, stock_bytes), (pieces, pieces_bytes) = (trained(arm, jit_compile) for arm in (False, True))
    np.testing.assert_allclose(pieces, stock, rtol=1e-3)
    logits = 4 * EXAMPLES * LENGTH * VOCABULARY  # 0.8 GB in float32
    assert pieces_bytes < stock_bytes - logits
