"""benchmarks/fit_goals.py: the goals are computed from the suite's results and PyTorch's lines."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fit_goals.py"


@pytest.fixture(scope="module")
def fit_goals():
    specification = importlib.util.spec_from_file_location("fit_goals", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def variant(name, median_ms, *, of_ceiling=None, ratio=None, peak=None):
    return {
        "name": name,
        "step_time": {"median_ms": median_ms},
        "of_ceiling": of_ceiling and {"ratio": of_ceiling},
        "comparison": ratio and {"ratio": ratio},
        "peak_memory_mib": peak,
    }


DOCUMENT = {
    "cases": [
        {
            "workload": "resnet50",
            "variants": [
                variant("overlap", 40.0, of_ceiling=0.97),
                variant('overlap, cache="device"', 38.0, of_ceiling=0.995),
            ],
        },
        {"workload": "gpt2", "variants": [variant("flash attention", 36.0, peak=15_000)]},
        {"workload": "mlp", "variants": [variant("overlap", 0.5, of_ceiling=0.8)]},
        {"workload": "attention, 2×64", "variants": [variant("flash attention", 1.0, ratio=4.0)]},
    ]
}
PEERS = [
    {"workload": "resnet50", "variant": "compiled, pinned", "samples_ms": [42.0, 44.0, 43.0], "peak_memory_mib": 1.0},
    {"workload": "gpt2", "variant": "compiled, resident", "samples_ms": [39.0, 39.6], "peak_memory_mib": 16_000},
    {"workload": "gpt2", "variant": "eager, resident", "samples_ms": [1.0], "peak_memory_mib": 1.0},
]


def test_each_goal_has_its_figure(fit_goals):
    found = [
        (goal.bound, goal.measured and round(goal.measured, 4), goal.met) for goal in fit_goals.goals(DOCUMENT, PEERS)
    ]
    assert found == [
        (0.98, 0.97, False),
        (1.0, 1.075, True),
        (0.99, 0.995, True),
        (1.15, 1.25, False),
        (1.1, 1.0917, False),
        (1.0, 0.9375, True),
        (2.5, 4.0, True),
    ]


def test_what_was_not_measured_is_said(fit_goals):
    lines = list(map(str, fit_goals.goals({"cases": []}, [])))
    assert len(lines) == 6
    assert all(line.endswith("not measured") for line in lines)
    assert str(fit_goals.goals(DOCUMENT, PEERS)[3]) == "mlp, overlap: time over the step's own: ≤ 1.15, 1.250: missed"
