"""Planted bottlenecks are named; each case runs for real."""

import time

import numpy as np
import pytest
import tensorflow as tf
from planted_stages import line, nap, numbers, quick, work
from quick import first_quick

from tfopt.errors import PipelineError
from tfopt.pipelines import plan_pipeline, profile_pipeline

SECONDS = 0.8
AUTO = tf.data.AUTOTUNE
PYTHON = "It calls a Python function, and Python runs one call at a time: rewrite it with TensorFlow operations."


def profile(dataset, seconds=SECONDS):
    return profile_pipeline(dataset, seconds)


def numbered(count=2000):
    return tf.data.Dataset.range(count)


def stage(found, name):
    return next(one for one in found.stages if one.name == name)


def names(found):
    return [one.name for one in found.stages]


@pytest.mark.parametrize("kind", first_quick(["sleep", "work"]))
@pytest.mark.parametrize("slow", first_quick(["transform", "read", "decode", "augment", "finish"]))
def test_the_slow_stage_of_a_dataset_is_named(slow, kind):
    per_batch = 8 if slow == "finish" else 1
    function = nap(3 * per_batch) if kind == "sleep" else work(384 if slow == "finish" else 192)
    found = profile(line(**{slow: function}))
    assert (found.limiting, found.remedy) == (slow, PYTHON if kind == "sleep" else ""), str(found)
    assert found.verdict.startswith(f"{slow} limits it")


def plan_of(read=None, decode=None, **options):
    return plan_pipeline(numbers(read, decode), batch_size=8, **{"cache": None, **options})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sleep", "work"])
@pytest.mark.parametrize("slow", ["transform", "read", "decode", "augment"])
def test_the_slow_stage_of_a_plan_is_named(slow, kind):
    light = {"decode": work(24), "transform": work(25), "augment": work(26)}
    found = profile(plan_of(**light | {slow: nap(4) if kind == "sleep" else work(192)}))
    assert (found.limiting, found.remedy) == (slow, PYTHON if kind == "sleep" else ""), str(found)
    assert found.name == "numbers"


@pytest.mark.slow
def test_a_slow_disk_beside_stages_that_compute():
    found = profile(plan_of(nap(6), work(), transform=work(96)))
    assert found.limiting == "read", str(found)
    assert names(found) == ["read", "shuffle", "decode", "transform", "batch", "prefetch"]


@pytest.mark.slow
def test_python_in_one_of_two_fused_stages_of_a_plan():
    found = profile(plan_of(transform=nap(0), augment=work(192), seed=None))
    assert (found.limiting, found.remedy) == ("augment", "")


def wait(x):
    time.sleep(0.004)
    return x


def nested(x):
    return tf.data.Dataset.from_tensors(x).map(nap(4))


IN_PYTHON = {
    "traced": tf.function(nap(4)),
    "numpy": nap(4),
    "py": lambda x: tf.ensure_shape(tf.py_function(wait, [x], x.dtype), x.shape),
    "stateless": lambda x: tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype, stateful=False), x.shape),
}


@pytest.mark.parametrize("kind", first_quick(IN_PYTHON))
def test_a_limiting_map_of_a_dataset_that_is_python_has_a_remedy(kind):
    found = profile(numbered().map(quick, name="quick").map(IN_PYTHON[kind], name="slow").batch(8))
    assert (found.limiting, found.remedy) == ("slow", PYTHON)
    assert str(found).endswith(PYTHON)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: numbered().interleave(nested, name="slow"), PYTHON),
        (lambda: numbered().map(nap(0), name="quick").map(work(192), name="slow"), ""),
    ],
    ids=["nested", "only the limiting one"],
)
def test_where_python_is_accused(make, remedy):
    found = profile(make().batch(8))
    assert (found.limiting, found.remedy) == ("slow", remedy)


def test_one_thread_limits_though_another_stage_costs_more():
    options = tf.data.Options()
    options.threading.private_threadpool_size = 8
    found = profile(line(decode=nap(4), transform=nap(6), calls=1).with_options(options))
    limiting = stage(found, "decode")
    assert found.limiting == "decode", str(found)
    assert limiting.parallelism == 1
    assert limiting.ms_per_example < stage(found, "transform").ms_per_example


@pytest.mark.slow
def test_the_speed_without_a_stage_is_that_of_the_pipeline_without_it():
    found = profile(line(decode=nap(8), augment=nap(2)), 1.0)
    counterfactual = profile(line(augment=nap(2)), 1.0)
    predicted = found.examples_per_second_without(stage(found, "decode"))
    assert 0.4 < predicted / counterfactual.examples_per_second < 2.5
    assert stage(found, "decode").speedup_without > 2


@pytest.mark.slow
def test_behind_a_full_cache_later_passes_are_measured():
    options = {"batch_size": 8, "augment": nap(2), "cache": "memory", "training": False}
    found = profile(plan_pipeline(numbers(decode=nap(4), count=32), **options), 1.0)
    assert (found.first_pass, found.limiting) == (False, "augment"), str(found)
    assert "decode" not in names(found)
    assert "later passes" in str(found)


def test_tensorflow_does_not_warn_of_the_memory_of_passes_that_ended(capfd, caplog):
    options = tf.data.Options()
    options.autotune.ram_budget = 8 * 2**20
    rows = tf.data.Dataset.from_tensor_slices(np.zeros((4, 1, 2**18), np.float32))  # 1 MiB each
    assert not profile(rows.prefetch(tf.data.AUTOTUNE).with_options(options), 0.5).first_pass
    assert "Prefetch autotuner" not in capfd.readouterr().err
    assert "ram_budget" not in caplog.text


@pytest.mark.slow
def test_a_cache_that_does_not_fill_in_the_time_is_measured_as_it_fills():
    options = {"batch_size": 8, "augment": nap(1), "cache": "memory", "seed": None}
    plan = plan_pipeline(numbers(decode=nap(4), count=100_000), **options)
    assert plan.to_dict()["shuffle_buffer"] > 1000  # which would not fill either
    found = profile(plan)
    assert (found.first_pass, found.limiting) == (True, "decode"), str(found)


def small():
    rows = tf.data.Dataset.from_tensor_slices(np.zeros((20_000, 4), np.float32)).repeat()
    return rows.map(quick, num_parallel_calls=AUTO, name="small").batch(200).prefetch(2)


def copying():
    large = tf.data.Dataset.from_tensors(tf.zeros((512, 512, 3))).repeat()
    return large.map(lambda x: x, num_parallel_calls=AUTO, name="nothing").batch(16)


def interleaved():
    def files(index):
        return tf.data.Dataset.range(50).map(nap(2), num_parallel_calls=1)

    read = numbered(10_000).interleave(files, cycle_length=2, num_parallel_calls=AUTO)
    return read.map(quick, num_parallel_calls=2).batch(4)


def generated():
    def generate():
        for number in range(1_000_000):
            yield wait(number)

    return tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec((), tf.int64)).batch(16)


def untuned():
    options = tf.data.Options()
    options.autotune.enabled = False
    return line(decode=nap(3)).with_options(options)


def of_unknown_making():
    mapped = numbered(100_000).map(nap(2), num_parallel_calls=2).batch(4)
    return tf.data.experimental.from_variant(tf.data.experimental.to_variant(mapped), mapped.element_spec)


@pytest.mark.parametrize(
    ("make", "limiting", "first_pass"),
    first_quick(
        [
            (small, "small", True),  # its calls take the time
            (of_unknown_making, "map", True),
            (copying, "batch", True),
            (lambda: numbered(10**6).map(nap(3), num_parallel_calls=AUTO, name="slow").batch(16), "slow", True),
            (interleaved, "interleave (files)", True),
            (generated, "generator", True),
            (untuned, "decode", True),
            (lambda: numbered(4).map(nap(2), name="slow").repeat().batch(4), "slow", True),
            (lambda: numbered(4).map(nap(2), name="slow").batch(4), "slow", False),
        ],
        2,
    ),
)
def test_the_limiting_stage_of_datasets_of_all_kinds(make, limiting, first_pass):
    found = profile(make())
    assert (found.limiting, found.first_pass) == (limiting, first_pass), str(found)
    assert found.batches > 3
    assert ("prefetch" in names(found)) == (make in (small, untuned))  # what the optimiser adds is no stage


@pytest.mark.slow
def test_what_a_filter_drops_costs_those_that_pass():
    slow = numbered(1_000_000).map(nap(3), name="slow")
    found = profile(tf.data.Dataset.zip(numbered(1_000_000), slow).filter(lambda a, b: a % 2 == 0).batch(4))
    assert found.limiting == "slow"
    assert stage(found, "slow").ms_per_example > 5.5


@pytest.mark.parametrize(
    "element",
    [
        lambda x: {"a": tf.fill((2,), x), "b": x},
        lambda x: tf.RaggedTensor.from_row_lengths([x, x], [2]),
        lambda x: tf.sparse.from_dense([x, 0]),
    ],
)
def test_examples_are_counted_in_any_structure(element):
    found = profile(numbered(1_000).map(element).map(lambda x: x).batch(10), 0.2)
    assert found.examples == 10 * found.batches


@pytest.mark.slow
def test_the_pipeline_that_is_trained_on_keeps_its_state():
    rows = np.arange(64, dtype=np.float32)
    plan = plan_pipeline(
        rows, seed=3, batch_size=8, augment=lambda row, *, seed: row + tf.random.stateless_uniform((), seed)
    )
    built, fresh = plan.build(), plan.build()
    profile(plan, 0.2)
    for _ in range(2):
        for batch, expected in zip(built, fresh, strict=True):
            np.testing.assert_array_equal(batch, expected)
    assert plan.to_dict()["shuffle_buffer"] == 64


def test_nothing_is_printed(capfd):
    profile(plan_pipeline(np.zeros((64, 4)), batch_size=8), 0.1)
    assert capfd.readouterr() == ("", "")


def divided(x):
    return tf.debugging.check_numerics(1 / (x - 4), "divided by zero")


@pytest.mark.parametrize(
    ("dataset", "seconds", "error", "text"),
    [
        ([1, 2], 1, TypeError, r"Expected a PipelinePlan or a tf\.data\.Dataset.*Received: list"),
        *((numbered(), value, ValueError, "Expected seconds to be above 0") for value in (0, -1)),
        *((numbered(), float(value), ValueError, "Expected seconds to be a finite") for value in ("nan", "inf")),
        *((numbered(), value, TypeError, "Expected seconds to be a number") for value in ("5", None, True)),
        (numbered(4).batch(8, drop_remainder=True), 0.1, PipelineError, "at least one batch"),
        (numbered(20).map(lambda _: tf.zeros((0, 3))), 0.1, PipelineError, r"Found \d+ batches without any"),
        (numbered(8).map(divided).batch(2), 0.2, PipelineError, "(?s)fails while it is profiled.*divided by zero"),
    ],
)
def test_what_cannot_be_profiled_is_refused(dataset, seconds, error, text):
    with pytest.raises(error, match=text) as raised:
        profile_pipeline(dataset, seconds)
    if "divided" in text:
        assert isinstance(raised.value.__cause__, tf.errors.InvalidArgumentError)


@pytest.mark.parametrize(
    ("make", "stages"),
    first_quick(
        [
            (lambda: numbered().concatenate(numbered(10)).batch(8), ["range", "concatenate", "batch"]),
            (lambda: numbered(100_000), ["range"]),
            (lambda: numbered().map(quick, num_parallel_calls=2), ["range", "map (quick)"]),
            (lambda: numbered().batch(8).prefetch(2), ["range", "batch", "prefetch"]),
            (
                lambda: plan_pipeline(np.zeros((512, 4)), batch_size=8, cache=None, prefetch=0, shuffle=False),
                ["read", "decode"],
            ),
        ]
    ),
)
def test_what_the_optimiser_adds_is_no_stage(make, stages):
    found = names(profile(make(), 1.0))
    # The ten elements that `concatenate` adds are a source of their own, which the sampler seldom catches at work.
    assert [name for name in found if name != "range 2"] == stages


@pytest.mark.slow
def test_a_cache_on_disk_is_read_and_never_written(tmp_path):
    options = {"cache": str(tmp_path / "cache"), "cache_key": "naps", "batch_size": 8, "shuffle": False}
    plan = plan_pipeline(np.arange(64), transform=nap(2), **options)
    found = profile(plan, 0.6)
    assert (found.first_pass, found.limiting) == (True, "transform"), str(found)
    assert not (tmp_path / "cache").exists()
    trained = plan.build()
    for _ in trained:
        pass
    assert (tmp_path / "cache" / plan.to_dict()["cache_key"] / "rows").exists()
    found = profile(plan, 1.5)
    assert not found.first_pass
    assert "cache" in names(found)
    assert "transform" not in names(found)
