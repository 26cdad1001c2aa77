import itertools
import json

import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick
from unwrapped import unwrapped

from tfopt.errors import PipelineError
from tfopt.pipelines import PipelinePlan, build_pipeline, plan_pipeline
from tfopt.pipelines.inspection import facts
from tfopt.pipelines.shared import options as options_module
from tfopt.pipelines.stages import order_stages

ROWS = np.arange(50, dtype=np.float32)


def double(row):
    return row * 2


def add_noise(row, *, seed):
    return row + tf.random.stateless_uniform((), seed)


def names(plan):
    return [stage.name for stage in plan.stages]


def test_the_stages_stand_in_their_order():
    plan = plan_pipeline(ROWS, batch_size=8, transform=double, augment=add_noise, device=None)
    last = ["prefetch", "device", "order", "memory"]
    assert names(plan) == ["read", "decode", "transform", "cache", "shuffle", "augment", "batch", *last]
    uncached = plan_pipeline(ROWS, batch_size=8, transform=double, augment=add_noise, cache=None)
    assert names(uncached)[:4] == ["read", "shuffle", "decode", "transform"]


def test_the_text_is_a_table_with_reasons():
    lines = str(plan_pipeline(ROWS, batch_size=8, transform=double, seed=3)).splitlines()
    assert lines[0] == "Training pipeline over arrays"
    table = {line.split()[0]: line for line in lines[1:]}
    assert "50 examples" in table["read"]
    assert "double" in table["transform"]
    assert "within a quarter of the 16,384 MiB" in table["cache"]
    assert "buffer of 50" in table["shuffle"]
    assert "6 steps an epoch" in unwrapped("\n".join(lines))
    assert "seed 3" in table["order"]
    assert len({line.index(setting) for line, setting in ((table["cache"], "memory"), (table["order"], "seed 3"))}) == 1
    assert max(map(len, lines)) <= 80


def test_the_plan_is_json():
    plan = plan_pipeline(ROWS, batch_size=8, transform=double, augment=add_noise, seed=3)
    found = json.loads(json.dumps(plan.to_dict()))
    assert (found["count"], found["steps_per_epoch"], found["cache"], found["shuffle_buffer"]) == (50, 6, "memory", 50)
    assert found["options"]["transform"] == "double"
    assert [stage["name"] for stage in found["stages"]] == names(plan)


def test_a_plan_is_frozen_and_builds_again():
    plan = plan_pipeline(ROWS, batch_size=8, training=False)
    assert isinstance(plan, PipelinePlan)
    with pytest.raises(AttributeError):
        plan.stages = ()
    assert [len(batch) for batch in plan.build()] == [len(batch) for batch in plan.build()] == [8] * 6 + [2]


def test_build_pipeline_is_the_plan_built():
    options = {"batch_size": 8, "seed": 3, "transform": double}
    built, planned = build_pipeline(ROWS, **options), plan_pipeline(ROWS, **options).build()
    assert [batch.numpy().tolist() for batch in built] == [batch.numpy().tolist() for batch in planned]


def test_too_few_examples_for_a_batch_are_refused():
    with pytest.raises(PipelineError, match=r"batch_size=51 .*has 50.*zero steps.*remainder='keep'"):
        plan_pipeline(ROWS, batch_size=51, remainder="drop")
    assert len(build_pipeline(ROWS, batch_size=51)) == 1
    assert len(build_pipeline(ROWS, batch_size=50)) == 1


def endless():
    return tf.data.Dataset.range(50).repeat()


def uncounted():
    return tf.data.Dataset.range(50).filter(lambda row: row >= 0)


FULL = "every batch is full, and its shape static"
LEFT_OUT = "2 of 50 examples are left out, different ones in each epoch"
KEPT = "all examples are used: "
TOO_MANY = "to drop 5 of 50 would be more than 5 % of each epoch"
LAST = "the last batch has 2, and XLA compiles a second time for it"


@pytest.mark.parametrize(
    ("source", "options", "remainder", "line"),
    [
        (ROWS, {}, "drop", f"{FULL}; {LEFT_OUT}; 6 steps"),
        (ROWS, {"batch_size": 10}, "drop", f"{FULL}; 5 steps"),
        (ROWS, {"batch_size": 9}, "keep", f"{KEPT}{TOO_MANY}; the last batch has 5, and XLA"),
        (np.zeros(100), {"batch_size": 19}, "drop", "; 5 of 100 examples are left out"),
        (np.zeros(100), {"batch_size": 47}, "keep", "to drop 6 of 100 would be more than 5 %"),
        (ROWS, {"batch_size": 51}, "keep", "; the only batch has 50; 1 steps"),
        (ROWS, {"shuffle": False}, "keep", f"same ones of every epoch; {LAST}"),
        (ROWS, {"training": False}, "keep", f"{KEPT}training=False; {LAST}; 7"),
        (ROWS, {"training": False, "shuffle": True}, "keep", f"{KEPT}training=False; {LAST}"),
        (ROWS, {"batch_size": 10, "training": False}, "keep", f"{FULL}; 5 steps"),
        (ROWS, {"cache": "device"}, "drop", LEFT_OUT),
        (ROWS, {"remainder": "drop", "shuffle": False}, "drop", "left out, the last, in each epoch"),
        (ROWS, {"remainder": "drop", "batch_size": 9}, "drop", "5 of 50 examples are left out, different ones"),
        (ROWS, {"remainder": "keep"}, "keep", f"{KEPT}remainder='keep'; {LAST}"),
        ((ROWS, ROWS), {"remainder": "pad"}, "pad", "remainder='pad'; a smaller last batch is filled"),
        (endless(), {}, "drop", FULL),
        (uncounted(), {}, "keep", "their number is unknown; the last batch may be smaller, and XLA would"),
        (uncounted(), {"remainder": "drop"}, "drop", f"{FULL}; examples that do not fill the last one"),
    ],
)
def test_the_plan_says_what_becomes_of_the_last_batch(source, options, remainder, line):
    plan = plan_pipeline(source, **{"batch_size": 8} | options)
    assert plan.options.remainder == plan.to_dict()["options"]["remainder"] == remainder
    assert line in plan.stage("batch").reason


@pytest.mark.parametrize(
    ("room_mib", "cache", "seed"),
    first_quick(
        [
            (0.0005, "./cache", None),
            *itertools.product((0.0005, 1024.0), (None, "auto", "memory"), (None, 3)),
            (0.0005, "./cache", 3),
            (1024.0, "./cache", None),
        ],
        2,
    ),
)
def test_the_default_drops_only_where_each_epoch_is_shuffled_as_a_whole(
    photos, record_files, monkeypatch, tmp_path, cache, seed, room_mib
):
    monkeypatch.chdir(tmp_path)
    for module in (facts, order_stages):
        monkeypatch.setattr(module, "SHUFFLE_MIB", room_mib)
    monkeypatch.setattr(options_module, "_MOST_LEFT_OUT_PERCENT", 50)  # of few examples
    found = []
    for source in (str(photos), record_files(), ROWS, endless().take(50)):
        plan = plan_pipeline(source, batch_size=8, cache=cache, cache_key="1", seed=seed)
        whole = plan.stage("shuffle").buffer >= plan.to_dict()["count"]
        found.append(plan.options.remainder)
        assert whole or found[-1] == "keep"
    assert "drop" in found
    assert ("keep" in found) == (room_mib < 1 and cache != "memory")


@pytest.mark.slow
def test_cache_auto_takes_the_same_steps_whatever_memory_is_free(free_memory, monkeypatch, record_files):
    """Processes that train together would wait for each other for ever."""
    monkeypatch.setattr(facts, "SHUFFLE_MIB", 0.0005)
    monkeypatch.setattr(options_module, "_MOST_LEFT_OUT_PERCENT", 50)
    steps = []
    for mib in (16384.0, 0.0):
        free_memory(mib)
        plan = plan_pipeline(record_files(), batch_size=8, transform=lambda row: tf.strings.join([row, row]))
        steps.append((plan.to_dict()["steps_per_epoch"], plan.options.remainder))
    assert steps == [(4, "keep")] * 2


def test_more_elements_than_the_buffer_takes_are_kept():
    read = tf.data.Dataset.range(100_001).map(lambda row: row + 1)
    plan = plan_pipeline(read, batch_size=100, cache=None)
    assert plan.stage("shuffle").buffer == 100_000
    assert plan.options.remainder == "keep"
    assert "the shuffle's buffer does not hold them all" in plan.stage("batch").reason


def fail(row):
    raise RuntimeError(f"not for {row.dtype}")


@pytest.mark.parametrize("stage", ["transform", "augment"])
def test_a_function_that_raises_is_named_with_its_stage(stage):
    with pytest.raises(
        PipelineError, match=rf"(?s)stage '{stage}' \(fail\) failed.*RuntimeError.*not for.*float32"
    ) as error:
        plan_pipeline(ROWS, **{stage: fail})
    assert isinstance(error.value.__cause__, RuntimeError)


def test_a_function_with_the_wrong_arguments_is_named():
    with pytest.raises(PipelineError, match=r"(?s)stage 'transform' \(double\).*TypeError.*1 positional argument"):
        plan_pipeline((ROWS, ROWS), transform=double)


def test_a_transform_that_fails_on_a_sampled_element_names_it():
    def at_most_four(row):
        return tf.debugging.check_numerics(1 / (row - 4), "divided by zero")

    with pytest.raises(
        PipelineError, match=r"stage transform \(.*at_most_four\) failed on element 4: .*divided by zero"
    ):
        plan_pipeline(ROWS, transform=at_most_four, batch_size=8)


def test_shapes_that_cannot_be_batched_are_told_apart():
    def grow(row):
        return tf.zeros(tf.cast(row, tf.int32) // 3)

    text = r"element 0 has shape \(0,\), element 3 has \(1,\)\. Bring them to one in `transform`"
    with pytest.raises(PipelineError, match=text):
        plan_pipeline(ROWS, transform=grow, batch_size=8)


def test_an_unsampled_element_of_another_shape_fails_in_the_epoch():
    def grow_late(row):
        return tf.zeros(tf.cast(row, tf.int32) // 40)

    dataset = build_pipeline(ROWS, transform=grow_late, batch_size=10)
    assert dataset.element_spec.shape.as_list() == [10, 0]
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"element of arrays has shape \(1\), unlike the first, \(0\)"
    ):
        list(dataset)


def test_functions_are_converted_as_dataset_map_does():
    def absolute(row):
        if row > 10:
            row = -row
        return [row, row]

    batch = next(iter(build_pipeline(ROWS, transform=absolute, training=False, batch_size=50)))
    expected = np.where(ROWS > 10, -ROWS, ROWS)
    np.testing.assert_array_equal(batch, (expected, expected))


def test_nothing_prints(capfd):
    plan = plan_pipeline(ROWS, batch_size=8, transform=double, augment=add_noise)
    list(plan.build())
    assert capfd.readouterr() == ("", "")
