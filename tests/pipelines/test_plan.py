import json

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import PipelinePlan, build_pipeline, plan_pipeline

ROWS = np.arange(50, dtype=np.float32)


def double(row):
    return row * 2


def add_noise(row, *, seed):
    return row + tf.random.stateless_uniform((), seed)


def names(plan):
    return [stage.name for stage in plan.stages]


def test_the_stages_stand_in_their_order():
    plan = plan_pipeline(ROWS, batch_size=8, transform=double, augment=add_noise)
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
    assert "6 steps an epoch" in table["batch"]
    assert "seed 3" in table["order"]
    assert len({line.index(setting) for line, setting in ((table["cache"], "memory"), (table["order"], "seed 3"))}) == 1


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
        plan_pipeline(ROWS, batch_size=51)
    assert len(build_pipeline(ROWS, batch_size=51, remainder="keep")) == 1
    assert len(build_pipeline(ROWS, batch_size=50)) == 1


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
