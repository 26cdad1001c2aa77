"""Architectures of keras.applications and KerasHub, in small sizes, with data that they can learn."""

import keras
import numpy as np

from precision_matrix.image_nets import images
from precision_matrix.nets import compiled, random
from tfopt.internals.sources import find

layers, ops = keras.layers, keras.ops


def _maker(path):
    """Of Keras' applications, whose makers are not public."""
    return getattr(*find(f"keras.src.applications.{path}"))


apps = keras.applications


def of_application(make, size=32, **options):
    def build():
        x, y = images(size, classes=4)
        x = np.clip(x * 60 + 100, 0, 255)  # some of them begin by scaling such values
        net = make(input_shape=(size, size, 3), weights=None, include_top=False, pooling="avg", **options)
        inputs = keras.Input((size, size, 3))
        return compiled(inputs, layers.Dense(4, name="head", dtype="float32")(net(inputs))), (x, y)

    return build


def small_dense_net(**options):
    return _maker("densenet:DenseNet")([2, 2, 2, 2], **options)


def small_res_net(**options):
    def stack(x):
        blocks = _maker("resnet:stack_residual_blocks_v1")
        x = blocks(x, 8, 2, stride1=1, name="a")
        return blocks(x, 16, 2, name="b")

    return _maker("resnet:ResNet")(stack, preact=False, use_bias=True, **options)


APPLICATIONS = {
    "ResNet": of_application(small_res_net),
    "ResNet50": of_application(apps.ResNet50),
    "DenseNet": of_application(small_dense_net),
    "MobileNetV2": of_application(apps.MobileNetV2, alpha=0.35),
    "MobileNetV3": of_application(apps.MobileNetV3Small, alpha=0.75, minimalistic=True),
    "EfficientNetB0": of_application(apps.EfficientNetB0),
    "ConvNeXt": of_application(
        lambda **options: _maker("convnext:ConvNeXt")([1, 1, 2, 1], [16, 32, 64, 128], name="convnext", **options)
    ),
}


def _tokens(length=16, vocabulary=60):
    x = random().integers(1, vocabulary, size=(64, length)).astype("int32")
    mask = (np.arange(length) < random(1).integers(length // 2, length + 1, size=(64, 1))).astype("int32")
    return x * mask, mask


def _hub():
    import keras_hub  # not everywhere installed

    return keras_hub.models


def of_decoder(name, **options):
    """A language model from a backbone of tokens and a padding mask: the next token."""

    def build():
        x, mask = _tokens()
        backbone = getattr(_hub(), name)(vocabulary_size=60, **options)
        found = backbone.output
        found = found if not isinstance(found, dict) else found["sequence_output"]
        model = compiled(backbone.inputs, layers.Dense(60, name="head", dtype="float32")(found))
        given = {tensor.name: mask if "mask" in tensor.name else np.zeros_like(x) if "segment" in tensor.name else x
                 for tensor in backbone.inputs}  # fmt: skip
        return model, (given, np.roll(x, -1, -1), mask.astype("float32"))

    return build


def of_two(name, **options):
    """An encoder of one sequence and a decoder of another."""

    def build():
        x, mask = _tokens()
        backbone = getattr(_hub(), name)(vocabulary_size=60, **options)
        model = compiled(backbone.inputs, layers.Dense(60, name="head", dtype="float32")(
            backbone.output["decoder_sequence_output"]))  # fmt: skip
        given = {tensor.name: mask if "mask" in tensor.name else x for tensor in backbone.inputs}
        if "encoder_features" in given:
            given["encoder_features"] = random().normal(size=(64, 32, 80)).astype("float32")
        return model, (given, np.roll(x, -1, -1), mask.astype("float32"))

    return build


def of_vision(name, size=32, **options):
    def build():
        x, y = images(size)
        backbone = getattr(_hub(), name)(**options)
        found = backbone.output
        found = layers.Flatten()(found[:, 0]) if len(found.shape) == 3 else layers.GlobalAveragePooling2D()(found)
        return compiled(backbone.inputs, layers.Dense(4, name="head", dtype="float32")(found)), (x, y)

    return build


_GPT = {"num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
_LLAMA = _GPT | {"num_query_heads": 4, "num_key_value_heads": 2}
HUB = {
    "BERT": of_decoder("BertBackbone", num_heads=2, max_sequence_length=16, **_GPT),
    "DeBERTa": of_decoder("DebertaV3Backbone", num_heads=2, max_sequence_length=16, bucket_size=8, **_GPT),
    "GPT-2": of_decoder("GPT2Backbone", num_heads=2, max_sequence_length=16, **_GPT),
    "Llama": of_decoder("LlamaBackbone", **_LLAMA),
    "Gemma": of_decoder("GemmaBackbone", head_dim=8, **_LLAMA),
    "Mixtral": of_decoder("MixtralBackbone", num_experts=4, top_k=2, sliding_window=8, **_LLAMA),
    "T5": of_two("T5Backbone", num_heads=2, key_value_dim=8, **_GPT),
    "Whisper": of_two("WhisperBackbone", num_heads=2, max_encoder_sequence_length=32, max_decoder_sequence_length=16,
                      num_mels=80, **_GPT),
    "ViT": of_vision("ViTBackbone", image_shape=(32, 32, 3), patch_size=8, num_layers=2, num_heads=2, hidden_dim=16,
                     mlp_dim=32),
    "ResNet of KerasHub": of_vision(
        "ResNetBackbone", input_conv_filters=[64], input_conv_kernel_sizes=[3], stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1], stackwise_num_strides=[1, 2], block_type="basic_block", image_shape=(32, 32, 3)),
}  # fmt: skip
