import keras
import pytest
import tensorflow as tf
from models import batch, small_net

from tfopt.batch import accumulate
from tfopt.errors import UnsupportedError
from tfopt.internals.graphs import in_xla
from tfopt.internals.sources import find
from tfopt.model.state import traced_steps
from tfopt.precision import apply
from tfopt.xla import jit, set_jit
from tfopt.xla.obstacles import device


class Tracer(keras.layers.Layer):
    """Notes each time that it is traced: whether for XLA."""

    def __init__(self, **options):
        super().__init__(**options)
        self.traced = []

    def call(self, inputs):
        if isinstance(inputs, tf.Tensor):  # no Keras input of a model being built
            graph = tf.compat.v1.get_default_graph()
            self.traced.append(in_xla(graph))
        return inputs

    def new(self):
        traced, self.traced = self.traced, []
        return set(traced)


def traced_net(*inner, **compile_options):
    tracer = Tracer()
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), tracer, *inner, keras.layers.Flatten(), keras.layers.Dense(10, name="head")]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": "adam", "loss": loss, "jit_compile": False} | compile_options)
    return model, tracer


def fit(model, steps=1):
    model.fit(tf.data.Dataset.from_tensors(batch()).repeat(steps), verbose=0, shuffle=False)


@pytest.mark.slow
def test_stock_keras_goes_on_as_it_was_traced():
    model, tracer = traced_net()
    fit(model)
    tracer.new()
    model.jit_compile = True
    fit(model)
    assert tracer.new() == set()
    set_jit(model, True)
    fit(model)
    assert tracer.new() == {True}


def test_evaluate_and_predict_are_switched_too():
    model, tracer = traced_net()
    data = tf.data.Dataset.from_tensors(batch())
    for on in (False, True, False):
        set_jit(model, on)
        tracer.new()
        model.evaluate(data, verbose=0)
        assert tracer.new() == {on}
        model.predict(data, verbose=0)
        assert tracer.new() == {on}


@pytest.mark.slow
def test_several_steps_per_execution():
    model, tracer = traced_net(steps_per_execution=2)
    fit(model, steps=4)
    tracer.new()
    set_jit(model, True)
    fit(model, steps=4)
    assert tracer.new() == {True}
    assert model.optimizer.iterations.numpy() == 8


def test_a_model_inside_runs_as_the_outer_one_does():
    inner, _ = traced_net()
    set_jit(inner, True)
    outer = keras.Sequential([keras.Input((8, 8, 1)), inner])
    outer.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    tracer = inner.layers[0]
    tracer.new()
    fit(outer)
    assert tracer.new() == {False}
    set_jit(outer, True)
    fit(outer)
    assert tracer.new() == {True}


@pytest.mark.slow
def test_stock_keras_forgets_it_in_a_saved_model(tmp_path):
    stock, mended = small_net(jit_compile=False), small_net(jit_compile=False)
    fit(stock)
    fit(mended)
    stock.jit_compile = True
    set_jit(mended, True)
    for model, kept in ((stock, False), (mended, True)):
        model.save(tmp_path / "model.keras")
        assert keras.models.load_model(tmp_path / "model.keras").jit_compile is kept
    set_jit(mended, False)
    mended.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").jit_compile is False


def test_a_block_gives_back_the_setting_and_what_was_compiled():
    model, tracer = traced_net()
    data = tf.data.Dataset.from_tensors(batch())
    fit(model)
    model.evaluate(data, verbose=0)
    functions = model.train_function, model.test_function, model.predict_function
    tracer.new()
    with jit(model, True):
        fit(model)
        assert tracer.new() == {True}
    assert (model.train_function, model.test_function, model.predict_function) == functions
    fit(model)
    model.evaluate(data, verbose=0)
    assert tracer.new() == set()
    assert (model.jit_compile, model.get_compile_config()["jit_compile"]) == (False, False)
    assert model.optimizer.iterations.numpy() == 3


def test_blocks_nest_and_end_with_exceptions():
    model, tracer = traced_net()
    set_jit(model, True)
    with pytest.raises(KeyError), jit(model, False):  # noqa: PT012
        with jit(model, True):
            assert model.get_compile_config()["jit_compile"] is True
        assert model.jit_compile is False
        fit(model)
        raise KeyError
    assert (model.jit_compile, model.get_compile_config()["jit_compile"]) == (True, True)
    tracer.new()
    fit(model)
    assert tracer.new() == {True}


def test_a_model_compiled_anew_in_a_block_keeps_that():
    model, _ = traced_net()
    fit(model)
    with jit(model, True):
        model.compile("sgd", "mse", jit_compile=True)
    assert model.jit_compile is True
    assert model.train_function is None  # the one before trains with another optimizer


def test_a_step_that_accumulates_since_a_block_goes_on_so():
    model, _ = traced_net()
    fit(model)
    with jit(model, True):
        accumulate(model, 2)
    assert model.jit_compile is False
    fit(model, 2)
    assert model.optimizer.iterations.numpy() == 2


def test_a_policy_applied_in_a_block_stays():
    model, _ = traced_net(keras.layers.Conv2D(2, 3))
    fit(model)
    with jit(model, True):
        apply(model, "mixed_bfloat16")
    fit(model)
    operations = [one for step in traced_steps(model) for one in step.graph.get_operations()]
    assert {one.outputs[0].dtype for one in operations if one.type == "Conv2D"} == {tf.bfloat16}


def test_a_block_that_cannot_begin_changes_nothing():
    model, _ = traced_net(keras.layers.RandomRotation(0.1))
    fit(model)
    function = model.train_function
    with pytest.raises(UnsupportedError, match="random_rotation"), jit(model, True):
        pytest.fail("entered")
    assert model.train_function is function
    with pytest.raises(TypeError, match="Expected True or False"), jit(model, "auto"):
        pytest.fail("entered")
    with pytest.raises(ValueError, match=r"not compiled\. Call model\.compile"), jit(small_net(compiled=False), True):
        pytest.fail("entered")


@pytest.mark.parametrize("model", [None, "model", keras.layers.Dense])
def test_only_models_are_switched(model):
    with pytest.raises(TypeError, match=r"Expected a keras\.Model\. Received"):
        set_jit(model, True)


def test_under_determinism_stock_keras_only_warns(monkeypatch):
    """Switched on for good it cannot be switched off: what asks whether it is on is replaced instead."""
    model, _ = traced_net()
    monkeypatch.setattr(*find("tensorflow.python.framework.config:is_op_determinism_enabled"), lambda: True)
    monkeypatch.setattr("tfopt.xla.obstacles.is_op_determinism_enabled", lambda: True)
    with pytest.warns(UserWarning, match="Model doesn't support"):
        model.jit_compile = True
    with pytest.raises(UnsupportedError, match=r"op determinism is on.*Leave XLA off"):
        set_jit(model, True)
    set_jit(model, False)


@pytest.mark.slow
def test_one_replica_may_run_under_xla():
    with tf.distribute.MirroredStrategy([f"{device()}:0"]).scope():
        model, tracer = traced_net()
    fit(model)
    tracer.new()
    set_jit(model, True)
    fit(model)
    assert tracer.new() == {True}


def test_two_replicas_are_refused(monkeypatch):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model, _ = traced_net()
    extended = model._distribute_strategy.extended
    monkeypatch.setattr(type(extended), "worker_devices", property(lambda self: ("GPU:0", "GPU:1")))
    with pytest.raises(UnsupportedError, match=r"2 devices.*Leave XLA off"):
        set_jit(model, True)


class Switches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        set_jit(self.model, not self.model.jit_compile)

    def on_test_batch_end(self, batch, logs=None):
        set_jit(self.model, not self.model.jit_compile)


@pytest.mark.slow
def test_a_callback_switches_while_fit_runs():
    model, tracer = traced_net()
    data = tf.data.Dataset.from_tensors(batch()).repeat(2)
    model.fit(data, validation_data=data, verbose=0, shuffle=False, callbacks=[Switches()])
    assert tracer.new() == {False, True}
    assert model.optimizer.iterations.numpy() == 2


def test_a_block_inside_a_callback():
    model, tracer = traced_net()
    data = tf.data.Dataset.from_tensors(batch())

    def evaluate(epoch, logs):
        with jit(model, True):
            model.evaluate(data, verbose=0)

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=evaluate)
    model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[callback])
    assert tracer.new() == {False, True}
    assert model.optimizer.iterations.numpy() == 2
    assert model.jit_compile is False
