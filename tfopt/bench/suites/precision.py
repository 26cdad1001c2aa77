"""float32 against the mixed policies: a training step each, the accuracy that they train to, and what the gate finds.

On a GPU also ResNet-50 under each of them, with XLA and without.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from tfopt import precision
from tfopt.bench.cases import Case, Scale
from tfopt.bench.suites import combinations, settings
from tfopt.bench.suites.settings import Setting
from tfopt.bench.workloads import digits

_SETTINGS = {
    "float32": Setting("Keras' default", policy="float32"),
    "mixed_bfloat16": Setting("bfloat16 compute, float32 weights", policy="mixed_bfloat16"),
    "mixed_float16": Setting("float16 compute, float32 weights, loss scaling", policy="mixed_float16"),
}


def cases(scale: Scale) -> list[Case]:
    """The cases for this size."""
    digits_case = settings.case("precision", "What does mixed precision do to a training step?", _SETTINGS, scale)
    digits_case = replace(digits_case, gate=partial(_gate, scale))
    resnet = combinations.cases(scale.resnet, scale.photos) if scale.resnet else []
    return [digits_case, *resnet]


def _gate(scale: Scale) -> list[dict[str, Any]]:
    net, batch = digits.model(width=scale.width), digits.batch(scale.batch_size)
    return [precision.check(net, batch, policy).to_dict() for policy in _SETTINGS if policy != "float32"]
