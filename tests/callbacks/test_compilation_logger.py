import gc
import time
import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import state
from watched_functions import is_watched

from tfopt.callbacks import CompilationLogger
from tfopt.errors import TfoptError
from tfopt.xla import set_jit, watch
from tfopt.xla.compilations.compilation import History
from tfopt.xla.compilations.recompilation import repeated_compilation

pytestmark = pytest.mark.filterwarnings("ignore:.*ran out of data")


def linear(**options):
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", "jit_compile": True} | options)
    return model


def data(examples, size=8):
    x = np.ones((examples, 3, 4), "float32")
    return tf.data.Dataset.from_tensor_slices((x, x[..., :1])).batch(size)


def lengths(*sizes):
    """Batches of sequences, each of another length."""
    spec = (tf.TensorSpec((2, None, 4)), tf.TensorSpec((2, None, 1)))
    batches = [(np.ones((2, size, 4), "float32"), np.ones((2, size, 1), "float32")) for size in sizes]
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)


def fit(logger, model=None, dataset=None, callbacks=(), **arguments):
    model, dataset = model or linear(), dataset or data(16)
    return model.fit(dataset, verbose=0, shuffle=False, callbacks=[logger, *callbacks], **arguments).history


@pytest.fixture(autouse=True)
def _left_as_found():
    yield
    gc.collect()
    assert not is_watched()


def test_each_epoch_logs_what_was_compiled_in_it():
    logger = CompilationLogger()
    history = fit(logger, dataset=data(20), epochs=2, validation_data=data(8))
    # Whole batches, the smaller last one, and the validation's.
    assert history["xla_compilations"] == [3, 0]
    assert history["xla_compilation_seconds"][0] == pytest.approx(logger.compilations.seconds)
    assert history["xla_compilation_seconds"][1] == 0.0
    assert logger.compilations.events[1].cause.startswith("x: (8, 3, 4) → (4, 3, 4)")


def test_without_jit_there_are_none():
    history = fit(CompilationLogger(), linear(jit_compile=False))
    assert (history["xla_compilations"], history["xla_compilation_seconds"]) == ([0], [0.0])


@pytest.mark.slow
def test_a_storm_of_lengths_is_warned_of_once():
    with pytest.warns(UserWarning, match=r"Expected at most 2 XLA compilations of the training step.* Found") as caught:
        history = fit(CompilationLogger(max_compilations=2), dataset=lengths(3, 4, 5, 6), epochs=2)
    assert history["xla_compilations"] == [4, 0]
    (warning,) = (str(one.message) for one in caught if "XLA" in str(one.message))
    assert "Found 3 in" in warning  # after the third step, not at the epoch's end
    assert "x: (2, 4, 4) → (2, 5, 4)" in warning
    assert "The cause is x. Give it one shape: pad to a fixed length" in warning


@pytest.mark.slow
def test_as_many_lengths_as_were_announced_are_no_storm():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".*ran out of data")
        fit(CompilationLogger(max_compilations=3), dataset=lengths(3, 4, 5), epochs=2)


def events(*shapes, dtype="float32"):
    history = History()
    return [history.add("f", "f_1", 1.0, {0: "int32 (2,)", 1: f"{dtype} {shape}"}) for shape in shapes]


def test_the_remedy_fits_the_cause():
    batches = str(repeated_compilation(events("(8, 3)", "(7, 3)", "(6, 3)"), 2))
    assert "Expected at most 2 XLA compilations of f. Found 3 in 3 s" in batches
    assert "input 1: (7, 3) → (6, 3)" in batches
    assert 'The cause is input 1. Give every batch the same size: build_pipeline(..., remainder="drop")' in batches
    assert "pad to a fixed length or size" in str(repeated_compilation(events("(8, 3)", "(8, 4)", "(7, 5)"), 2))
    assert "make no tf.function inside the training loop" in str(
        repeated_compilation(events("(8, 3)", "(8, 3)", "(8, 3)"), 2)
    )
    types = SimpleNamespace(add=History().add)
    mixed = [types.add("f", "f_1", 1.0, {0: f"{dtype} (4,)"}) for dtype in ("float32", "float16", "float64")]
    assert "Cast it to one dtype" in str(repeated_compilation(mixed, 2))
    assert repeated_compilation(events("(8, 3)", "(7, 3)"), 2) is None
    assert repeated_compilation([], 1) is None


def test_functions_of_one_name_are_counted_apart():
    history = History()
    both = [
        history.add("f", "f_1", 1.0, {0: f"float32 ({size},)"}, variables=(name,)) for size in (1, 2) for name in "ab"
    ]
    assert repeated_compilation(both, 2) is None
    assert repeated_compilation(both, 1) is not None


class Fails(keras.callbacks.Callback):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_train_batch_end(self, batch, logs=None):
        raise self.error


@pytest.mark.slow
def test_an_exception_in_another_callback():
    model, logger, fails = linear(), CompilationLogger(), Fails(KeyboardInterrupt)
    fit(CompilationLogger(), model)
    with pytest.raises(KeyboardInterrupt):
        fit(logger, model, callbacks=[fails])
    del fails
    gc.collect()
    assert not is_watched()
    assert logger.compilations.count == 0
    assert fit(logger, model)["xla_compilations"] == [0]


@pytest.mark.slow
def test_an_exception_in_a_step():
    def broken():
        yield np.ones((2, 3, 4), "float32"), np.ones((2, 3, 1), "float32")
        raise ValueError

    spec = (tf.TensorSpec((2, None, 4)), tf.TensorSpec((2, None, 1)))
    model, logger = linear(), CompilationLogger()
    with pytest.raises(tf.errors.OpError):
        fit(logger, model, tf.data.Dataset.from_generator(broken, output_signature=spec))
    gc.collect()
    assert not is_watched()
    assert logger.compilations.count == 1
    assert fit(logger, model, lengths(3))["xla_compilations"] == [0]


def test_ctrl_c_in_a_step_ends_it_though_a_notebook_keeps_the_exception():
    class Interrupted(keras.Sequential):
        def train_step(self, data):
            raise KeyboardInterrupt

    model = Interrupted([keras.Input((None, 4)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(CompilationLogger(), model)
    # The traceback, which a notebook keeps, holds on to all that fit has made.
    assert caught.tb is not None
    end = time.monotonic() + 60
    while is_watched() and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_watched()


def test_a_second_fit_begins_anew_where_the_first_was_left():
    model, logger = linear(), CompilationLogger()
    gc.disable()
    try:
        with pytest.raises(RuntimeError):
            fit(logger, model, callbacks=[Fails(RuntimeError)])
        other = linear()
        assert fit(logger, other)["xla_compilations"] == [1]
    finally:
        gc.enable()


def test_inside_a_watch_both_count():
    with watch() as compilations:
        history = fit(CompilationLogger())
    assert (compilations.count, history["xla_compilations"]) == (1, [1])


@pytest.mark.slow
def test_what_other_callbacks_compile_is_counted():
    def on_batch_end(batch, logs):
        tf.function(lambda x: x + 1.0, jit_compile=True)(tf.ones(3))

    history = fit(CompilationLogger(), callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=on_batch_end)])
    assert history["xla_compilations"] == [3]


def test_two_of_them_leave_nothing_behind():
    model, second = linear(), CompilationLogger()
    history = fit(CompilationLogger(), model, epochs=3, validation_data=data(8), callbacks=[second])
    assert history["xla_compilations"] == [2, 0, 0]
    assert second.compilations.count == 2


@pytest.mark.slow
def test_a_step_that_is_replaced_meanwhile_is_watched_too():
    model = linear(jit_compile=False)
    switch = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: set_jit(model, epoch == 1))
    assert fit(CompilationLogger(), model, epochs=2, callbacks=[switch])["xla_compilations"] == [0, 1]


def test_evaluate_alone_is_not_followed():
    seen = []
    look = keras.callbacks.LambdaCallback(on_test_batch_end=lambda batch, logs: seen.append(is_watched()))
    linear().evaluate(data(8), verbose=0, callbacks=[CompilationLogger(), look])
    assert seen == [False]


def steps_under_xla(model, seen):
    """A callback that notes after each step whether the model runs under XLA."""
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(model.jit_compile))


def test_an_error_ends_fit_at_the_step_that_exceeded_the_limit():
    model, logger, seen = linear(), CompilationLogger(max_compilations=2, on_recompile="error"), []
    with pytest.raises(TfoptError, match=r"Expected at most 2 XLA compilations of the training step\. Found 3 .* x: "):
        fit(logger, model, lengths(3, 4, 5, 6, 7), [steps_under_xla(model, seen)])
    assert model.optimizer.iterations.numpy() == 3
    assert seen == [True, True]  # its callback did not run after the third step
    assert not is_watched()


@pytest.mark.slow
def test_eager_trains_on_without_xla_to_the_same_weights():
    model, plain, seen = linear(), linear(jit_compile=False), []
    logger = CompilationLogger(max_compilations=2, on_recompile="eager")
    with pytest.warns(UserWarning, match="Found 3 .* From now on .* runs without XLA"):
        history = fit(logger, model, lengths(3, 4, 5, 6, 7, 8), [steps_under_xla(model, seen)])
    assert history["xla_compilations"] == [3]
    assert (seen, model.jit_compile) == ([True, True, False, False, False, False], False)
    plain.fit(lengths(3, 4, 5, 6, 7, 8), verbose=0, shuffle=False)
    for (name, value), (_, expected) in zip(state(model), state(plain), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, err_msg=name)


def test_validation_that_recompiles_ends_fit_too():
    model, logger = linear(), CompilationLogger(max_compilations=2, on_recompile="error")
    with pytest.raises(TfoptError, match="of the evaluation step"):
        fit(logger, model, data(16), validation_data=lengths(3, 4, 5, 6))


def test_what_to_do_must_be_known():
    for unknown in ("stop", None):
        with pytest.raises(ValueError, match="Expected on_recompile to be one of 'warn', 'error', 'eager'"):
            CompilationLogger(on_recompile=unknown)
