"""Each form of cuDNN's attention is tried on the machine before a model takes it."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from fake_cudnn import FakeCudnn
from plain_attention import LENGTH, attend, draw, largest_error
from quick import first_quick

from tfopt.kernels import dot_product_attention
from tfopt.kernels.attention import call
from tfopt.kernels.cudnn import calls, trial
from tfopt.kernels.cudnn.modules import AttentionSpec

SPEC = AttentionSpec(
    batch=16,
    query_length=1024,
    key_length=1024,
    heads=12,
    key_heads=12,
    size=64,
    dtype="bfloat16",
    causal=True,
    scale=1,
)
FORMS = {
    "groups": {"key_heads": 3},
    "mask": {"bias": (16, 1)},
    "causal": {},
    "full": {"causal": False},
    "float16": {"dtype": "float16"},
    "other lengths": {"causal": False, "query_length": 333, "key_length": 1000},
    "mask alike for all": {"bias": (1, 1)},
    "bias": {"bias": (1, 12)},
    "bias, float16": {"bias": (1, 12), "dtype": "float16", "causal": False},
    "window": {"window": 512},
    "a short window": {"window": 3},
    "window with a mask": {"window": 512, "bias": (16, 1)},
    "lengths": {"lengths": True},
    "groups with lengths": {"lengths": True, "key_heads": 1, "causal": False},
}


@pytest.fixture(autouse=True)
def forgotten():
    trial._defect.cache_clear()
    yield
    trial._defect.cache_clear()


@pytest.mark.parametrize("form", first_quick(FORMS, 2))
def test_a_right_form_has_no_defect(monkeypatch, form):
    """It is compiled by XLA, with a stand-in for cuDNN that computes in float64."""
    fake = FakeCudnn()
    monkeypatch.setattr(calls, "call_module", fake)
    spec = dataclasses.replace(SPEC, **FORMS[form])
    assert trial.defect(spec) is None
    assert len(fake.calls) == 2
    assert trial.defect(dataclasses.replace(spec, batch=4 * spec.batch, scale=0.1)) is None
    assert len(fake.calls) == 2  # the same form


@pytest.fixture
def quick_trials(monkeypatch):
    """Trials without XLA."""
    compiled = tf.function
    monkeypatch.setattr(trial.tf, "function", lambda function, **options: compiled(function, autograph=False))


def scaled(module, operands):
    return module.replace("fmha_scale\\22: 0.", "fmha_scale\\22: 0.9"), operands


def one_gradient(module, operands):
    """The output is right, and the gradient of one tensor is not."""
    return module, (*operands[:2], -operands[2], *operands[3:]) if "Backward" in module else operands


def without_mask(module, operands):
    return module.replace("CAUSAL", "NO_MASK"), operands


def not_finite(module, operands):
    return module, (operands[0] / 0, *operands[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "dtype"),
    [
        (scaled, "bfloat16"),
        (scaled, "float16"),
        (one_gradient, "bfloat16"),
        (without_mask, "bfloat16"),
        (not_finite, "bfloat16"),
    ],
)
def test_a_wrong_form_is_named(monkeypatch, quick_trials, wrong, dtype):
    fake = FakeCudnn()
    monkeypatch.setattr(calls, "call_module", lambda module, *given: fake(*wrong(module, given[0]), given[1]))
    found = trial.defect(dataclasses.replace(SPEC, dtype=dtype))
    assert found.startswith("cuDNN computes this form wrongly here: an error of ")


def test_what_cudnn_refuses_is_told_in_its_words(monkeypatch, quick_trials):
    def refused(*given):
        raise tf.errors.InternalError(None, None, "CUDNN_STATUS_NOT_SUPPORTED in tensor\nat line 7")

    monkeypatch.setattr(calls, "call_module", refused)
    assert trial.defect(SPEC) == "cuDNN refuses this form here: CUDNN_STATUS_NOT_SUPPORTED in tensor"


def test_what_is_of_the_moment_is_asked_again(monkeypatch, quick_trials):
    def full(*given):
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    monkeypatch.setattr(calls, "call_module", full)
    assert trial.defect(SPEC) == "cuDNN could not be tried here: out of memory"
    monkeypatch.setattr(calls, "call_module", FakeCudnn())
    assert trial.defect(SPEC) is None


@pytest.mark.slow
def test_it_is_tried_while_a_step_is_traced(cudnn, uncompiled, quick_trials, monkeypatch):
    monkeypatch.setattr(call, "defect", trial.defect)
    query = draw(3, LENGTH, 2, 8, dtype="bfloat16")

    @tf.function
    def step(query):
        with tf.device("CPU:0"), tf.GradientTape() as tape:
            tape.watch(query)
            output = dot_product_attention(query, query, query, causal=True)
        return tape.gradient(output, query)

    assert np.isfinite(tf.cast(step(query), tf.float32)).all()
    shapes = [config["intermediate_tensor_shape"]["dimensions"] for _, config in cudnn.calls]
    tried, traced = ["2", "2", "128", "128"], ["3", "2", "64", "64"]
    assert shapes == [tried, tried, traced, traced]


CHOICES = {
    # keys' heads, mask, wrong forms, the call that remains
    "groups": (1, None, [], {"key_heads": 1}),
    "groups that are wrong": (1, None, [lambda spec: spec.key_heads == 1], {"key_heads": 2}),
    "lengths": (2, "lengths", [], {"lengths": True, "bias": None}),
    "lengths that are wrong": (2, "lengths", [lambda spec: spec.lengths], {"lengths": False, "bias": (3, 1)}),
    "window": (2, "window", [], {"window": 5}),
    "a window that is wrong": (2, "window", [lambda spec: spec.window], {"window": 0, "bias": (1, 1)}),
    "groups and lengths that are wrong": (
        1,
        "lengths",
        [lambda spec: spec.key_heads == 1, lambda spec: spec.lengths],
        {"key_heads": 2, "bias": (3, 1)},
    ),
    "all": (1, "lengths", [lambda spec: True], None),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", first_quick(CHOICES, 3))
def test_a_wrong_form_gives_way_to_another(cudnn, uncompiled, monkeypatch, case):
    key_heads, masked, wrong, expected = CHOICES[case]
    monkeypatch.setattr(call, "defect", lambda spec: "wrong" if any(bad(spec) for bad in wrong) else None)
    taken = []
    monkeypatch.setattr(call, "flash_attention", lambda *given, **options: taken.append(options) or flash(**options))
    flash = calls.flash_attention
    query, key, value = (
        draw(3, LENGTH, heads, 8, dtype="bfloat16", seed=seed) for seed, heads in enumerate((2, key_heads, key_heads))
    )
    lengths = np.array([0, 7, LENGTH], np.int32)

    @tf.function
    def step(query, key, value, lengths):
        mask = {
            None: None,
            "lengths": tf.sequence_mask(lengths, LENGTH)[:, None, None],
            "window": tf.constant(~np.tri(LENGTH, k=-5, dtype=bool)),
        }[masked]
        return dot_product_attention(query, key, value, mask=mask, causal=masked != "lengths")

    found = step(query, key, value, lengths)
    mask = np.arange(LENGTH) < lengths[:, None, None, None] if masked == "lengths" else None
    exact = attend(
        query, key, value, mask=mask, window=5 if masked == "window" else 0, causal=masked != "lengths"
    ).numpy()
    if masked == "lengths":  # nothing to attend to: the mean, as Keras has it
        exact[0] = np.repeat(tf.cast(value, tf.float64)[0].numpy().mean(0, keepdims=True), 2 // key_heads, 1)
    assert largest_error([tf.cast(found, tf.float64).numpy()], [exact]) < 0.02
    spec = dataclasses.asdict(calls.attention_spec(**taken[0])) if taken else None
    assert (spec and {name: spec[name] for name in expected}) == expected
