import logging
import threading

import keras
import pytest
from versions import make_unknown

from tfopt import hardware, precision, repairs
from tfopt.errors import UnsupportedError
from tfopt.hardware import Gpu
from tfopt.internals import probing
from tfopt.internals.probe import NEEDED, Verdict
from tfopt.internals.scopes import get_state, set_state
from tfopt.warn import forget_warnings


def repaired():
    return {name for name, state in repairs.status().states.items() if state == "repaired"}


def gpu(capability, name="NVIDIA Test"):
    return Gpu(
        index=0,
        uuid=f"GPU-{name}-{capability}",
        name=name,
        memory_mib=1024,
        compute_capability=capability,
        mig=False,
        driver_version="1.2",
    )


@pytest.mark.parametrize(
    ("capability", "policy"),
    [
        ((9, 0), "mixed_bfloat16"),
        ((8, 9), "mixed_bfloat16"),
        ((8, 0), "mixed_bfloat16"),
        ((7, 5), "mixed_float16"),
        ((7, 0), "mixed_float16"),
        ((6, 1), "float32"),
        (None, "float32"),
    ],
)
def test_recommended_by_compute_capability(capability, policy):
    recommendation = precision.recommend(gpu(capability))
    assert recommendation.policy == policy
    assert any("XLA" in requirement for requirement in recommendation.requires) == (policy != "float32")
    assert any("loss scaling" in requirement for requirement in recommendation.requires) == (policy == "mixed_float16")
    if capability:
        assert f"{capability[0]}.{capability[1]}" in str(recommendation)
    assert recommendation.to_dict()["policy"] == policy


def test_the_weakest_gpu_decides(monkeypatch):
    monkeypatch.setattr(hardware, "gpus", lambda: (gpu((9, 0)), gpu((7, 5), "Weak")))
    assert precision.recommend().policy == "mixed_float16"
    assert "Weak" in precision.recommend().reason


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    assert precision.recommend().policy == "float32"
    assert "no NVIDIA GPU" in precision.recommend().reason


def test_auto_sets_what_is_recommended(monkeypatch):
    monkeypatch.setattr(hardware, "gpus", lambda: (gpu((8, 0)),))
    assert precision.set_policy("auto") == "mixed_bfloat16"
    assert keras.layers.Dense(1).compute_dtype == "bfloat16"


@pytest.mark.parametrize("name", precision.POLICIES)
def test_every_policy_is_set(name):
    assert precision.set_policy(name) == name
    assert keras.layers.Dense(1).dtype_policy.name == name


def test_a_policy_object_is_set():
    mixed = keras.DTypePolicy("mixed_float16")
    assert precision.set_policy(mixed) == "mixed_float16"
    assert keras.config.dtype_policy() is mixed


def test_a_scope_restores_the_same_object():
    own = keras.DTypePolicy("mixed_float16")
    keras.config.set_dtype_policy(own)
    with precision.policy("float32") as name:
        assert name == "float32"
        with precision.policy("mixed_bfloat16"):
            assert keras.config.dtype_policy().name == "mixed_bfloat16"
        assert keras.config.dtype_policy().name == "float32"
    assert keras.config.dtype_policy() is own


def test_a_scope_restores_after_an_exception():
    before = keras.config.dtype_policy()
    with pytest.raises(RuntimeError), precision.policy("mixed_bfloat16"):
        raise RuntimeError
    assert keras.config.dtype_policy() is before


@pytest.mark.parametrize("use", [precision.set_policy, lambda name: precision.policy(name).__enter__()])
def test_an_unknown_policy(use):
    before = keras.config.dtype_policy()
    with pytest.raises(ValueError, match=r"Received: 'mixed_bfloat'\. Did you mean 'mixed_bfloat16'\?"):
        use("mixed_bfloat")
    assert keras.config.dtype_policy() is before


def test_float16_under_auto_scales_the_loss(monkeypatch):
    monkeypatch.setattr(hardware, "gpus", lambda: (gpu((7, 5)),))
    with precision.policy("auto"):
        layers = [keras.layers.Dense(2), keras.layers.Dense(1, dtype="float32")]
        model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.parametrize("received", [3, None, ["mixed_float16"], keras.DTypePolicy])
def test_neither_a_name_nor_a_policy(received):
    with pytest.raises(TypeError, match=r"Expected a dtype policy: .* Received: .*\. Pass 'auto' for what"):
        precision.set_policy(received)


@pytest.mark.parametrize(
    "quantised",
    [
        "float8_from_mixed_bfloat16",
        "float8_from_float32",
        "int8_from_float32",
        keras.dtype_policies.get("int8_from_float32"),
    ],
    ids=str,
)
def test_a_quantised_global_policy_is_refused(quantised):
    """Keras takes one, and then every model fails when it is called."""
    keras.config.set_dtype_policy(quantised)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(NotImplementedError):
        model(keras.ops.ones((1, 2)))
    keras.config.set_dtype_policy("float32")
    with pytest.raises(UnsupportedError, match=r"single layers only\. Give float8 to the Dense"):
        precision.set_policy(quantised)
    assert keras.config.dtype_policy().name == "float32"


def test_float8_in_a_single_layer_works_as_the_refusal_says():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="float8_from_mixed_bfloat16")])
    model.compile("sgd", "mse")
    model.fit(keras.ops.ones((4, 2)), keras.ops.ones((4, 1)), verbose=0)


def test_clear_session_drops_the_policy_of_stock_keras():
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.clear_session()
    assert keras.config.dtype_policy().name == "float32"


def test_clear_session_leaves_what_was_set():
    precision.set_policy("mixed_bfloat16")
    keras.utils.clear_session()
    assert keras.config.dtype_policy().name == "mixed_bfloat16"
    assert repaired() == {"clear_session", "rounded_ids"}


def policy_map():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policies["encoder/.*"] = keras.DTypePolicy("mixed_float16")
    return policies


@pytest.mark.parametrize("make", [lambda: None, lambda: keras.DTypePolicy("mixed_bfloat16"), policy_map])
def test_clear_session_in_a_scope(make):
    before = make()
    set_state("dtype_policy", before)
    with precision.policy("bfloat16"):
        keras.utils.clear_session()
        with precision.policy("float64"):
            keras.backend.clear_session()
            assert keras.config.dtype_policy().name == "float64"
        keras.utils.clear_session()
        assert keras.config.dtype_policy().name == "bfloat16"
    assert get_state("dtype_policy") is before
    assert repaired() == {"rounded_ids"}
    keras.utils.clear_session()
    assert keras.config.dtype_policy().name == "float32"


def test_a_scope_keeps_the_repair_that_set_policy_wants():
    with precision.policy("mixed_bfloat16"):
        precision.set_policy("float64")
    assert keras.config.dtype_policy().name == "float32"
    assert repaired() == {"clear_session", "rounded_ids"}


@pytest.mark.parametrize(
    "policy",
    ["mixed_float16", "float16", keras.DTypePolicy("mixed_float16"), policy_map()],
    ids=["mixed_float16", "float16", "policy", "map"],
)
def test_float16_brings_its_repairs_for_good(policy):
    with precision.policy(policy):
        assert repaired() == {*repairs.FLOAT16, "rounded_ids", "clear_session"}
    assert repaired() == {*repairs.FLOAT16, "rounded_ids"}


@pytest.mark.parametrize(
    ("policy", "brought"),
    [("float32", set()), ("mixed_bfloat16", {"rounded_ids"}), ("bfloat16", {"rounded_ids"}), ("float64", set())],
)
def test_other_policies_bring_none_of_them(policy, brought):
    with precision.policy(policy):
        assert repaired() == {*brought, "clear_session"}
    assert repaired() == brought


@pytest.mark.parametrize("name", repairs.FLOAT16)
def test_float16_is_refused_where_keras_is_not_known(monkeypatch, name):
    repair = repairs.REPAIRS[name]
    make_unknown(monkeypatch, repair)
    for use in (precision.set_policy, lambda policy: precision.policy(policy).__enter__()):
        with pytest.raises(UnsupportedError, match=repair.name):
            use("mixed_float16")
        assert keras.config.dtype_policy().name == "float32"
        assert not repaired()
    with precision.policy("mixed_bfloat16"):
        pass


def test_what_a_policy_needs_is_tried_in_one_process(monkeypatch, tmp_path):
    asked = []

    def ask(patches, answer):
        asked.append({patch.name for patch in patches})
        for patch in patches:
            answer(patch.name, Verdict(NEEDED, "seen"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probing, "_known", {})
    monkeypatch.setattr(probing, "_ask", ask)
    needed = [*repairs.FLOAT16, "clear_session", "rounded_ids"]
    for name in needed:
        repair = repairs.REPAIRS[name]
        monkeypatch.setattr(repair, "broken", dict.fromkeys(repair.broken, frozenset({"other"})))
    with precision.policy("mixed_float16"):
        assert repaired() == set(needed)
    assert asked == [set(needed)]


def test_an_unknown_clear_session_is_only_warned_of_once(monkeypatch, caplog):
    forget_warnings()
    make_unknown(monkeypatch, repairs.CLEAR_SESSION)
    with caplog.at_level(logging.WARNING, "tfopt"):
        for _ in range(2):
            with precision.policy("mixed_bfloat16"):
                assert precision.set_policy("float64") == "float64"
    assert keras.config.dtype_policy().name == "float32"
    (record,) = caplog.records
    assert "Set the policy again after each clear_session" in record.message


def test_other_threads_see_float32():
    seen = []
    with precision.policy("mixed_bfloat16"):
        thread = threading.Thread(target=lambda: seen.append(keras.config.dtype_policy().name))
        thread.start()
        thread.join()
    assert seen == ["float32"]


@pytest.mark.parametrize("name", ["float8", "int8", "float8_from_foo", "gptq"])
def test_half_a_quantised_name_is_none(name):
    with pytest.raises(ValueError, match=f"Expected a dtype policy: .* Received: '{name}'"):
        precision.set_policy(name)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("bf16", "mixed_bfloat16"), ("FP16", "mixed_float16"), ("bf16-mixed", "mixed_bfloat16"), ("fp32", "float32")],
)
def test_short_names_mean_the_mixed_policies(given, meant):
    """Not the pure ones, whose names are nearer: their weights lose small updates."""
    with pytest.raises(ValueError, match=rf"Did you mean '{meant}'\?"):
        precision.set_policy(given)
