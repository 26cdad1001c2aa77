import json
import math
import re
from dataclasses import replace

import pytest
from unwrapped import unwrapped

from tfopt.precision import LayerPrecision, PrecisionReport
from tfopt.precision.gate.gate_chart import chart_of
from tfopt.precision.gate.layer_table import Deviation
from tfopt.precision.gate.verdict import relative
from tfopt.text import percent

FINE = Deviation(error=0.001, overflow=0.0, underflow=0.0, lost=0.0, largest=1.0, norm=1.0, difference=0.001)
GONE = replace(FINE, error=0.0, overflow=1.0, largest=1e5)


def layer(path, **parts):
    return LayerPrecision(path=path, kind="Dense", policy="mixed_float16", **parts)


LAYERS = (
    layer("first", output=replace(FINE, error=0.002), input=FINE, weight_gradient=FINE),
    layer("loud", output=GONE, input=FINE, blamed=True),
    layer("whole numbers"),
)
FAILED = PrecisionReport(
    policy="mixed_float16",
    problems=("'loud' overflows.", "The head is in float16."),
    notes=("A note.",),
    layers=LAYERS,
    first_overflow="loud",
    fallback={"net": "mixed_float16", "loud": "float32"},
    reference_loss=2.0,
    candidate_loss=math.nan,
    loss_scale=32768.0,
    batches=3,
)
PASSED = replace(FAILED, problems=(), layers=LAYERS[:1], first_overflow=None, fallback={}, candidate_loss=2.01)


def test_a_report_that_passes():
    assert PASSED.passed
    assert PASSED.loss_drift == pytest.approx(0.005)
    assert str(PASSED).splitlines() == [
        "mixed_float16 passes: the loss differs by 0.5 % from float32's.",
        "Note: A note.",
        "  layer, class, policy",
        "    error  own error  gradients  overflow  lost gradient",
        "  first, Dense, mixed_float16",
        "    0.2 %    0.173 %      0.1 %       0 %            0 %",
    ]


def test_a_report_that_does_not_has_the_verdict_on_top_and_the_worst_layer_first():
    assert not FAILED.passed
    assert str(FAILED).splitlines()[:5] == [
        "mixed_float16 does not pass: 2 problems.",
        "- 'loud' overflows.",
        "- The head is in float16.",
        "Passes instead: net: mixed_float16, loud: float32",
        "Note: A note.",
    ]
    assert re.findall("\n  (.*), Dense, ", str(FAILED)) == ["loud !", "first", "whole numbers"]
    assert "Passes instead: only float32" in str(replace(FAILED, fallback=None))
    assert "1 problem." in replace(FAILED, problems=("One.",)).verdict


def test_a_long_table_ends():
    many = replace(PASSED, layers=tuple(layer(str(number), output=FINE) for number in range(40)))
    lines = str(many).splitlines()
    assert len(lines) == 2 + 2 * (1 + 12) + 1
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "  (28 layers closer to float32 not shown)"


def test_a_long_fallback_ends():
    many = replace(FAILED, fallback={str(number): "float32" for number in range(40)})
    assert "\nPasses instead: 0: float32, 1: float32" in str(many)
    assert ", 11: float32 and 28 more (all in `fallback`) Note: " in unwrapped(many)
    assert max(map(len, str(many).splitlines())) <= 80
    assert len(many.to_dict()["fallback"]) == 40


def test_json():
    infinite = replace(PASSED, layers=(layer("a", output=replace(FINE, error=math.inf)),))
    for report in (PASSED, FAILED, infinite, replace(FAILED, fallback=None)):
        values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert (values["passed"], values["verdict"]) == (report.passed, report.verdict)
        assert values["fallback"] == report.fallback
        assert [one["path"] for one in values["layers"]] == [one.path for one in report.layers]
    assert FAILED.to_dict()["candidate_loss"] is None
    assert FAILED.to_dict()["loss_drift"] is None
    assert infinite.to_dict()["layers"][0]["output"]["error"] is None
    assert FAILED.to_dict()["layers"][1]["output"]["largest"] == 1e5


def test_chart():
    chart = FAILED.chart()
    assert chart == chart_of(json.loads(json.dumps(FAILED.to_dict())))
    assert chart.index(">loud<") < chart.index(">first<")
    assert "100 % overflow" in chart
    assert "0.2 %" in chart
    assert "whole numbers" not in chart
    assert chart.count('class="worse"') == 1
    assert replace(PASSED, layers=(layer("a", output=replace(FINE, error=math.inf)),)).chart()
    many = replace(PASSED, layers=tuple(layer(str(number), output=FINE) for number in range(40)))
    assert "The 16 furthest of 40 layers." in many.chart()


def test_own_error():
    assert layer("a", output=replace(FINE, error=0.5), input=replace(FINE, error=0.3)).own_error == pytest.approx(0.4)
    assert layer("a", output=FINE, input=replace(FINE, error=0.3)).own_error == 0
    assert layer("a").own_error == 0
    assert layer("a", output=replace(FINE, error=math.inf), input=replace(FINE, error=math.inf)).own_error == math.inf


def test_numbers():
    assert [percent(x) for x in (0.0, 1e-7, 0.0123, 1.0, math.inf, math.nan)] == [
        "0 %",
        "<0.01 %",
        "1.23 %",
        "100 %",
        "∞",
        "∞",
    ]
    assert relative(1.0, 0.0) == math.inf
    assert relative(0.0, 0.0) == 0
    assert relative(math.nan, 1.0) == math.inf
    assert relative(3.0, -2.0) == 2.5
