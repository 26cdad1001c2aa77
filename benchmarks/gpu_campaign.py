"""Measures everything that needs a GPU, in steps of at most eight minutes.

    python benchmarks/gpu_campaign.py [--output FOLDER]             what the steps are, and what is done
    python benchmarks/gpu_campaign.py --step N [--output FOLDER]    runs step N, or goes on where it stopped

Each figure is on disk as soon as it is measured, so that a step may be killed at any moment; run it again for what is
left. To measure something again, delete its file. Each step prints what it may take before it starts, and at most ten
lines when it ends. All processes share XLA's autotuning results. --rehearse runs the steps on a CPU with tiny sizes.

Exit codes: 0 the step is done, 1 something failed or is left, 2 wrong usage, 3 no GPU, 4 a goal is missed.
"""

import argparse
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from campaign import peers
from campaign.lines import Lines, parsed
from campaign.parts import Part, last_run, run, words

from tfopt.bench import isolated

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
STEP_SECONDS = 480.0
_SUMMARY_LINES = 10
_TEST = re.compile(r"(?P<test>tests/\S+::.+?) (?P<outcome>PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")

_XDIST_FAILURE = re.compile(r"\[gw\d+\].* (FAILED|ERROR) (?P<test>tests/\S+::.+?) *$")
_IN_A_NEW_FOLDER = """
import os, runpy, sys, tempfile
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    runpy.run_path(sys.argv[1], run_name="__main__")
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a step runs."""

    folder: Path
    machine: dict
    """As `machine_of` returns it."""
    rehearse: bool
    seconds: float


def first_look(setting):
    """The questions of campaign/first_look.py, each with the seconds it may take on a GPU."""
    limits = {"devices": 60, "attention": 120, "order": 60, "int32": 90, "small_steps": 60, "feeding": 300}
    script, tiny = str(HERE / "campaign" / "first_look.py"), ("--tiny",) * setting.rehearse
    return [
        Part(name=question, command=(script, question, *tiny), limit_seconds=limit, figures=_every_figure)
        for question, limit in limits.items()
    ]


def gpu_tests(setting):
    """The tests marked gpu, a process for each file: a crash, or memory that one keeps, is not the next one's."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    # The kernels' take longest, since each of their cases compiles: begun first, they end with the others.
    files = sorted(found, key=lambda path: ("kernels" not in path.parts, path))
    # Warnings of newer packages are no failures here, and the options of setup.cfg leave these tests out. What XLA
    # writes before it aborts the process reaches the log only if pytest does not capture it.
    options = (
        "-m",
        "gpu",
        "-W",
        "default",
        "-v",
        "--tb=short",
        "--color=no",
        "-p",
        "no:cacheprovider",
        "--capture=sys",
    )
    command = ("-m", "pytest", "-o", "addopts=--import-mode=importlib", *options)
    return [
        Part(
            name=str(path.relative_to(ROOT)),
            command=(*command, str(path.relative_to(ROOT))),
            limit_seconds=STEP_SECONDS,
            read=_test_outcome,
            figures=lambda records: ", ".join(f"{count} {name}" for name, count in _outcomes(records).items()),
        )
        for path in (files[:2] if setting.rehearse else files)  # without a GPU all are skipped
    ]


def other_tests(setting):
    """The examples and the quick tests: what works on a CPU shall work beside a GPU, where XLA and TF32 are on."""
    examples = sorted((ROOT / "examples").glob("*.py"))
    parts = [
        Part(name=f"examples/{path.name}", command=("-c", _IN_A_NEW_FOLDER, str(path)), limit_seconds=120, read=_said)
        for path in (examples[-1:] if setting.rehearse else examples)
    ]
    tests = ("tests/model/test_batches.py", "-n", "1") if setting.rehearse else ("tests", "-n", "8", "--timeout", "120")
    options = ("-m", "not slow and not campaign and not gpu", "-W", "default", "-v", "--tb=short", "--color=no")
    quick = Part(
        name="quick tests",
        command=("-m", "pytest", "-o", "addopts=--import-mode=importlib", *options, "-p", "no:cacheprovider", *tests),
        limit_seconds=STEP_SECONDS,
        read=_failure,
        figures=lambda records: f"{len(last_run(records))} failed",
    )
    return [*parts, quick]


def torch_peers(setting, name):
    """PyTorch's scripts; what was measured on this machine within a day is not measured again."""
    known = Lines(setting.folder / "peers.jsonl").read()
    parts = []
    for script in peers.SCRIPTS:
        part = f"{script}, {name}"
        variants = peers.missing(known, part, setting.machine)
        tiny = ("--device", "cpu", "--tiny") if setting.rehearse else ("--device", "cuda")
        parts.append(
            Part(
                name=part,
                command=(str(HERE / "peers" / f"{script}.py"), *tiny, "--variants", *(variants or peers.VARIANTS)),
                limit_seconds=300,
                read=lambda line: (found := parsed(line)) and found | {"driver": setting.machine["driver"]},
                done=lambda records, part=part: not peers.missing(records, part, setting.machine),
                figures=_peer_figures,
            )
        )
    return parts


def suites(setting):
    """tfopt-bench's list for a GPU, which goes on where it stopped: run this step until it is complete."""
    names = ["xla"] if setting.rehearse else ["gpu"]
    # It ends by itself before its limit; what it takes to start and to end is outside of its budget.
    budget = max(10.0, setting.seconds - 45.0)
    run_command = ("-m", "tfopt.bench", "run", *names, "--output", str(setting.folder))
    return [
        Part(
            name="tfopt-bench",
            command=(*run_command, "--resume", "--budget", f"{budget:g}"),
            limit_seconds=STEP_SECONDS,
            done=lambda records: _run_status(setting.folder)[0],
            figures=lambda records: _run_status(setting.folder)[1],
        )
    ]


def scripts(setting):
    """What deciding and the callbacks cost, and cases that tfopt-bench does without."""
    tiny = ("--repeats", "1") if setting.rehearse else ()
    costs = {"callback_cost": ("callbacks.json", 200), "decisions": ("decisions.json", 280)}
    cases = dict.fromkeys(("memory_batch", "compress", "cost", "distribute"), ("cases", STEP_SECONDS))
    wanted = {"decisions": costs["decisions"]} if setting.rehearse else costs | cases
    return [
        Part(
            name=name,
            command=(str(HERE / f"{name}.py"), str(setting.folder / results), *tiny, *["--resume"] * (name in cases)),
            limit_seconds=limit,
            read=_said,
            figures=lambda records: "; ".join(record["said"] for record in last_run(records))[:300],
        )
        for name, (results, limit) in wanted.items()
    ]


def goals(setting):
    """The goals beside the figures, and the page."""
    folder = str(setting.folder)
    return [
        Part(
            name="goals",
            command=(str(HERE / "campaign" / "goals.py"), folder),
            limit_seconds=60,
            again=True,
            figures=lambda records: ", ".join(f"{count} {name}" for name, count in _verdicts(records).items()),
        ),
        Part(
            name="report",
            command=("-m", "tfopt.bench", "report", folder, "--output", str(setting.folder / "benchmarks.md")),
            limit_seconds=120,
            again=True,
            read=lambda line: {"wrote": line},
        ),
    ]


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its parts are run in order, within the limit."""

    title: str
    minutes: str
    """How long it takes on an H200, as far as known."""
    file: str
    parts: Callable[[Setting], list[Part]]
    at_once: int = 1
    """How many of its parts run at a time; more than one where nothing is timed."""


STEPS = (
    Step("first look", "4 min", "first_look.jsonl", first_look),
    Step("tests marked gpu", "4 min", "gpu_tests.jsonl", gpu_tests, at_once=8),
    Step("PyTorch, before", "5 min", "peers.jsonl", partial(torch_peers, name="before")),
    Step("tfopt-bench run gpu", "8 min, about four times", "tfopt_bench.jsonl", suites),
    Step("more scripts", "8 min, about three times", "scripts.jsonl", scripts),
    Step("PyTorch, after", "5 min", "peers.jsonl", partial(torch_peers, name="after")),
    Step("goals and report", "1 min", "goals.jsonl", goals),
    Step("examples and quick tests", "6 min", "other_tests.jsonl", other_tests),
)


def _said(line):
    return {"said": line}


def _failure(line):
    found = _XDIST_FAILURE.search(line)
    return {"failed": found["test"]} if found else None


def _every_figure(records):
    return "; ".join(words(record) for record in last_run(records))


def _test_outcome(line):
    found = _TEST.search(line)
    return {"test": found["test"], "outcome": found["outcome"].lower()} if found else None


def _outcomes(records):
    return Counter(record["outcome"] for record in last_run(records))


def _peer_figures(records):
    samples = {record["variant"]: sorted(record["samples_ms"]) for record in records if "samples_ms" in record}
    medians = {variant: ms[len(ms) // 2] for variant, ms in samples.items()}
    return ", ".join(f"{variant} {ms:.2f} ms" for variant, ms in medians.items())


def _verdicts(records):
    return Counter({record["goal"]: record["verdict"] for record in records if "goal" in record}.values())


def _run_status(folder):
    """Whether tfopt-bench's last run is complete and without errors, and how it stands in words."""
    documents = [(path, parsed(path.read_text("utf-8"))) for path in sorted(folder.glob("*.json"))]
    runs = [(path, found) for path, found in documents if found and found.get("schema") == "tfopt-bench"]
    if not runs:
        return False, "no results"
    path, last = runs[-1]
    errors = [f"{case['suite']} on {case['workload']}: {case['error']}" for case in last["cases"] if case["error"]]
    done = last["status"] == "complete" and not errors
    return done, "; ".join([f"{path.name} {last['status']}, {len(last['cases'])} cases", *errors])[:600]


def main():
    """Runs a step, or lists them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, choices=range(1, len(STEPS) + 1), metavar="N", help="which step to run")
    parser.add_argument("--output", default="gpu-campaign", type=Path, metavar="FOLDER", help="default: gpu-campaign")
    parser.add_argument(
        "--limit", default=STEP_SECONDS, type=float, metavar="SECONDS", help="for the step; default 480"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny sizes")
    options = parser.parse_args()
    folder = options.output.absolute()
    begun = time.monotonic()
    if options.step is None:
        return _list(folder, options.rehearse)
    step = STEPS[options.step - 1]
    print(f"Step {options.step}, {step.title}: {step.minutes} on an H200, at most {options.limit:.0f} s.", flush=True)
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(HERE), os.environ.get("PYTHONPATH"))))
    }
    environ["PYTHONUNBUFFERED"] = "1"  # so that each line comes when it is printed
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # or the first of several processes takes all memory
    os.environ |= environ
    machine = isolated.call(machine_of, folder / "xla-cache", seconds=180)
    if refusal := _refusal(machine, folder, options.rehearse):
        print(refusal)
        return 3
    if machine["xla_flags"]:
        environ["XLA_FLAGS"] = machine["xla_flags"]
    setting = Setting(folder, machine, options.rehearse, options.limit)
    lines, logs = Lines(folder / step.file), folder / "logs" / f"step-{options.step}"
    os.chdir(ROOT)
    deadline = begun + options.limit
    run(step.parts(setting), lines, logs, deadline=deadline, environ=environ, at_once=step.at_once)
    return _summary(options.step, setting, lines.read(), logs, time.monotonic() - begun)


def _list(folder, rehearse):
    """Prints the steps; what is done follows from the files alone."""
    lines = Lines(folder / "campaign.jsonl").read()
    setting = Setting(
        folder, lines[-1]["machine"] if lines else {"torch": None, "driver": None}, rehearse, STEP_SECONDS
    )
    for number, step in enumerate(STEPS, 1):
        records, parts = Lines(folder / step.file).read(), step.parts(setting)
        done = sum(part.is_done(records) for part in parts)
        print(f"{number}  {step.title:<24} {step.minutes:<24} {done} of {len(parts)} done")
    print(f"Results: {folder}")
    return 0


def machine_of(send, cache):
    """What TensorFlow sees here, in a process of its own, since it takes a GPU's memory."""
    import keras
    import tensorflow as tf

    from tfopt.hardware import gpus
    from tfopt.measure import environment
    from tfopt.xla.autotune_cache import share_cache

    share_cache(cache)  # first: XLA reads its flags when devices start
    seen = tf.config.list_physical_devices("GPU")
    return {
        "gpu": tf.config.experimental.get_device_details(seen[0])["device_name"] if seen else None,
        "gpus_of_the_driver": [gpu.name for gpu in gpus()],
        "driver": environment()["driver"],
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "torch": metadata.version("torch") if find_spec("torch") else None,
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS"),
    }


def _refusal(machine, folder, rehearse):
    """Why this machine cannot run a step into this folder; None, and noted there, where it can."""
    if machine["gpu"] is None and not rehearse:
        driver = machine["gpus_of_the_driver"] or "none"
        return (
            f"Expected an NVIDIA GPU. Found none that TensorFlow sees (the driver's: {driver}). Run it on a machine "
            "with a GPU and pip install '.[gpu]', or pass --rehearse."
        )
    lines = Lines(folder / "campaign.jsonl")
    here = {name: machine[name] for name in ("gpu", "tensorflow", "keras")} | {"rehearsal": rehearse}
    before = [record["setting"] for record in lines.read()]
    if before and before[-1] != here:
        return (
            f"Expected results of this machine in {folder}. Found: {before[-1]}; here: {here}. Pass another --output."
        )
    lines.append(setting=here, machine=machine)
    return None


def _summary(number, setting, records, logs, seconds):
    """Prints at most ten lines, what failed first, and returns the exit code."""
    step = STEPS[number - 1]
    parts = step.parts(setting)
    good = [part for part in parts if part.is_done(records)]
    missed = step.parts is goals and _verdicts(records)["missed"]
    left = [part for part in parts if part not in good]
    print(f"Step {number}, {step.title}: {len(good)} of {len(parts)} done, {seconds:.0f} s. Logs: {logs}")
    shown = [part.summary(records)[:400] for part in left + good]
    room = _SUMMARY_LINES - 2
    print(*shown[:room], sep="\n")
    if len(shown) > room:
        print(f"and {len(shown) - room} more in {setting.folder / step.file}")
    elif left and not missed:
        print(f"For what is left: --step {number} again.")
    return 4 if missed else 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
