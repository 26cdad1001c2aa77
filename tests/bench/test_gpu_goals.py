"""benchmarks/gpu_goals.py: the goals are computed from the run's results and PyTorch's lines."""

import copy
import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_goals.py"


@pytest.fixture(scope="module")
def gpu_goals():
    specification = importlib.util.spec_from_file_location("gpu_goals", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def variant(name, median_ms, *, of_ceiling=None, ratio=None, peak=None, recommended=False):
    return {
        "name": name,
        "step_time": {"median_ms": median_ms},
        "of_ceiling": of_ceiling and {"ratio": of_ceiling},
        "comparison": ratio and {"ratio": ratio},
        "peak_memory_mib": peak,
        "recommended": recommended,
    }


def case(suite, workload, *variants, limit=None):
    return {"suite": suite, "workload": workload, "error": None, "limit": limit, "variants": variants}


DOCUMENT = {
    "cases": [
        case(
            "stack",
            "resnet50",
            variant("+ TF32", 1.0, ratio=1.6),
            variant("+ overlap", 1.0, ratio=13.0, recommended=True),
        ),
        case("stack", "gpt2", variant("+ flash attention", 1.0, ratio=6.0, recommended=True)),
        case(
            "fit",
            "resnet50",
            variant("overlap", 40.0, of_ceiling=0.97),
            variant('overlap, cache="device"', 38.0, of_ceiling=0.995),
        ),
        case("fit", "gpt2", variant("flash attention", 36.0, peak=15_000)),
        case("fit", "mlp", variant("overlap", 0.5, of_ceiling=0.8)),
        case("fit", "attention, 2×64", variant("flash attention", 1.0, ratio=4.0)),
        case(
            "pipeline",
            "resnet50 from JPEG",
            variant("build_pipeline, overlap", 42.0, of_ceiling=0.93, recommended=True),
            limit="step alone",
        ),
        case("callbacks", "digits", variant("tfopt's callbacks", 1.0, ratio=0.996)),
        {"suite": "xla", "workload": "digits", "error": "it broke", "variants": []},
    ]
}
PEERS = [
    {"workload": "resnet50", "variant": "compiled, pinned", "samples_ms": [42.0, 44.0, 43.0], "peak_memory_mib": 1.0},
    {"workload": "gpt2", "variant": "compiled, resident", "samples_ms": [39.0, 39.6], "peak_memory_mib": 16_000},
    {"workload": "gpt2", "variant": "eager, resident", "samples_ms": [1.0], "peak_memory_mib": 1.0},
]


def test_each_goal_has_its_figure(gpu_goals):
    found = [
        (goal.bound, goal.measured and round(goal.measured, 4), goal.met) for goal in gpu_goals.goals(DOCUMENT, PEERS)
    ]
    assert found == [
        (12, 13.0, True),
        (6.5, 6.0, False),
        (0.98, 0.97, False),
        (1.0, 1.075, True),
        (0.99, 0.995, True),
        (0.9, 0.93, True),
        (1.15, 1.25, False),
        (1.1, 1.0917, False),
        (1.0, 0.9375, True),
        (0.995, 0.996, True),
        (2.5, 4.0, True),
    ]


def test_what_limits_the_training_from_files_sets_its_goal(gpu_goals):
    decoding = copy.deepcopy(DOCUMENT)
    decoding["cases"][6]["limit"] = "input alone"
    goal = gpu_goals.goals(decoding, [])[5]
    assert (goal.bound, goal.met) == (0.95, False)
    assert "decoding alone, which limits" in goal.what


def test_what_was_not_measured_is_said(gpu_goals):
    lines = list(map(str, gpu_goals.goals({"cases": []}, [])))
    assert len(lines) == 10
    assert all(line.endswith("not measured") for line in lines)
    assert str(gpu_goals.goals(DOCUMENT, PEERS)[6]) == "mlp, overlap: time over the step's own: ≤ 1.15, 1.250: missed"
