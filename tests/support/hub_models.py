"""Small language models of KerasHub, and batches for them."""

import keras
import numpy as np

LENGTH = 64
VOCABULARY = 61

_ALIBI = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "intermediate_dim": 48}
_GROUPED = {"num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 32, "intermediate_dim": 48}
_HEADED = _GROUPED | {"head_dim": 8}
_WINDOW = {"use_sliding_window_attention": True, "sliding_window_size": 16}
LANGUAGE_MODELS = {
    "GPT2Backbone": _ALIBI | {"max_sequence_length": LENGTH, "dropout": 0.0},
    "BertBackbone": _ALIBI | {"max_sequence_length": LENGTH, "dropout": 0.0},
    "RobertaBackbone": _ALIBI | {"max_sequence_length": LENGTH, "dropout": 0.0},
    "DistilBertBackbone": _ALIBI | {"max_sequence_length": LENGTH, "dropout": 0.0},
    "OPTBackbone": _ALIBI | {"max_sequence_length": LENGTH, "dropout": 0.0},
    "LlamaBackbone": _GROUPED,
    "Llama3Backbone": _GROUPED,
    "MistralBackbone": _GROUPED | {"sliding_window": 16},
    "GemmaBackbone": _HEADED,
    "Gemma3Backbone": _HEADED | _WINDOW | {"image_size": 16, "vision_encoder": None},
    "QwenBackbone": _GROUPED,
    "Qwen3Backbone": _HEADED,
    "Phi3Backbone": _GROUPED,
    "GPTNeoXBackbone": _ALIBI | {"dropout": 0.0},
    "BloomBackbone": _ALIBI | {"dropout": 0.0},
    "T5Backbone": {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "intermediate_dim": 48, "dropout": 0.0},
}


def backbone(name, policy="mixed_bfloat16"):
    """A language model, without its head."""
    import keras_hub

    keras.utils.set_random_seed(3)
    options = LANGUAGE_MODELS[name] | {"vocabulary_size": VOCABULARY, "dtype": policy}
    return getattr(keras_hub.models, name)(**options)


def batch(model, padded, size=4):
    """Token ids with padding at the "right", at the "left", or "nowhere", for each input of the model."""
    random = np.random.default_rng(1)
    tokens = random.integers(1, VOCABULARY, (size, LENGTH))
    present = np.ones((size, LENGTH), bool)
    lengths = random.integers(5, LENGTH, size)
    if padded == "right":
        present = np.arange(LENGTH) < lengths[:, None]
    if padded == "left":
        present = np.arange(LENGTH) >= LENGTH - lengths[:, None]
    given = {}
    for name in model.input if isinstance(model.input, dict) else {}:
        given[name] = present if "padding_mask" in name else np.zeros_like(tokens) if "segment" in name else tokens
    return {name: value.astype("int32") for name, value in given.items()}
