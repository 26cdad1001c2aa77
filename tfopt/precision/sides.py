"""The two sides of a comparison: a model in float32, and the same weights under a policy."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError, essence
from tfopt.measure import preserved
from tfopt.measure.draws import without_dropout
from tfopt.model.layers import layer_paths
from tfopt.precision.float8 import quantized_clone, split_float8
from tfopt.precision.layer_policies import Policy, asked_for, present, resolved
from tfopt.precision.loss_scaling import scale_loss
from tfopt.precision.policy_names import is_16_bit, name_of
from tfopt.precision.probing import Side
from tfopt.repairs import computes_in_float16

# A float8 layer takes its scales from the steps before: the first one has none, the second the first one's.
_FLOAT8_STEPS = 3


def exact_side(model: keras.Model) -> Side:
    """The model in float32.

    Raises:
        tfopt.errors.UnsupportedError: It cannot be put under float32.
    """
    try:
        return Side(model, resolved(model, "float32"))
    except UnsupportedError as error:
        raise UnsupportedError(
            f"Expected a model that can compute in float32, to be compared with that. Found {model.name!r} with "
            "quantized layers, or with weights that are not kept in float32. Check a model made under float32 or a "
            "mixed policy, with the same weights; check float8 before it is applied."
        ) from error


@contextmanager
def candidate_side(model: keras.Model, batches: Sequence[Any], policy: Policy) -> Iterator[Side]:
    """The model under the policy; where it asks for float8, which cannot be taken back, a clone."""
    base, quantized = split_float8(model, policy)
    policies = resolved(model, base)
    if not quantized:
        yield Side(model, policies | _standing_heads(model, base, policies))
        return
    with preserved(model):  # a clone's training may advance the seed that all models share
        clone = quantized_clone(model, policies, quantized)
        with without_dropout(clone):
            _settle(clone, batches, policy)
            yield Side(clone, {})


def _standing_heads(
    model: keras.Model, policy: Policy, policies: Mapping[keras.Layer, keras.DTypePolicy]
) -> dict[keras.Layer, keras.DTypePolicy]:
    """Layers that make outputs in 16 bits now and that only `apply` would take to float32: to be seen, not mended."""
    asked, _ = asked_for(model, policy, layer_paths(model))
    changed = [layer for layer, its in policies.items() if its.compute_dtype != asked[layer].compute_dtype]
    return {layer: asked[layer] for layer in changed if is_16_bit(present(layer))}


def _settle(clone: keras.Model, batches: Sequence[Any], policy: Policy) -> None:
    """Trains a quantized clone until its scales fit, and puts back its weights."""
    kept = [variable for variable in clone.variables if not getattr(variable, "overwrite_with_gradient", False)]
    values = [variable.numpy() for variable in kept]
    if computes_in_float16(clone):
        scale_loss(clone)  # the gradients that it sees later are scaled, too
    clone.optimizer.build(clone.trainable_variables)
    # Keras' own step: one of the model's class may train anything, and is not what is compared later.
    step = tf.function(partial(keras.Model.train_step, clone), autograph=False)
    with refusing(policy):
        step.get_concrete_function(batches[0])
    for batch in islice(cycle(batches), max(_FLOAT8_STEPS, len(batches))):
        step(batch)
    for variable, value in zip(kept, values, strict=True):
        variable.assign(value)


@contextmanager
def refusing(policy: Policy) -> Iterator[None]:
    """Says so where a model cannot be traced under a policy."""
    try:
        yield
    except Exception as error:  # whatever the user's layers raise on tensors of this dtype
        raise refusal(policy, error) from error


def refusal(policy: Policy, error: Exception) -> UnsupportedError:
    """The error for a model that does not compute under a policy."""
    return UnsupportedError(
        f"Expected a model that computes under {described(policy)}. Found: {essence(error)}. Leave the layers "
        'concerned out of a policy for each layer, such as {"encoder/.*": "mixed_bfloat16"}.'
    )


def described(policy: Policy) -> str:
    """A policy in words."""
    if not isinstance(policy, Mapping):
        return name_of(policy)
    names = sorted({name_of(policy[key]) for key in policy})
    return f"a policy for each layer ({', '.join(names)})" if names else "the model as it stands"
