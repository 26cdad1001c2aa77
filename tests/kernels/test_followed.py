"""The attention of KerasHub's language models, computed in cuDNN's forms by TensorFlow on a CPU."""

import keras
import pytest
import tensorflow as tf
from hub_models import LANGUAGE_MODELS, backbone, batch
from plain_attention import largest_error

from tfopt.kernels import undo
from tfopt.kernels.followed.layers import explain_layer, follow

BFLOAT16 = 3e-2  # two layers, with every product and sum rounded
QUICK = ("LlamaBackbone", "T5Backbone")


def outputs(model, tokens):
    step = tf.function(lambda tokens: model(tokens, training=True), autograph=False)
    return [tf.cast(each, tf.float64).numpy() for each in keras.tree.flatten(step(tokens))]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in LANGUAGE_MODELS]
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of layers that KerasHub does not build
def test_language_models(cudnn, uncompiled, name):
    pytest.importorskip("keras_hub")
    model = backbone(name)
    tokens = {padded: batch(model, padded) for padded in ("nowhere", "right", "left")}
    plain = {padded: outputs(model, given) for padded, given in tokens.items()}
    changed = follow(model)
    for padded, given in tokens.items():
        assert largest_error(outputs(model, given), plain[padded]) < BFLOAT16
        rows = [row for layer in model._flatten_layers() if (row := explain_layer(layer, jit=True))]
        assert [row.training for row in rows] == [()] * changed
    assert changed >= 2
    assert undo(model) == changed
