"""benchmarks/checkpoint_peers.py: what each figure means, and that a wrong restore is noticed."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import checkpoint_peers as checkpoint
import keras
import numpy as np
import pytest
from checkpoint_peers import NO_SAVE, TFOPT, WAYS, Way, built_net, restore_ms, save_times, written_mib


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "WIDTH", 40)
    monkeypatch.setattr(checkpoint, "OUTPUTS", 9)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


class Clock:
    """Stands still but for what tests add."""

    now = 0.0

    def __call__(self):
        return self.now


def test_a_save_is_timed_from_the_end_of_a_step(monkeypatch, tmp_path):
    """Steps of 2 s and saves of 5 s; what is left to write takes 3 s when fit has returned."""
    clock = Clock()

    def add(seconds):
        clock.now += seconds

    saves = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: add(5))
    steps = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: add(2))
    monkeypatch.setattr(checkpoint, "flush", lambda folder: add(3))
    way = Way(callbacks=lambda folder: [steps, saves], restore=lambda net, folder: net)
    found = save_times(built_net(), way, 4, tmp_path, clock)
    assert (found.without_save_ms, found.with_save_ms) == (8000, 13_000)
    assert (found.call_ms, found.safe_ms) == (5000, 8000)


def test_a_restore_is_timed_alone(tmp_path):
    clock = Clock()

    def restore(net, folder):
        clock.now += 4
        return net

    assert restore_ms(replace(NO_SAVE, restore=restore), built_net(), tmp_path, clock) == 4000


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_each_way_restores_what_it_saved_last(name, tmp_path):
    net = built_net()
    restored = WAYS[name].restore(saved_twice(net, WAYS[name], tmp_path), tmp_path)
    assert restored is not net
    for mine, other in zip(state_of(net), state_of(restored), strict=True):
        np.testing.assert_array_equal(mine, other)


def saved_twice(net, way, folder):
    """Another model, built."""
    for epoch in range(2):
        checkpoint._fit(net, way.callbacks(folder), 1, epoch, epoch + 1)
    return built_net()


def state_of(net):
    return [np.asarray(variable) for variable in (*net.variables, *net.optimizer.variables)]


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_only_tfopt_leaves_frozen_layers_out(name, tmp_path):
    net = built_net()
    whole, frozen = written_mib(net, WAYS[name], tmp_path)
    state_mib = sum(each.nbytes for each in state_of(net)) / 2**20
    assert whole >= state_mib
    if name == TFOPT:
        assert frozen < whole / 2  # the last layer, and what describes the checkpoint
        restored = WAYS[name].restore(built_net(), tmp_path)
        assert all(map(np.array_equal, state_of(net), state_of(restored)))
    else:
        assert frozen >= state_mib


def test_only_the_last_layer_trains_before_the_second_save(tmp_path):
    seen = []
    notes = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(net.get_weights()))
    net = built_net()
    written_mib(net, replace(NO_SAVE, callbacks=lambda folder: [notes]), tmp_path)
    same = [np.array_equal(a, b) for a, b in zip(*seen, strict=True)]
    assert same == [True] * 4 + [False] * 2


def test_files_that_changed_are_counted(tmp_path):
    for name, size in (("kept", 2**20), ("changed", 2**21)):
        (tmp_path / name).write_bytes(bytes(size))
    before = checkpoint._files(tmp_path)
    assert checkpoint._mib(before) == 3
    os.utime(tmp_path / "changed", (1, 1))
    after = checkpoint._files(tmp_path)
    assert [path for path in after if after[path] != before[path]] == [tmp_path / "changed"]


def test_a_wrong_restore_is_noticed():
    trained = []

    def way(restore):
        notes = keras.callbacks.LambdaCallback()
        notes.on_train_end = lambda logs: trained.append(notes.model)
        return Way(callbacks=lambda folder: [notes], restore=restore)

    checkpoint.require_restored("the same", way(lambda net, folder: trained[-1]))
    with pytest.raises(RuntimeError, match=r"Expected nothing to restore what it saved\. It differs\."):
        checkpoint.require_restored("nothing", way(lambda net, folder: net))


def test_the_state_is_384_mib_and_nine_tenths_are_frozen(monkeypatch):
    monkeypatch.undo()
    kernels = [checkpoint.WIDTH**2, checkpoint.WIDTH**2, checkpoint.WIDTH * checkpoint.OUTPUTS]
    assert 3 * 4 * sum(kernels) / 2**20 == pytest.approx(384, abs=0.5)
    assert sum(kernels[: checkpoint._FROZEN]) / sum(kernels) == pytest.approx(0.9, abs=0.001)


@pytest.mark.slow
def test_the_script_compares_and_leaves_no_files(tmp_path):
    results, folder = tmp_path / "results.json", tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, checkpoint.__file__, results, "--smoke"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(folder)})
    found = json.loads(results.read_text())
    assert set(found["times"]) == set(found["written_mib"]) == set(WAYS)
    assert all(set(of) == set(checkpoint.FIELDS) for of in found["times"].values())
    assert ran.stdout.endswith("TrainingCheckpoint's time over this one.\n")
    assert list(folder.iterdir()) == []
