"""Trains cases in each process of a cluster: python data_check_job.py FOLDER few|rest

Each process writes into FOLDER what each wrong case was refused with, and the weights and examples of each healthy one;
some of both also trained without the check.
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import keras

from tfopt import distribute
from tfopt.distribute.data_check.fits import DATA_CHECK
from tfopt.errors import TfoptError


def outcome(strategy, case, rank, folder):
    """What the model has seen and learnt, or why it was refused."""
    from pipeline_parts import Recording

    folder.mkdir(parents=True)
    keras.utils.set_random_seed(1)
    try:
        with strategy.scope():
            model = Recording()
            model.compile("sgd", "mse", jit_compile=False)
            case(model, rank, str(folder))
    except TfoptError as error:
        return {"refused": str(error), "seen": model.seen}
    return {"weights": [weight.tolist() for weight in model.get_weights()], "seen": model.seen}


def main():
    """Trains all of it."""
    folder, which = Path(sys.argv[1]), sys.argv[2]
    logged = []
    logging.getLogger("tfopt").addFilter(lambda record: logged.append(record.getMessage()) or False)
    strategy = distribute.strategy("auto")
    rank = distribute.resolve().index
    from data_check_cases import COMPARED, FEW, HEALTHY, SHOWN, WRONG

    cases = {name: case for name, (case, _) in WRONG.items()} | HEALTHY
    chosen = [name for name in cases if (name in FEW) == (which == "few")]
    found = {"checked": {}, "without": {}}
    for name in chosen:
        logged.clear()
        found["checked"][name] = outcome(strategy, cases[name], rank, folder / f"{rank} {name}")
        found["checked"][name]["warned"] = [*logged]
    DATA_CHECK.remove()
    for name in chosen:
        if name in SHOWN + COMPARED:
            found["without"][name] = outcome(strategy, cases[name], rank, folder / f"{rank} without {name}")
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
