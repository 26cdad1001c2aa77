"""Cases in place of the suites', which processes of a run load by name: each function makes a run's list."""

import os
import signal
import time
from pathlib import Path

from tfopt.bench import suites
from tfopt.bench.cases import Case, Variant
from tfopt.errors import UnsupportedError
from tfopt.measure import StepTimes
from tfopt.warn import warn_once


def times(ms):
    return StepTimes(repeats_ms=((ms, ms),), steps_per_sample=1, first_step_seconds=1.0)


def _case(name, timer=lambda stack: lambda: times(1.0), repeats=2, **options):
    variants = [Variant(name=n, note="", timer=timer) for n in ("a", "b")]
    return Case(suite=name, workload="w", question="?", unit="step", variants=variants, repeats=repeats, **options)


def three(names, scale):
    def warns(stack):
        warn_once("planned", "Found no GPU to sample.")
        return lambda: times(1.0)

    return [_case(name, warns) for name in ("one", "two", "three")]


def one_of_each_suite(names, scale):
    return [_case(name) for name in suites.expand(names)]


def with_flags(names, scale):
    """The listing, the first process, sets a flag as `share_cache` does; without it, the case fails."""
    found = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = "--xla_gpu_per_fusion_autotune_cache_dir=/nowhere"

    def timer(stack):
        assert found
        return lambda: times(1.0)

    return [_case("one", timer)]


def all_slow(names, scale):
    def slowly():
        time.sleep(0.5)
        return times(500.0)

    return [_case(name, lambda stack: slowly, repeats=100) for name in ("one", "two", "three")]


def second_raises(names, scale):
    def broken(stack):
        raise RuntimeError("broken on purpose")

    return [_case("one"), _case("two", broken), _case("three")]


def second_is_refused(names, scale):
    def refused(stack):
        raise UnsupportedError("no such device")

    return [_case("one"), _case("two", refused), _case("three")]


def second_is_killed(names, scale):
    def killed(stack):
        os.kill(os.getpid(), signal.SIGKILL)

    return [_case("one"), _case("two", killed), _case("three")]


def second_hangs(names, scale):
    """Until the file "go" stands in the folder; "pid" names the process."""

    def hang(stack):
        Path("pid").write_text(str(os.getpid()))
        while not Path("go").exists():
            time.sleep(0.05)
        return lambda: times(2.0)

    return [_case("one"), _case("two", hang, limit_seconds=float(os.environ.get("LIMIT", "600"))), _case("three")]


def second_pauses(names, scale):
    """In its turn number PAUSE, counted from 0, the second case waits for "go"; "pid" then names its process.

    A turn takes MS milliseconds.
    """
    at = int(os.environ["PAUSE"])
    turns = []

    def timer():
        turns.append(1)
        if len(turns) == at + 1:
            Path("pid").write_text(str(os.getpid()))
            while not Path("go").exists():
                time.sleep(0.05)
        return times(float(os.environ.get("MS", "2")))

    return [_case("one"), _case("two", lambda stack: timer, repeats=3), _case("three")]


def second_is_slow(names, scale):
    """Half a second a turn, and a hundred turns of each variant."""

    def timer():
        time.sleep(0.5)
        return times(500.0)

    return [_case("one"), _case("two", lambda stack: timer, repeats=100), _case("three")]
