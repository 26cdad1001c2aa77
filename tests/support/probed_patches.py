"""Patches of a function of this module, with probes: what becomes of them in a process of their own."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tfopt.internals import probe
from tfopt.internals.patches import patched

_HERE = "probed_patches"


def number():
    return 1


def fails():
    raise RuntimeError("broken on purpose")


def hangs():
    time.sleep(1000)


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def measured():
    return number()


def _worker():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def _meet():
    """Waits for the other worker, in the folder of both."""
    Path(f"{_worker()}-{number()}").touch()
    while not Path(f"{1 - _worker()}-{number()}").exists():
        time.sleep(0.01)


def meets():
    _meet()
    return number()


def fails_in_one():
    if _worker():
        raise RuntimeError("broken on purpose")
    time.sleep(1000)


def dies_in_one():
    if _worker():
        os.kill(os.getpid(), signal.SIGKILL)
    return number()


def settings():
    import keras

    return [keras.config.floatx(), os.environ.get("KERAS_MAX_EPOCHS"), number()]


def shortened():
    return [2.0] * (3 - number())


def harmless():
    return [2.0, 3.0]


def harmed():
    return [2.0, float(number())]


@dataclass
class Patched:
    name: str
    probe: probe.Probe
    makes: int

    @property
    def targets(self):
        return [f"{_HERE}:number"]

    def tried(self):
        return patched(sys.modules[_HERE], "number", lambda original: lambda: self.makes, by=self.name)


def _patch(name, *, measure="measured", harmless="harmless", right=2, makes=2, workers=1):
    home, harmless, measure = f"{_HERE}:{name.upper()}", f"{_HERE}:{harmless}", measure and f"{_HERE}:{measure}"
    made = probe.Probe(home=home, harmless=harmless, measure=measure, right=right, workers=workers)
    return Patched(name, made, makes)


NEEDED = _patch("needed")
NEEDLESS = _patch("needless", right=1)
USELESS = _patch("useless", makes=3)
HARMFUL = _patch("harmful", harmless="harmed")
EQUAL = _patch("equal", measure="")
FAILING = _patch("failing", measure="fails")
HANGING = _patch("hanging", measure="hangs")
DYING = _patch("dying", measure="dies")
MEETING = _patch("meeting", measure="meets", workers=2)
LEFT = _patch("left", measure="fails_in_one", workers=2)
LOSING = _patch("losing", measure="dies_in_one", workers=2)
SETTINGS = _patch("settings", measure="settings", right=["float32", None, 2])
SHORTER = _patch("shorter", harmless="shortened")
ALL = [NEEDED, NEEDLESS, USELESS, HARMFUL, EQUAL, FAILING, HANGING, DYING, MEETING, LEFT, LOSING, SHORTER]
