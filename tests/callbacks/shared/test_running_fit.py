import gc
import weakref

import pytest

from tfopt.callbacks.shared.running_fit import variable_of_a_caller


class Thing:
    pass


@pytest.fixture
def _no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def found_below():
    return variable_of_a_caller("thing", Thing)


def test_the_nearest_callers_variable_of_that_kind():
    thing = Thing()

    def between():
        thing = "of another kind"
        return found_below(), thing

    assert between()[0] is thing
    assert variable_of_a_caller("no_such_variable", Thing) is None


@pytest.mark.usefixtures("_no_collection")
def test_what_was_found_goes_with_its_owner():
    """An iterator of tf.data that waited for the garbage collection would hold up the step in which that comes."""

    def fit():
        thing = Thing()
        assert found_below() is thing
        return weakref.ref(thing)

    assert fit()() is None


def test_what_a_caller_deletes_is_gone():
    """A frame keeps the variables that it was asked for, up to its end."""
    large = Thing()
    gone = weakref.ref(large)
    assert variable_of_a_caller("no_such_variable", Thing) is None
    del large
    assert gone() is None


def test_a_variable_that_an_inner_function_uses_is_found():
    thing = Thing()

    def inner():
        return thing

    assert found_below() is inner()
