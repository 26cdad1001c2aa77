"""A training that is interrupted and goes on ends as one that was not: weights, optimizer, metrics and history."""

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from resumed_fits import CASES, EPOCHS, MOMENTS, Case, Interrupt, X, Y, dense_net, difference

from tfopt.callbacks import TrainingCheckpoint
from tfopt.pipelines import build_pipeline, plan_pipeline

_QUICK = {
    ("arrays", "within an epoch"),
    ("plateau", "in the validation"),
    ("pipeline", "at an epoch's last step"),
    ("several steps a call, pipeline", "at an epoch's last step"),
    ("mixture", "soon in an epoch"),
}
_ALL = [(case, moment) for case in CASES for moment in MOMENTS]


def _marked(number, case, moment):
    # The slow ones hold every fourth case once, at one moment after the other.
    in_case, of_case = divmod(number, len(MOMENTS))
    slow = in_case % 4 == 0 and of_case == in_case // 4 % len(MOMENTS)
    marks = [] if (case, moment) in _QUICK else [pytest.mark.slow if slow else pytest.mark.campaign]
    return pytest.param(case, moment, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["accumulation", "generator of TensorFlow's"])
def test_an_interruption_in_the_last_validation(tmp_path, case):
    """No step is left, and yet what was saved then is all that the training has."""
    strategy = tf.distribute.get_strategy()
    resumed = CASES[case].interrupted(tmp_path, "validation", EPOCHS - 1, 1, strategy=strategy)
    again = CASES[case].fit(TrainingCheckpoint(tmp_path), strategy=strategy)
    assert again[1] == resumed[1]
    assert len(again[0]) == len(resumed[0])


@pytest.mark.slow
def test_a_second_interruption_in_the_same_validation(tmp_path):
    case, strategy = CASES["plateau"], tf.distribute.get_strategy()
    for _ in range(2):
        with pytest.raises(SystemExit):
            case.fit(TrainingCheckpoint(tmp_path), Interrupt("validation", 1, 1), strategy=strategy)
    variables, history = case.fit(TrainingCheckpoint(tmp_path), strategy=strategy)
    whole = case.fit(strategy=strategy)
    assert history == whole[1]
    assert all(map(np.array_equal, variables, whole[0]))


def in_one_notebook(case, folder, moment):
    """Whether a training that goes on with the same dataset, whose shuffle has drawn further, ends as a whole one."""
    variables, history = CASES[case].fit(strategy=tf.distribute.get_strategy())
    data = CASES[case].data()
    held = replace(CASES[case], data=lambda: data)
    again = held.interrupted(folder, *MOMENTS[moment], strategy=tf.distribute.get_strategy())
    return history == again[1] and all(map(np.array_equal, variables, again[0]))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["within an epoch", "between epochs"])
@pytest.mark.parametrize("case", ["dataset", "shuffled twice", "validation of the same dataset by steps", "pipeline"])
def test_goes_on_with_the_same_dataset(tmp_path, caplog, case, moment):
    assert in_one_notebook(case, tmp_path, moment)
    assert "The epoch starts over" not in caplog.text


@pytest.mark.slow
def test_a_dataset_that_cannot_go_back_begins_its_epoch_again(tmp_path, caplog):
    """The state of a shuffle lies in front of a cache."""
    assert not in_one_notebook("cached", tmp_path, "within an epoch")
    assert "a dataset that was read before in this process" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_pipeline_without_a_seed_goes_on_with_the_one_it_has_drawn(tmp_path, moment):
    """Each run draws another; the one that goes on, and the one that was not interrupted, have the first."""
    seeds = iter([1, 1, 2])

    def drawn():
        tf.random.set_seed(next(seeds))
        return build_pipeline((X, Y), batch_size=8, remainder="keep")

    assert difference(Case(data=drawn), tmp_path, MOMENTS[moment]) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_validation_reads_its_pipeline_before_the_training_reads_on(tmp_path):
    """The training has read a part of an epoch, and the validation the next one, of the same pipeline."""
    assert difference(CASES["validation of the same pipeline by steps"], tmp_path, ("validation", 0, 1)) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps", ["", " by steps"])
def test_what_a_validation_has_drawn_is_drawn_again(tmp_path, steps):
    """It shares the shuffle of the training data."""
    case = CASES[f"validation of the same dataset{steps}"]
    assert difference(case, tmp_path, MOMENTS["in the validation"]) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_pipeline_that_begins_in_the_middle_goes_on_from_there(tmp_path):
    case = Case(data=lambda: plan_pipeline((X, Y), batch_size=8, seed=4, remainder="keep").at(1, 3).build())
    assert difference(case, tmp_path, ("step", 0, 1)) is None


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "said"), [(None, "is shuffled or batched otherwise than in the checkpoint"), (4, "")])
def test_another_order_of_the_same_numbers_is_noticed(tmp_path, caplog, seed, said):
    """Without a seed a cache may change the order, which depends on free memory; with one it does not."""
    options = {"batch_size": 8, "remainder": "keep", "seed": seed, "transform": lambda x, y: (2 * x, y)}
    caches = iter(["memory", None])
    case = Case(data=lambda: build_pipeline((X, Y), cache=next(caches), **options))
    case.interrupted(tmp_path, *MOMENTS["within an epoch"], strategy=tf.distribute.get_strategy())
    assert ("The epoch starts over" in caplog.text) is bool(said)
    assert said in caplog.text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda data: data.shuffle(40, seed=3).map(lambda x, y: (2 * x, y)).batch(8), "a dataset with other stages"),
        (lambda data: data.shuffle(4, seed=3).batch(8), "a shuffle with another buffer or seed"),
        (lambda data: data.shuffle(40, seed=3).batch(8).prefetch(1), ""),
    ],
)
def test_data_of_changed_code_are_named(tmp_path, caplog, changed, said):
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    versions = iter([data.shuffle(40, seed=3).batch(8), changed(data)])
    case = Case(data=lambda: next(versions))
    case.interrupted(tmp_path, *MOMENTS["within an epoch"], strategy=tf.distribute.get_strategy())
    assert (f"Found: {said}" in caplog.text and "The epoch starts over" in caplog.text) is bool(said)
    assert bool(caplog.text) is bool(said)


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["classes", {0: 0.9, 1: 0.1}])
def test_another_balance_is_noticed(tmp_path, caplog, balance):
    options = {"batch_size": 8, "remainder": "keep", "seed": 4}
    balances = iter([balance, {0: 0.5, 1: 0.5} if balance == "classes" else "classes"])
    case = Case(data=lambda: build_pipeline((X, Y), balance=next(balances), **options))
    case.interrupted(tmp_path, *MOMENTS["within an epoch"], strategy=tf.distribute.get_strategy())
    changed = balance != "classes"  # the same shares by another name are the same order
    assert ("a pipeline that is shuffled or batched otherwise" in caplog.text) is changed


@pytest.mark.parametrize("steps", [np.int64(2), None])
def test_validation_is_what_fit_was_told(tmp_path, steps):
    """Also where a function that calls `fit` has variables of those names."""
    val_x, validation_steps = tf.data.Dataset.range(3), 3  # noqa: F841
    read = []

    class Read(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            read.append(batch)

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    net = dense_net()
    net.compile("adam", "binary_crossentropy")
    options = {"validation_data": data, "validation_steps": steps} if steps else {"validation_data": (X[:20], Y[:20])}
    net.fit(data, shuffle=False, verbose=0, callbacks=[TrainingCheckpoint(tmp_path), Read()], **options)
    assert read == ([0, 1] if steps else [0])


@pytest.mark.slow
def test_a_cache_in_the_order_of_another_seed_is_noticed(tmp_path, caplog):
    """As `adapt` fills it, before a fit that goes on."""
    seeds = iter([1, 2])

    def read_before():
        tf.random.set_seed(next(seeds))
        dataset = build_pipeline(
            (X, Y), batch_size=8, remainder="keep", cache="memory", transform=lambda x, y: (2 * x, y)
        )
        assert len(list(dataset)) == 7
        return dataset

    Case(data=read_before).interrupted(tmp_path, *MOMENTS["within an epoch"], strategy=tf.distribute.get_strategy())
    assert (
        "Found: a pipeline without seed=, whose cache in memory was read before it could go on. The epoch"
        in caplog.text
    )


@pytest.mark.slow
@pytest.mark.parametrize(("case", "moment"), [_marked(number, *each) for number, each in enumerate(_ALL)])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_ends_as_one_that_was_not_interrupted(tmp_path, case, moment):
    assert difference(CASES[case], tmp_path, MOMENTS[moment]) is None
