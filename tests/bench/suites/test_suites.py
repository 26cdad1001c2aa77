"""Each variant is measured and checked under the settings that it names."""

from contextlib import ExitStack
from dataclasses import replace

import keras
import pytest
import tensorflow as tf

from tfopt.bench.cases import CPU, GPU, DrawTimer, Scale
from tfopt.bench.cases.measuring import measure
from tfopt.bench.report import formatting, terminal
from tfopt.bench.results.run_file import RunFile, read
from tfopt.bench.run import _cases
from tfopt.bench.suites import SUMMARIES, expand, load, pipeline, position, precision, spell_out, xla
from tfopt.bench.workloads import digits, photos
from tfopt.hardware import Gpu
from tfopt.measure import compare, environment

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
    monkeypatch.setattr(precision, "StepTimer", Spy)
    monkeypatch.setattr(pipeline, "FitTimer", Spy)
    return Spy.seen


@pytest.fixture
def small_resnet(monkeypatch):
    """Stands for ResNet-50, whose full size is not needed to see its settings."""

    def batch(size, *, count):
        return tuple(map(tf.constant, digits.batch(size)))

    def model(jit_compile="auto"):
        layers = keras.layers
        net = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile("sgd", loss, jit_compile=jit_compile)
        return net

    monkeypatch.setattr(photos, "resnet50", model)
    monkeypatch.setattr(photos, "batch", batch)


def timers(case, stack):
    return [variant.timer(stack) for variant in case.variants]


@pytest.mark.slow
def test_precision_is_timed_under_each_policy(spied):
    case, *_ = precision.cases(TINY)
    timers(case, None)
    names = [variant.name for variant in case.variants]
    assert [policy for *_, policy in spied] == names == ["float32", "mixed_bfloat16", "mixed_float16"]
    assert [model.layers[0].dtype_policy.name for model, *_ in spied] == names
    assert isinstance(spied[2][0].optimizer, keras.optimizers.LossScaleOptimizer)


def test_xla_is_timed_off_and_on(spied):
    (case,) = xla.cases(TINY)
    timers(case, None)
    assert [model.jit_compile for model, *_ in spied] == [False, True]


@pytest.mark.slow
def test_resnet50_is_timed_under_every_combination(spied, small_resnet, monkeypatch):
    monkeypatch.setattr(precision, "FitTimer", Spy)
    _, alone, fit = precision.cases(TINY)
    for case in (alone, fit):
        timers(case, None)
        assert [v.name for v in case.variants] == [f"{p}{x}" for p in precision._POLICIES for x in ("", ", XLA")]
    policies = [policy for policy in precision._POLICIES for _ in range(2)]
    assert [policy for *_, policy in spied] == [m.layers[0].dtype_policy.name for m, *_ in spied] == 2 * policies
    assert [model.jit_compile for model, *_ in spied] == 6 * [False, True]
    batches = [data for _, data, *_ in spied]
    assert {tuple(data[0].shape) for data in batches[:6]} == {(4, 8, 8, 1)}
    stages = {type(data).__name__ for data in batches[6:]}
    assert stages == {"_OptionsDataset"}
    assert {tuple(data.element_spec[0].shape) for data in batches[6:]} == {(4, 8, 8, 1)}
    assert [int(data.cardinality()) for data in batches[6:]] == [4] * 6


@pytest.mark.parametrize(
    ("capability", "policy"), [((9, 0), "mixed_bfloat16"), ((7, 5), "mixed_float16"), (None, "float32")]
)
def test_what_the_device_is_recommended_is_marked(monkeypatch, small_resnet, capability, policy):
    gpu = Gpu(
        index=0, uuid="GPU-0", name="G", memory_mib=1, compute_capability=capability, mig=False, driver_version=None
    )
    monkeypatch.setattr("tfopt.hardware.gpus", lambda: (gpu,) if capability else ())
    for case in precision.cases(TINY)[1:]:
        assert [variant.name for variant in case.variants if variant.recommended] == [f"{policy}, XLA"]


@pytest.mark.slow
@pytest.mark.parametrize("workload", [1, 2])
def test_the_combinations_run(small_resnet, monkeypatch, workload, tmp_path):
    """On a small net in place of ResNet-50: the step and fit, under two policies, measured and recorded."""
    monkeypatch.setattr(precision, "_POLICIES", ("float32", "mixed_bfloat16"))
    monkeypatch.setattr(precision, "_STEPS", 2)
    case = precision.cases(TINY)[workload]
    outcome = measure(case)
    assert [variant.check for variant in outcome.variants] == [None] * 4
    assert [variant.times.examples_per_step for variant in outcome.variants] == [4] * 4
    assert {variant.turns for variant in outcome.variants} == {6}
    assert [variant.recommended for variant in outcome.variants] == [False, True, False, False]
    file = RunFile.create(tmp_path, ["precision"], environment())
    file.put(outcome)
    assert read(file.path).cases[0].workload == case.workload
    text = " ".join(terminal(file.run).split())
    assert f"{case.workload}: the recommended variant (*, float32, XLA) is" in text


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


@pytest.mark.slow
def test_the_pipelines_are_what_they_say(spied, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    case, *_ = pipeline.cases(replace(TINY, resnet=None))
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


@pytest.mark.slow
def test_the_input_alone_is_what_it_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = []
    monkeypatch.setattr(pipeline, "DrawTimer", lambda make, batch_size: seen.append(make()) or print)
    _, crop, by_hand, cache = pipeline.cases(replace(TINY, resnet=None))
    with ExitStack() as stack:
        for case in (crop, by_hand, cache):
            timers(case, stack)
        assert all(dataset.cardinality() == tf.data.INFINITE_CARDINALITY for dataset in seen)
        batches = [next(iter(dataset))[0] for dataset in seen]
    assert {(batch.shape, batch.dtype) for batch in batches} == {((32, photos.SIZE, photos.SIZE, 3), tf.uint8)}
    naive = seen[0].options()
    assert naive.experimental_optimization.map_parallelization is False
    assert seen[2].options().deterministic is False


def test_the_crop_by_hand_and_the_naive_one_find_the_same_window():
    for shape in [(300, 400, 3), (401, 300, 3), (224, 224, 3)]:
        begin, size = photos._central_window(tf.constant(shape))
        side = round(0.875 * min(shape[:2]))
        assert size.numpy().tolist() == [side, side, -1]
        assert begin.numpy().tolist() == [(shape[0] - side) // 2, (shape[1] - side) // 2, 0]


def test_drawing_is_timed_from_fresh_input_in_blocks():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock, made = Clock(), []

    def input_of_two_seconds_a_batch():
        made.append(0)
        clock.now += 10
        while True:
            clock.now += 2
            made[-1] += 1
            yield None

    timer = DrawTimer(input_of_two_seconds_a_batch, 32, clock=clock)
    for _ in range(2):
        times = timer(5, warmup=3, samples=2)
        assert times.repeats_ms == ((2000.0, 2000.0),)
        assert (times.steps_per_sample, times.first_step_seconds, times.examples_per_step) == (3, 12.0, 32)
    assert made == [10, 10]  # one first, three to warm up, two blocks of three


def test_an_input_that_ends_is_begun_anew():
    assert DrawTimer(lambda: [1, 2], 8)(4, warmup=3, samples=2).steps_per_sample == 2
    with pytest.raises(RuntimeError, match="StopIteration"):
        DrawTimer(lambda: [], 8)(4, warmup=3, samples=2)


def test_a_gpu_adds_resnet50():
    workloads = {
        name: [case.workload for suite in SUMMARIES for case in load(suite).cases(scale)]
        for name, scale in (("cpu", CPU), ("gpu", GPU))
    }
    photographs = ["photos", "photos, random crop", "photos, by hand", "photos, cache"]
    assert workloads["cpu"] == ["photos", "digits", "digits", *photographs, "mlp, tiny"]
    fit = [case.workload for case in load("fit").cases(GPU)]
    assert workloads["gpu"] == [
        *("resnet50", "gpt2", "resnet50, alone", "gpt2, alone"),
        *("digits", "resnet50", "resnet50, fit"),
        "digits",
        *("resnet50 from JPEG", *photographs),
        *fit,
    ]


def test_listing_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(_cases(["gpu"], GPU)) == len({(case.suite, case.workload) for case in _cases([*SUMMARIES], GPU)})
    assert list(tmp_path.iterdir()) == []


def test_the_list_for_a_gpu_has_every_suite_and_what_says_most_first():
    assert sorted(expand(["gpu"])) == sorted(SUMMARIES)
    assert expand(["xla", "gpu"])[:2] == ["xla", "fit"]
    assert expand([]) == ["stack", "precision", "xla", "pipeline", "fit"]
    with pytest.raises(ValueError, match=r"Received: 'gpus'\. Did you mean 'gpu'\?"):
        expand(["xla", "gpus"])
    addresses = [(case.suite, case.workload) for case in _cases(["gpu"], GPU)]
    fit, stack = addresses[:3], addresses[3:7]
    assert fit == [("fit", "resnet50"), ("fit", "gpt2"), ("fit", "mlp")]
    assert [workload for suite, workload in stack if suite == "stack"] == [
        *("resnet50", "gpt2", "resnet50, alone", "gpt2, alone")
    ]
    assert addresses[7] == ("pipeline", "resnet50 from JPEG")
    kernels = addresses[8:15]
    assert {suite for suite, _ in kernels} == {"fit"}
    assert kernels[-1] == ("fit", "resnet50, no XLA")
    assert list(dict.fromkeys(suite for suite, _ in addresses[15:])) == ["precision", "xla", "pipeline"]
    assert [suite for suite, _ in ((case.suite, case.workload) for case in _cases(["xla", "fit"], CPU))] == [
        "xla",
        "fit",
    ]
    assert position(["fit", "gpu"], ("fit", "resnet50, no XLA")) == 0


def test_a_case_may_be_asked_for_alone():
    names = ["pipeline/photos, cache", "xla", "pipeline/photos"]
    assert [(case.suite, case.workload) for case in _cases(names, CPU)] == [
        ("pipeline", "photos, cache"),
        ("xla", "digits"),
        ("pipeline", "photos"),
    ]
    assert expand(names) == ["pipeline", "xla"]
    assert spell_out([*names, "xla"]) == names
    assert spell_out(["gpu"])[:4] == ["fit/resnet50", "fit/gpt2", "fit/mlp", "stack"]
    assert position(names, ("pipeline", "photos, by hand")) is None
    for mistyped in ("stak/photos", "stack/", "gpu/resnet50"):
        with pytest.raises(ValueError, match=f"Received: '{mistyped}'"):
            expand([mistyped])


@pytest.mark.slow
def test_resnet50_from_files_has_two_ceilings(tmp_path, monkeypatch):
    """On a small net in place of ResNet-50, with every way to feed it run for real."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(photos, "resnet50", photos.small_net)
    monkeypatch.setattr(pipeline, "_RESNET_STEPS", 2)
    monkeypatch.setattr(pipeline, "_RESNET_WARMUP", 1)
    case, *_ = pipeline.cases(TINY)
    outcome = measure(replace(case, repeats=2))
    variants = {variant.name: variant for variant in outcome.variants}
    ceilings = {name: v.times.median_ms for name, v in variants.items() if v.ceiling}
    assert sorted(ceilings) == ["input alone", "step alone"]
    assert outcome.limit == max(ceilings, key=ceilings.get)
    own, limit = variants["build_pipeline, overlap"], variants[outcome.limit]
    assert own.metrics.of_ceiling.ratio == compare(limit.times, own.times).ratio
    assert [v.times.examples_per_step for v in variants.values()] == [4] * 4
    assert [v.metrics.mfu_percent is None for v in variants.values()] == [False, False, False, True]
    assert f"of the speed of {outcome.limit}, the lower ceiling: naive input" in formatting.reached(outcome)
