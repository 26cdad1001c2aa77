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


@pytest.mark.parametrize(
    ("speedups", "limiting", "verdict"),
    [
        ({"read": 1.0, "decode": 3.0}, "decode", "decode limits it: if it cost nothing, 3,000 examples/s."),
        # To leave the cache out would not be better.
        ({"cache": 3.0}, "cache", "access to the cache limits it: if it cost nothing, 3,000 examples/s."),
        ({"generator": math.inf}, "generator", "generator limits it: if it cost nothing, nothing would be left."),
        ({"read": 1.0, "decode": 1.05}, None, "No single stage limits it: without any one of them it would be about"),
        ({"read": 2.0, "decode": 2.05, "augment": 1.0}, None, "read and decode limit it alike: if one of them cost"),
        ({}, None, "No single stage limits it"),
    ],
)
def test_the_stage_without_which_it_would_be_fastest_limits(speedups, limiting, verdict):
    found = profile(**speedups)
    assert found.limiting == limiting
    assert found.verdict.startswith(verdict)


def test_the_table_is_aligned():
    lines = str(profile(read=1.0, decode=3.0)).splitlines()
    assert lines[0] == "Profile of photos: 1,000 examples/s (250 per core, 4 cores), first pass over the data"
    assert lines[1].split() == ["stage", "ms/example", "at", "once", "busy", "without", "it"]
    assert lines[3].split() == ["decode", "0.500", "2", "90", "%", "3,000/s"]
    assert len({len(line) for line in lines[1:4]}) == 1


def test_it_is_json():
    found = json.loads(json.dumps(profile(decode=3.0, read=math.inf).to_dict(), allow_nan=False))
    assert (found["limiting"], found["examples_per_second_per_core"], found["first_pass"]) == ("read", 250.0, True)
    decode = {"name": "decode", "ms_per_example": 0.5, "parallelism": 2, "busy_percent": 90.0}
    assert found["stages"][0] == decode | {"examples_per_second_without": 3000.0}
    assert found["stages"][1]["examples_per_second_without"] is None


def test_the_chart_marks_the_limiting_stage():
    chart = profile(read=1.0, decode=3.0).chart()
    for tone, name in (("worse", "decode"), ("plain", "read")):
        assert f'<li class="{tone}"><span class="name" title="{name}">' in chart
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
    assert str(dataclasses.replace(found, remedy="Do this.")).endswith("\nDo this.")
