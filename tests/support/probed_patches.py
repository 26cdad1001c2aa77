"""Patches of a function of this module, with probes: what becomes of them in a process of their own."""

import os
import signal
import sys
import time
from dataclasses import dataclass

from tfopt.internals import probing
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


def harmless():
    return [2.0, 3.0]


def harmed():
    return [2.0, float(number())]


@dataclass
class Patched:
    name: str
    probe: probing.Probe
    makes: int

    @property
    def targets(self):
        return [f"{_HERE}:number"]

    def tried(self):
        return patched(sys.modules[_HERE], "number", lambda original: lambda: self.makes, by=self.name)


def _patch(name, *, measure="measured", harmless="harmless", right=2, makes=2):
    measure = measure and f"{_HERE}:{measure}"
    probe = probing.Probe(home=f"{_HERE}:{name.upper()}", harmless=f"{_HERE}:{harmless}", measure=measure, right=right)
    return Patched(name, probe, makes)


NEEDED = _patch("needed")
NEEDLESS = _patch("needless", right=1)
USELESS = _patch("useless", makes=3)
HARMFUL = _patch("harmful", harmless="harmed")
EQUAL = _patch("equal", measure="")
FAILING = _patch("failing", measure="fails")
HANGING = _patch("hanging", measure="hangs")
DYING = _patch("dying", measure="dies")
ALL = [NEEDED, NEEDLESS, USELESS, HARMFUL, EQUAL, FAILING, HANGING, DYING]
