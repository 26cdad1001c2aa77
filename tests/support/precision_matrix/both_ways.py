"""Trains the healthy cases of the matrix in float32 and under their policies, and records how far the losses fall.

Run from the repository, for all cases that are not recorded yet or those of them whose names begin with an argument:

    PYTHONPATH=.:tests/support python -m precision_matrix.both_ways [NAME ...]

It writes `both_ways.json` beside this file, which the tests of the matrix compare with the verdicts that they expect.
"""

import json
import sys
from contextlib import suppress

import keras
import numpy as np
import tensorflow as tf

from precision_matrix import cases
from precision_matrix.case import RECORD, RECORDS, Case, first
from tfopt.precision import apply

EPOCHS = 8
UNSTEADY = ("depthwise_net", "encoder after training")
"""Cases whose last loss in float32 varies so much that it takes three seeds to compare it, not one."""
NOT_TRAINED = {
    "large_targets": "its loss is 10⁹ and does not move in 8 epochs",
    "GAN": "the loss of a GAN's parts says nothing of how well it trains",
    "GAN, by a mapping": "as GAN",
    "GAN, half of it": "as GAN",
}
"""Cases that are healthy by their construction, and why no training shows it."""


def share_of_fall(record):
    """How much of the fall of the loss in float32 is reached under the policy: 1 if it trains alike, NaN if none."""
    first, float32, policy = (float(np.mean(record[part])) for part in ("first", "float32", "policy"))
    return (first - policy) / (first - float32) if first != float32 else float("nan")


def losses(case: Case, seed: int, *, policy) -> list[float]:
    """The loss after each epoch."""
    model, data = case.build(seed)
    data = keras.tree.map_structure(tf.convert_to_tensor, data)  # as which fit also takes strings
    parts = data if isinstance(data, tuple) else (data,)
    if policy:
        with suppress(NotImplementedError):  # a GAN has no call
            model(first(parts[0], 1))  # where apply finds the outputs of a subclassed model
        apply(model, policy)
    model.jit_compile = False
    options = dict(zip(("x", "y", "sample_weight"), parts, strict=False))
    seen: list[float] = []  # a train_step of one's own leaves zeros in the history
    seeing = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"])))
    model.fit(**options, batch_size=32, epochs=EPOCHS, verbose=0, callbacks=[seeing])
    return seen[len(seen) // EPOCHS - 1 :: len(seen) // EPOCHS]


def trained(case: Case, known) -> dict[str, list[float]]:
    """The loss of the first epoch and of the last, in float32 and under the policy, for each seed."""
    seeds = (1, 2, 3) if case.name in UNSTEADY else (1,)
    if case.name not in known:
        plain = Case(name=case.name, make=case.make, policy=None, verdict="pass")
        known[case.name] = [losses(plain, seed, policy=None) for seed in seeds]
    both = known[case.name], [losses(case, seed, policy=case.policy) for seed in seeds]
    found = {"first": [one[0] for one in both[0]], "float32": [one[-1] for one in both[0]]}
    found["policy"] = [one[-1] for one in both[1]]
    return {part: [float(f"{value:.4g}") for value in values] for part, values in found.items()}


def main():
    wanted = [case for case in cases.ALL if case.truth is cases.TRAINED and case.name not in NOT_TRAINED]
    records = dict(RECORDS)
    known: dict[str, list[list[float]]] = {}
    for case in wanted:
        if case.id in records or (sys.argv[1:] and not case.name.startswith(tuple(sys.argv[1:]))):
            continue
        keras.backend.clear_session()
        keras.config.set_dtype_policy("float32")
        try:
            records[case.id] = trained(case, known)
        except Exception as error:
            print(f"{case.id}: {type(error).__name__}: {error}"[:400], flush=True)
            continue
        print(f"{case.id}: {share_of_fall(records[case.id]):.3f} {records[case.id]}", flush=True)
        kept = {case.id: records[case.id] for case in wanted if case.id in records}
        RECORD.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
