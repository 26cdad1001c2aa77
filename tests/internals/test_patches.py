import types

import pytest

from tfopt.errors import UnsupportedError
from tfopt.internals.patches import Patch, patched, present, put, undo


class Base:
    @property
    def size(self):
        return 1

    def area(self):
        return 3


class Box(Base):
    pass


def plus(number):
    return lambda original: lambda *args: original(*args) + number


def times(number):
    return lambda original: lambda *args: original(*args) * number


@pytest.fixture(autouse=True)
def _as_found():
    before = present()
    yield
    assert present() == before
    assert (Box().area(), Box().size, "area" in vars(Box)) == (3, 1, False)


def test_patches_of_one_function_are_undone_in_any_order():
    one, two, three = (Patch(Base, "area", make, "test") for make in (plus(1), times(10), plus(2)))
    put([one, two, three])
    assert Box().area() == 42
    undo([one])
    assert Box().area() == 32
    undo([three])
    assert Box().area() == 30
    undo([two])


def test_what_stands_on_top_stays_there():
    upper, lower = Patch(Base, "area", plus(1), "test", on_top=True), Patch(Base, "area", times(10), "test")
    put([upper])
    put([lower])
    assert Box().area() == 31
    assert [patch for patch in present() if patch.owner is Base] == [lower, upper]
    undo([upper, lower])


def test_a_function_in_a_closure_is_named_as_itself():
    held = Base.area

    def area():
        return held

    (cell,) = area.__closure__
    with patched(cell, "cell_contents", plus(1), by="test"):
        assert area()(Box()) == 4
        assert str(present()[-1]) == "Base.area"


def test_an_inherited_function_is_inherited_again():
    with patched(Box, "area", plus(1), by="test"):
        assert (Box().area(), Base().area()) == (4, 3)


def test_a_property_stays_one():
    with patched(Base, "size", plus(1), by="test"):
        assert Box().size == 2


def test_a_function_keeps_its_name():
    with patched(Base, "area", plus(1), by="test"):
        assert Base.area.__qualname__ == "Base.area"


def test_one_that_fails_leaves_none():
    def fails(original):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        put([Patch(Base, "area", plus(1), "test"), Patch(Base, "size", fails, "test")])


def test_what_others_put_on_top_is_patched_too_and_keeps_those_below():
    below, above = Patch(Base, "area", plus(1), "test"), Patch(Base, "area", plus(3), "test")
    put([below])
    ours = Base.area
    Base.area = lambda self: ours(self) * 10
    put([above])
    assert Box().area() == 43
    with pytest.raises(UnsupportedError, match=r"Expected Base\.area as test left it\. Found: another patch on top"):
        undo([above, below])
    assert Box().area() == 43
    undo([above])
    assert Box().area() == 40
    Base.area = ours
    undo([below])


def test_names_in_other_modules_follow(monkeypatch):
    first, second = types.ModuleType("first"), types.ModuleType("second")
    first.area = second.its_area = lambda: 3
    for module in (first, second):
        monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    with patched(first, "area", plus(1), by="test"):
        assert (first.area(), second.its_area()) == (4, 4)
    assert (first.area(), second.its_area()) == (3, 3)
