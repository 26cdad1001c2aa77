"""Saving and restoring a training of 384 MiB: TrainingCheckpoint beside TensorFlow, Keras and Orbax.

    python -m venv ORBAX && ORBAX/bin/pip install -r benchmarks/peers/requirements-orbax.txt
    python benchmarks/checkpoint_peers.py ORBAX/bin/python [RESULTS.json] [--smoke]

Each turn trains for the same number of steps twice, saves after each time, and restores the last save; the ways
alternate. Orbax saves a JAX training of the same size in its own process, which is idle otherwise. Times in
milliseconds:

- blocked: how much longer the steps after a save took, the save included, than those before it
- call: how long training stopped for it
- safe: from the last step until the last save is on disk, with no training alongside
- restore: into a built model and its optimizer, with the files in the page cache; cold: from disk

Files go to the temporary folder (`TMPDIR`). The goals: blocked and call at most 0.15 of tf.train.Checkpoint's and 1.0
of Orbax's; a save with 90 % of the weights frozen writes at most 0.15 of a full one; restoring takes at most as long as
the fastest of the others. On two CPU cores two goals are not met: blocked against tf.train.Checkpoint, and restore from
the page cache; docs/checkpoints.md has the figures.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections import defaultdict
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import keras

from tfopt.bench.suites import checkpoint
from tfopt.bench.suites.checkpoint import TFOPT, Way, one_sample, restore_ms, save_times, written_mib
from tfopt.files import write_atomic
from tfopt.measure import StepTimes, compare, environment, interleave

ORBAX = "Orbax, asynchronous"
FIELDS = ("blocked", "call", "safe", "restore", "restore_cold")
REPEATS = 7
LEAST_MS = 1.0  # floor for a difference, which noise can make negative


def _resume(net, folder):
    callback = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    callback.set_model(net)
    callback.on_train_begin()
    net._initial_epoch = None  # or the next fit begins there
    return net


WAYS = checkpoint.WAYS | {
    "BackupAndRestore": Way(
        note="keras.callbacks.BackupAndRestore",
        callbacks=lambda folder: [keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)],
        restore=_resume,
    )
}


class Orbax:
    """A process that trains in JAX and saves with Orbax."""

    def __init__(self, python, steps):
        script = Path(__file__).parent / "peers" / "orbax_checkpoint.py"
        sizes = (checkpoint.WIDTH, checkpoint.OUTPUTS, checkpoint.EXAMPLES, steps)
        self._process = subprocess.Popen(
            [python, script, *map(str, sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        self.about = self._answer()

    def ask(self, what):
        """Makes it train, restore or write, and returns what it measured."""
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self):
        """Ends it."""
        self._process.stdin.close()
        self._process.wait()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            python, script, *_ = self._process.args
            raise RuntimeError(
                f"Expected an answer from {script}. It exited with {self._process.wait()}. Check the packages in the "
                f"environment of {python}."
            )
        return json.loads(line)


def of_orbax(orbax):
    """Returns the times of one Orbax turn, in ms."""
    found = orbax.ask("train")
    found["restore_ms"] = orbax.ask("restore")
    forget(Path(orbax.about["folder"]))
    return found | {"restore_cold_ms": orbax.ask("restore")}


def of_way(way, net, steps):
    """Returns the times of one turn, in ms."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = asdict(save_times(net, way, steps, folder))
        found["restore_ms"] = restore_ms(way, net, folder)
        forget(folder)
        return found | {"restore_cold_ms": restore_ms(way, net, folder)}


def forget(folder):
    """Drops a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def figures(turns):
    """The times of each field, and the ratios of tfopt's to the others', each with its interval."""
    times = {name: {field: _times(of, field) for field in FIELDS} for name, of in turns.items()}
    ratios = {field: {} for field in FIELDS}
    for name, of in times.items():
        for field in FIELDS if name != TFOPT else ():
            found = compare(times[TFOPT][field], of[field])
            ratios[field][name] = {"ratio": found.ratio, "interval": found.interval}
    return {
        "times": {name: {field: each.to_dict() for field, each in of.items()} for name, of in times.items()},
        "ratios": ratios,
    }


def _times(turns, field):
    if field == "blocked":
        values = [max(LEAST_MS, turn["with_save_ms"] - turn["without_save_ms"]) for turn in turns]
    else:
        values = [turn[f"{field}_ms"] for turn in turns]
    return StepTimes(repeats_ms=tuple((value,) for value in values), steps_per_sample=1, first_step_seconds=0.0)


def written(orbax):
    """MiB that each way writes: whole, and with 90 % of the weights frozen."""
    found = {ORBAX: orbax.ask("written")}
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = written_mib(checkpoint.built_net(), way, Path(folder))
    return found


def show(found, sizes):
    """Prints a table."""
    print(f"{'':22}" + "".join(f"{field:>22}" for field in FIELDS) + f"{'MiB':>8}{'frozen':>8}")
    for name, of in found["times"].items():
        cells = []
        for field in FIELDS:
            ratio = "" if name == TFOPT else f" ({found['ratios'][field][name]['ratio']:.2f})"
            cells.append(f"{of[field]['median_ms']:,.0f}{ratio}")
        print(f"{name:22}" + "".join(f"{cell:>22}" for cell in cells) + "".join(f"{mib:8.1f}" for mib in sizes[name]))
    print(f"In brackets: {TFOPT}'s time over this one.")


def measure(orbax, steps, repeats, keep):
    """Measures all ways, alternating; after each turn `keep` receives everything measured so far."""
    net = checkpoint.built_net()
    ways = {name: lambda way=way: of_way(way, net, steps) for name, way in WAYS.items()} | {
        ORBAX: lambda: of_orbax(orbax)
    }
    turns = defaultdict(list)

    def turn(name):
        turns[name].append(ways[name]())
        return one_sample(turns[name][-1]["with_save_ms"], 0.0)

    def done(name, number):
        print(f"turn {number + 1}, {name}: {turns[name][-1]}", flush=True)
        if name == ORBAX:  # the last of a turn
            keep(turns)

    of_way(checkpoint.NO_SAVE, net, 1)  # compiles
    interleave({name: lambda name=name: turn(name) for name in ways}, repeats, on_progress=done)


def main():
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description="Saving and restoring, beside TensorFlow, Keras and Orbax.")
    parser.add_argument("orbax", help="the python of an environment with Orbax")
    parser.add_argument("results", nargs="?", help="a JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="only show that it works: a tiny state, one turn")
    arguments = parser.parse_args()
    steps, repeats = checkpoint.STEPS, REPEATS
    if arguments.smoke:
        checkpoint.WIDTH, checkpoint.OUTPUTS, steps, repeats = 40, 9, 2, 1
    with closing(Orbax(arguments.orbax, steps)) as orbax:
        document = {"environment": environment(), "orbax": orbax.about["versions"], "steps": steps}
        document["written_mib"] = written(orbax)

        def keep(turns):
            document.update(figures(turns), turns=dict(turns))
            if arguments.results:
                write_atomic(arguments.results, json.dumps(document, indent=1) + "\n")

        measure(orbax, steps, repeats, keep)
    show(document, document["written_mib"])


if __name__ == "__main__":
    main()
