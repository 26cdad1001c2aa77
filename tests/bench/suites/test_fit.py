"""Suite `fit`: what is timed is what its name says, and what is compared would show a difference."""

import dataclasses
from contextlib import ExitStack
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from fake_cudnn import FakeCudnn
from keras.callbacks import CallbackList
from plain_attention import attention_batch, draw, heads_net

from tfopt import fit as overlapping
from tfopt import kernels as tfopt_kernels
from tfopt import memory
from tfopt.bench.cases import GPU, Scale, kernels
from tfopt.bench.cases.measuring import measure
from tfopt.bench.report import formatting
from tfopt.bench.suites import fit
from tfopt.bench.workloads import digits, gpt2, photos
from tfopt.errors import UnsupportedError
from tfopt.fit.launching import overlap_of
from tfopt.measure import compare
from tfopt.pipelines.device.device_stage import stage_of

CPU = Scale(batch_size=8, width=1, steps=1, photos=64, resnet=None, seeds=(0,))
SHAPE = kernels.Shape(2, 64, 2, 8, causal=True)


class Spy:
    """Stands for a timer: keeps the model, the data, whether the model was overlapped then, and its policies."""

    seen: list

    def __init__(self, model, data):
        policies = {layer.dtype_policy.name for layer in model.layers}
        self.seen.append((model, data, overlap_of(model) is not None, policies))

    def __call__(self, *steps, **options):
        return steps, options


@pytest.fixture
def spied(monkeypatch):
    Spy.seen = []
    monkeypatch.setattr(fit, "FitTimer", Spy)
    monkeypatch.setattr(fit, "StepTimer", Spy)
    return Spy.seen


@pytest.fixture
def small_resnet(monkeypatch):
    """Stands for ResNet-50: it normalizes, and takes what the digits' net takes."""

    def model(jit_compile="auto"):
        layers = keras.layers
        net = keras.Sequential([keras.Input((8, 8, 1)), layers.BatchNormalization(), layers.Flatten()])
        net.add(layers.Dense(10, dtype="float32"))
        net.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit_compile)
        return net

    monkeypatch.setattr(photos, "resnet50", model)
    monkeypatch.setattr(photos, "batch", lambda size, *, count: tuple(map(tf.constant, digits.batch(size))))


@pytest.fixture
def cudnn(monkeypatch):
    """A machine that looks like one with an H200, on which TensorFlow computes what cuDNN would."""
    FakeCudnn().install(monkeypatch)


def noted(monkeypatch, workload, name, model):
    """The models that a workload makes from now on."""
    made = []

    def make(jit_compile):
        made.append(model(jit_compile=jit_compile))
        return made[-1]

    monkeypatch.setattr(workload, name, make)
    return made


def test_a_cpu_gets_the_tiny_net_alone():
    assert [case.workload for case in fit.cases(CPU)] == ["mlp, tiny"]


def test_a_gpu_gets_what_says_most_first():
    workloads = [case.workload for case in fit.cases(GPU)]
    assert workloads[:3] == ["resnet50", "gpt2", "mlp"]
    assert workloads[-1] == "resnet50, no XLA"
    assert len([name for name in workloads if name.startswith("attention, ")]) == 6
    assert workloads[3] == "attention, 16×1024, 12 heads of 64, causal"
    assert len(set(workloads)) == 10


def test_one_fit_is_overlapped_and_keras_is_itself_again(spied):
    (case,) = fit.cases(CPU)
    stock = CallbackList._on_train_batch_end
    with ExitStack() as stack:
        for variant in case.variants:
            variant.timer(stack)
        assert CallbackList._on_train_batch_end is not stock
    assert CallbackList._on_train_batch_end is stock
    assert [overlapped for *_, overlapped, _ in spied] == [False, True, True, False]
    assert [model.jit_compile for model, *_ in spied] == [False] * 4
    assert [overlap_of(model) for model, *_ in spied] == [None] * 4
    (_, stock_data, *_), (_, data, *_), _, (_, batch, *_) = spied
    assert (
        stock_data.element_spec
        == data.element_spec
        == (tf.TensorSpec((8, 784), tf.float32), tf.TensorSpec((8,), tf.int32))
    )
    np.testing.assert_array_equal(next(iter(data))[0], batch[0])


def test_keras_is_itself_again_after_a_timer_that_failed(spied):
    (case,) = fit.cases(CPU)
    stock = CallbackList._on_train_batch_end
    stack = ExitStack()
    case.variants[1].timer(stack)
    assert CallbackList._on_train_batch_end is not stock
    assert not stack.__exit__(RuntimeError, RuntimeError("on purpose"), None)
    assert CallbackList._on_train_batch_end is stock


@pytest.mark.slow
def test_the_weights_are_those_of_a_training(monkeypatch):
    (case,) = fit.cases(CPU)
    stock, *others = (variant.values() for variant in case.variants)
    assert len(stock) == 784 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10
    assert [case.judge(stock, other).passed for other in others] == [True] * 3
    assert case.judge(stock, [*stock[:-1], stock[-1] + 1e-6]).text == "1 of 13002 differ"

    def planted(net, **_):
        net.optimizer.learning_rate = 2e-3

    monkeypatch.setattr(overlapping, "overlap", planted)
    assert not case.judge(stock, case.variants[1].values()).passed


@pytest.mark.slow
def test_resnet50_is_fed_as_the_names_say(spied, small_resnet, monkeypatch):
    # On a GPU with room for the examples the cache "auto" puts them there.
    caches = []

    def build_pipeline(source, *, cache="auto", **options):
        caches.append(cache)
        return stock_pipeline(source, cache=cache, **options)

    stock_pipeline = fit.build_pipeline
    monkeypatch.setattr(fit, "build_pipeline", build_pipeline)
    case = fit.resnet50_case(4)
    with ExitStack() as stack:
        for variant in case.variants:
            variant.timer(stack)
    whole = ["stock fit, whole batches", "overlap, whole batches"]
    names = ["stock fit", "overlap", 'overlap, cache="device"', *whole, "step alone"]
    assert [variant.name for variant in case.variants] == names
    assert [overlapped for *_, overlapped, _ in spied] == [False, True, True, False, True, False]
    assert [model.jit_compile for model, *_ in spied] == [True] * 6
    assert all("mixed_bfloat16" in policies for *_, policies in spied)
    *fed, batch = [data for _, data, *_ in spied]
    assert caches == [None, None, "device"]
    assert [stage_of(data) is not None for data in fed] == [False, False, True, False, False]
    assert {data.element_spec[0].shape for data in fed} == {tf.TensorShape((4, 8, 8, 1))} == {batch[0].shape}
    # No epoch ends while the steps are timed: the first one, the warm-up, the samples.
    assert [int(data.cardinality()) for data in fed] == [40] * 5
    assert photos.BATCHES > 1 + fit._RESNET_WARMUP + fit._RESNET_STEPS


@pytest.mark.slow
def test_resnet50_is_measured(small_resnet, monkeypatch):
    for name, value in {"_RESNET_STEPS": 4, "_RESNET_WARMUP": 1}.items():
        monkeypatch.setattr(fit, name, value)
    uncompiled = photos.resnet50
    monkeypatch.setattr(photos, "resnet50", lambda jit_compile="auto": uncompiled(jit_compile=False))
    outcome = measure(fit.resnet50_case(4))
    assert {variant.times.examples_per_step for variant in outcome.variants} == {4}
    assert [variant.check for variant in outcome.variants] == [None] * 6
    *fed, ceiling = outcome.variants
    times = [variant.times for variant in outcome.variants]
    assert [variant.metrics.of_ceiling for variant in fed] == [compare(times[-1], one) for one in times[:-1]]
    share = formatting.number(fed[0].metrics.of_ceiling.ratio)
    assert formatting.reached(outcome).startswith(f"resnet50, of the ceiling's speed: stock fit {share}, overlap ")
    assert ceiling.metrics.of_ceiling is None


def test_batch_norm_is_fused_in_one_variant(small_resnet, monkeypatch):
    monkeypatch.setattr(kernels, "_STEPS", 2)
    made = noted(monkeypatch, photos, "resnet50", photos.resnet50)
    measure(kernels.batch_norm_case(4))
    assert [net.jit_compile for net in made] == [False, False]
    (plain,), (fused,) = (tfopt_kernels.explain(net).layers for net in made)
    assert plain.training == ("not requested: fuse_batch_norm(model)",)
    assert fused.training == ()


@pytest.mark.slow
def test_gpt2_takes_flash_attention(cudnn, monkeypatch):
    made = noted(
        monkeypatch, gpt2, "model", partial(gpt2.model, blocks=1, width=16, heads=2, vocabulary=256, length=64)
    )
    monkeypatch.setattr(gpt2, "batch", partial(gpt2.batch, length=64, vocabulary=256))
    monkeypatch.setattr(kernels, "GPT2_BATCH", 2)
    for variant in kernels.gpt2_case().variants[1:]:
        variant.timer(ExitStack())
    for net, recomputed in zip(made, (0, 1), strict=True):
        assert (net.jit_compile, net.dtype_policy.name) == (True, "mixed_bfloat16")
        assert [row.training for row in tfopt_kernels.explain(net).layers] == [()]
        assert memory.undo(net) == recomputed


@pytest.mark.slow
@pytest.mark.no_gpu
def test_keras_path_is_not_measured_under_the_kernels_name(monkeypatch):
    made = noted(monkeypatch, gpt2, "model", heads_net)
    monkeypatch.setattr(gpt2, "batch", attention_batch)
    plain, taken, _ = kernels.gpt2_case().variants
    plain.timer(ExitStack())
    assert tfopt_kernels.explain(made[0]).layers[0].training == ("not requested: use_flash_attention(model)",)
    with pytest.raises(UnsupportedError, match=r"Found Keras' own path: .*no GPU"):
        taken.timer(ExitStack())
    alone = kernels.attention_cases()[0].variants[1]
    monkeypatch.setattr(kernels, "_operands", lambda shape: [draw(2, 64, 2, 8, dtype="bfloat16")] * 4)
    with pytest.raises(UnsupportedError, match=r"Found Keras' own path: .*no GPU"):
        alone.timer(ExitStack())()


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_attention_alone(cudnn, monkeypatch, padded):
    monkeypatch.setattr(kernels, "_SHAPES", (dataclasses.replace(SHAPE, padded=padded),))
    monkeypatch.setattr(kernels, "_CALLS", 2)
    (case,) = kernels.attention_cases()
    plain, taken = (variant.check for variant in measure(case).variants)
    assert (len(plain.values), plain.passed, taken.passed) == (4, True, True)
    # bfloat16 has eight bits: one rounding is off by 0.2 % or so.
    assert 1e-3 < max(taken.values) <= max(plain.values) < 2e-2


@pytest.mark.slow
def test_attention_is_timed_in_a_chain_of_eight(cudnn):
    operands = kernels._operands(SHAPE)
    chain = kernels._compiled(SHAPE, kernels._flash, kernels._CHAINED)
    operations = chain.get_concrete_function(*operands).graph.get_operations()
    assert len([operation for operation in operations if operation.type == "XlaCallModule"]) == 2 * 8
    output, *_ = chain(*operands)
    query, key, value, _ = operands
    for _ in range(8):
        query = kernels._plain(query, key, value, causal=SHAPE.causal, mask=None)
    np.testing.assert_allclose(
        tf.cast(output, "float32"), tf.cast(query, "float32"), atol=8 * 2**-8 * np.abs(query).max()
    )


@pytest.mark.parametrize(
    ("values", "passed"), [([0.1, 0.2], True), ([0.2, 0.1], True), ([0.1, 0.21], False), ([0.1, float("nan")], False)]
)
def test_an_error_may_be_as_large_as_kerass(values, passed):
    assert kernels._no_larger_error([0.1, 0.2], values).passed == passed


def test_the_exact_attention_is_exact():
    shape = kernels.Shape(1, 5, 2, 4, causal=True)
    operands = [tf.random.stateless_normal((1, 5, 2, 4), (1, n), dtype=tf.float64) for n in range(4)]
    output, *gradients = kernels._exact(shape, *operands)
    with tf.GradientTape() as tape:
        tape.watch(operands[:3])
        plain = keras.ops.dot_product_attention(*operands[:3], is_causal=True)
    np.testing.assert_allclose(output, plain, atol=1e-12)
    expected = tape.gradient(plain, operands[:3], output_gradients=operands[3])
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
