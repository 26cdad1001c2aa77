"""float32 against the mixed policies: a training step each, and the accuracy that they train to.

On a GPU also ResNet-50 under each of them, with XLA and without.
"""

from tfopt.bench.cases import Case, Scale
from tfopt.bench.suites import combinations, settings
from tfopt.bench.suites.settings import Setting

_SETTINGS = {
    "float32": Setting("Keras' default", policy="float32"),
    "mixed_bfloat16": Setting("bfloat16 compute, float32 weights", policy="mixed_bfloat16"),
    "mixed_float16": Setting("float16 compute, float32 weights, loss scaling", policy="mixed_float16"),
}


def cases(scale: Scale) -> list[Case]:
    """The cases for this size."""
    digits = settings.case("precision", "What does mixed precision do to a training step?", _SETTINGS, scale)
    resnet = combinations.cases("precision", scale.resnet, scale.photos) if scale.resnet else []
    return [digits, *resnet]
