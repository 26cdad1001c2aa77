import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, plan_pipeline
from tfopt.pipelines.sources.dataset import dataset


def test_examples_come_back_in_order():
    source = dataset(tf.data.Dataset.range(10).map(lambda number: number * number))
    batches = build_pipeline(source, batch_size=4, training=False)
    assert [number for batch in batches for number in batch.numpy()] == [number**2 for number in range(10)]


def test_the_count_is_the_cardinality():
    assert dataset(tf.data.Dataset.range(10)).count == 10
    assert dataset(tf.data.Dataset.range(10).repeat()).count is None
    assert dataset(tf.data.Dataset.range(10).filter(lambda number: number > 3)).count is None


def test_endless_data_stays_endless():
    plan = plan_pipeline(tf.data.Dataset.range(10).repeat(), batch_size=4)
    assert int(plan.build().cardinality()) == tf.data.INFINITE_CARDINALITY
    assert "steps_per_epoch" in str(plan)
    assert plan.layout.cached is False


def test_the_plan_says_what_follows_from_an_unknown_count():
    source = tf.data.Dataset.range(10).filter(lambda number: number > 3)
    assert "one optimizer iteration too many" in str(plan_pipeline(source, batch_size=4))
    assert "optimizer" not in str(plan_pipeline(source, batch_size=4, training=False))


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"expects a tf\.data\.Dataset\. Received: int"):
        dataset(3)


def test_an_empty_dataset_is_refused():
    with pytest.raises(PipelineError, match="at least one example in dataset"):
        build_pipeline(tf.data.Dataset.range(10).filter(lambda number: number < 0))


def test_failures_of_the_given_dataset_name_the_element():
    failing = tf.data.Dataset.range(5).map(lambda number: 6 // (number - 2))
    with pytest.raises(PipelineError, match="Reading element 2 of dataset failed"):
        build_pipeline(failing, batch_size=2)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"x": x}])
def test_shapes_that_agree_become_static_and_the_structure_stays(wrap):
    def generate():
        return (wrap([number] * 3) for number in range(6))

    spec = wrap(tf.TensorSpec([None], tf.int32))
    built = build_pipeline(tf.data.Dataset.from_generator(generate, output_signature=spec), batch_size=2)
    tf.nest.assert_same_structure(built.element_spec, spec)
    assert tf.nest.flatten(built.element_spec)[0].shape.as_list() == [2, 3]
    assert sum(1 for _ in built) == 3
