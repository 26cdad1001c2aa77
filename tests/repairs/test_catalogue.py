import dataclasses
import json
import subprocess
import sys

import keras
import pytest
from versions import make_unknown

from tfopt import fit, repairs
from tfopt.errors import UnsupportedError
from tfopt.internals.patches import present
from tfopt.internals.training import TensorFlowTrainer

NAMES = [
    "replica_overflow",
    "loss_scaling",
    "unscaled_loss",
    "clear_session",
    "rounded_ids",
    "multi_worker",
    "uneven_batches",
    "clipping",
    "accumulation",
    "replica_executions",
    "shuffle_warning",
    "recomputation",
    "numpy_slices",
    "random_layers",
    "extra_step",
    "replica_losses",
    "shared_files",
    "failed_steps",
    "schedule_free",
]
BROKEN = {name: "absent" if repair.is_absent else "broken" for name, repair in repairs.REPAIRS.items()}


def test_every_defect_is_in_the_installed_keras():
    assert repairs.status().to_dict()["states"] == BROKEN
    assert list(repairs.REPAIRS) == NAMES
    for name, repair in repairs.REPAIRS.items():
        assert (repair.name, repair.applies(), repair.installed) == (name, not repair.is_absent, False)
        assert repair.defect.endswith(".")
        assert repair.without.endswith(".")


@pytest.mark.slow
def test_installed_and_removed_by_name():
    compile = keras.Model.compile
    status = repairs.install("loss_scaling", "clear_session")
    assert status.states == BROKEN | {"loss_scaling": "repaired", "clear_session": "repaired"}
    assert keras.Model.compile is not compile
    assert repairs.install().states == BROKEN | {
        name: "repaired" for name, state in BROKEN.items() if state == "broken"
    }
    assert repairs.remove("clear_session").states["clear_session"] == "broken"
    assert repairs.remove().states == BROKEN
    assert keras.Model.compile is compile


def test_two_that_changed_one_function_are_taken_back_in_any_order():
    stock = TensorFlowTrainer._make_function
    repairs.install("replica_executions")
    repairs.install("uneven_batches")
    both = TensorFlowTrainer._make_function
    repairs.remove("replica_executions")
    assert TensorFlowTrainer._make_function not in (both, stock)
    repairs.install("replica_executions")
    repairs.remove("uneven_batches", "replica_executions")
    assert TensorFlowTrainer._make_function is stock


def test_losses_are_noted_over_what_divides_them_in_either_order():
    repairs.install("replica_losses")
    repairs.install("uneven_batches")
    patches = [patch.by for patch in present() if patch.name == "scale_loss_for_distribution"]
    assert patches == ["uneven_batches", "replica_losses"]


def test_the_status_reads_well(monkeypatch):
    repairs.install("clear_session")
    make_unknown(monkeypatch, repairs.UNSCALED_LOSS)
    monkeypatch.setattr(repairs.LOSS_SCALING, "mended", repairs.LOSS_SCALING.broken)
    lines = str(repairs.status()).splitlines()
    assert [line.split("  ")[0] for line in lines[: len(NAMES)]] == NAMES
    for line, words in zip(lines, ["broken, not repaired", "fixed upstream", "unknown", "repaired "], strict=False):
        assert words in line
    assert lines[0].endswith("leaves the loss scale as it was.")
    assert json.loads(json.dumps(repairs.status().to_dict()))["states"] == BROKEN | {
        "replica_overflow": "broken",
        "loss_scaling": "mended",
        "unscaled_loss": "unknown",
        "clear_session": "repaired",
    }


def test_the_status_lists_all_that_is_patched():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    fit.overlap(model)
    hooks = [
        "CallbackList._on_train_batch_end",
        "CallbackList._on_test_batch_end",
        "CallbackList._on_predict_batch_end",
    ]
    try:
        found = repairs.status()
    finally:
        fit.undo(model)
    assert found.patches["overlap"] == hooks
    assert f"overlap has patched {', '.join(hooks)}" in str(found).splitlines()
    assert "overlap" not in repairs.status().patches


def test_an_unknown_function_and_none_is_installed(monkeypatch):
    make_unknown(monkeypatch, repairs.UNSCALED_LOSS)
    with pytest.raises(UnsupportedError, match=r"LossScaleOptimizer\.apply .*custom train_step calls"):
        repairs.install(*repairs.FLOAT16)
    assert "repaired" not in repairs.status().states.values()


def test_mended_upstream_is_not_patched(monkeypatch):
    monkeypatch.setattr(repairs.CLEAR_SESSION, "mended", repairs.CLEAR_SESSION.broken)
    clear = keras.utils.clear_session
    assert repairs.install("clear_session").states["clear_session"] == "mended"
    assert keras.utils.clear_session is clear


@pytest.mark.parametrize("use", [repairs.install, repairs.remove])
def test_an_unknown_name(use):
    with pytest.raises(ValueError, match=r"Received: 'clear_sesion'\. Did you mean 'clear_session'\?"):
        use("loss_scaling", "clear_sesion")
    with pytest.raises(ValueError, match=r"Received: \['clear_session'\]"):
        use(["clear_session"])
    assert "repaired" not in repairs.status().states.values()


def test_the_status_is_a_frozen_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        repairs.status().states = {}


@pytest.mark.slow
def test_importing_tfopt_patches_nothing():
    script = (
        "import keras, tfopt; before = [keras.Model.compile, keras.utils.clear_session]\n"
        "from tfopt import measure, precision, repairs, xla, callbacks, pipelines\n"
        "assert before == [keras.Model.compile, keras.utils.clear_session]\n"
        "print(set(repairs.status().states.values()))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "{'broken'}"
