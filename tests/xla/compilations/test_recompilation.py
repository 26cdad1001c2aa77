"""What a watch does about functions that are compiled again and again."""

import threading

import pytest
import tensorflow as tf
from watched_functions import data, is_watched, linear, total

from tfopt.errors import TfoptError
from tfopt.fit import overlap
from tfopt.xla import watch


def called(f, *sizes):
    for size in sizes:
        f(tf.ones(size))


def fitted(model, *sizes):
    for size in sizes:
        model.fit(data(size, size), verbose=0, shuffle=False)


@pytest.mark.slow
def test_an_error_is_raised_at_the_call_that_exceeded_the_limit():
    f = total()
    traced = r"Expected at most 2 XLA compilations of .*\. Found 3 .* The cause is x\. "
    with pytest.raises(TfoptError, match=traced), watch(on_recompile="error", limit=2) as compilations:
        called(f, 101, 102, 102, 103, 104)
    assert [event.inputs[0] for event in compilations.events] == [f"float32 ({size},)" for size in (101, 102, 103)]
    called(f, 105, 106, 107)  # after the block


def test_a_warning_is_given_once():
    limited = watch(on_recompile="warn", limit=2)
    with pytest.warns(UserWarning, match="Expected at most 2 XLA compilations") as warned, limited as compilations:
        called(total(), 2, 3, 4, 5, 6)
    assert (len(warned), compilations.count) == (1, 5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_each_function_has_its_limit():
    with watch(on_recompile="error", limit=2) as compilations:
        called(total(), 2, 3)
        linear().fit(data(12), verbose=0, shuffle=False, validation_data=data(12))
    assert compilations.count == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("steps", [1, 2])
def test_a_model_whose_steps_overlap_goes_on_without_xla_too(steps):
    model = linear(steps_per_execution=steps)
    if steps == 1:
        overlap(model)
    limited = watch(on_recompile="eager", limit=2)
    with pytest.warns(UserWarning, match="Found 3 .* runs without XLA"), limited as compilations:
        fitted(model, 2, 3, 4, 5, 6)
    assert (model.jit_compile, compilations.count) == (False, 3)
    assert {event.step for event in compilations.events} == {"training step"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_eager_takes_only_the_model_that_recompiles_off_xla():
    storm, calm = linear(), linear()
    found, limited = f"Found 3 .*From now on '{storm.name}' runs without XLA", watch(on_recompile="eager", limit=2)
    fitted(calm, 16)
    with pytest.warns(UserWarning, match=found), limited as compilations:
        fitted(storm, 2, 3, 4, 5, 6)
    assert (storm.jit_compile, calm.jit_compile) == (False, True)
    assert compilations.count == 3


def test_a_function_of_no_model_stays_under_xla():
    limited = watch(on_recompile="eager", limit=1)
    with pytest.warns(UserWarning, match="It is not a step of a Keras model, so XLA stays on"), limited:
        called(total(), 2, 3)


def test_only_the_thread_of_the_block_is_interrupted():
    ended = []

    def work():
        called(total(), 2, 3, 4)
        ended.append(True)

    def work_elsewhere():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert ended == [True]
        tf.function(lambda: tf.constant(1))()  # the next call in this thread

    with pytest.raises(TfoptError, match="Found 3"), watch(on_recompile="error", limit=2):
        work_elsewhere()


def test_watches_that_overlap_leave_nothing_behind():
    first, second = watch(on_recompile="error"), watch(on_recompile="warn")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    called(total(), 2)
    assert is_watched()
    second.__exit__(None, None, None)
    assert not is_watched()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"on_recompile": "eagerly"}, ValueError), ({"limit": 0}, ValueError), ({"limit": 1.5}, TypeError)],
)
def test_bad_arguments(arguments, error):
    with pytest.raises(error, match="Expected"), watch(**arguments):
        pass
