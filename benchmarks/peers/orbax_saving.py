"""Changes arrays and saves them with Orbax, to be killed by benchmarks/checkpoint_kills.py.

    python -m venv orbax && orbax/bin/pip install -r benchmarks/peers/requirements-orbax.txt
    orbax/bin/python benchmarks/peers/orbax_saving.py FOLDER WIDTH EPOCHS

Goes on with the newest checkpoint in FOLDER. Prints JSON lines: where it goes on, each save when it begins and when it
is on the disk, each state, and the result. It trains nothing: JAX and TensorFlow would compute different bits.
"""

import hashlib
import json
import sys
import time

import numpy as np
import orbax.checkpoint as ocp


def note(**values):
    """Prints a line."""
    print(json.dumps(values), flush=True)


def state_at(epoch, state):
    """The arrays after one more epoch; each depends on the ones before."""
    return {name: array * np.float32(0.9) + np.float32(epoch) for name, array in state.items()}


def digest(state):
    """Of all arrays."""
    return hashlib.sha256(b"".join(np.asarray(state[name]).tobytes() for name in sorted(state))).hexdigest()


def main(folder, width, epochs):
    """Goes on to the last epoch."""
    draw = np.random.default_rng(0)
    state = {f"kernel_{number}": draw.normal(size=(width, width)).astype("float32") for number in range(3)}
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        newest = manager.latest_step() or 0
        if newest:
            state = manager.restore(newest, args=ocp.args.StandardRestore(state))
        note(resumed=[newest, digest(state)])
        for epoch in range(newest + 1, epochs + 1):
            state = state_at(epoch, state)
            note(state=[epoch, digest(state)])
            begin = time.monotonic()
            note(begun=epoch)
            manager.save(epoch, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
            note(done=epoch, seconds=time.monotonic() - begin)
    note(result={"model": digest(state)})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
