import keras
import pytest

from tfopt import hardware, precision
from tfopt.hardware import Gpu


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
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="float32")])
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
