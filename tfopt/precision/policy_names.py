"""Dtype policies by name: which there are, and what they compute in."""

from typing import Any

import keras

from tfopt.errors import unknown_name
from tfopt.precision.recommendation import recommend

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16", "float64")
"""The policies that Keras trains with; "auto" stands for the one that `recommend` names.

"bfloat16" and "float16" keep the weights in 16 bits as well. Keras takes them, so tfopt does: updates smaller than the
weights' rounding are lost, which `tfopt.precision.check` measures. The loss is scaled under "float16" all the same.
"""


def as_policy(policy: str | keras.DTypePolicy) -> keras.DTypePolicy:
    """A Keras policy from its name; "auto" is what `recommend()` names.

    Raises:
        TypeError: It is neither a name nor a policy.
        ValueError: The name is no policy that Keras trains with.
    """
    if isinstance(policy, keras.DTypePolicy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(
            "Expected a dtype policy: a name such as 'mixed_bfloat16', or a keras.DTypePolicy. "
            f"Received: {policy!r}. Take 'auto' for what tfopt.precision.recommend() names."
        )
    name = recommend().policy if policy == "auto" else policy
    if name not in POLICIES:
        raise unknown_name("dtype policy", name, ("auto", *POLICIES))
    return keras.DTypePolicy(name)


def name_of(policy: Any) -> str:
    """The name of a policy; of what is none, what it prints as."""
    return policy.name if isinstance(policy, keras.DTypePolicy) else str(policy)


def is_16_bit(policy: keras.DTypePolicy) -> bool:
    """Whether what computes under a policy puts out 16 bits."""
    return policy.compute_dtype in ("float16", "bfloat16")
