"""What follows from samples and readings; and that a file that states something else is refused."""

import copy
import json
from dataclasses import replace

import pytest

from tfopt.bench.results import CaseResult, Check, DeviceRates, GpuConditions, VariantResult
from tfopt.bench.results.run_file import RunFile, dumps, read
from tfopt.errors import ResultsError
from tfopt.measure import StepTimes, compare

ENVIRONMENT = {"tfopt": "0", "packages": {}, "gpus": [], "host": {"cpu_model": None, "cpus": 2.0}}
RATES = DeviceRates(
    matmul_tflops={"float32": 0.5, "bfloat16": 2.0}, copy_gib_per_second=1.0, host_to_device_gib_per_second=None
)


def times(*samples_ms, examples=100, turns=5):
    return StepTimes(
        repeats_ms=(samples_ms,) * turns, steps_per_sample=1, first_step_seconds=1.0, examples_per_step=examples
    )


TIMES = {"stock": times(4.0, 4.2), "fast": times(2.0, 2.2), "alone": times(1.0, 1.0)}


def variant(name, *, dtype="float32", watts=None, passed=None, measured=TIMES):
    return VariantResult(
        name=name,
        dtype=dtype,
        ceiling=name == "alone",
        check=None if passed is None else Check(what="", values=(), passed=passed, text=""),
        conditions=None if watts is None else GpuConditions(gpu_power_watts=watts),
        times=measured[name],
    )


def metrics(changed=None, **fields):
    """Figures of the changed variant in a case whose others are as they are, else of "fast"."""
    changed = changed or variant("fast")
    named = {"suite": "fit", "workload": "mlp", "question": "?", "unit": "step", "baseline": "stock"}
    rates = {"operations_per_example": 3_000_000, "ceilings": RATES}
    variants = tuple(changed if name == changed.name else variant(name) for name in TIMES)
    case = CaseResult(**{**named, **rates, "variants": variants, **fields}).with_metrics()
    return next(found.metrics for found in case.variants if found.name == changed.name)


def test_a_variant_is_held_against_the_baseline_and_the_ceiling():
    found = metrics(variant("fast", watts=500.0, dtype="bfloat16"))
    assert found.comparison == compare(TIMES["stock"], TIMES["fast"])
    assert found.of_ceiling == compare(TIMES["alone"], TIMES["fast"])
    assert found.verdict == "faster"
    per_second = 100 * 1000 / 2.1
    assert found.mfu_percent == pytest.approx(100 * 3e6 * per_second / 2e12)
    assert found.joules_per_thousand_examples == pytest.approx(1000 * 500 / per_second)


def test_few_turns_give_no_verdict():
    few = replace(variant("fast"), times=times(2.0, 2.2, turns=2))
    assert metrics(few).verdict == "too few repeats to tell"
    assert metrics(replace(few, check=Check(what="", values=(), passed=False, text=""))).verdict == "changes the result"


def test_the_baseline_and_the_ceiling_are_held_against_nothing():
    assert metrics(variant("stock")).comparison is None
    assert metrics(variant("stock")).verdict == "baseline"
    assert metrics(variant("alone")).of_ceiling is None


@pytest.mark.parametrize("name", ["stock", "fast"])
def test_what_computes_something_else_is_that_above_all(name):
    assert metrics(variant(name, passed=False)).verdict == "changes the result"


@pytest.mark.parametrize(
    ("change", "of_variant"),
    [
        ({"operations_per_example": None}, {}),
        ({"ceilings": None}, {}),
        ({}, {"dtype": None}),
    ],
)
def test_what_is_not_known_gives_no_utilisation(change, of_variant):
    assert metrics(variant("fast", **of_variant), **change).mfu_percent is None


def test_without_a_batch_size_or_readings_nothing_follows():
    unknown = TIMES | {"fast": times(2.0, examples=None)}
    found = metrics(variant("fast", watts=500.0, measured=unknown))
    assert found.mfu_percent is None
    assert found.joules_per_thousand_examples is None
    assert metrics(variant("fast")).joules_per_thousand_examples is None


@pytest.fixture
def written(tmp_path):
    case = CaseResult(
        suite="fit",
        workload="mlp",
        question="?",
        unit="step",
        baseline="stock",
        operations_per_example=3_000_000,
        ceilings=RATES,
        variants=(variant("stock", watts=400.0), variant("fast", watts=500.0), variant("alone")),
    )
    file = RunFile.create(tmp_path, ["fit"], ENVIRONMENT)
    file.put(case.with_metrics())
    return file


def test_what_follows_is_read_back(written):
    assert [v.name for v in read(written.path).cases[0].variants] == list(TIMES)


@pytest.mark.parametrize(
    "change",
    [
        lambda case: case["variants"][1].update(mfu_percent=12.0),
        lambda case: case["variants"][1].update(mfu_percent=None),
        lambda case: case["variants"][1].update(joules_per_thousand_examples=12.0),
        lambda case: case["variants"][1].update(conditions=None),
        lambda case: case["variants"][1]["of_ceiling"].update(ratio=1.0),
        lambda case: case["variants"][1].update(of_ceiling=None),
        lambda case: case["variants"][2].update(of_ceiling={"ratio": 1.0, "interval": [1.0, 1.0]}),
        lambda case: case["variants"][1].update(dtype="bfloat16"),
        lambda case: case.update(limit="fast"),
        lambda case: case.update(limit="none"),
        lambda case: case.update(operations_per_example=1),
        lambda case: case["ceilings"]["matmul_tflops"].update(float32=50.0),
        lambda case: case["variants"][1].pop("mfu_percent"),
    ],
)
def test_what_does_not_follow_is_refused(written, change):
    document = copy.deepcopy(json.loads(dumps(written.run)))
    change(document["cases"][0])
    written.path.write_text(json.dumps(document))
    with pytest.raises(ResultsError, match="follow from its raw samples"):
        read(written.path)
