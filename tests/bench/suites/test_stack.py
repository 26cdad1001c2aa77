"""Techniques on top of each other: each variant trains as it says, from the same weights, to the same loss."""

from contextlib import ExitStack
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt import hardware, precision
from tfopt.bench.cases.measuring import measure
from tfopt.bench.suites import stack
from tfopt.bench.suites.stack import TrainingSetup, Workload, alone, stacked
from tfopt.bench.workloads import digits
from tfopt.hardware import Gpu
from tfopt.pipelines import build_pipeline

ROWS = digits.perceptron_batch(64)


def net(jit_compile):
    return digits.perceptron(width=8, jit_compile=jit_compile)


TINY = Workload(
    name="tiny",
    techniques=("TF32", "mixed_bfloat16", "XLA", "build_pipeline", "overlap"),
    net=net,
    naive=lambda optimised: tf.data.Dataset.from_tensor_slices(ROWS).batch(8),
    pipeline=lambda kept: build_pipeline(ROWS, batch_size=8, cache=kept),
    batch=lambda: tuple(part[:8] for part in ROWS),
    steps=2,
    warmup=1,
    tolerance=0.02,
)


class Spy:
    """Stands for a timer: notes what it is made with, and whether TF32 is on when it is called."""

    def __init__(self, model, data):
        self.model, self.data = model, data
        seen.append(self)

    def __call__(self, steps, **options):
        self.tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
        self.options = {"steps": steps, **options}


seen = []


@pytest.fixture
def spied(monkeypatch):
    seen.clear()
    monkeypatch.setattr(stack, "FitTimer", Spy)
    monkeypatch.setattr(stack, "StepTimer", Spy)
    return seen


def played(case):
    with ExitStack() as undone:
        for variant in case.variants:
            variant.timer(undone)()
        return [(timer.tf32, timer.model.layers[0].dtype_policy.name, timer.model.jit_compile) for timer in seen]


@pytest.mark.slow
def test_losses_are_compared_in_a_case_resumed_with_all_its_turns():
    def made():
        return replace(stacked(replace(TINY, techniques=("build_pipeline",))), repeats=1)

    reported = []
    whole = measure(made(), lambda result, name: reported.append(result))
    earlier = next(result for result in reported if all(variant.turns for variant in result.variants))
    assert {variant.check for variant in earlier.variants} == {None}
    resumed = measure(made(), earlier=earlier)
    assert [variant.times for variant in resumed.variants] == [variant.times for variant in earlier.variants]
    assert [variant.check for variant in resumed.variants] == [variant.check for variant in whole.variants]


@pytest.mark.slow
def test_each_is_on_top_of_those_before(spied):
    case = stacked(replace(TINY, tolerance=None))
    names = ["TF32", "mixed_bfloat16", "XLA", "build_pipeline", "overlap"]
    added = [f"+ {name}" for name in names]
    assert [variant.name for variant in case.variants] == ["naive Keras", "Keras' defaults", *added, "step alone"]
    naive, defaults, *rows = played(case)
    assert naive == (False, "float32", False)
    assert defaults[:2] == (True, "float32")
    bfloat16 = (True, "mixed_bfloat16", True)
    assert rows == [(True, "float32", False), (True, "mixed_bfloat16", False), *[bfloat16] * 4]
    assert [v.dtype for v in case.variants] == ["float32", "tensorfloat32", "tensorfloat32", *["bfloat16"] * 5]
    assert [v.name for v in case.variants if v.recommended] == ["+ overlap"]
    assert [v.name for v in case.variants if v.ceiling] == ["step alone"]
    assert isinstance(spied[-1].data, tuple)


@pytest.mark.slow
def test_each_is_alone(spied):
    case = alone(replace(TINY, tolerance=None, techniques=(*TINY.techniques, 'cache="memory"', "flash attention")))
    names = ["TF32", "mixed_bfloat16", "XLA", "build_pipeline", "overlap"]
    assert [variant.name for variant in case.variants] == ["naive Keras", *(f"{name} alone" for name in names)]
    plain = (False, "float32", False)
    assert played(case) == [
        plain,
        (True, *plain[1:]),
        (False, "mixed_bfloat16", False),
        (False, "float32", True),
        plain,
        plain,
    ]


@pytest.mark.slow
def test_fit_is_overlapped_and_fed_where_it_says(spied, monkeypatch):
    overlapped, built = [], []
    monkeypatch.setattr(stack.fit, "overlap", overlapped.append)
    monkeypatch.setattr(stack.fit, "undo", lambda model: None)
    dataset = TINY.naive(False)
    workload = replace(TINY, tolerance=None, pipeline=lambda kept: built.append(kept) or dataset)
    played(stacked(replace(workload, techniques=("build_pipeline", 'cache="memory"', "overlap"))))
    assert built == [None, "memory", "memory"]
    assert [timer.model for timer in spied[4:5]] == overlapped


@pytest.mark.slow
def test_keras_defaults_are_what_is_on_by_itself(spied):
    optimised = []
    workload = replace(TINY, tolerance=None, naive=lambda own: optimised.append(own) or TINY.naive(own))
    played(stacked(workload))
    assert optimised[:2] == [False, True]
    assert spied[1].tf32
    assert spied[1].model.jit_compile == net("auto").jit_compile


@pytest.mark.slow
def test_all_begin_with_the_same_weights(spied):
    played(stacked(replace(TINY, tolerance=None)))
    first, *others = [timer.model.get_weights() for timer in spied]
    for weights in others:
        for one, other in zip(first, weights, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_tf32_is_given_back(spied):
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    played(alone(replace(TINY, tolerance=None)))
    assert tf.config.experimental.tensor_float_32_execution_enabled() == before


@pytest.mark.slow
def test_a_case_runs_and_every_variant_trains_the_same():
    outcome = measure(stacked(TINY))
    *trained, ceiling = outcome.variants
    assert [variant.check.passed for variant in trained] == [True] * 7
    assert ceiling.check is None
    losses = [variant.check.values[0] for variant in trained]
    assert losses[0] == losses[1] == losses[2] != losses[3]  # TF32 is none on a CPU, bfloat16 is
    assert outcome.limit == "step alone"
    assert outcome.operations_per_example == 4 * 784 * 8 + 6 * (8 * 8 + 8 * 10)
    assert sorted(outcome.ceilings.matmul_tflops) == ["bfloat16", "float32", "tensorfloat32"]


@pytest.mark.slow
def test_a_technique_that_trains_something_else_is_found(monkeypatch):
    def wrong(jit_compile):
        model = net(jit_compile)
        if jit_compile:
            model.optimizer.learning_rate = 0.1
        return model

    outcome = measure(alone(replace(TINY, net=wrong, techniques=("XLA", "overlap"))))
    verdicts = {variant.name: variant.metrics.verdict for variant in outcome.variants}
    assert verdicts["XLA alone"] == "changes the result"
    assert verdicts["overlap alone"] != "changes the result"


@pytest.mark.slow
def test_where_flash_attention_is_not_taken_it_is_refused_by_name():
    inputs = keras.Input((128, 8))
    attended = keras.layers.MultiHeadAttention(2, 64)(inputs, inputs)

    def attention(jit_compile):
        model = keras.Model(inputs, keras.layers.Flatten()(attended))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    rows = np.zeros((4, 128, 8), "float32"), np.zeros((4, 1024), "float32")
    workload = replace(
        TINY,
        techniques=("flash attention",),
        net=attention,
        naive=lambda optimised: tf.data.Dataset.from_tensor_slices(rows).batch(2),
        batch=lambda: rows,
        tolerance=None,
    )
    naive, defaults, flash, _ = measure(stacked(workload)).variants
    assert naive.refused is defaults.refused is None
    assert "Expected a step through the kernel" in flash.refused
    assert flash.times is None


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), ("TF32", "mixed_bfloat16", "XLA", "build_pipeline", "overlap", "flash attention")),
        ((7, 5), ("mixed_float16", "XLA", "build_pipeline", "overlap")),
        ((6, 1), ("XLA", "build_pipeline", "overlap")),
    ],
)
def test_a_gpu_gets_the_techniques_that_it_has(monkeypatch, capability, expected):
    gpu = Gpu(
        index=0, uuid="GPU-0", name="G", memory_mib=1, compute_capability=capability, mig=False, driver_version=None
    )
    monkeypatch.setattr(hardware, "gpus", lambda: (gpu,))
    assert stack._on_gpu("flash attention") == expected
    assert stack._on_gpu('cache="device"')[-1] == 'cache="device"'


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_the_dtype_is_what_products_run_in(policy):
    with precision.policy(policy):
        assert TrainingSetup(policy=policy).dtype == keras.layers.Dense(1).compute_dtype
