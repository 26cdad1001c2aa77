"""Each variant is measured and checked under the settings that it names."""

import keras
import pytest

from tfopt.bench.cases import CPU, GPU, Scale
from tfopt.bench.suites import callbacks, load, pipeline, precision, settings, xla
from tfopt.bench.workloads import digits, photos
from tfopt.callbacks import ThroughputLogger, UtilizationLogger

TINY = Scale(batch_size=8, width=2, steps=3, photos=64, resnet=4, seeds=(5,))


class Spy:
    """Stands for a timer: keeps what it was made with, and the dtype policy then."""

    seen: list

    def __init__(self, model, data, **options):
        self.seen.append((model, data, options, keras.config.dtype_policy().name))

    def __call__(self, *steps, **options):
        return steps, options


@pytest.fixture
def spied(monkeypatch):
    Spy.seen = []
    monkeypatch.setattr(settings, "StepTimer", Spy)
    monkeypatch.setattr(pipeline, "FitTimer", Spy)
    monkeypatch.setattr(callbacks, "FitTimer", Spy)
    # ResNet-50 in its full size is not needed to see its settings.
    monkeypatch.setattr(settings.resnet50, "model", lambda **options: digits.model(**options))
    monkeypatch.setattr(settings.resnet50, "batch", lambda size, count: digits.batch(size))
    return Spy.seen


def timers(case, stack):
    return [variant.timer(stack) for variant in case.variants]


@pytest.mark.parametrize("workload", [0, 1])
def test_precision_is_timed_under_each_policy(spied, workload):
    case = precision.cases(TINY)[workload]
    timers(case, None)
    names = [variant.name for variant in case.variants]
    assert [policy for *_, policy in spied] == names == ["float32", "mixed_bfloat16", "mixed_float16"]
    assert [model.layers[0].dtype_policy.name for model, *_ in spied] == names
    assert isinstance(spied[2][0].optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.parametrize("workload", [0, 1])
def test_xla_is_timed_off_and_on(spied, workload):
    timers(xla.cases(TINY)[workload], None)
    assert [model.jit_compile for model, *_ in spied] == [False, True]


@pytest.mark.parametrize(
    ("suite", "expected"), [(precision, ["float32", "mixed_bfloat16", "mixed_float16"]), (xla, [False, True])]
)
def test_accuracies_are_those_of_the_setting(monkeypatch, suite, expected):
    seen = []

    def accuracy(seed, *, width, jit_compile):
        seen.append((seed, width, keras.config.dtype_policy().name if suite is precision else jit_compile))
        return 0.99

    monkeypatch.setattr(digits, "accuracy", accuracy)
    assert [variant.values() for variant in suite.cases(TINY)[0].variants] == [[0.99]] * len(expected)
    assert seen == [(5, 2, setting) for setting in expected]


def test_the_pipelines_are_what_they_say(spied, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (case,) = pipeline.cases(TINY)
    timers(case, None)
    found = {}
    for variant, (_, dataset, *_) in zip(case.variants, spied, strict=True):
        stages, waiting = [], [dataset]
        while waiting:
            stage = waiting.pop()
            stages.append(type(stage).__name__)
            waiting += stage._inputs()
        found[variant.name] = stages
    assert [any("Cache" in stage for stage in stages) for stages in found.values()] == [False, False, False, True]
    assert [any("Prefetch" in stage for stage in stages) for stages in found.values()] == [False, False, True, True]
    naive = spied[0][1].options()
    assert naive.experimental_optimization.map_parallelization is False
    assert spied[1][1].options().experimental_optimization.map_parallelization is None


def test_the_loggers_are_on_in_one_variant(spied, monkeypatch):
    from contextlib import ExitStack

    (case,) = callbacks.cases(TINY)
    with ExitStack() as stack:
        timers(case, stack)
    kinds = [[type(callback) for callback in options["callbacks"]] for _, _, options, _ in spied]
    assert kinds == [[], [UtilizationLogger, ThroughputLogger]]
    fitted = []
    monkeypatch.setattr(keras.Model, "fit", lambda self, *data, callbacks, **options: fitted.append(len(callbacks)))
    for variant in case.variants:
        variant.values()
    assert fitted == [0, 2]


def test_a_gpu_adds_resnet50(monkeypatch, tmp_path):
    monkeypatch.setattr(photos, "folder", lambda count: tmp_path)
    workloads = {
        name: [case.workload for suite in load([]) for case in suite.cases(scale)]
        for name, scale in (("cpu", CPU), ("gpu", GPU))
    }
    assert workloads["cpu"] == ["digits", "digits", "photos", "digits"]
    assert workloads["gpu"] == ["digits", "resnet50", "digits", "resnet50", "photos", "digits"]
