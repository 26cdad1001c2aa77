"""Which mixed-precision policy suits the device."""

from dataclasses import asdict, dataclass
from typing import Any

from tfopt import hardware
from tfopt.hardware import Gpu


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A policy for a device, with the reason.

    Attributes:
        policy: The name of a Keras dtype policy.
        reason: Why this one.
        requires: What must hold for it to pay; without it the policy can be slower than float32.
    """

    policy: str
    reason: str
    requires: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)

    def __str__(self) -> str:
        requires = f" Requires: {'; '.join(self.requires)}." if self.requires else ""
        return f"{self.policy}: {self.reason}{requires}"


def recommend(gpu: Gpu | None = None) -> Recommendation:
    """Recommends a dtype policy for training on a GPU.

    bfloat16 has float32's range, so it needs no loss scaling; its Tensor Cores came with compute capability 8.0
    (Ampere). Volta and Turing (7.x) have float16 ones. Source: NVIDIA, "Train With Mixed Precision", and the CUDA C++
    Programming Guide's table of Tensor Core types by compute capability.

    Args:
        gpu: One of `tfopt.hardware.gpus()`. By default the weakest GPU that this process may use, since a model that
            is trained on several has one policy.

    Returns:
        The policy, the reason and what it requires.
    """
    gpus = hardware.gpus() if gpu is None else (gpu,)
    known = [g for g in gpus if g.compute_capability is not None]
    if not known:
        found = "no NVIDIA GPU was found" if not gpus else "the GPU's compute capability is unknown"
        return Recommendation("float32", f"{found}; 16-bit training pays on Tensor Cores only.")
    weakest = min(known, key=lambda g: g.compute_capability or (0, 0))
    major, minor = weakest.compute_capability or (0, 0)
    device = f"{weakest.name} has compute capability {major}.{minor}"
    if (major, minor) >= (8, 0):
        return Recommendation("mixed_bfloat16", f"{device}: bfloat16 Tensor Cores.", (_XLA,))
    if major == 7:
        scaling = "loss scaling, which model.compile adds to a model built under this policy"
        return Recommendation("mixed_float16", f"{device}: float16 Tensor Cores.", (_XLA, scaling))
    return Recommendation("float32", f"{device}, which has no Tensor Cores.")


# Keras' batch norm is many small operations; only XLA fuses them, and their 16-bit casts otherwise cost more than the
# Tensor Cores gain.
_XLA = "XLA (jit_compile=True) for models with batch normalisation, which Keras does not fuse without it"
