"""Sixteen language models of KerasHub in small sizes, with the heads that KerasHub gives them."""

import keras
import numpy as np

from model_cases.training import EXAMPLES, Net

LENGTH, VOCABULARY, MASKED = 64, 61, 8
_ALIKE = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "intermediate_dim": 48, "dropout": 0.0}
_LIMITED = _ALIKE | {"max_sequence_length": LENGTH}
_GROUPED = {"num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 32, "intermediate_dim": 48}
_HEADED = _GROUPED | {"head_dim": 8}
_BACKBONES = {
    "GPT-2": ("GPT2CausalLM", _LIMITED),
    "BERT": ("BertMaskedLM", _LIMITED),
    "RoBERTa": ("RobertaMaskedLM", _LIMITED),
    "DistilBERT": ("DistilBertMaskedLM", _LIMITED),
    "OPT": ("OPTCausalLM", _LIMITED),
    "Llama": ("LlamaCausalLM", _GROUPED),
    "Llama 3": ("Llama3CausalLM", _GROUPED),
    "Mistral": ("MistralCausalLM", _GROUPED | {"sliding_window": 16}),
    "Gemma": ("GemmaCausalLM", _HEADED),
    "Gemma 3": ("Gemma3CausalLM", _HEADED | {"image_size": 16, "vision_encoder": None, "sliding_window_size": 16}),
    "Qwen 2": ("QwenCausalLM", _GROUPED),
    "Qwen 3": ("Qwen3CausalLM", _HEADED),
    "Phi-3": ("Phi3CausalLM", _GROUPED),
    "GPT-NeoX": ("GPTNeoXCausalLM", _ALIKE),
    "BLOOM": ("BloomCausalLM", _ALIKE),
    "T5": ("T5Seq2SeqLM", _ALIKE),
}


def _tokens():
    """Ids of shape (examples, LENGTH), of other lengths with padding to the right, and which are not padding."""
    random = np.random.default_rng(1)
    ids = random.integers(1, VOCABULARY, (EXAMPLES, LENGTH))
    present = np.arange(LENGTH) < random.integers(LENGTH // 2, LENGTH + 1, (EXAMPLES, 1))
    return (ids * present).astype("int32"), present.astype("int32")


def _batches(model):
    """All examples: what each input of the model takes, the ids to be predicted, and their weights."""
    ids, present = _tokens()
    following, weights = np.roll(ids, -1, axis=1), present.astype("float32")
    places = np.sort(
        np.random.default_rng(2).permuted(np.tile(np.arange(LENGTH // 2), (EXAMPLES, 1)), axis=1)[:, :MASKED]
    )
    given = {}
    for name in model.input:
        if "mask_positions" in name:
            given[name] = places.astype("int32")
            following = np.take_along_axis(ids, places, axis=1)
            weights = np.ones_like(following, "float32")
        else:
            given[name] = present if "mask" in name else np.zeros_like(ids) if "segment" in name else ids
    return given, following, weights


def _language_model(task, options):
    def make():
        import keras_hub

        task_class = getattr(keras_hub.models, task)
        backbone = task_class.backbone_cls(vocabulary_size=VOCABULARY, **options)
        model = task_class(backbone=backbone, preprocessor=None)
        model.compile(optimizer=keras.optimizers.Adam(1e-3), jit_compile=False)
        return model, _batches(model)

    return make


NETS = tuple(Net(name, _language_model(*choice), needs="keras_hub") for name, choice in _BACKBONES.items())
