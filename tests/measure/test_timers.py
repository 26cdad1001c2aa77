import itertools
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state
from quick import first_quick

import tfopt
from tfopt.errors import PipelineError, TfoptError, UnsupportedError
from tfopt.internals.sources import find
from tfopt.measure import FitTimer, StepTimer, fit_time, one_batch, step_time

SEEDS = getattr(*find("keras.src.random.seed_generator:global_seed_generator"))


class Ticks:
    """A clock that advances by one second each time it is read."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def dataset(examples=40, size=8):
    return tf.data.Dataset.from_tensor_slices(batch(examples)).batch(size)


POLICIES = ("mixed_float16", "float32", "mixed_bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jit", "policy", "measure"),
    first_quick(itertools.product((False, True), POLICIES, (step_time, fit_time)), 2, every=3),
)
def test_the_model_comes_back_bit_for_bit(measure, policy, jit):
    # mixed_float16 as the global policy, so that compile adds a LossScaleOptimizer, whose scale is state too.
    keras.config.set_dtype_policy(policy)
    model = small_net(policy, jit_compile=jit)
    model.fit(dataset(), epochs=2, verbose=0, shuffle=False)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == (policy == "mixed_float16")
    before, train_function, history = state(model), model.train_function, model.history
    measure(model, dataset(), steps=6)
    assert_same_state(before, state(model))
    assert (model.train_function, model.history, model.jit_compile) == (train_function, history, jit)


@pytest.mark.slow
@pytest.mark.parametrize("measure", [step_time, fit_time])
def test_training_goes_on_as_if_never_measured(measure):
    plain, measured = small_net(), small_net()
    measure(measured, dataset(), steps=4)
    for model in (plain, measured):
        model.fit(dataset(), epochs=2, verbose=0, shuffle=False)
    assert_same_state(state(plain), state(measured))


@pytest.mark.parametrize("measure", [step_time, fit_time])
def test_an_unbuilt_model_gets_the_weights_it_would_have_had(measure):
    def unbuilt():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dropout(0.3), keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    plain, measured = unbuilt(), unbuilt()
    measure(measured, dataset(), steps=3)
    for model in (plain, measured):
        model.fit(dataset(), verbose=0, shuffle=False)
    assert_same_state(state(plain), state(measured))


class Noisy(keras.layers.Layer):
    """Draws from Keras' global seed generator, and counts its calls in a variable of TensorFlow's own."""

    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0)

    def call(self, inputs):
        self.calls.assign_add(1)
        return inputs + keras.random.normal(keras.ops.shape(inputs))


@pytest.mark.parametrize("measure", [step_time, fit_time])
def test_state_outside_keras_variables_is_kept(measure):
    keras.utils.set_random_seed(1)
    noisy = Noisy()
    model = keras.Sequential([keras.Input((8, 8, 1)), noisy, keras.layers.Flatten(), keras.layers.Dense(10)])
    # XLA on a GPU does not reach a variable of int32, which TensorFlow keeps on the host.
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    model.fit(dataset(), verbose=0, shuffle=False)
    before = (
        noisy.calls.numpy(),
        SEEDS().state.numpy().tolist(),
    )
    measure(model, dataset(), steps=4)
    assert (
        noisy.calls.numpy(),
        SEEDS().state.numpy().tolist(),
    ) == before


def test_variables_of_a_model_that_runs_eagerly_are_kept():
    noisy = Noisy()
    model = keras.Sequential([keras.Input((8, 8, 1)), noisy, keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    step_time(model, dataset(), steps=2)
    fit_time(model, dataset(), steps=2)
    assert noisy.calls.numpy() == 0


def test_a_step_that_cannot_be_traced_is_refused():
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    plain = model.train_step
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    model.train_step = lambda data: {"x": float(tf.reduce_mean(data[0]))} and plain(data)
    with pytest.raises(UnsupportedError, match="Measure the model without run_eagerly=True"):
        step_time(model, dataset(), steps=2)


class Adversaries(keras.Model):
    """Trains through a step of its own and cannot be called, as a GAN; `fit` trains it."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(1)
        self.own = keras.optimizers.Adam()

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.inner(keras.ops.reshape(data[0], (-1, 64))) ** 2)
        weights = self.inner.trainable_variables
        self.own.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("measure", [step_time, fit_time])
@pytest.mark.parametrize("eager", [False, True])
def test_a_model_with_a_step_and_an_optimizer_of_its_own(measure, eager):
    models = []
    for measured in (False, True):
        keras.utils.set_random_seed(5)
        model = Adversaries()
        model.compile(run_eagerly=eager)
        if measured:
            measure(model, dataset(), steps=3)
        model.fit(dataset(), verbose=0, shuffle=False)
        models.append(model)
    for one, other in zip(*(model.own.variables for model in models), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert_same_state(state(models[0]), state(models[1]))


def test_the_global_seed_is_kept_where_no_graph_shows_it():
    model = keras.Sequential([keras.Input((8, 8, 1)), Noisy(), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    before = SEEDS().state.numpy().tolist()
    step_time(model, dataset(), steps=2)
    assert SEEDS().state.numpy().tolist() == before


def test_state_comes_back_after_an_exception():
    model = small_net()
    model.fit(dataset(), verbose=0, shuffle=False)
    before = state(model)

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fit_time(model, dataset(), callbacks=[Fails()])
    assert_same_state(before, state(model))


TWO_REPLICAS = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from models import batch, small_net
from tfopt.measure import fit_time, step_time

def parts(model):
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return [part.numpy().tobytes() for v in variables for part in getattr(v.value, "values", (v.value,))]

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = small_net(jit_compile=False)
dataset = tf.data.Dataset.from_tensor_slices(batch(40)).batch(8)
model.fit(dataset, verbose=0, shuffle=False)
before = parts(model)
for measure in (step_time, fit_time):
    assert measure(model, dataset, steps=3).examples_per_step == 8
    assert parts(model) == before
print("replicas:", strategy.num_replicas_in_sync, "parts:", len(before))
"""


@pytest.mark.slow
def test_two_replicas_come_back_bit_for_bit():
    """In a process of its own: logical devices are made before TensorFlow starts."""
    folders = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(folders)}
    run = subprocess.run([sys.executable, "-c", TWO_REPLICAS], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "replicas: 2" in run.stdout


def test_the_steps_are_real():
    model = small_net()
    seen = []

    class Watching(keras.optimizers.SGD):
        def apply_gradients(self, pairs):
            tf.py_function(lambda: seen.append(1), [], [])
            return super().apply_gradients(pairs)

    model.compile(Watching(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    step_time(model, dataset(), steps=7, warmup=2)
    assert len(seen) == 1 + 2 + 7
    seen.clear()
    fit_time(model, dataset(), steps=7, warmup=2)
    assert len(seen) == 1 + 2 + 7


def test_a_sample_is_a_block_of_steps_with_one_wait(monkeypatch):
    waits = []
    monkeypatch.setattr("tfopt.measure.timers.wait", lambda: waits.append(1))
    times = StepTimer(small_net(), dataset(), clock=Ticks())(40, warmup=0)
    assert times.steps_per_sample == 4
    assert times.samples_ms == (250.0,) * 10  # one tick of a second over four steps
    assert len(waits) == 1 + 1 + 10  # the first step, the warm-up, and each block
    assert times.examples_per_step == 8


def test_fit_samples_are_blocks_of_steps(set_clock):
    set_clock(Ticks(), fit_time)
    times = fit_time(small_net(), dataset(), steps=40, warmup=3)
    assert times.steps_per_sample == 4
    assert times.samples_ms == (250.0,) * 10


@pytest.mark.slow
@pytest.mark.parametrize(("per_execution", "block"), first_quick([(4, 4), (3, 6), (100, 100)], 2))
def test_steps_per_execution(per_execution, block, set_clock):
    model = small_net(steps_per_execution=per_execution)
    set_clock(Ticks(), fit_time)
    times = fit_time(model, dataset(), steps=40, warmup=3)
    assert times.steps_per_sample == block
    assert times.samples_ms == (1000.0 / block,) * 10


@pytest.mark.slow
def test_no_warm_up():
    assert len(fit_time(small_net(), dataset(), steps=20, warmup=0).samples_ms) == 10


def test_a_fit_that_ends_early_is_an_error():
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            self.model.stop_training = step == 4

    with pytest.raises(TfoptError, match=r"to run \d+ steps\. Found that it ended after 5: a callback stopped it"):
        fit_time(small_net(), dataset(), callbacks=[Stops()])


@pytest.mark.slow
def test_a_timer_traces_once():
    traces = []
    model = small_net()
    plain = model.train_step
    model.train_step = lambda data: traces.append(1) or plain(data)
    for timer in (StepTimer(model, dataset()), FitTimer(model, dataset())):
        timer(2)
        traced = len(traces)
        timer(2)
        assert len(traces) == traced > 0


def test_run_eagerly():
    model = small_net(run_eagerly=True)
    model.fit(dataset(), verbose=0, shuffle=False)
    before = state(model)
    assert step_time(model, dataset(), steps=2).median_ms > 0
    assert_same_state(before, state(model))


@pytest.mark.slow
def test_one_batch_is_data_too():
    assert step_time(small_net(), batch(16), steps=2).examples_per_step == 16
    assert fit_time(small_net(), batch(16), steps=2).examples_per_step == 16
    assert step_time(small_net(), (*batch(16), None), steps=2).examples_per_step == 16


def test_numpys_floats_arrive_as_fit_hands_them_on():
    x, y = np.zeros((4, 8)), (np.zeros(4, "float16"), [np.zeros(4, "int64")])
    assert [part.dtype.name for part in tf.nest.flatten(one_batch((x, y)))] == ["float32", "float32", "int64"]


@pytest.mark.parametrize("measure", [step_time, fit_time])
@pytest.mark.parametrize("kind", ["tensor", "dict"])
def test_what_a_train_step_takes_need_not_be_a_tuple(measure, kind):
    seen = []

    class Reconstructs(keras.Sequential):
        def train_step(self, data):
            images = data["image"] if kind == "dict" else data
            seen.append(images.shape)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(images) - images) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    model = Reconstructs([keras.Input((8,)), keras.layers.Dense(8)])
    model.compile("sgd")
    images = np.zeros((40, 8), "float32")
    data = tf.data.Dataset.from_tensor_slices({"image": images} if kind == "dict" else images).batch(8)
    assert measure(model, data, steps=3).examples_per_step == 8
    assert {shape[1:] for shape in seen} == {(8,)}
    assert {len(shape) for shape in seen} == {2}


def test_lists_of_inputs():
    inputs = [keras.Input((4,)), keras.Input((4,))]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.concatenate(inputs)))
    model.compile("sgd", "mse")
    data = ([np.zeros((8, 4)), np.zeros((8, 4))], np.zeros((8, 1)))
    assert step_time(model, data, steps=2).examples_per_step == 8


@pytest.mark.parametrize("measure", [step_time, fit_time])
class TestRefusals:
    def test_uncompiled(self, measure):
        with pytest.raises(ValueError, match=r"not compiled\. Call model\.compile"):
            measure(small_net(compiled=False), dataset())

    def test_no_model(self, measure):
        with pytest.raises(TypeError, match=r"Expected a keras\.Model"):
            measure("model", dataset())

    def test_empty(self, measure):
        with pytest.raises(PipelineError, match="at least one batch"):
            measure(small_net(), dataset().take(0))

    def test_no_data(self, measure):
        with pytest.raises(TypeError, match=r"Received: ndarray\. Make a dataset with tfopt\.pipelines"):
            measure(small_net(), np.zeros((8, 8, 8, 1)))

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "value"), [("steps", 0), ("steps", 2.5), ("warmup", -1)])
    def test_counts(self, measure, name, value):
        with pytest.raises(ValueError, match=f"Expected {name} to be an integer"):
            measure(small_net(), dataset(), **{name: value})


@pytest.mark.parametrize("verb", ["step_time", "fit_time", "find", "decide", "cost"])
def test_a_model_without_an_optimizer_is_refused_as_such(verb):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(None, "mse")
    call = getattr({"find": tfopt.batch, "decide": tfopt.xla, "cost": tfopt.compress}.get(verb, tfopt.measure), verb)
    with pytest.raises(ValueError, match="compiled with optimizer=None"):
        call(model, (np.ones((4, 3), "float32"), np.ones((4, 2), "float32")))
