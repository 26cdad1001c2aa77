"""Reading XLA's assignment of buffers, also as a GPU's compiler hands it out."""

import keras
import numpy as np
import pytest
from tensorflow.compiler.xla.service import hlo_pb2

from tfopt.memory import compiled_buffers, estimate

DATA = np.zeros((1024, 256)), np.zeros((1024, 1))
KEPT_MIB = 1024 * 512 * 4 / 2**20


def net():
    layers = [keras.layers.Dense(512, activation="relu", name=f"hidden_{number}") for number in range(4)]
    model = keras.Sequential([keras.Input((256,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=True)
    return model


@pytest.fixture
def stages(monkeypatch):
    """What XLA returned last for each stage, which a test may replace."""
    original, replaced = compiled_buffers._stage, {}

    def stage(step, name):
        return replaced[name](original(step, name)) if name in replaced else original(step, name)

    monkeypatch.setattr(compiled_buffers, "_stage", stage)
    return replaced


@pytest.mark.slow
def test_the_module_apart_from_the_buffers(stages):
    together = estimate(net(), DATA)

    def without_module(given):
        compiled = hlo_pb2.HloProto.FromString(given)
        compiled.ClearField("hlo_module")
        return compiled.SerializeToString()

    stages["optimized_hlo_proto_serialized"] = without_module
    apart = estimate(net(), DATA)
    assert apart == together
    assert {layer.path: layer.mib for layer in apart.by_layer}["hidden_1"] >= KEPT_MIB


@pytest.mark.slow
def test_without_a_module_that_matches_all_is_workspace(stages):
    expected = estimate(net(), DATA)

    def another(given):
        compiled = hlo_pb2.HloProto.FromString(given)
        for computation in compiled.hlo_module.computations:
            for instruction in computation.instructions:
                instruction.name += ".other"
        return compiled.SerializeToString()

    stages["optimized_hlo_proto_serialized"] = another
    found = estimate(net(), DATA)
    assert found.total_mib == pytest.approx(expected.total_mib)
    assert found.by_layer == ()
    assert found.workspace_mib == pytest.approx(
        expected.workspace_mib + expected.activations_mib + expected.gradients_mib
    )


@pytest.mark.slow
def test_the_graph_where_xla_keeps_no_buffers(stages):
    stages["optimized_hlo_proto_serialized"] = lambda _: b""
    found = estimate(net(), DATA)
    assert found.source == "the step's graph"
    assert {layer.path: layer.mib for layer in found.by_layer}["hidden_1"] == KEPT_MIB


@pytest.mark.slow
def test_lists_of_a_loop_belong_to_its_layer():
    layers = [keras.layers.LSTM(64, return_sequences=True, name=name) for name in ("first", "second")]
    model = keras.Sequential([keras.Input((20, 16)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    found = estimate(model, (np.zeros((64, 20, 16)), np.zeros((64, 20, 1))))
    for name in ("first", "second"):
        of_loop = sum(layer.mib for layer in found.by_layer if layer.path and layer.path.startswith(name))
        assert of_loop > 7 * 20 * 64 * 64 * 4 / 2**20
    assert found.activations_mib > 0.9 * (found.activations_mib + found.workspace_mib)
    assert found.workspace_mib > 0


@pytest.mark.slow
def test_the_total_is_what_xla_allocates(stages):
    given = []
    stages["optimized_hlo_proto_serialized"] = lambda compiled: given.append(compiled) or compiled
    found = estimate(net(), DATA)
    allocations = hlo_pb2.HloProto.FromString(given[0]).buffer_assignment.buffer_allocations
    taken = sum(one.size for one in allocations if not one.is_thread_local)
    assert found.total_mib == pytest.approx(taken / 2**20, abs=0.01)
