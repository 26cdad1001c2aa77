"""The emitted modules, as text and as the HLO that XLA makes of them."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import tensorflow as tf
from fake_cudnn import parse
from plain_attention import draw

from tfopt.kernels.cudnn.calls import flash_attention
from tfopt.kernels.cudnn.modules import AttentionSpec, backward_module, forward_module

MODULES = {"forward": forward_module, "backward": backward_module}
RECORDED = AttentionSpec(
    batch=2, query_length=256, key_length=256, heads=4, key_heads=4, size=64, dtype="bfloat16", causal=True, scale=0.125
)
FORMS = {
    "bias": {"causal": False, "bias": (2, 1)},
    "dbias": {"bias": (1, 4)},
    "padding": {"lengths": True},
    "window": {"window": 64},
    "gqa": {"key_heads": 2},
}
SHAPES = [
    # batch, query length, key length, heads, size, dtype, causal
    (2, 256, 256, 4, 64, "bfloat16", True),
    (1, 128, 128, 2, 32, "float16", False),
    (3, 333, 333, 1, 128, "float16", True),
    (5, 256, 512, 6, 64, "bfloat16", False),
    (1, 64, 96, 3, 8, "bfloat16", False),
]


def spec(batch, query_length, key_length, heads, size, dtype, causal):
    return AttentionSpec(
        batch=batch,
        query_length=query_length,
        key_length=key_length,
        heads=heads,
        key_heads=heads,
        size=size,
        dtype=dtype,
        causal=causal,
        scale=size**-0.5,
    )


@pytest.mark.parametrize("direction", MODULES)
def test_the_module_is_the_one_that_ran_on_a_gpu(direction):
    recorded = (Path(__file__).parent / "data" / f"{direction}.mlir.txt").read_text()
    assert MODULES[direction](RECORDED) == recorded


def calls(module):
    """A module's custom calls, without the names of their operands."""
    found = re.findall(r"@(__cudnn\S+?)\((.*?)\) (\{.*\} : .*)$", module, re.MULTILINE)
    return [(target, operands.count("%"), rest) for target, operands, rest in found]


@pytest.mark.parametrize("form", FORMS)
def test_the_calls_are_those_that_jax_lowers(form):
    spec = dataclasses.replace(RECORDED, **FORMS[form])
    # JAX's module of the gradients holds the forward call, too.
    recorded = (Path(__file__).parent / "data" / f"{form}_backward.mlir.txt").read_text()
    assert len(calls(recorded)) == 2
    assert [*calls(forward_module(spec)), *calls(backward_module(spec))] == calls(recorded)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("direction", MODULES)
def test_only_what_the_shapes_say_differs_from_the_recorded_configuration(direction, shape):
    (target, config), (recorded_target, recorded) = (parse(MODULES[direction](of)) for of in (spec(*shape), RECORDED))
    batch, query_length, key_length, heads, size, dtype, causal = shape
    assert target == recorded_target
    scores = config["intermediate_tensor_shape"]
    assert scores.pop("dimensions") == [str(number) for number in (batch, heads, query_length, key_length)]
    assert scores.pop("element_type") == {"bfloat16": "BF16", "float16": "F16"}[dtype]
    assert config.pop("mask_type") == ("CAUSAL" if causal else "NO_MASK")
    assert config.pop("fmha_scale") == size**-0.5
    for varying in ("fmha_scale", "mask_type"):
        del recorded[varying]
    for varying in ("dimensions", "element_type"):
        del recorded["intermediate_tensor_shape"][varying]
    assert config == recorded


def hlo(batch, query_length, key_length, heads, size, dtype, causal):
    """The HLO of attention and its gradients, and the two custom calls in it."""

    def step(query, key, value, upstream):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = flash_attention(query, key, value, causal=causal, scale=0.5)
        return output, tape.gradient(output, [query, key, value], output_gradients=upstream)

    operands = [draw(batch, length, heads, size, dtype=dtype) for length in (query_length, key_length, key_length)]
    text = tf.function(step, jit_compile=True).experimental_get_compiler_ir(*operands, operands[0])(stage="hlo")
    return text, [line for line in text.splitlines() if "custom_call_target" in line]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_hlo_has_the_operands_results_and_layouts_that_cudnn_takes(shape):
    batch, query_length, key_length, heads, size, dtype, causal = shape
    element = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    query = f"{element}[{batch},{query_length},{heads},{size}]{{3,2,1,0}}"
    key = f"{element}[{batch},{key_length},{heads},{size}]{{3,2,1,0}}"
    swapped_query = f"{element}[{batch},{heads},{query_length},{size}]{{3,1,2,0}}"
    swapped_key = f"{element}[{batch},{heads},{key_length},{size}]{{3,1,2,0}}"
    statistic = f"f32[{batch},{heads},{query_length}]{{2,1,0}}"

    text, (forward, backward) = hlo(*shape)
    entry = text.split("ENTRY")[0].splitlines()[0]
    assert entry.count(query) >= 4  # query and upstream in, output and its gradient out
    for call, target, operands, results in (
        (forward, "__cudnn$fmhaSoftmax", [query, key, key], [swapped_query, statistic]),
        (
            backward,
            "__cudnn$fmhaSoftmaxBackward",
            [query, key, key, statistic, query, query],
            [swapped_query, swapped_key, swapped_key],
        ),
    ):
        assert f'custom_call_target="{target}"' in call
        assert f"operand_layout_constraints={{{', '.join(operands)}}}" in call
        found = re.search(r"= \((.*?)\) custom-call", call)[1]
        assert re.sub(r"/\*.*?\*/", "", found) == ", ".join([*results, "u8[0]{0}"])
        assert "api_version=API_VERSION_STATUS_RETURNING" in call
        config = json.loads(re.search(r"backend_config=(\{.*\})", call)[1])["cudnn_fmha_backend_config"]
        assert config["mask_type"] == ("CAUSAL" if causal else "NO_MASK")
        assert config["fmha_scale"] == 0.5


def test_the_statistic_and_the_output_of_the_forward_call_reach_the_backward_call():
    text, _ = hlo(*SHAPES[0])
    entry = text.split("ENTRY")[1]
    forward, backward = (line for line in entry.splitlines() if " call(" in line)
    name = forward.split("=")[0].strip()
    output, statistic = (
        re.search(rf"(\S+) = \S+ get-tuple-element\(.*{re.escape(name)}\), index={index}", entry)[1] for index in (0, 1)
    )
    operands = re.findall(r"%[\w.-]+", re.search(r"call\((.*?)\), to_apply", backward)[1])
    assert operands[3] == statistic
    assert operands[5] == output
    assert len(set(operands)) == 6
