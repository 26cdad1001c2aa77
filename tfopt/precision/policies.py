"""Keras' global dtype policy, set so that it can be taken back and stays what was set."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import keras
from keras.src.backend.common import global_state

from tfopt import repairs
from tfopt.errors import UnsupportedError, unknown_name
from tfopt.precision.policy_names import POLICIES, as_policy
from tfopt.warn import warn_once


def set_policy(policy: str | keras.DTypePolicy = "auto") -> str:
    """Sets Keras' global dtype policy for the rest of the process; layers made afterwards take it.

    It also repairs, for the rest of the process, what would undo the policy: `keras.utils.clear_session()` keeps it,
    and under a policy with float16 the repairs `tfopt.repairs.FLOAT16` make sure that the loss is scaled, in every
    layer, replica and saved model.

    The policy holds in the calling thread. Keras keeps it in a `threading.local`: any other thread sees float32 until
    it sets a policy itself.

    Args:
        policy: A name, a Keras policy object (a `DTypePolicyMap`, too), or "auto" for what `recommend()` names.

    Returns:
        The name of the policy that was set.

    Raises:
        TypeError: `policy` is neither a name nor a policy.
        ValueError: The name is no policy that Keras trains with.
        tfopt.errors.UnsupportedError: A quantised policy, float8 included, which only a layer can have; or a policy
            with float16, and the installed Keras has a function that the repairs do not know.

    Example:
        >>> tfopt.precision.set_policy("auto")
        'mixed_bfloat16'
    """
    chosen = _resolved(policy)
    _install_for_float16(chosen)
    if _clear_session_is_known():
        repairs.CLEAR_SESSION.install()
    keras.config.set_dtype_policy(chosen)
    return str(chosen.name)


@contextmanager
def policy(policy: str | keras.DTypePolicy = "auto") -> Iterator[str]:
    """Sets Keras' global dtype policy for a block of code, and puts back the very object that was there.

    Inside, `keras.utils.clear_session()` keeps the policy; the repair ends with the block unless `set_policy` wants it.
    The repairs that float16 needs stay, as for `set_policy`: the models made in the block outlive it.

    Args:
        policy: As for `set_policy`.

    Yields:
        The name of the policy that was set.

    Raises:
        TypeError, ValueError, tfopt.errors.UnsupportedError: As for `set_policy`.

    Example:
        >>> with tfopt.precision.policy("mixed_bfloat16"):
        ...     model = make_model()
    """
    chosen = _resolved(policy)
    _install_for_float16(chosen)
    # None where no policy was ever set: Keras then makes the default one when it is first asked for.
    before = global_state.get_global_attribute("dtype_policy")
    with ExitStack() as stack:
        if _clear_session_is_known():
            stack.enter_context(repairs.CLEAR_SESSION.during())
        stack.callback(global_state.set_global_attribute, "dtype_policy", before)
        keras.config.set_dtype_policy(chosen)
        yield str(chosen.name)


def _resolved(policy: str | keras.DTypePolicy) -> keras.DTypePolicy:
    """The policy object for a name, if Keras trains with it."""
    quantised = isinstance(policy, str) and policy.startswith(_QUANTISED)
    chosen = _quantised(policy) if quantised else as_policy(policy)
    if chosen.quantization_mode is not None:
        # Keras takes such a global policy, and then every model and most layers fail in their first call.
        raise UnsupportedError(
            "Expected a global dtype policy that every layer can have. Found a quantised one, "
            f"{chosen.name!r}, which Keras has for single layers only. Give float8 to the Dense and EinsumDense layers "
            "themselves: keras.layers.Dense(..., dtype='float8_from_mixed_bfloat16')."
        )
    return chosen


def _quantised(name: str) -> keras.DTypePolicy:
    """The quantised policy of a name, which Keras has for layers."""
    try:
        return keras.dtype_policies.get(name)
    except (ValueError, TypeError, IndexError) as error:  # as Keras' parser of such names raises
        raise unknown_name("dtype policy", name, ("auto", *POLICIES)) from error


_QUANTISED = ("int8", "int4", "float8", "gptq", "awq")


def _install_for_float16(policy: keras.DTypePolicy) -> None:
    policies = [policy]
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policies = [policy.default_policy, *(policy[key] for key in policy)]
    if any(part.compute_dtype == "float16" for part in policies):
        repairs.install(*repairs.FLOAT16)


def _clear_session_is_known() -> bool:
    """Whether clear_session can be repaired; if not, the policy is right all the same until somebody calls it."""
    try:
        repairs.CLEAR_SESSION.applies()
    except UnsupportedError as error:
        warn_once("clear_session", str(error))
        return False
    return True
