"""`balance`: the shares of classes in each batch, how often examples are read, and what is refused."""

import json
from itertools import pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfopt.callbacks import TrainingCheckpoint
from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines import build_pipeline, mix, plan_pipeline, profile_pipeline
from tfopt.pipelines.shared.epochs import Position
from tfopt.pipelines.stages.balance import Balance, Class

LABELS = np.repeat([0, 1, 2], [60, 20, 10])
ROWS = np.arange(90), LABELS


def epochs(dataset, number=1):
    """The batches of each epoch as pairs of arrays."""
    return [list(dataset.as_numpy_iterator()) for _ in range(number)]


def read_times(read):
    return np.bincount(np.concatenate([x for epoch in read for x, _ in epoch]), minlength=90)


def test_each_batch_has_all_classes_alike():
    dataset = build_pipeline(ROWS, batch_size=9, balance="classes", seed=1, remainder="drop")
    (batches,) = epochs(dataset)
    assert len(batches) == len(dataset) == 10
    assert all(np.array_equal(np.bincount(labels), [3, 3, 3]) for _, labels in batches)
    assert all(np.array_equal(LABELS[x], labels) for x, labels in batches)


def test_over_epochs_all_examples_of_a_class_are_read_equally_often():
    dataset = build_pipeline(ROWS, batch_size=10, balance={0: 0.5, 1: 0.25, 2: 0.25}, seed=1)
    times = read_times(epochs(dataset, 7))
    assert np.unique(times[:60]).tolist() == [5, 6]  # 315 of 60
    assert np.unique(times[60:80]).tolist() == [8, 9]  # 161 of 20
    assert np.unique(times[80:]).tolist() == [15, 16]  # 154 of 10


def test_what_is_left_out_is_missed_by_all_alike():
    labels = np.repeat([0, 1], [105, 100])
    dataset = build_pipeline((np.arange(205), labels), batch_size=10, balance="classes", seed=1)
    times = np.bincount(np.concatenate([x for epoch in epochs(dataset, 8) for x, _ in epoch]), minlength=205)
    assert np.unique(times[:105]).tolist() == [7, 8]  # 800 of 105
    assert times[105:].tolist() == [8] * 100


def test_epochs_differ_and_follow_from_the_seed():
    one, other, again = (build_pipeline(ROWS, batch_size=10, balance="classes", seed=seed) for seed in (1, 2, 1))
    first, second = ([x.tolist() for x, _ in epoch] for epoch in epochs(one, 2))
    assert first != second
    assert first != [x.tolist() for x, _ in epochs(other)[0]]
    assert [first, second] == [[x.tolist() for x, _ in epoch] for epoch in epochs(again, 2)]


def test_a_plan_begins_anywhere():
    plan = plan_pipeline(ROWS, batch_size=10, balance="classes", seed=1)
    whole = [x.tolist() for epoch in epochs(plan.build(), 3) for x, _ in epoch]
    moved = [x.tolist() for epoch in epochs(plan.at(1, 4).build(), 2) for x, _ in epoch]
    assert moved == whole[13:]


def test_the_first_epoch_of_a_profile_is_that_of_the_training():
    plan = plan_pipeline(ROWS, batch_size=10, balance="classes", seed=1)
    one, other = (
        [x.tolist() for x, _ in dataset.as_numpy_iterator()] for dataset in (plan.first_epoch(), plan.build())
    )
    assert one == other
    assert profile_pipeline(plan, seconds=0.2).name == "arrays"


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    weights=st.lists(st.integers(1, 20), min_size=12, max_size=12),
    epoch=st.integers(0, 50),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_any_stretch_of_an_epoch_has_the_shares(sizes, weights, epoch, seed):
    bounds = np.cumsum([0, *sizes])
    members = [np.arange(low, high) for low, high in pairwise(bounds)]
    taken = [10 * weight for weight, _ in zip(weights, sizes, strict=False)]
    classes = tuple(Class(name="", members=at, taken=number) for at, number in zip(members, taken, strict=True))
    order = Balance(name="balance", setting="", reason="", classes=classes).order(Position(seed, epoch))
    assert len(order) == sum(taken)
    for at, number in zip(members, taken, strict=True):
        is_own = np.isin(order, at)
        even = np.arange(1, len(order) + 1) * number / len(order)
        # Each class is within one example of an even pace, and so are all together within one for each class.
        assert np.abs(np.cumsum(is_own) - even).max() < 1 + len(sizes) * number / len(order)
        own, first = order[is_own], -epoch * number % len(at)  # where its next permutation begins
        whole = own[first : first + (number - first) // len(at) * len(at)].reshape(-1, len(at))
        assert np.array_equal(np.sort(whole, axis=1), np.broadcast_to(at, whole.shape))


def test_names_of_classes_split_augment_and_the_plan(tmp_path):
    for name, count in (("cat", 30), ("dog", 10)):
        (tmp_path / name).mkdir()
        for number in range(count):
            image = np.full((4, 4, 3), number, "uint8")
            tf.io.write_file(str(tmp_path / name / f"{number}.png"), tf.io.encode_png(image))
    plan = plan_pipeline(
        str(tmp_path),
        batch_size=8,
        balance={"cat": 1, "dog": 3},
        split=0.2,
        seed=1,
        augment=lambda image, label: (image, label),
    )
    stage = plan.stage("balance")
    dogs = 32 - stage.classes[0].members.size
    assert stage.setting == "cat 25 %, dog 75 %"
    assert f"{24 / dogs:.3g} of dog; equal within a class over the epochs" in stage.reason
    assert "reads some examples more often" in plan.stage("cache").reason
    (batches,) = epochs(plan.build())
    assert [int(label.sum()) for _, label in batches] == [6] * 4
    assert plan.to_dict()["balance"]["cat"]["examples_per_epoch"] == 8


@pytest.mark.parametrize("kind", ["float", "text", "bool", "npy", "large numbers", "columns"])
def test_labels_of_any_kind(tmp_path, kind):
    labels = {
        "float": LABELS.astype("float32"),
        "text": np.array(["a", "b", "c"])[LABELS],
        "bool": LABELS > 0,
        "npy": LABELS,
        "large numbers": LABELS + 1234560,
        "columns": LABELS[:, None],
    }[kind]
    source = ROWS[0], labels
    if kind == "npy":
        paths = [str(tmp_path / name) for name in ("x.npy", "y.npy")]
        for path, rows in zip(paths, source, strict=True):
            np.save(path, rows)
        source = tuple(paths)
    (batches,) = epochs(build_pipeline(source, batch_size=6, balance="classes", seed=1, remainder="drop"))
    kinds = len(np.unique(labels))
    assert all(np.unique(label, return_counts=True)[1].tolist() == [6 // kinds] * kinds for _, label in batches)


def test_fit_resumes_in_place(tmp_path):
    class Seen(keras.callbacks.Callback):
        def __init__(self, stop=None):
            super().__init__()
            self.stop = stop

        def on_train_batch_end(self, batch, logs=None):
            if batch == self.stop:
                raise KeyboardInterrupt

    def train(*callbacks):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        data = ROWS[0][:, None].astype("float32"), LABELS
        dataset = build_pipeline(data, batch_size=10, balance="classes")
        tf.random.set_seed(1)
        model.fit(dataset, epochs=2, verbose=0, callbacks=[*callbacks])
        return model.get_weights()

    whole = train(TrainingCheckpoint(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        train(TrainingCheckpoint(tmp_path / "cut", every_steps=1), Seen(4))
    assert all(map(np.array_equal, whole, train(TrainingCheckpoint(tmp_path / "cut"))))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"balance": "class"}, ValueError, "classes"),
        ({"balance": 3}, TypeError, "the share of each class"),
        ({"balance": {0: -1}}, ValueError, "at least 0"),
        ({"balance": {0: 0}}, ValueError, "above 0"),
        ({"balance": {0: 1, 1: 1}}, ValueError, "Found none of 2"),
        ({"balance": {0: 1, 1: 1, 2: 1, 7: 1}}, ValueError, "Found 7"),
        ({"balance": {0: 1, 1: 1, 2: 1e-6}}, PipelineError, "Found none of 2, whose shares are too small"),
        ({"balance": {0: 1, "0": 1, 1: 1, 2: 1}}, ValueError, "Found two"),
        ({"balance": "classes", "training": False}, ValueError, "shuffle=True"),
        ({"balance": "classes", "cache": "memory"}, ValueError, "cache='memory'"),
        ({"balance": "classes", "cache": "device"}, ValueError, "cache='device'"),
        ({"balance": "classes", "service": "grpc://host:1"}, ValueError, "no `service`"),
        ({"balance": "classes", "bucket": True}, ValueError, "no `bucket`"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, error, said):
    with pytest.raises(error, match=said):
        plan_pipeline(ROWS, batch_size=10, **options)


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        (np.zeros(10), ValueError, r"\(x, label\)"),
        ((np.zeros(10), np.zeros((10, 2))), ValueError, r"\(x, label\)"),
        ((np.zeros(10), np.linspace(0, 1, 10)), ValueError, "Found 0.111.* in example 1 of arrays"),
        (tf.data.Dataset.from_tensor_slices(ROWS), UnsupportedError, "by position"),
    ],
)
def test_data_without_classes_are_refused(source, error, said):
    with pytest.raises(error, match=said):
        plan_pipeline(source, batch_size=2, balance="classes")


def test_plans_are_values():
    shares = {key: np.float32(1) for key in np.unique(LABELS)}
    one, other = (plan_pipeline(ROWS, batch_size=10, seed=1, balance=shares).stage("balance") for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert "array" not in repr(one)
    values = json.loads(json.dumps(plan_pipeline(ROWS, batch_size=10, balance=shares).to_dict()))
    assert values["options"]["balance"] == {"0": 1.0, "1": 1.0, "2": 1.0}


def test_mixtures_and_loaders_are_refused():
    plan = plan_pipeline(ROWS, batch_size=10, balance="classes")
    with pytest.raises(UnsupportedError, match="mix a source of each class"):
        mix([(plan, 1), (ROWS, 1)], batch_size=10)
    with pytest.raises(UnsupportedError, match="Expected no 'balance'"):
        plan_pipeline(lambda: iter([ROWS]), balance="classes")
