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


def profile(dataset, seconds=SECONDS):
    return profile_pipeline(dataset, seconds)


def numbered(count=2000):
    return tf.data.Dataset.range(count)


def stage(found, name):
    return next(one for one in found.stages if one.name == name)


@pytest.mark.parametrize("kind", first_quick(["sleep", "work"]))
@pytest.mark.parametrize("slow", first_quick(["transform", "read", "decode", "augment", "finish"]))
def test_the_slow_stage_of_a_dataset_is_named(slow, kind):
    per_batch = 8 if slow == "finish" else 1
    function = nap(3 * per_batch) if kind == "sleep" else work(384 if slow == "finish" else 192)
    found = profile(line(**{slow: function}))
    assert found.limiting == slow, str(found)
    assert found.verdict.startswith(f"{slow} limits it")


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_quick(["sleep", "work"]))
@pytest.mark.parametrize("slow", first_quick(["transform", "read", "decode", "augment"]))
def test_the_slow_stage_of_a_plan_is_named(slow, kind):
    light = {"read": None, "decode": work(24), "transform": work(25), "augment": work(26)}
    stages = light | {slow: nap(4) if kind == "sleep" else work(192)}
    plan = plan_pipeline(
        numbers(stages["read"], stages["decode"]),
        transform=stages["transform"],
        augment=stages["augment"],
        batch_size=8,
        cache=None,
    )
    found = profile(plan)
    assert found.limiting == slow, str(found)
    assert found.name == "numbers"


@pytest.mark.slow
def test_a_slow_disk_beside_stages_that_compute():
    plan = plan_pipeline(numbers(nap(6), work()), transform=work(96), batch_size=8, cache=None)
    found = profile(plan)
    assert found.limiting == "read", str(found)
    assert [one.name for one in found.stages] == ["read", "shuffle", "decode", "transform", "batch", "prefetch"]


def test_one_thread_limits_though_another_stage_costs_more():
    options = tf.data.Options()
    options.threading.private_threadpool_size = 8
    found = profile(line(decode=nap(4), transform=nap(6), calls=1).with_options(options))
    limiting = stage(found, "decode")
    assert found.limiting == "decode", str(found)
    assert limiting.parallelism == 1
    assert limiting.ms_per_example < stage(found, "transform").ms_per_example


def test_stages_that_limit_alike_are_both_named():
    found = profile(line(decode=nap(3), augment=nap(3)))
    assert found.limiting is None
    assert found.verdict.startswith("decode and augment limit it alike"), str(found)


@pytest.mark.slow
def test_the_speed_without_a_stage_is_that_of_the_pipeline_without_it():
    found = profile(line(decode=nap(8), augment=nap(2)), 1.0)
    counterfactual = profile(line(augment=nap(2)), 1.0)
    predicted = found.examples_per_second_without(stage(found, "decode"))
    assert 0.4 < predicted / counterfactual.examples_per_second < 2.5
    assert stage(found, "decode").speedup_without > 2


@pytest.mark.slow
def test_the_copying_of_a_fused_batch_is_told_from_its_function():
    large = tf.data.Dataset.from_tensors(tf.zeros((512, 512, 3))).repeat()
    copying = large.map(lambda x: x, num_parallel_calls=tf.data.AUTOTUNE, name="nothing").batch(16)
    assert profile(copying).limiting == "batch"
    small = tf.data.Dataset.range(1_000_000)
    assert profile(small.map(nap(3), num_parallel_calls=tf.data.AUTOTUNE, name="slow").batch(16)).limiting == "slow"


@pytest.mark.slow
def test_behind_a_full_cache_later_passes_are_measured():
    options = {"batch_size": 8, "augment": nap(2), "cache": "memory", "training": False}
    found = profile(plan_pipeline(numbers(decode=nap(4), count=32), **options), 1.0)
    assert (found.first_pass, found.limiting) == (False, "augment"), str(found)
    assert "decode" not in [one.name for one in found.stages]
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


def test_many_calls_on_small_elements_are_counted():
    rows = tf.data.Dataset.from_tensor_slices(np.zeros((20_000, 4), np.float32)).repeat()
    found = profile(rows.map(quick, num_parallel_calls=tf.data.AUTOTUNE, name="small").batch(200).prefetch(2))
    assert found.limiting == "small", str(found)


@pytest.mark.slow
def test_nested_and_joined_datasets():
    def files(index):
        return tf.data.Dataset.range(50).map(nap(2), num_parallel_calls=1)

    read = tf.data.Dataset.range(10_000).interleave(files, cycle_length=2, num_parallel_calls=tf.data.AUTOTUNE)
    assert profile(read.map(quick, num_parallel_calls=2).batch(4)).limiting == "interleave (files)"

    slow = tf.data.Dataset.range(1_000_000).map(nap(3), name="slow")
    joined = tf.data.Dataset.zip(tf.data.Dataset.range(1_000_000), slow).filter(lambda a, b: a % 2 == 0).batch(4)
    found = profile(joined)
    assert found.limiting == "slow"
    # Half of the elements are filtered out: an example costs two naps.
    assert stage(found, "slow").ms_per_example > 5.5

    def generate():
        for number in range(1_000_000):
            time.sleep(0.002)
            yield number

    generated = tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec((), tf.int64))
    assert profile(generated.batch(16)).limiting == "generator"


@pytest.mark.slow
def test_short_endless_and_untuned_datasets():
    short = profile(tf.data.Dataset.range(4).map(nap(2), name="slow").batch(4))
    assert (short.limiting, short.first_pass) == ("slow", False)
    assert short.batches > 3
    endless = profile(tf.data.Dataset.range(4).map(nap(2), name="slow").repeat().batch(4))
    assert (endless.limiting, endless.first_pass) == ("slow", True)
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    assert profile(line(decode=nap(3)).with_options(untuned)).limiting == "decode"


@pytest.mark.parametrize(
    "element",
    [
        lambda x: {"a": tf.fill((2,), x), "b": x},
        lambda x: tf.RaggedTensor.from_row_lengths([x, x], [2]),
        lambda x: tf.sparse.from_dense([x, 0]),
    ],
)
def test_examples_are_counted_in_any_structure(element):
    found = profile(tf.data.Dataset.range(1_000).map(element).map(lambda x: x).batch(10), 0.2)
    assert found.examples == 10 * found.batches


def test_single_elements_count_as_one():
    found = profile(tf.data.Dataset.range(1_000_000), 0.2)
    assert found.examples == found.batches


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


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"Expected a PipelinePlan or a tf\.data\.Dataset.*Received: list"):
        profile_pipeline([1, 2])
    dataset = tf.data.Dataset.range(4).batch(2)
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"Expected seconds to be (above 0|a finite number)"):
            profile_pipeline(dataset, seconds)
    for seconds in ("5", None, True):
        with pytest.raises(TypeError, match="Expected seconds to be a number"):
            profile_pipeline(dataset, seconds)
    with pytest.raises(PipelineError, match="at least one batch"):
        profile_pipeline(tf.data.Dataset.range(4).batch(8, drop_remainder=True), 0.1)


def test_an_error_in_the_pipeline_is_told():
    failing = tf.data.Dataset.range(8).map(lambda x: tf.debugging.check_numerics(1 / (x - 4), "divided by zero"))
    with pytest.raises(PipelineError, match=r"(?s)fails while it is profiled.*divided by zero") as raised:
        profile_pipeline(failing.batch(2), 0.2)
    assert isinstance(raised.value.__cause__, tf.errors.InvalidArgumentError)


def test_batches_without_examples_are_refused():
    with pytest.raises(PipelineError, match=r"Found \d+ batches without any"):
        profile_pipeline(tf.data.Dataset.range(20).map(lambda _: tf.zeros((0, 3))), 0.1)


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
    found = [one.name for one in profile(make(), 1.0).stages]
    # The ten elements that `concatenate` adds are a source of their own, which the sampler seldom catches at work.
    assert [name for name in found if name != "range 2"] == stages


def test_of_a_dataset_of_unknown_making_the_nodes_are_told():
    mapped = tf.data.Dataset.range(100_000).map(nap(2), num_parallel_calls=2).batch(4)
    variant = tf.data.experimental.to_variant(mapped)
    found = profile(tf.data.experimental.from_variant(variant, mapped.element_spec), 0.3)
    assert found.limiting == "map", str(found)
    assert "prefetch" not in [one.name for one in found.stages]


@pytest.mark.slow
def test_a_cache_on_disk_is_read_and_never_written(tmp_path):
    options = {
        "transform": nap(2),
        "cache": str(tmp_path / "cache"),
        "cache_key": "naps",
        "batch_size": 8,
        "shuffle": False,
    }
    plan = plan_pipeline(np.arange(64), **options)
    found = profile(plan, 0.6)
    assert (found.first_pass, found.limiting) == (True, "transform"), str(found)
    assert not (tmp_path / "cache").exists()
    trained = plan.build()
    for _ in trained:
        pass
    assert (tmp_path / "cache" / plan.to_dict()["cache_key"] / "rows.tfrecord").exists()
    found = profile(plan, 1.5)
    assert not found.first_pass
    assert "cache" in [one.name for one in found.stages]
    assert "transform" not in [one.name for one in found.stages]


def in_python(kind):
    """A slow function that calls Python, of an element or of a batch."""

    def wait(x):
        time.sleep(0.004)
        return x

    def by_eager_python(x):
        return tf.ensure_shape(tf.py_function(wait, [x], x.dtype), x.shape)

    def by_stateless_python(x):
        return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype, stateful=False), x.shape)

    traced = tf.function(nap(4))
    return {"numpy": nap(4), "py": by_eager_python, "stateless": by_stateless_python, "traced": traced}[kind]


PYTHON = "It calls a Python function, and Python runs one call at a time: rewrite it with TensorFlow operations."


@pytest.mark.parametrize("kind", first_quick(["traced", "numpy", "py", "stateless"]))
def test_a_limiting_map_of_a_dataset_that_is_python_has_a_remedy(kind):
    found = profile(numbered().map(quick, name="quick").map(in_python(kind), name="slow").batch(8))
    assert (found.limiting, found.remedy) == ("slow", PYTHON)
    assert str(found).endswith(PYTHON)


def test_python_nested_in_the_function_of_an_interleave_has_a_remedy():
    slow = in_python("numpy")
    dataset = numbered().interleave(lambda x: tf.data.Dataset.from_tensors(x).map(slow), name="files").batch(8)
    found = profile(dataset)
    assert (found.limiting, found.remedy) == ("files", PYTHON)


def test_only_the_limiting_stage_is_accused_of_python():
    found = profile(numbered().map(nap(0), name="quick").map(work(192), name="slow").batch(8))
    assert (found.limiting, found.remedy) == ("slow", "")


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["transform", "read", "decode", "augment"])
def test_a_limiting_stage_of_a_plan_that_is_python_has_a_remedy(slow):
    stages = {"read": None, "decode": work(24), "transform": work(25), "augment": work(26)} | {slow: nap(4)}
    source = numbers(stages["read"], stages["decode"])
    plan = plan_pipeline(source, transform=stages["transform"], augment=stages["augment"], batch_size=8, cache=None)
    found = profile(plan)
    assert (found.limiting, found.remedy) == (slow, PYTHON)


@pytest.mark.slow
def test_python_in_one_of_two_fused_stages_of_a_plan():
    plan = plan_pipeline(numbers(), transform=nap(0), augment=work(192), batch_size=8, cache=None, seed=None)
    found = profile(plan)
    assert (found.limiting, found.remedy) == ("augment", "")
