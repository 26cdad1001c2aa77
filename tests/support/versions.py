"""Tests that are about a release of Keras."""

import keras
import pytest


def since_keras(release):
    """A mark for tests that are about what this release of Keras brought."""
    older = tuple(map(int, keras.__version__.split(".")[:2])) < tuple(map(int, release.split(".")))
    return pytest.mark.skipif(older, reason=f"about Keras {release} and later")


def make_unknown(monkeypatch, repair):
    """Makes a repair meet functions that it does not know, and cannot try."""
    monkeypatch.setattr(repair, "broken", dict.fromkeys(repair.broken, frozenset({"other"})))
    monkeypatch.setattr(repair, "probe", None)
