"""What remains when every cause is gone: how the computation compares with what the device can do."""

from collections import Counter

import keras

from tfopt.diagnosis.training import Training
from tfopt.measure import StepTimes, matmul_tflops
from tfopt.model.flops import step_flops
from tfopt.model.products import layer_calls, matrix_products
from tfopt.text import figure, listed, percent

_NAMED = 3
_COMPUTE_BOUND = 0.5
_PEAKS = {"float32": "tensorfloat32", "bfloat16": "bfloat16", "float16": "float16"}


def describe(training: Training, floor: StepTimes) -> str:
    """Says what the computation reaches of a large matrix product's rate, and which layers cost most."""
    counted = step_flops(training.model, training.graph, [], training.examples)
    if counted.per_example is None:
        unknown = listed(counted.unknown, 2) or "no matrix products were found"
        return f"Its FLOPs cannot be counted: {unknown}."
    tflops = sum(counted.by_dtype.values()) / floor.median_ms / 1e9
    peak = matmul_tflops(_PEAKS.get(counted.dtype or "float32", "tensorfloat32"))
    share = tflops / peak
    bound = (
        "the matrix products set the pace, so a faster device, or fewer FLOPs, is what helps"
        if share >= _COMPUTE_BOUND
        else "the rest of the time goes into moving memory, small operations and layers that are not matrix products"
    )
    costly = _costliest(training.model, training.examples)
    # Above 1 where the machine was busier while the peak was measured.
    reached = f"{percent(share)} of the" if share < 1 else "no less than the"
    return (
        f"The computation runs at {_rate(tflops)}, {reached} {_rate(peak)} that a large matrix product reaches here: "
        f"{bound}.{costly}"
    )


def _rate(tflops: float) -> str:
    return next(
        f"{figure(tflops * factor)} {unit}FLOP/s"
        for unit, factor in (("T", 1), ("G", 1e3), ("M", 1e6), ("k", 1e9))
        if tflops * factor >= 1 or unit == "k"
    )


def _costliest(model: keras.Model, examples: int) -> str:
    try:
        shapes = [tuple(tensor.shape) for tensor in model.inputs]
    except (AttributeError, ValueError):
        shapes = []
    sizes: Counter[str] = Counter()
    for call in layer_calls(model, examples, shapes):
        products = matrix_products(call)
        if products is not None:
            sizes[call.path] += products.at_least()
    total = sum(sizes.values())
    if not total:
        return ""
    named = [f"{path} ({percent(size / total)})" for path, size in sizes.most_common(_NAMED)]
    return f" Most of its FLOPs are in {', '.join(named)}."
