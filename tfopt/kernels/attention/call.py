"""One attention to compute: what keeps cuDNN from it, and the form in which cuDNN computes it."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.kernels.attention.masks import MASKED, lengths_of, mask_of_addend, number, of_rank, split_masks
from tfopt.kernels.cudnn.calls import attention_spec, flash_attention
from tfopt.kernels.cudnn.support import obstacles
from tfopt.kernels.cudnn.trial import FILL, defect


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Softmax of (scale · query · key + addends, where masks allow) times value."""

    query: tf.Tensor
    """(batch, query length, heads, size)."""
    key: tf.Tensor
    """(batch, key length, key heads, size); each head serves a group of the query's."""
    value: tf.Tensor
    """Like the key."""
    scale: float
    causal: bool = False
    masks: Sequence[tf.Tensor] = ()
    """Boolean, True means attend. Each broadcasts to the scores, (batch, heads, query length, key length)."""
    addends: Sequence[tf.Tensor] = ()
    """Added to the scores; likewise."""
    window: int = 0
    """To how many positions, itself included, a causal attention goes back; 0: to all."""
    lengths: tf.Tensor | None = None
    """The number of keys of each example, int32 (batch or 1), if the only mask is made of it."""
    zeros: bool = False
    """Whether a query that may attend to nothing gets zeros; otherwise the mean of all values."""

    def attempt(self) -> tuple[tf.Tensor | None, tuple[str, ...]]:
        """Returns the output by cuDNN, (batch, query length, heads, size); or None, and what keeps cuDNN from it."""
        found = tuple(obstacles(self.query, self.key, self.value))
        if found:
            return None, found
        call = self._with_masks_apart()
        found = tuple(call._obstacles())
        if found:
            return None, found
        for form in call._forms():
            operands = form._operands()
            wrong = defect(attention_spec(**operands))
            if wrong is None:
                output = flash_attention(**operands)[..., : self.query.shape[3]]
                return form._with_empty_rows(output), ()
            found = (*found, wrong)
        return None, tuple(dict.fromkeys(found))

    def _with_masks_apart(self) -> "AttentionCall":
        length, keys = self.query.shape[1], self.key.shape[1]
        of_addends = [mask_of_addend(addend) for addend in self.addends]
        addends = [addend for addend, mask in zip(self.addends, of_addends, strict=True) if mask is None]
        given = [*self.masks, *(of_rank(mask, 4) for mask in of_addends if mask is not None)]
        split = split_masks(given, length, keys, causal=self.causal)
        lengths = [lengths_of(mask, keys) for mask in split.others if mask.shape[1:] == (1, 1, keys)]
        return replace(
            self,
            causal=split.causal,
            window=split.window,
            masks=split.others,
            addends=addends,
            lengths=lengths[0] if len(split.others) == len(lengths) == 1 and not addends else None,
        )

    def _forms(self) -> Iterator["AttentionCall"]:
        """The forms in which cuDNN may compute this, the fastest first: another is for machines where that is wrong."""
        forms = [self]
        if self.lengths is not None or self.window:
            forms.append(self._with_bias())
        yield from forms
        groups = self.query.shape[2] // self.key.shape[2]
        if groups > 1:
            for form in forms:
                key, value = (tf.repeat(each, groups, axis=2) for each in (form.key, form.value))
                yield replace(form, key=key, value=value)

    def _with_bias(self) -> "AttentionCall":
        """The same, with lengths and a window as masks."""
        masks = self.masks
        if self.window:
            length = self.query.shape[1]
            masks = (*masks, tf.constant(~np.tri(length, k=-self.window, dtype=bool)[None, None]))
        return replace(self, masks=masks, lengths=None, window=0)

    def _obstacles(self) -> Iterator[str]:
        if any(term.shape.rank != 4 or not term.shape.is_fully_defined() for term in (*self.masks, *self.addends)):
            yield "a mask of no fixed size"
            return
        biases, added = self._biases, self._added
        if any(mask.shape[1] != 1 for mask in self.masks):
            yield "a mask of its own for each head"
        elif any(_has_gradient(term) for term in added):
            yield "a bias of its own for each example"
        elif any(term.shape[1] != 1 for term in added):
            yield "a bias of its own for each example and head"
        elif not all(_rounds_well(term) for term in (*biases, *added)):
            yield f"a float32 bias that {self.query.dtype.name} does not hold"
        # cuDNN adds one tensor to the scores. Beside a bias, what masks keys goes with the keys themselves.
        elif biases and any(term.shape[2] != 1 for term in (*self.masks, *added)):
            yield "a bias and a mask that differs by query"
        elif biases and (self.masks or added) and (self.query.shape[3] + _FURTHER > 128 or abs(self.scale) < 1e-4):
            yield f"a bias and a mask with heads of size {self.query.shape[3]} and a scale of {self.scale:g}"

    @property
    def _biases(self) -> list[tf.Tensor]:
        """The addends of which cuDNN gives the gradient."""
        return [term for term in self.addends if _is_bias(term)]

    @property
    def _added(self) -> list[tf.Tensor]:
        """The other addends; cuDNN takes them for constants."""
        return [term for term in self.addends if not _is_bias(term)]

    def _operands(self) -> dict[str, Any]:
        """What `flash_attention` takes."""
        dtype, query, key, value = self.query.dtype, self.query, self.key, self.value
        batch, length, keys = query.shape[0], query.shape[1], key.shape[1]
        given = {"scale": self.scale, "causal": self.causal, "window": self.window}
        if self.lengths is not None:
            lengths = tf.fill((batch,), length), tf.broadcast_to(self.lengths, (batch,))
            return {"query": query, "key": key, "value": value, "lengths": lengths, **given}
        bias, constant = None, self._constant()
        if self._biases:
            total = functools.reduce(tf.add, (tf.cast(term, tf.float32) for term in self._biases))
            bias = tf.cast(tf.broadcast_to(total, (1, query.shape[2], length, keys)), dtype)
        elif constant is not None:
            bias = tf.broadcast_to(constant, (constant.shape[0], 1, length, keys))
        if self._biases and constant is not None:
            # One more term of the product: 1 / scale of the query with what a key's score gets.
            constant = tf.transpose(tf.broadcast_to(constant, (batch, 1, 1, keys)), (0, 3, 1, 2))
            first = tf.one_hot(0, _FURTHER, dtype=dtype)
            inverse = tf.cast(1 / self.scale, dtype) * first
            query = tf.concat([query, tf.broadcast_to(inverse, (*query.shape[:3], _FURTHER))], 3)
            key = tf.concat([key, tf.broadcast_to(constant * first, (*key.shape[:3], _FURTHER))], 3)
            value = tf.pad(value, ((0, 0), (0, 0), (0, 0), (0, _FURTHER)))
        return {"query": query, "key": key, "value": value, "bias": bias, **given}

    def _constant(self) -> tf.Tensor | None:
        """What masks and constants add to the scores, in the query's dtype: broadcasts to (batch, 1, queries, keys)."""
        dtype = self.query.dtype
        terms = [tf.where(self._allowed(), 0.0, FILL[dtype.name])] if self.masks else []
        terms += [tf.cast(term, tf.float32) for term in self._added]
        return tf.cast(tf.maximum(functools.reduce(tf.add, terms), FILL[dtype.name]), dtype) if terms else None

    def _allowed(self) -> tf.Tensor:
        return functools.reduce(tf.logical_and, self.masks)

    def _with_empty_rows(self, output: tf.Tensor) -> tf.Tensor:
        """The output, with what the layer gives a query that may attend to nothing."""
        if not self.masks:
            return output
        allowed = self._allowed()
        if self.causal:
            band = tf.ones((self.query.shape[1], self.key.shape[1]), tf.bool)
            allowed &= tf.linalg.band_part(band, self.window - 1 if self.window else -1, 0)
        attends = tf.transpose(tf.reduce_any(allowed, -1, keepdims=True), (0, 2, 1, 3))
        mean = tf.cast(tf.reduce_mean(tf.cast(self.value, tf.float32), 1, keepdims=True), output.dtype)
        mean = tf.repeat(mean, self.query.shape[2] // self.value.shape[2], axis=2)
        return tf.where(attends, output, tf.zeros_like(mean) if self.zeros else mean)


_FURTHER = 8  # of a head; its size must be a multiple of it
_LARGEST_ROUNDING = 0.02  # of a score, of which exp is taken
_OF_ONE = ("Cast", "ExpandDims", "Reshape", "StridedSlice", "BroadcastTo", "Identity", "Neg")


def _is_bias(addend: tf.Tensor) -> bool:
    """Whether an addend is alike for all examples, and differs by head or has a gradient."""
    return bool(addend.shape[0] == 1 and (addend.shape[1] != 1 or _has_gradient(addend)))


def _rounds_well(term: tf.Tensor) -> bool:
    """Whether what is added to the scores is about the same in 16 bits."""
    if term.dtype.size <= 2:
        return True
    value = tf.get_static_value(term)
    if value is not None:
        value = value[value > MASKED]
        return bool(
            (np.abs(value - value.astype(tf.bfloat16.as_numpy_dtype).astype(value.dtype)) < _LARGEST_ROUNDING).all()
        )
    if not hasattr(term, "op"):
        return False
    inputs = list(term.op.inputs)
    if term.op.type == "SelectV2":
        return all(map(_rounds_well, inputs[1:]))
    if term.op.type in _OF_ONE:
        return _rounds_well(inputs[0]) if inputs[0].dtype.is_floating else inputs[0].dtype == tf.bool
    if term.op.type == "Mul":  # whole numbers times one beside which scores do not count
        return any(_is_whole(one) and abs(number(other)) >= -MASKED for one, other in (inputs, inputs[::-1]))
    return False


def _is_whole(term: tf.Tensor) -> bool:
    """Whether a tensor surely holds whole numbers alone."""
    if not term.dtype.is_floating:
        return True
    value = tf.get_static_value(term)
    if value is not None:
        return bool((value == np.round(value)).all())
    return term.op.type in (*_OF_ONE, "Sub", "AddV2", "Minimum", "Maximum") and all(
        _is_whole(given) for given in term.op.inputs[: 1 if term.op.type in _OF_ONE else 2]
    )


def _has_gradient(tensor: tf.Tensor) -> bool:
    """Whether a tensor may depend on weights or inputs in a way that has a gradient."""
    if not hasattr(tensor, "op"):  # eager
        return True
    seen: set[str] = set()
    waiting = [tensor]
    while waiting:
        operation = waiting.pop().op
        if operation.name in seen or operation.type == "StopGradient":
            continue
        seen.add(operation.name)
        if operation.type.endswith(("Placeholder", "Call")) or any(
            given.dtype == tf.resource for given in operation.inputs
        ):
            return True
        waiting += [given for given in operation.inputs if given.dtype.is_floating]
    return False
