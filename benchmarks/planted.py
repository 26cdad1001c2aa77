"""Whether `tfopt.diagnose` finds causes that were planted in trainings, and whether its remedies gain what it predicts.

    PYTHONPATH=tests/support python benchmarks/planted.py [RESULTS.json] [--pages] [--only NAME ...]

Each training of tests/support/planted_trainings.py is diagnosed as it is. Then `fit` is timed as it is and with the
remedy, in turn, by the wall. Both go into benchmarks/results/planted-cpu.json as soon as a training is done; a second
run goes on with those that are missing. The table goes into docs/diagnosis.md; with `--pages`, nothing is measured. Run
it on a machine that has nothing else to do. Goals: the planted cause comes first, and none where none was planted; the
gain is within 20 % of the predicted one for four trainings in five, or within the bound where one is given, and never
on the other side of 1.
"""

import math
import time
from statistics import median

import harness
import keras
import numpy as np
from planted_trainings import PLANTED

from tfopt.diagnosis import diagnose_fit
from tfopt.diagnosis.arms import quiet

RESULTS = harness.RESULTS / "planted-cpu.json"
PAGE = harness.ROOT / "docs" / "diagnosis.md"
ROUNDS = 3
WITHIN = 0.2
NOTHING = "nothing"
LEAST_STEPS = 200  # in an epoch, or what a fit and an epoch take to begin would count as much as their steps
TRAININGS = {training.__name__: (cause, training) for cause, trainings in PLANTED.items() for training in trainings}


def measured(name):
    """Diagnoses a training, then times it as it is and with the remedy."""
    cause, make = TRAININGS[name]
    keras.utils.set_random_seed(0)
    with quiet():
        diagnosis = diagnose_fit(*long(make, cause, mended=False))
    found = [one for one in diagnosis.worth_changing if cause in one.name]
    fits = {"as it is": timed(make, cause, mended=False), "mended": timed(make, cause, mended=True)}
    seconds = {how: [] for how in fits}
    for _ in range(ROUNDS):
        for how, fit in fits.items():
            seconds[how].append(fit())
    return {
        "name": name,
        "cause": cause,
        "first": diagnosis.worth_changing[0].name if diagnosis.worth_changing else None,
        "predicted": found[0].gain if found else None,
        "seconds": seconds,
        "diagnosis": diagnosis.to_dict(),
    }


def long(make, cause, mended):
    """The training with more rows, unless what is done once an epoch is in question."""
    model, arguments = make(mended=mended)
    if isinstance(arguments["x"], np.ndarray) and cause not in ("validation", "between epochs", NOTHING):
        steps = len(arguments["x"]) / make(mended=False)[1].get("batch_size", 32)  # as many rows, mended or not
        times = math.ceil(LEAST_STEPS / steps)
        arguments |= {name: np.concatenate([arguments[name]] * times) for name in ("x", "y")}
    return model, arguments


def timed(make, cause, mended):
    """Returns what trains once more and says how many seconds that took, without the compilation of the first step."""
    if cause == "new shapes":  # what was compiled must not be kept

        def fit():
            model, arguments = long(make, cause, mended)
            with quiet():
                model.fit(arguments["x"].take(1))
            return seconds_of(model, arguments)

    else:
        model, arguments = long(make, cause, mended)
        seconds_of(model, arguments)

        def fit():
            return seconds_of(model, arguments)

    return fit


def seconds_of(model, arguments):
    """Trains, and returns the seconds it took."""
    with quiet():
        started = time.perf_counter()
        model.fit(**arguments)
        return time.perf_counter() - started


def planted(row):
    """The cause as it was diagnosed."""
    return next(one for one in row["diagnosis"]["causes"] if row["cause"] in one["name"] and one["counts"])


def gain(row):
    """How many times as fast the training became: the median of the turns' ratios."""
    pairs = zip(row["seconds"]["as it is"], row["seconds"]["mended"], strict=True)
    return median(before / after for before, after in pairs)


def came_first(row):
    """Whether the diagnosis names the cause as the most expensive, or as too close to that to tell them apart."""
    return row["first"] is None if row["cause"] == NOTHING else row["cause"] in row["diagnosis"]["verdict"]


def verdict(row):
    """Whether the prediction held."""
    if row["predicted"] is None:
        return "" if row["cause"] == NOTHING and row["first"] is None else "not found"
    if (row["predicted"] > 1) != (gain(row) > 1):
        return "wrong side of 1"
    if planted(row)["at_most"]:
        return "within the bound" if gain(row) <= (1 + WITHIN) * row["predicted"] else "beyond the bound"
    return "within 20 %" if abs(row["predicted"] / gain(row) - 1) <= WITHIN else "further off"


def table(rows):
    """The rows as Markdown."""
    lines = []
    for row in rows:
        predicted = "" if row["predicted"] is None else f"{row['predicted']:.2f}×"
        if row["predicted"] is not None and planted(row)["at_most"]:
            predicted = f"≤ {predicted}"
        first = "yes" if came_first(row) else row["first"] or "nothing counted"
        name = row["name"].replace("_", " ")
        lines.append([row["cause"], name, first, predicted, f"{gain(row):.2f}×", verdict(row)])
    causes = [row for row in rows if row["cause"] != NOTHING]
    held = sum(verdict(row).startswith("within") for row in causes)
    came = sum(map(came_first, causes))
    heads = ("Planted", "Training", "Came first", "Predicted", "Gained", "")
    counted = f"Of {len(causes)} planted causes, {came} came first, and {held} predictions held."
    return f"{harness.table(heads, lines, right=('Predicted', 'Gained'))}\n\n{counted}"


def recorded(path=RESULTS):
    """The rows measured so far, in order."""
    by_name = {row["name"]: row for row in harness.read(path, {"rows": []})["rows"]}
    return [by_name[name] for name in TRAININGS if name in by_name]


def main():
    """Measures what is missing, and writes."""
    parser = harness.parser(__doc__, RESULTS)
    parser.add_argument("--pages", action="store_true", help="measure nothing; fill the page")
    parser.add_argument("--only", nargs="+", choices=TRAININGS, metavar="NAME", help="measure these, again")
    options = parser.parse_args()
    done = {row["name"] for row in recorded(options.results)}
    for name in () if options.pages else options.only or [name for name in TRAININGS if name not in done]:
        row = measured(name)
        rows = [other for other in recorded(options.results) if other["name"] != name] + [row]
        harness.write(options.results, harness.document(rows=rows))
        print(f"{name}: {row['first']}; predicted {row['predicted'] or 0:.2f}, gained {gain(row):.2f}", flush=True)
    if options.results == RESULTS:
        harness.fill(PAGE, "planted", table(recorded()))


if __name__ == "__main__":
    main()
