"""cuDNN's attention calls on a CPU: the modules that tfopt emits run, with TensorFlow in the place of cuDNN."""

import json
import re

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

_TARGET = re.compile(r"@(__cudnn\$\w+)")
_CONFIG = re.compile(r'backend_config = "(.*?)", operand_layouts = \[.*?\], result_layouts = \[.*?\]\}')
_CALLED = "tf.backend_config = {called_index = 0 : i64, has_token_input_output = false}}"


class FakeCudnn:
    """Stands in for `tfopt.kernels.cudnn.call_module`, and keeps what was called: (target, configuration)."""

    def __init__(self):
        self.calls = []

    def __call__(self, module, operands, results):
        target, config = parse(module)
        self.calls.append((target, config))
        kernel = {"__cudnn$fmhaSoftmax": _forward, "__cudnn$fmhaSoftmaxBackward": _backward}[target]
        types = [tf.TensorSpec(operand.shape, operand.dtype) for operand in operands]
        called = tf.function(lambda *operands: kernel(config, *operands)).get_concrete_function(*types)
        if not tf.executing_eagerly():
            called.add_to_graph(tf.compat.v1.get_default_graph())
        return xla.call_module(
            operands,
            version=9,
            module=_CONFIG.sub(_CALLED, _TARGET.sub("@tf.call_tf_function", module)),
            Tout=[dtype for _, dtype in results],
            Sout=[shape for shape, _ in results],
            platforms=["CUDA"],
            disabled_checks=["platform"],
            function_list=[called.function_def.signature.name],
        )

    @property
    def targets(self):
        return [target for target, _ in self.calls]


def parse(module):
    """The custom call's target and its configuration."""
    text = _CONFIG.search(module)[1].replace("\\22", '"')
    return _TARGET.search(module)[1], json.loads(text)["cudnn_fmha_backend_config"]


def _scores(config, query, key):
    """Scores as the configuration asks for them, in float64, and their log Σ exp."""
    shape = config["intermediate_tensor_shape"]
    batch, heads, query_length, key_length = map(int, shape["dimensions"])
    assert query.shape == (batch, query_length, heads, query.shape[3])
    assert key.shape == (batch, key_length, heads, query.shape[3])
    assert {"BF16": tf.bfloat16, "F16": tf.float16}[shape["element_type"]] == query.dtype == key.dtype
    scores = config["fmha_scale"] * tf.einsum("bqhd,bkhd->bhqk", _wide(query), _wide(key))
    if config["mask_type"] == "CAUSAL":
        allowed = tf.linalg.band_part(tf.ones((query_length, key_length), tf.bool), -1, 0)
        scores = tf.where(allowed, scores, tf.constant(-1e30, scores.dtype))
    return scores


def _forward(config, query, key, value):
    scores = _scores(config, query, key)
    output = tf.einsum("bhqk,bkhd->bhqd", tf.nn.softmax(scores), _wide(value))
    return tf.cast(output, query.dtype), tf.cast(tf.reduce_logsumexp(scores, -1), tf.float32), _workspace()


def _backward(config, query, key, value, statistic, upstream, output):
    weights = tf.exp(_scores(config, query, key) - _wide(statistic)[..., None])
    upstream, dtype = _wide(upstream), query.dtype
    inner = tf.einsum("bqhd,bkhd->bhqk", upstream, _wide(value))
    mean = tf.einsum("bqhd,bqhd->bhq", upstream, _wide(output))
    scores = config["fmha_scale"] * weights * (inner - mean[..., None])
    gradients = (
        tf.einsum("bhqk,bkhd->bhqd", scores, _wide(key)),
        tf.einsum("bhqk,bqhd->bhkd", scores, _wide(query)),
        tf.einsum("bhqk,bqhd->bhkd", weights, upstream),
    )
    return (*(tf.cast(gradient, dtype) for gradient in gradients), _workspace())


def _wide(tensor):
    return tf.cast(tensor, tf.float64)


def _workspace():
    return tf.zeros((0,), tf.uint8)
