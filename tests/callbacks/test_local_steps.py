"""Local SGD equals trainings of single devices whose weights are averaged by NumPy."""

import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from local_cases import CASES, FEW, by_hand
from quick import SLOW, in_shares
from trained_apart import distance, ended, start

from tfopt.callbacks import LocalSteps
from tfopt.distribute import compress_gradients, shard_optimizer
from tfopt.errors import UnsupportedError

WHERE = ["here", "workers0", "workers1"]
LIMITS = {"float64": 1e-12, "mixed_float16": 1e-3, "mixed_bfloat16": 1e-2}


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What a share of the cases became on two devices, in two processes, and on one device after another."""
    folder = tmp_path_factory.mktemp("local")
    for where, workers in (("here", 0), ("truth", 0), ("workers", 2)):
        ended(start("local_training.py", folder, where, request.param, workers=workers))
    return {name: pickle.loads((folder / f"{name}.pickle").read_bytes()) for name in [*WHERE, "truth"]}


in_few = pytest.mark.parametrize("found", [SLOW], indirect=True, scope="module")
ROWS = [(where, name) for where in WHERE for name in CASES if where == "here" or not CASES[name].overlapped]


@pytest.mark.parametrize(
    ("found", "where", "name"),
    in_shares(ROWS, lambda where, name: name in FEW[where.rstrip("01")]),
    indirect=["found"],
    scope="module",
)
def test_weights_are_the_mean_of_separate_trainings(found, where, name):
    case = CASES[name]
    trained = found[where][name]
    assert not isinstance(trained, str), trained
    limit = 1e-6 if case.outer else LIMITS[case.dtype]  # Keras keeps the outer learning rate in 32 bits
    truth = found["truth"][name]
    assert distance(trained["weights"], truth["weights"]) <= limit
    assert trained["loss"] == pytest.approx(truth["loss"], rel=max(limit, 1e-6))
    assert (trained["iterations"], trained["scale"]) == (truth["iterations"], truth["scale"])
    assert trained["apart"] == 0
    assert trained["apart at epoch's ends"] == [0] * case.epochs
    assert trained["stock again"]


@in_few
@pytest.mark.parametrize("where", WHERE)
def test_each_float16_replica_scales_its_own_loss_until_the_first_ones_scale_is_taken(found, where):
    name = "float16, overflow in the second"
    first, second = found["truth"][name]["scales"][-1]
    assert first > second
    assert found[where][name]["scale"] == first


@in_few
@pytest.mark.parametrize("where", WHERE)
def test_numpy_alone_finds_the_same(found, where):
    keras.config.set_floatx("float64")
    try:
        assert distance(found[where]["sgd"]["weights"], by_hand(CASES["sgd"])) < 1e-12
        assert distance(found[where]["every step"]["weights"], by_hand(CASES["every step"])) < 1e-12
    finally:
        keras.config.set_floatx("float32")


@in_few
def test_every_step_is_synchronous_training(found):
    keras.config.set_floatx("float64")
    try:
        case = CASES["every step"]
        model = case.model()
        model.fit(case.dataset(), epochs=case.epochs, verbose=0, shuffle=False)
    finally:
        keras.config.set_floatx("float32")
    assert distance(found["here"]["every step"]["weights"], model.get_weights()) < 1e-12
    assert distance(found["here"]["sgd"]["weights"], model.get_weights()) > 1e-4


@in_few
@pytest.mark.parametrize("where", WHERE)
def test_192_steps_synchronise_25_times(found, where):
    counted = found[where]["counted"]
    assert counted["synchronizations"] == 25  # after each 8 steps, and once the momentum
    assert counted["iterations"] == 193
    assert counted["local step"] == 0
    assert counted["synchronous step"] == 2  # two processes: gradients, and logs; two devices: one each
    assert counted["end of a round"] == ([2, 2] if where == "here" else [1, 1])


@in_few
@pytest.mark.parametrize("where", WHERE)
def test_a_fit_after_an_interrupted_one_is_synchronous(found, where):
    interrupted = found[where]["interrupted"]
    assert interrupted["within"] > 0 or where != "here"
    assert interrupted["saved"] == interrupted["after"] == 0
    assert interrupted["function"] != "LocalFunction"


@in_few
@pytest.mark.parametrize("where", WHERE)
def test_a_training_resumes_from_a_checkpoint(found, where):
    resumed = found[where]["resumed"]
    assert distance(resumed["whole"], resumed["resumed"]) == 0
    assert resumed["at"] == 0
    assert resumed["before"] > 0 or where != "here"


def net(optimizer="sgd", layers=()):
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer, "mse", jit_compile=False)
    return model


DATA = tf.data.Dataset.from_tensors((np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))).repeat(5)


def outer():
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


def test_one_replica_trains_as_without_it():
    local = LocalSteps(2)
    model = net()
    model.fit(DATA, verbose=0, shuffle=False, callbacks=[local])
    assert type(model.train_function).__name__ != "LocalFunction"
    assert local.synchronizations == 0


def test_the_outer_step_of_one_replica():
    keras.utils.set_random_seed(1)
    model = net(keras.optimizers.SGD(0.1))
    weight = model.get_weights()[0].astype("float64")
    local = LocalSteps(2, outer=outer())
    model.fit(DATA, verbose=0, shuffle=False, callbacks=[local])
    velocity, anchor = 0.0, weight
    for steps in (2, 2, 1):
        for _ in range(steps):
            weight = weight - 0.1 * 2 * (weight.sum() - 1)
        change = anchor - weight
        velocity = 0.9 * velocity + change
        anchor = weight = anchor - 0.7 * (change + 0.9 * velocity)
    np.testing.assert_allclose(model.get_weights()[0], weight, rtol=1e-5)
    assert local.synchronizations == 3
    assert "evaluate" not in vars(model)


class Failing(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise RuntimeError("planted")


@pytest.mark.parametrize("compiled_again", [False, True])
def test_a_fit_beside_a_kept_exception_trains_without_local_steps(compiled_again):
    """A notebook keeps the exception, and with it all of the interrupted fit."""
    model, twin = net(), net()
    with pytest.raises(RuntimeError, match="planted") as kept:
        model.fit(DATA, verbose=0, shuffle=False, callbacks=[LocalSteps(8, outer=outer()), Failing()])
    assert kept.tb is not None
    if compiled_again:
        model.compile("sgd", "mae", jit_compile=False)
        twin.compile("sgd", "mae", jit_compile=False)
    model.set_weights([np.ones((2, 1))])
    twin.set_weights([np.ones((2, 1))])
    for each in (model, twin):
        each.fit(DATA, verbose=0, shuffle=False)
    np.testing.assert_array_equal(model.get_weights(), twin.get_weights())
    assert model.train_function is not None
    assert type(model.train_function).__name__ != "LocalFunction"
    assert not {"evaluate", "make_train_function"} & vars(model).keys()


def test_bad_arguments():
    with pytest.raises(TypeError, match="every to be an integer"):
        LocalSteps("8")
    with pytest.raises(ValueError, match="at least 1"):
        LocalSteps(0)
    with pytest.raises(TypeError, match=r"Expected outer to be one of keras\.optimizers"):
        LocalSteps(outer="sgd")
    with pytest.raises(UnsupportedError, match="Pass its inner_optimizer"):
        LocalSteps(outer=keras.optimizers.LossScaleOptimizer(outer()))


class OwnUpdate(keras.optimizers.SGD):
    """An optimizer that may synchronise."""

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        super()._backend_update_step(grads, trainable_variables, learning_rate)


class OwnFunction(keras.Sequential):
    """A model with its own training function."""

    def make_train_function(self, force=False):
        super().make_train_function(force)


def own_function():
    model = OwnFunction([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def averages():
    return keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=2)


REFUSED = {
    "shard_optimizer": lambda: net(shard_optimizer(keras.optimizers.Adam())),
    "compress_gradients": lambda: compress_gradients(net()),
    "OwnUpdate with its own _backend_update_step": lambda: net(OwnUpdate()),
    "ema_overwrite_frequency": lambda: net(averages()),
    "synchronized=True": lambda: net(layers=[keras.layers.BatchNormalization(synchronized=True)]),
    "OwnFunction overrides": own_function,
}


@pytest.mark.parametrize("found", REFUSED)
def test_what_needs_the_others_in_each_step_is_refused(found):
    with pytest.raises(UnsupportedError, match=found):
        REFUSED[found]().fit(DATA, verbose=0, shuffle=False, callbacks=[LocalSteps(outer=outer())])
