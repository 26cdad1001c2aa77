import dataclasses
import json
import math

import numpy as np
import pytest

from tfopt.pipelines import PipelineProfile, StageProfile, per_batch, plan_pipeline
from tfopt.pipelines.profiling.profile import remedy


def profile(**speedups):
    stages = tuple(
        StageProfile(name=name, ms_per_example=0.5, parallelism=2, busy_percent=90.0, speedup_without=speedup)
        for name, speedup in speedups.items()
    )
    return PipelineProfile(
        name="photos",
        seconds=5.0,
        batches=10,
        examples=5000,
        examples_per_second=1000.0,
        cores=4.0,
        first_pass=True,
        stages=stages,
    )


def test_the_stage_without_which_it_would_be_fastest_limits():
    found = profile(read=1.0, decode=3.0, augment=1.2)
    assert found.limiting == "decode"
    assert found.verdict == "decode limits it: if it cost nothing, 3,000 examples/s."


def test_a_cache_that_limits_is_not_said_to_be_better_left_out():
    found = profile(cache=3.0, batch=1.0)
    assert found.limiting == "cache"
    assert found.verdict == "access to the cache limits it: if it cost nothing, 3,000 examples/s."


@pytest.mark.parametrize(
    ("speedups", "verdict"),
    [
        ({"read": 1.0, "decode": 1.05}, "No single stage limits it"),
        (
            {"read": 2.0, "decode": 2.05, "augment": 1.0},
            "read and decode limit it alike: if one of them cost nothing, 2,000",
        ),
        ({}, "No single stage limits it"),
    ],
)
def test_where_none_stands_out_none_is_named(speedups, verdict):
    found = profile(**speedups)
    assert found.limiting is None
    assert found.verdict.startswith(verdict)


def test_a_stage_without_which_nothing_would_be_left():
    found = profile(generator=math.inf)
    assert found.limiting == "generator"
    assert "nothing would be left" in found.verdict
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["stages"][0]["examples_per_second_without"] is None


def test_the_table_is_aligned():
    lines = str(profile(read=1.0, decode=3.0)).splitlines()
    assert lines[0] == "Profile of photos: 1,000 examples/s (250 per core, 4 cores), first pass over the data"
    assert lines[1].split() == ["stage", "ms/example", "at", "once", "busy", "without", "it"]
    assert lines[3].split() == ["decode", "0.500", "2", "90", "%", "3,000/s"]
    assert len({len(line) for line in lines[1:4]}) == 1


def test_it_is_json():
    found = json.loads(json.dumps(profile(read=1.0, decode=3.0).to_dict(), allow_nan=False))
    assert (found["limiting"], found["examples_per_second_per_core"], found["first_pass"]) == ("decode", 250.0, True)
    assert found["stages"][1] == {
        "name": "decode",
        "ms_per_example": 0.5,
        "parallelism": 2,
        "busy_percent": 90.0,
        "examples_per_second_without": 3000.0,
    }


def test_the_chart_marks_the_limiting_stage():
    chart = profile(read=1.0, decode=3.0).chart()
    assert chart.startswith("<figure")
    assert '<li class="worse"><span class="name" title="decode">' in chart
    assert '<li class="plain"><span class="name" title="read">' in chart
    assert "</svg>limits the input</span>" in chart
    assert "0.500 ms, busy 90 %" in chart


@pytest.mark.parametrize(("name", "limits"), [("transform", "transform"), ("augment", "augment"), ("augment", "batch")])
@pytest.mark.parametrize(("milliseconds", "quick"), [(0.01, True), (0.5, False)])
def test_a_quick_function_of_single_examples_is_better_called_with_batches(name, limits, milliseconds, quick):
    def negate(row):
        return -row

    found = profile(**{"read": 1.0, limits: 3.0})
    stages = tuple(dataclasses.replace(stage, ms_per_example=milliseconds) for stage in found.stages)
    found = dataclasses.replace(found, stages=stages)
    single, batched = (plan_pipeline(np.zeros((8, 2)), batch_size=4, **{name: f}) for f in (negate, per_batch(negate)))
    assert (f"pass {name}=per_batch(function)" in remedy(single, found)) is (quick and limits == name)
    assert remedy(batched, found) == ""
    told = dataclasses.replace(found, remedy="Do this.")
    assert str(told).endswith("\nDo this.")
    assert told.to_dict()["remedy"] == "Do this."
