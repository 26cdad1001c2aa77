"""What the pairs of docs/from-keras.md read in a second: with Keras' own code, and with tfopt's in its place.

    python benchmarks/from_keras.py [RESULTS.json]

Runs the snippets of the first three pairs, as the page has them, on files that it makes (2,048 photographs of
256 × 192, 8,192 texts of 200 words, a table of 65,536 rows), and times epochs of both in turn. The table goes into the
page. Run it on a machine that has nothing else to do.
"""

import os
import re
import tempfile
import time
from pathlib import Path

import harness
import keras
import numpy as np

RESULTS = harness.RESULTS / "from-keras-cpu.json"
PAGE = harness.ROOT / "docs" / "from-keras.md"
PAIRS = {"images in a folder": 2048, "texts in a folder": 8192, "a table": 65536}
TURNS = 8


def make_files():
    """Writes what the snippets read into the working directory."""
    draws = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(20_000)])
    for name in ("cats", "dogs"):
        for folder in ("photos", "reviews"):
            Path(folder, name).mkdir(parents=True)
        for number in range(PAIRS["images in a folder"] // 2):
            coarse = draws.integers(256, size=(12, 16, 3)).astype("uint8")
            picture = keras.utils.array_to_img(coarse, scale=False).resize((256, 192))
            picture.save(f"photos/{name}/{number}.jpg")
        for number in range(PAIRS["texts in a folder"] // 2):
            Path("reviews", name, f"{number}.txt").write_text(" ".join(draws.choice(words, 200)), encoding="utf-8")
    rows = PAIRS["a table"]
    columns = (draws.normal(40, 9, rows).round(2), draws.choice(words[:500], rows), draws.integers(2, size=rows))
    lines = ["age,word,target", *(",".join(map(str, row)) for row in zip(*columns, strict=True))]
    Path("patients.csv").write_text("\n".join(lines), encoding="utf-8")


def pairs():
    """The datasets of each pair, Keras' first, by its name."""
    names, found = {"__name__": __name__}, []  # the name is for AutoGraph
    for snippet in re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M):
        exec(compile(snippet, PAGE.name, "exec"), names)
        if "dataset" in names:
            found.append(names.pop("dataset"))
        if len(found) == 2 * len(PAIRS):
            return dict(zip(PAIRS, zip(found[::2], found[1::2], strict=True), strict=True))
    raise ValueError(f"Expected {len(PAIRS)} pairs in {PAGE}. Found {len(found) / 2}.")


def epoch_seconds(dataset):
    """How long it takes to read all batches once."""
    began = time.perf_counter()
    for _ in dataset:
        pass
    return time.perf_counter() - began


def measured(datasets):
    """Seconds of the first epoch and of later ones, of each dataset."""
    turns = [[epoch_seconds(dataset) for dataset in datasets] for _ in range(TURNS + 1)]
    return {"first": turns[0], "later": np.transpose(turns[1:]).tolist()}


def table(found):
    """Examples a second, and how many times as many, as Markdown."""
    rows = []
    for name, each in found.items():
        keras_own, ours = np.array(each["later"])
        ends = harness.interval(lambda turns: np.median(turns[0] / turns[1]), np.array(each["later"]))
        ratio = f"{np.median(keras_own / ours):.3g}× ({ends[0]:.3g}–{ends[1]:.3g})"
        rates = [f"{PAIRS[name] / np.median(seconds):,.0f}" for seconds in (keras_own, ours)]
        rows.append([name, *rates, ratio, f"{each['first'][0] / each['first'][1]:.3g}×"])
    heads = ("", "Keras' own, examples a second", "tfopt", "later epochs", "first epoch")
    return harness.table(heads, rows, right=heads[1:3])


def main():
    """Measures and writes."""
    results = harness.parser(__doc__, RESULTS).parse_args().results.absolute()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_files()
        document = harness.document(seconds={name: measured(datasets) for name, datasets in pairs().items()})
        os.chdir(harness.ROOT)
    harness.write(results, document)
    print(table(document["seconds"]))
    if results == RESULTS:
        harness.fill(PAGE, "from-keras", table(document["seconds"]))


if __name__ == "__main__":
    main()
