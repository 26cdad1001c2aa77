"""`PipelinePlan.at` under `fit`, on the device, in several processes; what it reads, says and refuses."""

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from iterations import contents, noting
from quick import first_quick

from tfopt.errors import UnsupportedError
from tfopt.model.batches import first_batch, looked_at
from tfopt.pipelines import RandomCrop, Source, build_pipeline, per_batch, plan_pipeline, profile_pipeline
from tfopt.pipelines.device.device_stage import stage_of
from tfopt.pipelines.plan import place_of, plan_of
from tfopt.pipelines.shared.epochs import Place, Position
from tfopt.pipelines.sources import parts
from tfopt.pipelines.stages import batch_stages

COUNT, BATCH, STEPS = 50, 8, 7
OPTIONS = {"batch_size": BATCH, "remainder": "keep", "seed": 3}


def scaled(number, seed):
    return tf.cast(number, tf.float32) * tf.random.stateless_uniform((), seed)


def trained_on(dataset, epochs, **options):
    """The labels of each batch that `fit` took, in order."""
    seen = []

    class Recording(keras.Sequential):
        def train_step(self, data):
            tf.numpy_function(lambda labels: seen.append(labels.tolist()), [data[1]], [])
            return super().train_step(data)

    model = Recording([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(dataset, epochs=epochs, verbose=0, **options)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "class_weight"),
    [("memory", None), (None, dict.fromkeys(range(50), 2.0))],
)
def test_epochs_of_fit_are_met_where_it_read_them(cache, class_weight):
    """It opens two iterators an epoch and reads one, also of what it maps for its class weights."""
    rows = np.zeros((COUNT, 1), "float32"), np.arange(COUNT)
    plan = plan_pipeline(rows, cache=cache, **OPTIONS)
    weights = {} if class_weight is None else {"class_weight": class_weight}
    seen = trained_on(plan.build(), 4, **weights)
    moved = plan.at(epoch=1, batch=2).build()
    labels = [batch[1] for batch in contents(moved)]
    assert labels == seen[STEPS + 2 : 2 * STEPS]
    assert int(moved.map(lambda x, y: (x, y)).cardinality()) == STEPS
    iter(moved)
    assert trained_on(moved, 2, **weights) == seen[2 * STEPS :]


def test_an_epoch_begins_when_its_first_batch_is_read():
    plan = plan_pipeline(np.arange(COUNT), **OPTIONS)
    epochs = [contents(plan.at(number).build()) for number in range(5)]
    dataset = plan.build()
    opened = iter(dataset)
    assert contents(dataset) == epochs[0]
    left_early = contents([next(iter(dataset))])
    assert left_early == epochs[1][:1]
    assert contents(opened) == epochs[2], "opened first, and read third"
    place_of(dataset).move(replace(place_of(dataset).position, epoch=1, batch=3))
    assert [contents(dataset) for _ in range(2)] == [epochs[1][3:], epochs[2]]


@pytest.mark.parametrize("source", [np.arange(COUNT), tf.data.Dataset.range(COUNT)], ids=["by position", "in a buffer"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_iterators_that_are_read_in_turn_have_an_epoch_each(source, shuffle):
    plan = plan_pipeline(source, augment=scaled, shuffle=shuffle, **OPTIONS)
    epochs = [contents(plan.at(number).build()) for number in range(2)]
    dataset = plan.build()
    iterators = [iter(dataset), iter(dataset)]
    read = [[next(each) for each in iterators] for _ in range(STEPS)]
    assert [contents(batches) for batches in zip(*read, strict=True)] == epochs


def test_a_look_at_the_first_batch_takes_no_epoch():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    dataset = plan_pipeline((np.zeros((COUNT, 1), "float32"), np.arange(COUNT)), **OPTIONS).build()
    seen = contents([first_batch(model, dataset)])
    with pytest.raises(ZeroDivisionError), looked_at(dataset):
        raise ZeroDivisionError(next(iter(dataset)))
    assert place_of(dataset).position.is_start
    assert contents(dataset)[:1] == seen


def test_positions_that_no_iterator_took_are_forgotten():
    place = Place(Position(7))
    place.move(Position(7, 0, 4), Position(7, 1))
    place.settle()
    assert place.position == Position(7, 1)
    place.begin([7, 5, 0, 1])  # of an iterator that was restored, and taken elsewhere
    assert place.position == Position(7, 6)


@pytest.mark.parametrize("steps", [None, 3])
def test_a_second_fit_goes_on_where_the_first_one_ended(steps):
    """Also with epochs of other lengths: the iterator that `fit` leaves is not read further."""
    rows = np.zeros((COUNT, 1), "float32"), np.arange(COUNT)
    plan = plan_pipeline(rows, **OPTIONS)
    epochs = [[labels for _, labels in contents(plan.at(number).build())] for number in range(3)]
    dataset = plan.build()
    first = trained_on(dataset, 2, steps_per_epoch=steps)
    assert first == (epochs[0] + epochs[1] if steps is None else epochs[0][:6])
    assert trained_on(dataset, 1) == epochs[2 if steps is None else 1]


def counting(calls):
    """A source that is read by position, and notes which rows it is asked for."""

    def source(**options):
        return Source(name="rows", dataset=lambda: tf.data.Dataset.range(COUNT), count=COUNT, **options)

    return source(at=lambda positions: positions.map(noting(calls))), source(decode=noting(calls))


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"training": False, "seed": None}])
@pytest.mark.parametrize("which", [0, 1])
def test_nothing_before_the_position_is_read(options, which):
    """Of a source without `at`, the raw elements are, but not decoded."""
    calls = []
    plan = plan_pipeline(counting(calls)[which], cache=None, **OPTIONS | options)
    dataset = plan.build()
    assert contents(dataset)
    expected = contents(dataset)[3:]
    calls.clear()
    moved = plan.at(1, 3).build()
    iter(moved)
    assert calls == [], "an iteration that is not read"
    moved = plan.at(1, 3).build()
    assert contents(moved) == expected
    assert sorted(calls) == sorted(number for batch in expected for (numbers,) in [batch] for number in numbers)


def test_examples_for_a_cache_are_computed_once():
    calls = []
    plan = plan_pipeline(counting(calls)[1], cache="memory", **OPTIONS)
    moved = plan.at(1, 3).build()
    calls.clear()
    for _ in range(3):
        assert contents(moved)
    assert sorted(calls) == list(range(COUNT))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    first_quick(
        [
            {"augment": per_batch(scaled)},
            {"shuffle": False, "remainder": "drop"},
            {"shuffle": False, "augment": per_batch(scaled)},
            {},
        ],
        2,
    ),
)
def test_the_device_stage_begins_there_too(options):
    plan = plan_pipeline(np.arange(COUNT), cache="device", **OPTIONS | options)
    stage, moved = stage_of(plan.build()), stage_of(plan.at(1, 4).build())
    assert contents(stage.elements)
    iter(stage.elements)
    epochs = [contents(map(stage.batch, stage.elements)) for _ in range(3)]
    assert [contents(map(moved.batch, moved.elements)) for _ in range(3)] == [epochs[0][4:], *epochs[1:]]
    assert int(moved.elements.cardinality()) == moved.steps == stage.steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "remainder", "shuffle"),
    first_quick([(52, "drop", True), (COUNT, "keep", True), (COUNT, "keep", False), (52, "drop", False)]),
)
def test_each_of_several_processes_goes_on_with_its_part(monkeypatch, count, remainder, shuffle):
    """Of 52 examples one process has a batch more than the others, of 50 all have an equal number."""
    monkeypatch.setattr(batch_stages, "distributed", lambda dataset, part: dataset)
    for index in range(3):
        monkeypatch.setattr(parts, "_place", lambda index=index: (index, 3))
        options = {"augment": scaled, "shuffle": shuffle, "batch_size": 9, "remainder": remainder}
        plan = plan_pipeline(np.arange(count), **OPTIONS | options)
        dataset = plan.build()
        epochs = [contents(dataset) for _ in range(3)]
        for batch in (2, int(plan.to_dict()["steps_per_epoch"])):
            moved = plan.at(1, batch).build()
            assert [contents(moved), contents(moved)] == [epochs[1][batch:], epochs[2]]


@pytest.mark.parametrize("what", ["bucketed", "in two processes"])
def test_the_epoch_after_a_resumed_one_is_whole(monkeypatch, what):
    data, options = np.arange(COUNT), {}
    if what == "bucketed":
        data, options = [[number] * (1 + number % 30) for number in range(COUNT)], {"bucket": True}
    else:
        monkeypatch.setattr(batch_stages, "distributed", lambda dataset, part: dataset)
        monkeypatch.setattr(parts, "_place", lambda: (0, 2))
    plan = plan_pipeline(data, **OPTIONS | options)
    steps = len(list(plan.build()))
    moved = plan.at(0, 3).build()
    assert [len(list(moved)) for _ in range(2)] == [steps - 3, steps]


def test_the_plan_says_where_it_begins():
    plan = plan_pipeline(np.arange(COUNT), **OPTIONS)
    assert "begin" not in str(plan)
    assert "position" not in plan.to_dict()
    moved = plan.at(2, 3)
    assert "\n  begin     epoch 2, batch 3  examples before it are not read\n" in str(moved)
    assert moved.to_dict()["position"] == {"epoch": 2, "batch": 3}
    assert "epochs before it are not read" in str(plan.at(1))
    cached = plan_pipeline(np.arange(COUNT), cache="memory", **OPTIONS)
    assert "read for the cache, and dropped" in " ".join(str(cached.at(0, 1)).split())
    generated = plan_pipeline(tf.data.Dataset.range(COUNT), **OPTIONS)
    assert "are read and dropped" in " ".join(str(generated.at(0, 1)).split())
    assert str(moved.at()) == str(plan)


def test_its_stages_are_profiled_from_the_start():
    plan = plan_pipeline(np.arange(COUNT), augment=scaled, **OPTIONS)
    assert "augment" in [stage.name for stage in profile_pipeline(plan.at(1, STEPS), 0.2).stages]


def test_a_dataset_knows_its_plan():
    plan = plan_pipeline(np.arange(COUNT), **OPTIONS).at(1)
    for dataset in (plan.build(), plan_pipeline(np.arange(COUNT), cache="device", **OPTIONS).build()):
        assert plan_of(dataset).options.seed == 3
        assert plan_of(dataset.map(tf.abs)) is plan_of(dataset.take(2)) is None
    assert plan_of(plan.build()) is plan
    assert plan_of(build_pipeline(np.arange(COUNT), training=False)).position.batch == 0
    assert plan_of(tf.data.Dataset.range(3)) is None


def unordered():
    return tf.data.Dataset.range(COUNT).map(lambda number: number + 1, num_parallel_calls=2, deterministic=False)


@pytest.mark.parametrize(
    ("data", "options", "found"),
    [
        (np.arange(COUNT), {}, "Found a shuffle without a seed. What to do: pass seed="),
        (np.arange(COUNT), {"shuffle": False, "augment": tf.abs}, "Found an `augment` without a seed"),
        (np.zeros((COUNT, 8, 8, 3)), {"shuffle": False, "crop": RandomCrop(4)}, "Found a RandomCrop without a seed"),
        (unordered(), {"shuffle": False}, "deterministic=False in the source. What to do: take it out"),
        (tf.data.Dataset.range(COUNT).shuffle(9), {"training": False}, r"Dataset\.shuffle in the source"),
        (
            np.arange(COUNT),
            {"shuffle": False, "cache": None, "transform": lambda row: (row, tf.random.uniform(()))},
            "in `transform`",
        ),
    ],
)
def test_what_would_not_be_the_same_is_refused(data, options, found):
    plan = plan_pipeline(data, batch_size=BATCH, remainder="keep", **options)
    with pytest.raises(UnsupportedError, match=found):
        plan.at()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"epoch": -1}, ValueError, "epoch to be at least 0"),
        ({"epoch": 1.0}, TypeError, "epoch to be an integer"),
        ({"batch": "2"}, TypeError, "batch to be an integer"),
        ({"batch": STEPS + 1}, ValueError, f"batch to be from 0 to {STEPS}"),
    ],
)
def test_a_position_is_checked(arguments, error, message):
    plan = plan_pipeline(np.arange(COUNT), **OPTIONS)
    with pytest.raises(error, match=message):
        plan.at(**arguments)
