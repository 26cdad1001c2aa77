"""Tests that are about a release of Keras."""

import keras
import pytest
import tensorflow as tf

from tfopt.internals import probe, probing


def since_keras(release):
    """A mark for tests that are about what this release of Keras brought."""
    return _since("Keras", keras.__version__, release)


def since_tensorflow(release):
    """A mark for tests that are about what this release of TensorFlow brought."""
    return _since("TensorFlow", tf.__version__, release)


def _since(name, installed, release):
    older = tuple(map(int, installed.split(".")[:2])) < tuple(map(int, release.split(".")))
    return pytest.mark.skipif(older, reason=f"about {name} {release} and later")


def make_unknown(monkeypatch, repair):
    """Makes a repair meet functions that it does not know, and does not fit."""
    monkeypatch.setattr(repair, "broken", dict.fromkeys(repair.broken, frozenset({"other"})))
    nothing_fits(monkeypatch)


def nothing_fits(monkeypatch):
    """Makes each probe say that the patch does not fit."""
    monkeypatch.setattr(probing, "kept", lambda _: None)
    unfit = probe.Verdict(probe.UNFIT, "nothing fits")
    monkeypatch.setattr(probing, "verdicts", lambda patches: [unfit] * len(patches))
