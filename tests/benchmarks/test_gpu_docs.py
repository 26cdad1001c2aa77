"""The figures of docs/gpu.md, computed from the recorded samples."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text("utf-8")


def recorded(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text("utf-8"))


def figures():
    """Each figure of the table from raw samples: milliseconds, or MiB, by what was measured."""
    looks, peers = (recorded(name)["lines"] for name in ("first-look-h100.json", "peers-h100.json"))
    first, again = ({one["way"]: one["step_ms"] for one in looks if one["part"] == part} for part in PARTS)
    attention = {(one["attention"], one["dtype"]): one for one in looks if one["part"] == "attention"}
    torch = {(one["workload"], one["variant"]): one for one in peers}
    cases = {case["workload"]: case["variants"] for case in recorded("h100.json")["cases"]}
    steps = {
        (workload, variant["name"]): median(median(turn) for turn in variant["step_time"]["repeats_ms"])
        for workload, variants in cases.items()
        for variant in variants
    }
    memory = {variant["name"]: variant["peak_memory_mib"] for variant in cases["gpt2"]}
    mlp, chunked = "step alone", recorded("chunked-loss-h100.json")
    gpt2, (whole, pieces) = chunked["pytorch"], (chunked["figures"][name] for name in ("Keras' own", "auto"))
    (stack,) = recorded("stack-h100.json")["cases"]
    stack_ms = {
        one["name"]: median(median(turn) for turn in one["step_time"]["repeats_ms"]) for one in stack["variants"]
    }
    recommended = stack_ms['+ cache="device"']

    def milliseconds(figure):
        return median(median(turn) for turn in figure["wall_times"]["repeats_ms"])

    def over(dtype, what):
        return attention["flash", dtype][what] / attention["plain", dtype][what]

    return [
        stack_ms["naive Keras"] / recommended,
        stack_ms["Keras' defaults"] / recommended,
        first["ceiling"] / median(first["gather"]),
        again["ceiling"] / median(again["map and batch"]),
        again["ceiling"] / median(again["device cache"]),
        median(torch["resnet50", "compiled, pinned"]["samples_ms"]) / median(first["gather"]),
        1 / over("bfloat16", "ms"),
        1 / over("float16", "ms"),
        over("bfloat16", "error"),
        over("float16", "error"),
        steps["gpt2", "Keras' attention"] / steps["gpt2", "flash attention"],
        memory["flash attention"] / memory["Keras' attention"],
        median(gpt2["samples_ms"]) / milliseconds(whole),
        whole["peak_mib"] / gpt2["peak_memory_mib"],
        pieces["peak_mib"] / whole["peak_mib"],
        milliseconds(pieces) / milliseconds(whole),
        pieces["peak_mib"] / gpt2["peak_memory_mib"],
        steps["mlp", "overlap"] / steps["mlp", mlp],
        steps["mlp", "stock fit"] / steps["mlp", mlp],
    ]


PARTS = ("feeding", "feeding, again")
TABLE = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("|")][2:]
ROWS = [[cell.strip() for cell in row] for row in TABLE]


def test_the_table_holds_each_figure():
    assert len(ROWS) == len(figures())


@pytest.mark.parametrize(("row", "figure"), list(zip(ROWS, figures(), strict=True)), ids=[row[0] for row in ROWS])
def test_a_figure_is_that_of_the_samples_and_its_verdict_follows(row, figure):
    _, goal, shown, verdict = row
    number, decimals = shown.removesuffix("×"), len(shown.removesuffix("×").partition(".")[2])
    assert f"{figure:.{decimals}f}" == number
    bound = re.fullmatch(r"([≥≤]) ([\d.]+)×?", goal)
    reached = bound and (figure >= float(bound[2]) if bound[1] == "≥" else figure <= float(bound[2]))
    assert verdict == {None: "", True: "met", False: "missed"}[reached]


def test_what_other_pages_say_is_in_the_table():
    readme, kernels = (" ".join((ROOT / name).read_text("utf-8").split()) for name in ("README.md", "docs/kernels.md"))
    naive, defaults, *_ = figures()
    assert (
        f"trained {naive:.1f}× as fast as in naive Keras and {defaults:.2f}× as fast as with Keras' defaults" in readme
    )
    chunked = recorded("chunked-loss-h100.json")["figures"]
    whole, pieces = chunked["Keras' own"], chunked["auto"]
    speed = whole["wall_times"]["median_ms"] / pieces["wall_times"]["median_ms"]
    took = f"{pieces['peak_mib']:,.0f} MiB instead of {whole['peak_mib']:,.0f} at its peak, in 8 pieces and at"
    assert f"{took} {speed:.2f}× the speed" in kernels


def test_the_trace_says_what_the_last_product_and_the_pieces_take():
    whole, pieces = recorded("kernels-gpt2-h100.json")["kernels"].values()
    total = sum(kernel["ms"] for kernel in whole.values())
    product = sum(kernel["ms"] for name, kernel in whole.items() if "tf32" in name)
    text = " ".join(PAGE.split())
    assert f"of the {total:.1f} ms of its kernels, {product:.1f} go into the last product" in text
    assert f"added up 16 times, which takes {pieces['wrapped_add']['ms']:.1f} ms" in text
