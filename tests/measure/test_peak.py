import pytest
import tensorflow as tf

from tfopt.measure import copy_gib_per_second, matmul_tflops, peak


class Clock:
    """Seconds that pass from one reading to the next, in turn."""

    def __init__(self, *passing):
        self.now = 0.0
        self.passing = [seconds for taken in passing for seconds in (0.0, taken)]

    def __call__(self):
        self.now += self.passing.pop(0)
        return self.now


def test_the_best_block_counts_and_the_first_product_does_not(set_clock):
    # One to compile, one to see how many make a block of 0.04 s (two), and five blocks.
    clock = Clock(9.0, 0.03, 0.4, 0.2, 0.1, 0.4, 0.8)
    set_clock(clock, matmul_tflops)
    assert matmul_tflops("float32", 100) == pytest.approx(2 * 100**3 / 0.05 / 1e12)
    assert clock.passing == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tensorfloat32", "float32", "float64"])
def test_every_dtype_gives_a_rate_and_leaves_tf32_as_it_was(dtype, monkeypatch):
    seen = []
    product = tf.matmul
    monkeypatch.setattr(tf, "matmul", lambda a, b: seen.append((a.dtype, tf32())) or product(a, b))
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled
    before = tf32()
    assert 0 < matmul_tflops(dtype, 16) < 1000
    assert seen == [("float32" if dtype == "tensorfloat32" else dtype, dtype == "tensorfloat32")]
    assert tf32() == before


@pytest.mark.slow
def test_a_copy_reads_and_writes_every_byte(monkeypatch):
    copies = []
    monkeypatch.setattr(peak, "best_seconds", lambda copy: copies.append(copy()) or 0.5)
    assert copy_gib_per_second() == 2 * 2**28 / 0.5 / 2**30
    (copied,) = copies
    assert (copied.shape, copied.dtype) == ((2**26,), tf.float32)
    assert bool(tf.reduce_all(copied == -1))


def test_bad_arguments():
    with pytest.raises(ValueError, match="Did you mean 'bfloat16'"):
        matmul_tflops("bfloat")
    with pytest.raises(ValueError, match="size=0"):
        matmul_tflops(size=0)
    with pytest.raises(ValueError, match="size=True"):
        matmul_tflops(size=True)
