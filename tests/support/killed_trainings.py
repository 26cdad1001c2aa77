"""Kills trainings that save checkpoints, and checks what is left: python killed_trainings.py FOLDER calls|moments N

`calls` kills after every Nth call that changes the disk, middles of writes included. `moments` kills at N seeded
moments or a few more, again and again until a training ends. Prints a JSON line with the number of kills. It imports
no TensorFlow, so that a process to be killed costs a fork.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import saved_trainings
from shimmed_disk import BEFORE, shimmed

LARGE = 40  # so that most of the time goes into writing


def in_process(script, folder, *arguments):
    """Runs this script, or another like it, in a process of its own; returns what it printed."""
    output = subprocess.run(
        [sys.executable, script, str(folder), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert output.returncode == 0, output.stderr[-5000:]
    return json.loads(output.stdout)


def killed(body, after_seconds=None):
    """Runs a body in a child, which may be killed; returns the last step it has saved, and whether it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            body(lambda step: os.write(writer, bytes([step])))
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    os.close(writer)
    if after_seconds is not None:
        time.sleep(after_seconds)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader, "rb") as steps:
        saved = steps.read()
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return max(saved, default=0), status != 0


def at_call(number, calls):
    """A shim that kills at a call."""

    def on(call, moment, path, arguments):
        if moment == BEFORE:
            return
        calls.append(f"{call} {saved_trainings.plain(path)}")
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return on


def kill_at_calls(folder, every):
    calls = []
    with shimmed(folder, at_call(None, calls)):
        saved_trainings.train(folder)
    shutil.rmtree(folder)
    numbers = range(every, len(calls) + 1, every)
    for number in numbers:

        def body(saved, number=number):
            with shimmed(folder, at_call(number, [])):
                saved_trainings.train(folder, saved=saved)

        saved, was_killed = killed(body)
        assert was_killed, number
        expect_to_go_on(folder, saved, f"call {number}, {calls[number - 1]}")
    return {"kills": len(numbers), "calls": len(calls), "kinds": sorted({*calls})}


def kill_at_moments(folder, least):
    begin = time.monotonic()
    saved_trainings.train(folder, scale=LARGE)
    whole_seconds = time.monotonic() - begin
    shutil.rmtree(folder)
    kills = seed = 0
    while kills < least:
        draw, newest = random.Random(seed), 0
        while newest < saved_trainings.STEPS:
            left = range(newest + 1, saved_trainings.STEPS + 1)
            last, was_killed = killed(
                lambda saved, left=left: saved_trainings.train(folder, left, saved, LARGE),
                draw.uniform(0, 1.1 * whole_seconds),
            )
            kills += was_killed
            newest = saved_trainings.expect_nothing_lost(folder, max(last, newest), LARGE)
        expect_to_go_on(folder, newest, f"seed {seed}", LARGE)
        seed += 1
    return {"kills": kills, "trainings": seed}


def expect_to_go_on(folder, saved, where, scale=1):
    """Fails unless nothing is lost, and a training that goes on from what is there ends as one never killed."""
    try:
        newest = saved_trainings.expect_nothing_lost(folder, saved, scale)
        left = range(newest + 1, saved_trainings.STEPS + 1)
        saved_trainings.train(folder, left, scale=scale)
        saved_trainings.expect_nothing_lost(folder, saved_trainings.STEPS, scale)
        saved_trainings.expect_no_leftovers(folder)
    except BaseException as error:
        raise AssertionError(f"killed at {where}") from error
    shutil.rmtree(folder)


if __name__ == "__main__":
    place, which, number = Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3])
    print(json.dumps({"calls": kill_at_calls, "moments": kill_at_moments}[which](place, number)))
