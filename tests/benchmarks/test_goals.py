"""The campaign's goals are computed from the results of tfopt-bench and the scripts, and PyTorch's lines."""

import datetime

from campaign import goals, peers


def variant(name, median_ms, *, of_ceiling=None, ratio=None, peak=None, recommended=False, errors=None):
    return {
        "check": errors and {"values": errors},
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
            variant("Keras' defaults", 1.0, ratio=2.0),
            variant("+ overlap", 1.0, ratio=13.0, recommended=True),
        ),
        case("stack", "gpt2", variant("+ flash attention", 1.0, ratio=6.0, recommended=True)),
        case(
            "fit",
            "resnet50",
            variant("overlap", 40.0, of_ceiling=0.97),
            variant('overlap, cache="device"', 38.0, of_ceiling=0.995),
        ),
        case(
            "fit",
            "gpt2",
            variant("flash attention", 36.0, peak=15_000),
            variant("flash attention, activations recomputed", 40.0, peak=12_000),
        ),
        case("fit", "mlp", variant("overlap", 0.5, of_ceiling=0.8)),
        case(
            "fit",
            "attention, 2×64",
            variant("Keras' attention", 4.0, errors=[0.01, 0.02]),
            variant("flash attention", 1.0, ratio=4.0, errors=[0.004, 0.005]),
        ),
        case(
            "pipeline",
            "resnet50 from JPEG",
            variant("build_pipeline, overlap", 42.0, of_ceiling=0.93, recommended=True),
            limit="step alone",
        ),
        {"suite": "xla", "workload": "digits", "error": "it broke", "variants": []},
    ]
}
PEERS = [
    {"workload": "resnet50", "variant": "compiled, pinned", "samples_ms": [42.0, 44.0, 43.0], "peak_memory_mib": 1.0},
    {"workload": "gpt2", "variant": "compiled, resident", "samples_ms": [39.0, 39.6], "peak_memory_mib": 16_000},
    {"workload": "gpt2", "variant": "eager, resident", "samples_ms": [1.0], "peak_memory_mib": 1.0},
]


DECISIONS = {
    "decisions": {
        "quick": {"decide_seconds": [9.0], "timed_seconds": [5.0], "first_step_seconds": [1.9]},
        "slow": {"decide_seconds": [9.0, 9.0], "timed_seconds": [5.0, 5.0], "first_step_seconds": [1.0, 1.5]},
    },
    "gate_seconds": [12.0, 14.0, 13.0],
}
CALLBACKS = {"figures": {"on a step": {"5 ms": {"wall": {"longer_percent": 0.4}}}}}


def test_each_goal_has_its_figure():
    found = [goal.to_dict() for goal in goals.goals(DOCUMENT, PEERS, DECISIONS, CALLBACKS)]
    assert [(goal["bound"], goal["measured"], goal["verdict"]) for goal in found] == [
        ("≥ 0.98", 0.97, "missed"),
        ("≥ 1", 1.075, "met"),
        ("≥ 0.99", 0.995, "met"),
        ("≥ 0.9", 0.93, "met"),
        ("≤ 1.15", 1.25, "missed"),
        ("≥ 1.1", 1.0917, "missed"),
        ("≤ 1", 0.9375, "met"),
        ("≥ 1.1", 0.9825, "missed"),
        ("≤ 1", 0.75, "met"),
        ("≥ 2.5", 4.0, "met"),
        ("≤ 1", 0.25, "met"),
        ("≤ 0.5", 0.4, "met"),
        ("≥ 12", 13.0, "met"),
        ("≥ 6.5", 6.0, "missed"),
        (None, 6.5, "reported"),
        (None, None, "not measured"),
        ("≤ 1", 1.5, "missed"),
        ("≤ 20", 13.0, "met"),
    ]
    assert found[4]["goal"] == "mlp, overlap: time over the step's own"


def test_what_was_not_measured_is_said():
    for document in (None, {"cases": []}, {"cases": [case("fit", "resnet50", variant("overlap", 40.0))]}):
        found = goals.goals(document, [])
        assert len(found) == 17
        assert {goal.verdict for goal in found} == {"not measured"}


NOW = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC)


def line(hours_ago, part="gpt2, before", variant="compiled, resident", **setting):
    at = (NOW - datetime.timedelta(hours=hours_ago)).isoformat()
    same = {"torch": "2.11.0+cu130", "driver": "580", "device": "H200"}
    return {"part": part, "workload": "gpt2", "variant": variant, "samples_ms": [1.0], "at": at} | same | setting


def test_lines_count_for_a_day_on_one_machine():
    again = line(2, samples_ms=[2.0])
    others = [line(30), line(5, torch="2.10.0"), line(5, driver="570"), line(5, device="A100")]
    after, ended = line(1, part="gpt2, after"), {"part": "gpt2, before", "ended": "done", "at": "x"}
    assert peers.fresh([*others, line(3), again, after, ended], NOW) == [again, after]
    assert peers.fresh([line(30)], NOW) == []


def test_only_missing_lines_are_measured(monkeypatch):
    machine = {"torch": "2.11.0", "driver": "580"}
    now = datetime.datetime.now().astimezone().isoformat()
    known = [line(0, variant=name, at=now) for name in peers.VARIANTS[:3]]
    assert peers.missing(known, "gpt2, before", machine) == ["compiled, pinned"]
    assert peers.missing(known, "gpt2, after", machine) == list(peers.VARIANTS)
    assert peers.missing(known, "gpt2, before", machine | {"driver": "570"}) == list(peers.VARIANTS)
    assert peers.missing(known, "gpt2, before", machine | {"torch": None}) == list(peers.VARIANTS)
