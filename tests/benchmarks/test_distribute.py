"""benchmarks/distribute.py: real processes train the same, what they send is counted, and what is predicted follows."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import distribute
import numpy as np
import pytest

from tfopt.bench.report import formatting, page
from tfopt.bench.results.run_file import from_json, read
from tfopt.errors import ResultsError

ON_TWO_DEVICES = """
import json, sys
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from tfopt.bench.cases.measuring import measure
from tfopt.bench.results.run_file import _case_to_json
sys.path.insert(0, sys.argv[1])
import distribute
distribute._DEVICE_BATCH_SIZE = 32
print(json.dumps(_case_to_json(measure(distribute.devices_case(["CPU:0", "CPU:1"], 8)))))
"""

BENCHMARKS = Path(distribute.__file__).parent


@pytest.fixture(scope="module", params=["kept", pytest.param("fresh", marks=pytest.mark.campaign)])
def document(request, tmp_path_factory):
    """A run that is kept in the repository, or made now."""
    if request.param == "kept":
        return json.loads((BENCHMARKS / "results" / "cpu.json").read_text("utf-8"))
    folder = tmp_path_factory.mktemp("results")
    subprocess.run([sys.executable, distribute.__file__, folder], check=True, capture_output=True)
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text("utf-8"))


def find(document, workload):
    """A case of the suite."""
    (case,) = (each for each in document["cases"] if (each["suite"], each["workload"]) == ("distribute", workload))
    assert case["error"] is None
    return case


@pytest.fixture
def case(document):
    """The suite's part of a real run."""
    return find(document, "mlp, 2 processes")


def test_all_ways_train_to_the_same_weights(case):
    variants = {variant["name"]: variant for variant in case["variants"]}
    assert list(variants) == ["tf.distribute", "strategy()", "strategy(), fit", "shard_optimizer", "one process"]
    assert all(variant["check"]["passed"] for variant in variants.values())
    assert variants["one process"]["of_ceiling"] is None
    assert all(variants[name]["of_ceiling"]["ratio"] > 0 for name in list(variants)[:4])
    examples = {name: variant["step_time"]["examples_per_step"] for name, variant in variants.items()}
    assert examples == {
        "tf.distribute": 256,
        "strategy()": 256,
        "strategy(), fit": 256,
        "shard_optimizer": 256,
        "one process": 128,
    }


def test_local_steps_show_their_loss_and_must_learn(document):
    case = find(document, "mlp, local steps")
    every, local = case["variants"]
    assert (every["name"], local["name"]) == ("every step", "LocalSteps(8)")
    assert every["check"]["passed"]
    assert local["check"]["passed"]
    assert every["check"]["values"] != local["check"]["values"]  # another training
    assert distribute._learns([0.1], [1.0]).passed
    assert not distribute._learns([0.1], [1.5]).passed
    assert not distribute._learns([0.1], [float("nan")]).passed


def test_input_is_read_once_by_all_processes_together(document):
    case = find(document, "input in processes")
    assert [variant["name"] for variant in case["variants"]] == ["1 process", "2 processes", "4 processes"]
    assert all(variant["check"]["text"] == "each once" for variant in case["variants"])


def test_what_is_sent_is_counted(case):
    found = case["communication"]
    assert (
        found["expected_bytes_per_step"] == found["model"]["gradient_bytes"] == 4 * (785 * 512 + 513 * 512 + 513 * 10)
    )
    # Others on this machine may send, too.
    assert found["sent_bytes_per_step"] > found["expected_bytes_per_step"]
    assert [each["replicas"] for each in found["predictions"]] == [2, 8, 64]
    assert set(found["start_to_first_step_seconds"]) == {"tf.distribute", "strategy()", "one process"}


def test_a_sharded_optimizer_keeps_half_of_the_state_and_sends_half_as_much_again(case):
    found, weights = case["communication"]["sharding"], case["communication"]["model"]["gradient_bytes"]
    assert found["unsharded_state_bytes"] == 2 * weights
    assert weights <= found["state_bytes"] <= weights + 100  # a part of odd length is filled up
    # Others on this machine may send, too; fit also agrees on each step's data and logs.
    assert 1.5 * weights < found["measured_sent_bytes"]
    assert abs(found["sent_bytes"] - 1.5 * weights) < 100


def test_other_weights_are_seen():
    weights = np.arange(1.0, 100.0)
    assert distribute._same_weights(weights, weights * (1 + 1e-6)).passed
    check = distribute._same_weights(weights, weights * 1.01)
    assert (check.passed, check.text) == (False, "0.01 apart")


def test_the_page_tells_what_is_predicted(document, case):
    only = from_json(document | {"cases": [case]})
    (said,) = [sentence for sentence in formatting.sentences(only.cases[0]) if "sends" in sentence]
    assert "each of the 2 replicas sends " in said
    assert " MiB per step, 2.55 MiB by the model's size" in said
    assert "Predicted, not measured: 2 replicas " in said
    html = page(only)
    for said in (
        "Latency of a message",
        "Predicted, not measured",
        "64 replicas",
        "Start to first step, strategy()",
        "The same with shard_optimizer",
    ):
        assert said in html


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["predictions"][1].update(step_ms=1.0),
        lambda found: found["predictions"][2].update(efficiency=1.0),
        lambda found: found["model"].update(compute_ms=1.0),
        lambda found: found.update(expected_bytes_per_step=1.0),
        lambda found: found.pop("model"),
    ],
)
def test_figures_that_do_not_follow_are_refused(document, case, change, tmp_path):
    changed = copy.deepcopy(document | {"cases": [case]})
    path = tmp_path / "results.json"
    path.write_text(json.dumps(changed))
    read(path)
    change(changed["cases"][0]["communication"])
    path.write_text(json.dumps(changed))
    with pytest.raises(ResultsError):
        read(path)


@pytest.mark.slow
def test_devices_of_one_process():
    command = [sys.executable, "-c", ON_TWO_DEVICES, BENCHMARKS]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300)
    case = json.loads(out.stdout.splitlines()[-1])
    both, one = case["variants"]
    assert (both["name"], one["name"]) == ("2 devices", "1 device")
    assert both["check"]["passed"]
    assert one["check"]["passed"]
    assert one["ceiling"]
    assert both["step_time"]["examples_per_step"] == 2 * one["step_time"]["examples_per_step"] == 64
    assert case["communication"]["sent_bytes_per_step"] is None
    assert case["communication"]["model"]["compute_ms"] == one["step_time"]["median_ms"]
