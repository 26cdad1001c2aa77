"""The cases that a GPU gets, with small nets in place of ResNet-50 and GPT-2 and every variant run for real."""

from dataclasses import replace
from functools import partial

import pytest

from tfopt.bench.cases import CPU, Scale
from tfopt.bench.cases.measuring import measure
from tfopt.bench.suites import stack
from tfopt.bench.workloads import gpt2, photos

GPU = Scale(batch_size=8, width=1, steps=2, photos=64, resnet=4, seeds=(0,))
# Without flash attention, which is for a GPU, and XLA, whose compilations take long on a CPU.
TECHNIQUES = ("TF32", "mixed_bfloat16", "build_pipeline", "overlap")


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(stack, "_on_gpu", lambda last: (*TECHNIQUES, *[last] * (last != "flash attention")))
    monkeypatch.setattr(photos, "resnet50", photos.small_net)
    sizes = {"blocks": 1, "width": 16, "heads": 2, "vocabulary": 256, "length": 32}
    monkeypatch.setattr(gpt2, "model", partial(gpt2.model, **sizes))
    monkeypatch.setattr(gpt2, "batch", partial(gpt2.batch, length=32, vocabulary=256))
    monkeypatch.setattr(stack, "GPT2_BATCH", 2)
    monkeypatch.setattr(photos, "PHOTOGRAPHS", 64)
    for name, value in {"_STEPS": 2, "_WARMUP": 1}.items():
        monkeypatch.setattr(stack, name, value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "workload", "last"),
    [(0, "resnet50", '+ cache="device"'), (1, "gpt2", "+ overlap"), (2, "resnet50, alone", "overlap alone")],
)
def test_every_variant_runs(small, at, workload, last):
    case = stack.cases(GPU)[at]
    assert case.workload == workload
    outcome = measure(replace(case, repeats=1))
    *trained, ceiling = outcome.variants if at < 2 else [*outcome.variants, None]
    assert trained[-1].name == last
    batch_size = 2 if workload == "gpt2" else 4
    assert {variant.times.examples_per_step for variant in trained} == {batch_size}
    assert all(variant.metrics.mfu_percent > 0 for variant in trained)
    checks = [variant.check and variant.check.passed for variant in trained]
    assert checks == [True if workload == "gpt2" else None] * len(trained)
    assert ceiling is None or ceiling.metrics.mfu_percent > 0


def test_a_cpu_gets_photographs_and_no_more():
    assert [case.workload for case in stack.cases(CPU)] == ["photos"]


def test_no_epoch_ends_while_steps_are_timed():
    assert stack._GPT2_BATCHES > 1 + stack._WARMUP + stack._STEPS
    assert photos.BATCHES > 1 + stack._WARMUP + stack._STEPS
