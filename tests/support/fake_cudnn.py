"""cuDNN's attention calls on a CPU: the modules that tfopt emits run, with TensorFlow in the place of cuDNN."""

import json
import re

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from tfopt.kernels.attention import call
from tfopt.kernels.cudnn import calls, support

_TARGET = re.compile(r"@(__cudnn\$\w+)")
_CONFIG = re.compile(r'backend_config = "(.*?)", operand_layouts = \[.*?\], result_layouts = \[.*?\]\}')
_CALLED = "tf.backend_config = {called_index = 0 : i64, has_token_input_output = false}}"


class FakeCudnn:
    """Stands in for `call_module` of tfopt.kernels.cudnn, and keeps targets, configurations and shapes."""

    def __init__(self):
        self.calls = []
        self.shapes = []

    def install(self, monkeypatch):
        """Makes this machine look like one with an H200."""
        monkeypatch.setattr(support, "compute_capabilities", lambda: [(9, 0)])
        monkeypatch.setattr(support, "device_type", lambda: "GPU")
        monkeypatch.setattr(calls, "call_module", self)
        monkeypatch.setattr(call, "defect", lambda spec: None)  # a trial compiles for seconds
        return self

    def __call__(self, module, operands, results):
        target, config = parse(module)
        self.calls.append((target, config))
        self.shapes.append({"query": operands[0].shape, "key": operands[1].shape})
        kernel = {
            "__cudnn$fmhaSoftmax": _forward,
            "__cudnn$fmhaSoftmaxBackward": _backward,
            "__cudnn$fmhaScaleBiasSoftmax": _forward_with_bias,
            "__cudnn$fmhaScaleBiasSoftmaxBackward": _backward_with_bias,
        }[target]
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


def _scores(config, query, key, bias, lengths):
    """Scores as the configuration asks for them, in float64, and which queries there are."""
    shape = config["intermediate_tensor_shape"]
    batch, heads, query_length, key_length = map(int, shape["dimensions"])
    assert query.shape == (batch, query_length, heads, query.shape[3])
    assert key.shape == (batch, key_length, key.shape[2], query.shape[3])
    assert {"BF16": tf.bfloat16, "F16": tf.float16}[shape["element_type"]] == query.dtype == key.dtype
    key = tf.repeat(_wide(key), heads // key.shape[2], axis=2)
    scores = config["fmha_scale"] * tf.einsum("bqhd,bkhd->bhqk", _wide(query), key)
    if bias is not None:
        assert bias.dtype == query.dtype
        assert bias.shape[0] in (1, batch)
        assert bias.shape[1:] in ((1, query_length, key_length), (heads, query_length, key_length))
        scores += _wide(bias)
    rows, columns = tf.range(query_length)[:, None], tf.range(key_length)[None, :]
    allowed = tf.ones((query_length, key_length), tf.bool)
    if "CAUSAL" in config["mask_type"]:
        allowed &= columns <= rows
    if config["sliding_window_length"]:
        allowed &= columns > rows - config["sliding_window_length"]
    assert ("PADDING" in config["mask_type"]) == bool(lengths)
    if lengths:
        queries, keys = (length[:, None, None, None] for length in lengths)
        allowed &= (rows < queries) & (columns < keys)
    return tf.where(allowed, scores, tf.constant(-1e30, scores.dtype)), tf.reduce_any(allowed, -1, keepdims=True)


def _forward(config, query, key, value, *lengths, bias=None):
    scores, present = _scores(config, query, key, bias, lengths)
    value = tf.repeat(_wide(value), query.shape[2] // value.shape[2], axis=2)
    weights = tf.where(present, tf.nn.softmax(scores), 0)
    output = tf.einsum("bhqk,bkhd->bhqd", weights, value)
    return tf.cast(output, query.dtype), tf.cast(tf.reduce_logsumexp(scores, -1), tf.float32), _workspace()


def _forward_with_bias(config, query, key, value, bias, *lengths):
    return _forward(config, query, key, value, *lengths, bias=bias)


def _backward(config, query, key, value, statistic, upstream, output, *lengths):
    return (*_gradients(config, query, key, value, statistic, upstream, None, output, lengths)[:3], _workspace())


def _backward_with_bias(config, query, key, value, statistic, upstream, bias, output, *lengths):
    return (*_gradients(config, query, key, value, statistic, upstream, bias, output, lengths), _workspace())


def _gradients(config, query, key, value, statistic, upstream, bias, output, lengths):
    scores, present = _scores(config, query, key, bias, lengths)
    weights = tf.where(present, tf.exp(scores - _wide(statistic)[..., None]), 0)
    upstream, heads, key_heads = _wide(upstream), query.shape[2], key.shape[2]
    inner = tf.einsum("bqhd,bkhd->bhqk", upstream, tf.repeat(_wide(value), heads // key_heads, axis=2))
    mean = tf.einsum("bqhd,bqhd->bhq", upstream, _wide(output))
    of_scores = weights * (inner - mean[..., None])
    scores = config["fmha_scale"] * of_scores

    def of_groups(gradient):
        batch, _, length, size = gradient.shape
        return tf.reduce_sum(tf.reshape(gradient, (batch, key_heads, heads // key_heads, length, size)), 2)

    gradients = [
        tf.einsum("bhqk,bkhd->bhqd", scores, tf.repeat(_wide(key), heads // key_heads, axis=2)),
        of_groups(tf.einsum("bhqk,bqhd->bhkd", scores, _wide(query))),
        of_groups(tf.einsum("bhqk,bqhd->bhkd", weights, upstream)),
    ]
    if bias is not None:
        axes = [axis for axis in (0, 1) if bias.shape[axis] == 1]
        gradients.append(tf.reduce_sum(of_scores, axes, keepdims=True))
    return [tf.cast(gradient, query.dtype) for gradient in gradients]


def _wide(tensor):
    return tf.cast(tensor, tf.float64)


def _workspace():
    return tf.zeros((0,), tf.uint8)
