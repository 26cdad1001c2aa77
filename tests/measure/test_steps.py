import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator
from models import assert_same_state, batch, small_net, state

from tfopt.errors import PipelineError
from tfopt.measure import FitTimer, StepTimer, fit_time, step_time


class Ticks:
    """A clock that advances by one second each time it is read."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def dataset(examples=40, size=8):
    return tf.data.Dataset.from_tensor_slices(batch(examples)).batch(size)


@pytest.mark.parametrize("measure", [step_time, fit_time])
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("jit", [False, True])
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
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(dataset(), verbose=0, shuffle=False)
    before = noisy.calls.numpy(), global_seed_generator().state.numpy().tolist()
    measure(model, dataset(), steps=4)
    assert (noisy.calls.numpy(), global_seed_generator().state.numpy().tolist()) == before


def test_the_global_seed_is_kept_where_no_graph_shows_it():
    model = keras.Sequential([keras.Input((8, 8, 1)), Noisy(), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    before = global_seed_generator().state.numpy().tolist()
    step_time(model, dataset(), steps=2)
    assert global_seed_generator().state.numpy().tolist() == before


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


def test_two_replicas_come_back_bit_for_bit():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = small_net(jit_compile=False)
    model.fit(dataset(), verbose=0, shuffle=False)
    before = state(model)
    times = step_time(model, dataset(), steps=3)
    assert times.examples_per_step == 8
    assert_same_state(before, state(model))


def test_the_steps_are_real():
    model = small_net()
    seen = []

    class Watching(keras.optimizers.SGD):
        def apply_gradients(self, pairs):
            tf.py_function(lambda: seen.append(1), [], [])
            return super().apply_gradients(pairs)

    model.compile(Watching(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    step_time(model, dataset(), steps=7, warmup=2)
    assert len(seen) == 1 + 2 + 7
    seen.clear()
    fit_time(model, dataset(), steps=7, warmup=2)
    assert len(seen) == 1 + 2 + 7


def test_a_sample_is_a_block_of_steps_with_one_wait(monkeypatch):
    waits = []
    monkeypatch.setattr("tfopt.measure.steps.wait", lambda: waits.append(1))
    times = step_time(small_net(), dataset(), steps=40, warmup=0, clock=Ticks())
    assert times.steps_per_sample == 4
    assert times.samples_ms == (250.0,) * 10  # one tick of a second over four steps
    assert len(waits) == 1 + 1 + 10  # the first step, the warm-up, and each block
    assert times.examples_per_step == 8


def test_fit_samples_are_blocks_of_steps():
    times = fit_time(small_net(), dataset(), steps=40, warmup=3, clock=Ticks())
    assert times.steps_per_sample == 4
    assert times.samples_ms == (250.0,) * 10


def test_steps_per_execution():
    times = fit_time(small_net(steps_per_execution=4), dataset(), steps=40, warmup=3, clock=Ticks())
    assert times.samples_ms == (250.0,) * len(times.samples_ms)
    assert len(times.samples_ms) >= 9


def test_a_timer_traces_once():
    traces = []
    model = small_net()
    plain = model.train_step
    model.train_step = lambda data: traces.append(1) or plain(data)
    for timer in (StepTimer(model, dataset()), FitTimer(model, dataset())):
        traces.clear()
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


def test_one_batch_is_data_too():
    assert step_time(small_net(), batch(16), steps=2).examples_per_step == 16
    assert fit_time(small_net(), batch(16), steps=2).examples_per_step == 16


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

    @pytest.mark.parametrize(("name", "value"), [("steps", 0), ("steps", 2.5), ("warmup", -1)])
    def test_counts(self, measure, name, value):
        with pytest.raises(ValueError, match=f"Expected {name} to be an integer"):
            measure(small_net(), dataset(), **{name: value})
