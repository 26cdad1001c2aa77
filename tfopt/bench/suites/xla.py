"""The training step with and without XLA, and the accuracy that both train to."""

from tfopt.bench.cases import Case, Scale
from tfopt.bench.suites.precision import Setting, digits_case

_SETTINGS = {
    "XLA off": Setting("jit_compile=False", jit_compile=False),
    "XLA on": Setting("jit_compile=True", jit_compile=True),
}


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size."""
    return [digits_case("xla", "What does XLA do to a training step?", _SETTINGS, scale)]
