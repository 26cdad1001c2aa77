"""Precision of the whole process: dtype policies, the one that suits the device, and TF32."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt import hardware, repairs
from tfopt.errors import UnsupportedError, unknown_name
from tfopt.hardware import Gpu
from tfopt.internals.scopes import get_state, set_state
from tfopt.repairs.catalogue import try_out
from tfopt.text import Shown
from tfopt.warn import warn_once

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16", "float64")
"""The policies Keras trains with; "auto" stands for the one `recommend` names.

"bfloat16" and "float16" keep the weights in 16 bits as well. tfopt accepts them because Keras does: updates smaller
than the rounding of the weights are lost. The loss is scaled under "float16" all the same.
"""
_QUANTIZED = ("int8", "int4", "float8", "gptq", "awq")
# Keras' batch norm is many small operations that only XLA fuses; otherwise their 16-bit casts cost more than the Tensor
# Cores gain.
_XLA = "XLA (jit_compile=True) for models with batch normalisation, which Keras does not fuse without it"


@dataclass(frozen=True, slots=True, repr=False)
class Recommendation(Shown):
    """A policy for a device, with the reason."""

    policy: str
    """Name of a Keras dtype policy."""
    reason: str
    requires: tuple[str, ...] = ()
    """Without these, the policy can be slower than float32."""

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)

    def __str__(self) -> str:
        requires = f" Requires: {'; '.join(self.requires)}." if self.requires else ""
        return f"{self.policy}: {self.reason}{requires}"


def recommend(gpu: Gpu | None = None) -> Recommendation:
    """Recommends a dtype policy for training on a GPU.

    bfloat16 has float32's range, so it needs no loss scaling; its Tensor Cores came with compute capability 8.0
    (Ampere). Volta and Turing (7.x) have float16 Tensor Cores only. Source: NVIDIA, "Train With Mixed Precision", and
    the CUDA C++ Programming Guide's table of Tensor Core types by compute capability.

    Args:
        gpu: One of `tfopt.hardware.gpus()`. By default the weakest GPU this process may use, since a model trained on
            several GPUs has one policy.

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


# What these stand for elsewhere: 16-bit compute with float32 weights, not the pure policy whose name is nearer.
_MEANT = {
    **dict.fromkeys(("bf16", "bfloat", "bf16-mixed", "amp_bf16", "mixed_bf16"), "mixed_bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half", "16-mixed", "amp", "amp_fp16", "mixed_fp16"), "mixed_float16"),
    **dict.fromkeys(("fp32", "f32", "single", "32-true"), "float32"),
}


def named(policy: Any) -> Any:
    """A policy, or a mapping to policies, with what "auto" stands for on this machine in place of it."""
    if isinstance(policy, Mapping) and not isinstance(policy, keras.DTypePolicy):
        return {key: named(value) for key, value in policy.items()}
    return recommend().policy if policy == "auto" else policy


def as_policy(policy: str | keras.DTypePolicy) -> keras.DTypePolicy:
    """Returns a Keras policy for a name; "auto" is what `recommend()` names."""
    if isinstance(policy, keras.DTypePolicy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(
            "Expected a dtype policy: a name such as 'mixed_bfloat16', or a keras.DTypePolicy. "
            f"Received: {policy!r}. Pass 'auto' for what tfopt.precision.recommend() names."
        )
    name = named(policy)
    if name not in POLICIES:
        raise unknown_name("dtype policy", name, ("auto", *POLICIES), _MEANT.get(name.lower()))
    return keras.DTypePolicy(name)


def set_policy(policy: str | keras.DTypePolicy = "auto") -> str:
    """Sets Keras' global dtype policy for the rest of the process; layers made afterwards take it.

    It also installs, for the rest of the process, the repairs that the policy needs: `keras.utils.clear_session()`
    keeps it; under a 16-bit policy, no Sequential rounds its ids; and under a policy with float16
    `tfopt.repairs.FLOAT16` makes sure that the loss is scaled in every layer, replica and saved model.

    Keras keeps the policy in a `threading.local`, so every other thread has float32 until it sets a policy itself.

    Args:
        policy: A name, a Keras policy (also a `DTypePolicyMap`), or "auto" for what `recommend()` names.

    Returns:
        The name of the policy that was set.

    Raises:
        TypeError: If `policy` is neither a name nor a policy.
        ValueError: If Keras does not train with a policy of that name.
        tfopt.errors.UnsupportedError: If the policy is quantized (float8 included), which only single layers can be, or
            if it has float16 and the repairs do not know a function of the installed Keras.

    Example:
        >>> tfopt.precision.set_policy("auto")
        'mixed_bfloat16'
    """
    chosen = _global_policy(policy)
    if _can_repair(repairs.CLEAR_SESSION):
        repairs.CLEAR_SESSION.install()
    keras.config.set_dtype_policy(chosen)
    return str(chosen.name)


@contextmanager
def policy(policy: str | keras.DTypePolicy = "auto") -> Iterator[str]:
    """Sets Keras' global dtype policy for a block of code, and restores the previous policy object.

    It takes, yields and raises what `set_policy` takes, returns and raises. Inside the block,
    `keras.utils.clear_session()` keeps the policy. The repairs that 16 bits need stay installed afterwards, since the
    models made in the block outlive it.

    Example:
        >>> with tfopt.precision.policy("mixed_bfloat16"):
        ...     model = make_model()
    """
    chosen = _global_policy(policy)
    # None if no policy was ever set; Keras then makes the default one on demand.
    before = get_state("dtype_policy")
    with ExitStack() as stack:
        if _can_repair(repairs.CLEAR_SESSION):
            stack.enter_context(repairs.CLEAR_SESSION.during())
        stack.callback(set_state, "dtype_policy", before)
        keras.config.set_dtype_policy(chosen)
        yield str(chosen.name)


def _global_policy(policy: str | keras.DTypePolicy) -> keras.DTypePolicy:
    """The policy object for a name, with the repairs it needs installed."""
    if isinstance(policy, str) and policy.startswith(_QUANTIZED):
        try:
            chosen = keras.dtype_policies.get(policy)
        except (ValueError, TypeError, IndexError) as error:  # from Keras' parser of such names
            raise unknown_name("dtype policy", policy, ("auto", *POLICIES), _MEANT.get(policy.lower())) from error
    else:
        chosen = as_policy(policy)
    if chosen.quantization_mode is not None:
        # Keras accepts such a global policy; then every model and most layers fail in their first call.
        raise UnsupportedError(
            "Expected a global dtype policy that every layer can have. Found a quantized one, "
            f"{chosen.name!r}, which Keras has for single layers only. Give float8 to the Dense and EinsumDense layers "
            "themselves: keras.layers.Dense(..., dtype='float8_from_mixed_bfloat16')."
        )
    is_map = isinstance(chosen, keras.dtype_policies.DTypePolicyMap)
    parts = [chosen.default_policy, *(chosen[key] for key in chosen)] if is_map else [chosen]
    dtypes = {part.compute_dtype for part in parts}
    of_float16 = repairs.FLOAT16 if "float16" in dtypes else ()
    of_16_bits = [repairs.ROUNDED_IDS.name] if dtypes & {"float16", "bfloat16"} else []
    try_out(*of_float16, *of_16_bits, repairs.CLEAR_SESSION.name)  # one after another would take longer
    if of_float16:
        repairs.install(*of_float16)
    if of_16_bits:
        keep_ids()
    return chosen


def keep_ids() -> None:
    """Installs the repair that keeps ids from being rounded to 16 bits, or warns that it does not know this Keras."""
    if _can_repair(repairs.ROUNDED_IDS):
        repairs.ROUNDED_IDS.install()


def _can_repair(repair: repairs.Repair) -> bool:
    """Whether a defect that only some models or calls meet can be repaired; warns once if not."""
    try:
        repair.applies()
    except UnsupportedError as error:
        warn_once(repair.name, str(error))
        return False
    return True


def set_tf32(enabled: bool) -> None:
    """Switches TF32 on or off for the rest of the process.

    TensorFlow starts with TF32 on: GPUs of compute capability 8.0 (Ampere) and later then round the inputs of float32
    matrix products and convolutions from 23 to 10 bits of mantissa. Other devices and dtypes are not affected. Switch
    it off where float32 must mean float32, such as for a reference that 16-bit training is compared with; it is much
    slower. NVIDIA_TF32_OVERRIDE=0 in the environment overrides what is set here. Source: NVIDIA, "TensorFloat-32 in the
    A100 GPU Accelerates AI Training, HPC up to 20x".

    Raises:
        TypeError: If `enabled` is not a bool.

    Example:
        >>> tfopt.precision.set_tf32(False)
    """
    if not isinstance(enabled, bool):
        raise TypeError(
            f"Expected enabled to be True or False. Received: enabled={enabled!r}. Pass False where float32 must mean "
            "float32."
        )
    tf.config.experimental.enable_tensor_float_32_execution(enabled)


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Switches TF32 on or off for a block of code, and restores the previous setting; arguments as for `set_tf32`.

    The switch is process-wide, not per thread. Set it before the first step: whether a step already compiled by XLA
    follows it has not been measured.

    Example:
        >>> with tfopt.precision.tf32(False):
        ...     reference = model(inputs)
    """
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    set_tf32(enabled)
    try:
        yield
    finally:
        set_tf32(before)
