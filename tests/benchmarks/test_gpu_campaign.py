"""benchmarks/gpu_campaign.py: its steps, run on a CPU with tiny sizes and killed on the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_campaign
import pytest
from campaign import parts, peers
from campaign.lines import Lines

ROOT = Path(gpu_campaign.__file__).parents[1]
MACHINE = {"gpu": "H200", "gpus_of_the_driver": [], "driver": "580", "tensorflow": "2", "keras": "3", "torch": "2.11.0"}


def setting(folder, **changes):
    return gpu_campaign.Setting(folder, MACHINE | changes, rehearse=False, seconds=480.0)


def test_no_step_or_part_may_take_longer_than_eight_minutes(tmp_path):
    assert gpu_campaign.STEP_SECONDS == 480
    for step in gpu_campaign.STEPS:
        for part in step.parts(setting(tmp_path)):
            assert part.limit_seconds <= 480


@pytest.mark.slow
def test_every_test_marked_gpu_is_run(tmp_path):
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = {line.split("::")[0] for line in told.stdout.splitlines() if "::" in line}
    found = {part.name for part in gpu_campaign.gpu_tests(setting(tmp_path))}
    assert files <= found
    assert "tests/test_gpu.py" in files


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("tests/a/test_b.py::test_c PASSED                 [ 50%]", ("tests/a/test_b.py::test_c", "passed")),
        ("tests/test_b.py::test_c[x y-1] FAILED            [ 50%]", ("tests/test_b.py::test_c[x y-1]", "failed")),
        ("tests/test_b.py::test_c SKIPPED (needs a GPU)    [100%]", ("tests/test_b.py::test_c", "skipped")),
        ("1 passed in 3.20s", None),
    ],
)
def test_outcomes_are_read_from_pytests_lines(line, outcome):
    found = gpu_campaign._test_outcome(line)
    assert found == (outcome and {"test": outcome[0], "outcome": outcome[1]})


@pytest.mark.parametrize(
    ("line", "failed"),
    [
        ("[gw2] [ 80%] FAILED tests/a/test_b.py::test_c[x y-1] ", "tests/a/test_b.py::test_c[x y-1]"),
        ("[gw2] [ 80%] ERROR tests/a/test_b.py::test_c", "tests/a/test_b.py::test_c"),
        ("[gw2] [ 80%] PASSED tests/a/test_b.py::test_c ", None),
        ("FAILED tests/a/test_b.py::test_c - assert 1 == 2", None),
    ],
)
def test_failures_are_read_from_lines_of_several_workers(line, failed):
    assert gpu_campaign._failure(line) == (failed and {"failed": failed})


def test_only_one_machine_writes_to_a_folder(tmp_path):
    assert gpu_campaign._refusal(MACHINE, tmp_path, False) is None
    # Another patch of the driver, and another torch, are the same machine.
    assert gpu_campaign._refusal(MACHINE | {"driver": "581", "torch": None}, tmp_path, False) is None
    assert "Pass another --output" in gpu_campaign._refusal(MACHINE | {"gpu": "A100"}, tmp_path, False)
    assert "Pass another --output" in gpu_campaign._refusal(MACHINE, tmp_path, True)
    without = MACHINE | {"gpu": None, "gpus_of_the_driver": ["H200"]}
    refusal = gpu_campaign._refusal(without, tmp_path / "new", False)
    assert refusal.startswith("Expected an NVIDIA GPU. Found none that TensorFlow sees (the driver's: ['H200'])")
    assert gpu_campaign._refusal(without, tmp_path / "new", True) is None


PEER = """
import json, sys
name, variants = sys.argv[0].split("/")[-1][:-3], sys.argv[sys.argv.index("--variants") + 1:]
for variant in variants:
    setting = {"workload": name, "variant": variant, "torch": "2.11.0+cu130", "device": "H200"}
    print(json.dumps(setting | {"samples_ms": [1.0, 3.0, 2.0]}), flush=True)
    if name == "gpt2" and variant == "eager, pinned" and len(variants) == 4:
        raise SystemExit("it broke")
"""


def test_peers_are_measured_once_and_again_after_the_suites(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_campaign, "HERE", tmp_path)
    (tmp_path / "peers").mkdir()
    for script in peers.SCRIPTS:
        (tmp_path / "peers" / f"{script}.py").write_text(PEER)
    lines = Lines(tmp_path / "peers.jsonl")

    def go(name):
        before = len(lines.read())
        steps = gpu_campaign.torch_peers(setting(tmp_path), name)
        log = tmp_path / "log"
        done = parts.run(steps, lines, log, deadline=time.monotonic() + 60, environ=dict(os.environ))
        return done, [record["variant"] for record in lines.read()[before:] if "variant" in record]

    first, second, third, fourth = peers.VARIANTS
    # GPT-2 fails after two variants; what it measured is not measured again.
    assert go("before") == (False, [*peers.VARIANTS, first, second])
    assert go("before") == (True, [third, fourth])
    assert go("before") == (True, [])
    assert {record["driver"] for record in lines.read() if "variant" in record} == {"580"}
    done, measured = go("after")
    assert (done, len(measured)) == (False, 6)
    shown = gpu_campaign.torch_peers(setting(tmp_path), "before")[0].summary(lines.read())
    assert shown.endswith(
        "eager, resident 2.00 ms, eager, pinned 2.00 ms, compiled, resident 2.00 ms, compiled, pinned 2.00 ms"
    )


def test_a_run_cut_by_its_budget_is_not_done(tmp_path, capsys):
    step = 1 + [step.parts for step in gpu_campaign.STEPS].index(gpu_campaign.suites)
    records = [{"part": "tfopt-bench", "ended": "done", "code": 0, "seconds": 435.0, "tail": ""}]
    cases = [{"suite": "fit", "workload": "gpt2", "error": None}]
    for status, code in (("out of budget", 1), ("complete", 0)):
        document = {"schema": "tfopt-bench", "status": status, "cases": cases}
        (tmp_path / "run.json").write_text(json.dumps(document))
        assert gpu_campaign._summary(step, setting(tmp_path), records, tmp_path / "log", 440.0) == code
        assert f"tfopt-bench: done, 435 s; run.json {status}, 1 cases" in capsys.readouterr().out
    cases[0]["error"] = "it broke"
    (tmp_path / "run.json").write_text(json.dumps(document))
    assert gpu_campaign._summary(step, setting(tmp_path), records, tmp_path / "log", 440.0) == 1
    assert "fit on gpt2: it broke" in capsys.readouterr().out


def campaign(folder, *arguments):
    command = [sys.executable, ROOT / "benchmarks" / "gpu_campaign.py", "--output", folder, *arguments]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_list_says_what_is_done(tmp_path):
    process = campaign(tmp_path)
    listed = process.communicate()[0].splitlines()
    assert process.returncode == 0
    assert len(listed) == 1 + len(gpu_campaign.STEPS)
    assert listed[0].split() == ["1", "first", "look", "4", "min", "0", "of", "6", "done"]


# What a step has recorded when it is killed.
KILLED_AT = {
    1: ("first_look.jsonl", '"attention":'),
    2: ("gpu_tests.jsonl", '"outcome"'),
    4: ("*.json", '"median_ms"'),
    5: ("scripts.jsonl", '"said"'),
    7: ("goals.jsonl", '"goal"'),
    8: ("other_tests.jsonl", '"said"'),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=pytest.mark.slow if step == 5 else pytest.mark.campaign) for step in KILLED_AT],
)
def test_a_killed_step_keeps_its_figures_and_goes_on(tmp_path, step):
    pattern, mark = KILLED_AT[step]
    if step == 7:  # there is a run to report
        shutil.copy(ROOT / "benchmarks" / "results" / "cpu.json", tmp_path)

    def recorded():
        return [text for path in tmp_path.glob(pattern) if mark in (text := path.read_text())]

    arguments = ("--step", str(step), "--rehearse")
    process = campaign(tmp_path, *arguments)
    while not recorded() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (before,) = recorded()
    again = campaign(tmp_path, *arguments)
    printed = again.communicate()[0].splitlines()
    assert again.returncode == 0, "\n".join(printed)
    assert printed[0].startswith(f"Step {step}, ")
    summary = printed[[at for at, line in enumerate(printed) if line.startswith(f"Step {step}, ")][-1] :]
    assert len(summary) <= 10
    if pattern.endswith("jsonl"):
        assert recorded()[0].startswith(before)
