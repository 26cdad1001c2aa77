import functools
import linecache
import sys

import keras
import pytest
import tensorflow as tf
from versions import nothing_fits

from tfopt.errors import UnsupportedError
from tfopt.internals.probe import Probe
from tfopt.internals.sources import fingerprint
from tfopt.repairs import Repair

SOURCE = '''
def area(radius):
    """What it returns."""
    return 3 * radius


class Box:
    def size(self):
        return 1
'''
MENDED = SOURCE.replace("3 * radius", "3.14 * radius**2")
SAID = (
    f"in TensorFlow {tf.__version__} and Keras {keras.__version__}. It stays unpatched, and this may still be wrong: "
    "The area of a circle is wrong. Square it yourself. tfopt has tried the patch on this version: nothing fits. Its "
    "answers are in /caches/tfopt/probes; to try again, remove them and start Python anew. docs/versions.md lists the "
    "versions it knows."
)
# Taken under Python 3.11; the same under 3.12 and 3.13.
AREA, SIZE, MENDED_AREA = "24bbdd3f1c8489f0", "4ca3af8e59bc4887", "add4e59d2f389804"


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """Makes a module as if it came with Keras, and one that holds its function under a name of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source=SOURCE):
        (tmp_path / "upstream.py").write_text(source)
        (tmp_path / "user.py").write_text("from upstream import area as its_area\n")
        linecache.clearcache()
        import upstream
        import user

        return upstream, user

    yield write
    for name in ("upstream", "user", "late"):
        sys.modules.pop(name, None)


def repair(**fields):
    return Repair(
        **{
            "name": "circles",
            "defect": "The area of a circle is wrong.",
            "reference": "none",
            "broken": {"upstream:area": frozenset({AREA}), "upstream:Box.size": frozenset({SIZE})},
            "mended": {"upstream:area": frozenset({MENDED_AREA})},
            "replace": {
                "upstream:area": lambda original: lambda radius: original(radius) * radius,
                "upstream:Box.size": lambda original: lambda self: original(self) + 1,
            },
            "probe": Probe(home="nowhere:CIRCLES", harmless="nowhere:fitted"),
            "without": "Square it yourself.",
        }
        | fields
    )


def test_installed_and_removed_everywhere(upstream):
    module, user = upstream()
    original, size = module.area, module.Box.__dict__["size"]
    circles = repair()
    assert (circles.applies(), circles.installed, module.area(2)) == (True, False, 6)
    circles.install()
    circles.install()
    assert (circles.applies(), circles.installed) == (True, True)
    assert module.area(2) == user.its_area(2) == 12
    assert module.Box().size() == 2
    assert user.its_area.__name__ == "area"
    late = type(sys)("late")  # imported while the repair is in place
    sys.modules["late"] = late
    late.area = module.area
    circles.remove()
    circles.remove()
    assert module.area is user.its_area is late.area is original
    assert module.Box.__dict__["size"] is size
    assert not circles.installed


def test_mended_upstream_is_left_alone(upstream):
    module, _ = upstream(MENDED)
    original = module.area
    circles = repair()
    assert not circles.applies()
    circles.install()
    assert module.area is original
    assert not circles.installed


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (SOURCE.replace("3 *", "4 *"), r"upstream:area .*Found: a version with the fingerprint [0-9a-f]{16}, in"),
        (SOURCE.replace("return 1", "return 2"), r"upstream:Box\.size .*Found: a version with the fingerprint"),
        (SOURCE.replace("def area", "def circle_area") + "\narea = None", r"upstream:area .*cannot be read"),
        (SOURCE.replace("class Box", "class Cube"), r"upstream:Box\.size .*cannot be read .*no attribute 'Box'"),
        (SOURCE.replace("def area", "def circle_area") + "\narea = len", r"upstream:area .*cannot be read"),
        (SOURCE + "\nexec('def area(radius): return 3 * radius')", r"upstream:area .*cannot be read"),
    ],
    ids=["changed", "helper changed", "no function", "gone", "built in", "without source"],
)
def test_an_unknown_function_that_the_repair_does_not_fit_is_refused_by_name(monkeypatch, upstream, source, target):
    nothing_fits(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    module, _ = upstream(source)
    original = module.area
    circles = repair()
    for use in (circles.applies, circles.install, lambda: circles.during().__enter__()):
        with pytest.raises(UnsupportedError, match=target) as caught:
            use()
        assert str(caught.value).startswith("Expected a version of upstream:")
        assert str(caught.value).endswith(SAID)
    assert module.area is original
    assert not circles.installed


def test_a_module_that_is_gone_is_refused(monkeypatch):
    nothing_fits(monkeypatch)
    with pytest.raises(UnsupportedError, match=r"nowhere:area .*No module named 'nowhere'"):
        repair(broken={"nowhere:area": frozenset({AREA})}).applies()


def test_a_patch_on_top_is_refused_and_survives(upstream):
    module, _ = upstream()
    circles = repair()
    circles.install()
    ours = module.area
    module.area = lambda radius: 0
    with pytest.raises(UnsupportedError, match="Found: another patch on top"):
        circles.remove()
    assert (circles.installed, module.area(2), module.Box().size()) == (True, 0, 2)
    module.area = ours
    circles.remove()
    assert (module.area(2), module.Box().size()) == (6, 1)


def test_two_repairs_of_one_function(upstream):
    module, _ = upstream()
    only_area = {"broken": {"upstream:area": frozenset({AREA})}}
    first = repair(**only_area, replace={"upstream:area": lambda original: lambda r: original(r) + 1})
    second = repair(**only_area, replace={"upstream:area": lambda original: lambda r: original(r) * 10})
    first.install()
    second.install()
    assert module.area(2) == 70
    second.remove()
    first.remove()
    assert module.area(2) == 6


def test_during_a_block(upstream):
    module, _ = upstream()
    circles = repair()
    with circles.during():
        with pytest.raises(RuntimeError), circles.during():
            raise RuntimeError
        assert module.area(2) == 12
    assert module.area(2) == 6
    with circles.during():
        circles.install()  # outlasts the block
    assert module.area(2) == 12
    with circles.during():
        pass
    assert module.area(2) == 12


def test_the_fingerprint_is_of_the_code(upstream):
    module, _ = upstream()
    assert fingerprint(module.area) == AREA
    wrapper = functools.wraps(module.area)(lambda *args: module.area(*args))
    assert fingerprint(wrapper) == AREA


@pytest.mark.parametrize(
    "source",
    [
        SOURCE.replace("What it returns", "How large it is"),
        SOURCE.replace('"""What it returns."""', '"""What it returns.\n\n    In full.\n    """'),
        SOURCE.replace('    """What it returns."""\n', ""),
        SOURCE.replace("return 3 * radius", "# Why three.\n\n    return 3 * radius  # about"),
        "if True:\n" + SOURCE.replace("\n", "\n    "),
    ],
    ids=["docstring", "longer", "none", "comments", "indented"],
)
def test_the_fingerprint_leaves_out_what_does_not_run(upstream, source):
    assert fingerprint(upstream(source)[0].area) == AREA


def test_a_text_that_looks_like_a_comment_counts(upstream):
    one, other = (SOURCE.replace("3 * radius", f"'# {text}'") for text in ("one", "other"))
    module, _ = upstream(one)
    first = fingerprint(module.area)
    sys.modules.pop("upstream")
    module, _ = upstream(other)
    assert fingerprint(module.area) != first
