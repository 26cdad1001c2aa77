"""Runs a layer's method with operations that note its products, and recognize the one that ends an attention."""

import dis
import math
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from tfopt.kernels.attention.call import AttentionCall
from tfopt.kernels.attention.masks import factors, of_rank
from tfopt.kernels.attention.weights import Product, Weights, read_weights
from tfopt.kernels.cudnn.support import step_obstacles

Function = Callable[..., Any]

_PRODUCTS = ("einsum", "matmul")


def attends(function: Any) -> bool:
    """Whether a method seems to compute attention: by its names, a softmax between products, or Keras' operation."""
    if not isinstance(function, types.FunctionType) or _sets_globals(function.__code__):
        return False
    names = _names(function.__code__)
    softmax = any("softmax" in name for name in names)
    return "dot_product_attention" in names or (softmax and sum(map(names.count, _PRODUCTS)) >= 2)


def _names(code: types.CodeType) -> list[str]:
    """The names that code uses, as often as it does."""
    used = [step.argval for step in dis.get_instructions(code) if step.opcode in dis.hasname]
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return [*used, *(name for each in inner for name in _names(each))]


def _sets_globals(code: types.CodeType) -> bool:
    """Whether code assigns to globals, of which a method that is followed has a copy."""
    return any(step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in dis.get_instructions(code))


class Following:
    """One call of a layer's method.

    Args:
        note: Called with what keeps an attention from cuDNN, nothing if it is taken.
        further: What else keeps all attention of this call from cuDNN.
    """

    def __init__(self, note: Callable[[tuple[str, ...]], None], further: tuple[str, ...]):
        self._note, self._further = note, further
        self._products: dict[Any, Product] = {}

    def bind(self, function: types.FunctionType) -> Function:
        """Returns a method's function with the operations of this call in the place of Keras' and TensorFlow's."""
        given = {name: self._instead_of(value) for name, value in function.__globals__.items()}
        bound = types.FunctionType(
            function.__code__, given, function.__name__, function.__defaults__, function.__closure__
        )
        bound.__kwdefaults__ = function.__kwdefaults__
        return bound

    def _instead_of(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return _Module(value, self) if _is_ours(value) else value
        for name in ("einsum", "matmul", "dot_product_attention"):
            if value is getattr(keras.ops, name):
                return getattr(self, name)
        return value

    def einsum(self, subscripts: Any, *operands: Any, **options: Any) -> Any:
        """Stands for `keras.ops.einsum`."""
        letters = _letters(subscripts, operands, options)
        return self._product(letters, operands, lambda: keras.ops.einsum(subscripts, *operands, **options))

    def matmul(self, x1: Any, x2: Any) -> Any:
        """Stands for `keras.ops.matmul`."""
        return self._product(_of_matmul(x1, x2), (x1, x2), lambda: keras.ops.matmul(x1, x2))

    def _product(self, letters: tuple[str, str, str] | None, operands: Any, plain: Function) -> Any:
        if letters is None or not all(map(_in_graph, operands)):
            return plain()
        product = Product((letters[0], letters[1]), letters[2], tuple(operands))
        for number in (0, 1):
            weights = read_weights(operands[number], self._products)
            if weights is None:
                continue
            found = weights if isinstance(weights, str) else attention_of(weights, product, number)
            if isinstance(found, str):
                self._note((*step_obstacles(), found, *self._further))
                return plain()
            call, restore = found
            output = self._taken(call)
            if output is None:
                return plain()
            return tf.cast(restore(output), keras.backend.result_type(*(each.dtype.name for each in operands)))
        result = plain()
        self._products[result.ref()] = replace(product, shape=result.shape)
        return result

    def dot_product_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        scale: Any = None,
        is_causal: bool = False,
        flash_attention: Any = None,
        attn_logits_soft_cap: Any = None,
        **options: Any,
    ) -> Any:
        """Stands for `keras.ops.dot_product_attention`."""
        options |= {"flash_attention": flash_attention, "attn_logits_soft_cap": attn_logits_soft_cap}

        def plain() -> Any:
            given = {"bias": bias, "mask": mask, "scale": scale, "is_causal": is_causal} | options
            return keras.ops.dot_product_attention(query, key, value, **given)

        if not all(isinstance(each, tf.Tensor) for each in (query, key, value)):
            return plain()
        unknown = [name for name, option in options.items() if option not in (None, False)]
        scale_ = query.shape[-1] ** -0.5 if scale is None and query.shape[-1] else scale
        if unknown or not isinstance(scale_, int | float):
            what = "a soft cap" if "attn_logits_soft_cap" in unknown else f"the options {', '.join(unknown)}"
            self._note((*step_obstacles(), what if unknown else "a scale that is a tensor", *self._further))
            return plain()
        call = AttentionCall(
            query=query,
            key=key,
            value=value,
            scale=float(scale_),
            causal=bool(is_causal),
            masks=() if mask is None else (of_rank(tf.cast(mask, tf.bool), 4),),
            addends=() if bias is None else (of_rank(tf.convert_to_tensor(bias), 4),),
        )
        output = self._taken(call)
        return plain() if output is None else output

    def _taken(self, call: AttentionCall) -> tf.Tensor | None:
        output, found = (None, self._further) if self._further else call.attempt()
        self._note(found)
        return output


class _Module(types.ModuleType):
    """A module with the operations of a call in the place of its own."""

    def __init__(self, module: types.ModuleType, following: Following):
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _following=following)

    def __getattr__(self, name: str) -> Any:
        return self._following._instead_of(getattr(self._module, name))


def _is_ours(module: types.ModuleType) -> bool:
    return module in (keras, keras.ops) or module.__name__ in ("keras.src", "keras.src.ops")


def _in_graph(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and hasattr(tensor, "op")  # an eager one has none


def _letters(subscripts: Any, operands: Any, options: Any) -> tuple[str, str, str] | None:
    """The letters of both operands and the result; None unless it is a plain product of two."""
    if not isinstance(subscripts, str) or len(operands) != 2 or options:
        return None
    given, arrow, result = subscripts.replace(" ", "").partition("->")
    first, comma, second = given.partition(",")
    if not (arrow and comma) or "." in subscripts or any(len({*each}) < len(each) for each in (first, second, result)):
        return None
    return first, second, result


def _of_matmul(x1: Any, x2: Any) -> tuple[str, str, str] | None:
    one, other = (tuple(getattr(each, "shape", ())) for each in (x1, x2))
    if not 3 <= len(one) <= 6 or len(one) != len(other) or one[:-2] != other[:-2]:  # the last: one is repeated
        return None
    batch = "abcd"[: len(one) - 2]
    return f"{batch}xz", f"{batch}zy", f"{batch}xy"


def attention_of(weights: Weights, last: Product, number: int) -> tuple[AttentionCall, Function] | str:
    """Returns the attention of weights and the product with its values, and what gives its output the right axes.

    Args:
        weights: As read off the graph.
        last: Their product with the values.
        number: Which operand of it they are.
    """
    scores = weights.product.result
    if len(scores) < 3:
        return "scores without a batch, queries and keys"
    if last.operands[number].shape != weights.product.shape:
        return "scores that are broadcast"
    names = dict(zip(last.letters[number], scores, strict=True))  # the axes of both products by the same letters
    free = iter(sorted(set("abcdefghijklmnopqrstuvwxyz") - set("".join(weights.product.letters))))
    of_value = last.letters[1 - number]
    names |= {letter: next(free) for letter in of_value if letter not in names}
    values, result = ("".join(names[letter] for letter in each) for each in (of_value, last.result))
    batch, *heads, queries, keys = [*scores]
    asks = next((index for index in (0, 1) if keys not in weights.product.letters[index]), None)
    if asks is None:
        return "scores of one tensor"
    of_query, of_key = weights.product.letters[asks], weights.product.letters[1 - asks]
    size, value_size = set(of_query) & set(of_key) - set(scores), set(values) - set(scores)
    shared = [letter for letter in heads if letter in of_key]
    understood = (
        len(size) == len(value_size) == 1
        and set(of_query) == {batch, *heads, queries, *size}
        and set(of_key) == {batch, *shared, keys, *size}
        and set(values) == {batch, *shared, keys, *value_size}
        and set(result) == {batch, *heads, queries, *value_size}
        and heads[: len(shared)] == shared
    )
    if not understood:
        return f"products of {','.join(weights.product.letters)} and {','.join(last.letters)}"
    operands = weights.product.operands
    query = _arranged(operands[asks], of_query, [batch, queries, *heads, *size])
    key, value = operands[1 - asks], last.operands[1 - number]
    if len(heads) == len(shared) == 1:
        one, other = (_unrepeated(each, of.index(heads[0])) for each, of in ((key, of_key), (value, values)))
        if (
            one is not None
            and other is not None
            and one.shape[of_key.index(heads[0])] == other.shape[values.index(heads[0])]
        ):
            key, value = one, other
    key = _arranged(key, of_key, [batch, keys, *shared, *size])
    value = _arranged(value, values, [batch, keys, *shared, *value_size])
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=weights.scale,
        masks=[_one_head(factor, weights.product) for mask in weights.masks for factor in factors(mask)],
        addends=[_one_head(addend, weights.product) for addend in weights.addends],
        zeros=weights.zeros,
    )

    def restore(output: tf.Tensor) -> tf.Tensor:
        sizes = dict(zip(of_query, operands[asks].shape, strict=True))
        axes = [batch, queries, *heads, *value_size]
        shape = [*(sizes[axis] for axis in axes[:-1]), output.shape[-1]]
        return tf.transpose(tf.reshape(output, shape), [axes.index(letter) for letter in result])

    return call, restore


def _arranged(tensor: tf.Tensor, letters: str, wanted: list[str]) -> tf.Tensor:
    """A tensor as (batch, length, heads, size), from axes in that order; several of heads become one."""
    order = [letters.index(letter) for letter in wanted]
    tensor = tf.transpose(tensor, order) if order != sorted(order) else tensor
    sizes = tensor.shape
    if len(wanted) == 4 or not sizes.is_fully_defined():
        return tensor
    count = 1
    for each in sizes[2:-1]:
        count *= each
    return tf.reshape(tensor, (sizes[0], sizes[1], count, sizes[-1]))


def _unrepeated(tensor: tf.Tensor, axis: int) -> tf.Tensor | None:
    """A tensor before each entry of an axis was repeated, as by `keras.ops.repeat`; None if that was not done."""
    if tensor.op.type != "Reshape" or tensor.op.inputs[0].op.type != "Tile":
        return None
    tiled = tensor.op.inputs[0]
    expanded = tiled.op.inputs[0]
    if expanded.op.type != "ExpandDims":
        return None
    given, shape = expanded.op.inputs[0], tensor.shape
    fixed = given.shape.is_fully_defined() and tiled.shape.is_fully_defined() and shape.is_fully_defined()
    if not fixed or given.shape.rank != shape.rank or given.shape[axis] == 1 == tiled.shape[axis]:
        return None
    sizes = [*given.shape]
    repeats = shape[axis] // sizes[axis]
    as_repeat = [*sizes[: axis + 1], repeats, *sizes[axis + 1 :]] == [*tiled.shape]
    within = [*sizes[:axis], repeats * sizes[axis], *sizes[axis + 1 :]] == [*shape]
    return given if as_repeat and within and tf.get_static_value(expanded.op.inputs[1]) == axis + 1 else None


def _one_head(tensor: tf.Tensor, product: Product) -> tf.Tensor:
    """What broadcasts to the scores of a product, with one axis of heads."""
    scores = product.shape
    rank = len(product.result)
    tensor = of_rank(tensor, rank)
    shape = tensor.shape
    if rank == 4 or scores is None or not scores.is_fully_defined() or not shape.is_fully_defined():
        return tensor
    heads = [*shape[1:-2]]
    if any(size != 1 for size in heads):
        heads = [*scores[1:-2]]
        tensor = tf.broadcast_to(tensor, (shape[0], *heads, *shape[-2:]))
    return tf.reshape(tensor, (shape[0], math.prod(heads), *shape[-2:]))
