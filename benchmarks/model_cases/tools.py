"""The tools of tfopt, one function each: what it does to a model's training, beside the training without it."""

import os
import signal
import tempfile
from collections import Counter
from typing import Any, NamedTuple

import keras

import tfopt
from model_cases.counted import counted_flops
from model_cases.training import BATCH, Training, unequal, weights
from tfopt.callbacks import ThroughputLogger, TrainingCheckpoint

SAME, REFUSED, NOTHING, WRONG = "same", "refused", "nothing to do", "WRONG"
FAILS = "fails without tfopt"
_LOSS_SCALE = 2.0**8
"""From Keras' 2¹⁵ the first steps overflow and are left out, which no training in float32 does."""
_FLOPS_TOLERANCE = 0.02
_INTERRUPTED_AFTER = 6  # steps: in the middle of the second epoch


class Found(NamedTuple):
    """One cell of the table."""

    verdict: str
    said: str = ""
    """What stands behind the verdict in the cell."""
    why: str = ""
    """The footnote."""


def _judged(difference: str | None, said: str = "", why: str = "") -> Found:
    return Found(WRONG, difference, why) if difference else Found(SAME, said, why)


def _precision(training: Training, policy: str) -> Found:
    """Checks, applies what passes, trains, and goes back to float32."""
    model = training.build()
    before = weights(model)
    report = tfopt.precision.check(model, training.batch, policy)
    if difference := unequal(weights(model), before):
        return Found(WRONG, f"check changes {difference}")
    chosen = policy if report.passed else report.fallback
    why = "" if report.passed else " ".join(report.problems)
    if chosen is None:
        return Found(REFUSED, "only float32 passes", why)
    tfopt.precision.apply(model, chosen)
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        model.optimizer.build(model.trainable_variables)
        model.optimizer.dynamic_scale.assign(_LOSS_SCALE)
    found = training.fit(model)
    if difference := training.same_losses(found, policy.removeprefix("mixed_")):
        return Found(WRONG, difference, why)
    trained = weights(model)
    tfopt.precision.apply(model, "float32")
    difference = unequal(weights(model), trained)
    if difference is None:
        untouched = training.build()
        tfopt.precision.apply(untouched, chosen)
        tfopt.precision.apply(untouched, "float32")
        difference = training.same_bits(training.fit(untouched))
    policies = Counter(() if report.passed else chosen.values())
    said = ", ".join(f"{count} in {name}" for name, count in policies.items() if name != policy)
    return _judged(difference and f"back in float32: {difference}", said, why)


def bfloat16(training: Training) -> Found:
    """`precision.check` and `apply`."""
    return _precision(training, "mixed_bfloat16")


def float16(training: Training) -> Found:
    """`precision.check` and `apply`."""
    return _precision(training, "mixed_float16")


def xla(training: Training) -> Found:
    """`xla.decide`, and a training after `set_jit` with and without data."""
    model = training.build()
    tfopt.xla.decide(model, training.data, steps=5).apply(model)
    tfopt.xla.set_jit(model, False)
    if difference := training.same_bits(training.fit(model)):
        return Found(WRONG, f"after decide, without XLA: {difference}")
    model = training.build()
    tfopt.xla.set_jit(model, True, data=training.data)
    return _judged(training.same_to_rounding(training.fit(model)))


def overlap(training: Training) -> Found:
    """`fit.overlap`."""
    model = tfopt.fit.overlap(training.build())
    try:
        return _judged(training.same_bits(training.fit(model)))
    finally:
        tfopt.fit.undo(model)  # or the other tools would train with its callbacks


def flash_attention(training: Training) -> Found:
    """`use_flash_attention`, which changes nothing without a GPU but the path that layers take."""
    model = training.build()
    attentions = _outermost(model, lambda layer: "Attention" in type(layer).__name__)
    changed = tfopt.kernels.use_flash_attention(model)
    if not changed and not attentions:
        return Found(NOTHING)
    difference = training.same_bits(training.fit(model))
    why = "; ".join(map(str, tfopt.kernels.explain(model).layers)) if changed else ""
    return _judged(difference, f"{changed} of {len(attentions)}", why)


def _outermost(layer: keras.Layer, chosen: Any) -> list[keras.Layer]:
    """The layers that are chosen, but none inside of another such one."""
    if chosen(layer):
        return [layer]
    parts = layer._flatten_layers(include_self=False, recursive=False)
    return list({id(one): one for part in parts for one in _outermost(part, chosen)}.values())


def fused_batch_norm(training: Training) -> Found:
    """`fuse_batch_norm`."""
    model = training.build()
    norms = _outermost(model, lambda layer: isinstance(layer, keras.layers.BatchNormalization))
    changed = tfopt.kernels.fuse_batch_norm(model)
    if not changed and not norms:
        return Found(NOTHING)
    return _judged(training.same_to_rounding(training.fit(model)), f"{changed} of {len(norms)}")


def alignment(training: Training) -> Found:
    """`precision.alignment`: whether it knows all products of the forward pass."""
    model = training.build()
    report = tfopt.precision.alignment(model, BATCH)
    said, share = f"{len(report.misses)} missed", 0.0
    if model.built:  # else it has no call
        share = 2 * report.multiply_adds / counted_flops(lambda: model(_inputs(training.batch), training=True))
        said += f", {100 * share:.0f} % known"
    why = "; ".join(f"{one.reason}" for one in report.unknown)
    return Found(SAME if share <= 1 + _FLOPS_TOLERANCE else WRONG, said, why)


def flops(training: Training) -> Found:
    """`ThroughputLogger` beside the products that the step computes when it runs eagerly."""
    model, logger = training.build(), ThroughputLogger()
    difference = training.same_bits(training.fit(model, logger))
    if difference or logger.flops_per_example is None:
        return Found(WRONG, difference) if difference else Found(REFUSED, "not counted")
    counted = counted_flops(lambda: model.train_step(training.batch))
    ratio = BATCH * logger.flops_per_example / counted
    return Found(SAME if abs(ratio - 1) <= _FLOPS_TOLERANCE else WRONG, f"{ratio:.3f}")


class _Interrupt(keras.callbacks.Callback):
    """Sends this process SIGTERM after some steps."""

    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        """Counts."""
        self.steps += 1
        if self.steps == _INTERRUPTED_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)


def checkpoint(training: Training) -> Found:
    """`TrainingCheckpoint`: interrupted by SIGTERM in the middle of an epoch, resumed in a new model, and restored."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            training.fit(training.build(), TrainingCheckpoint(folder), _Interrupt())
        except SystemExit:
            trained = training.build()
            difference = training.same_bits(training.fit(trained, TrainingCheckpoint(folder)))
            model = training.build()
            tfopt.checkpoint.restore(model, folder)
            return _judged(difference or unequal(weights(model), weights(trained)))
    return Found(WRONG, "SIGTERM did not end the training")


def recompute(training: Training) -> Found:
    """`memory.recompute`."""
    model = training.build()
    count = tfopt.memory.recompute(model)
    found = training.fit(model)
    exactly = training.same_bits(found) is None
    said = f"{count} blocks" + (", bit for bit" if exactly else "")
    return _judged(None if exactly else training.same_to_rounding(found), said)


TOOLS = {
    "bfloat16": bfloat16,
    "float16": float16,
    "XLA": xla,
    "overlap": overlap,
    "flash attention": flash_attention,
    "fused batch norm": fused_batch_norm,
    "alignment": alignment,
    "FLOPs": flops,
    "checkpoint": checkpoint,
    "recompute": recompute,
}


def found(training: Training, tool: str) -> Found:
    """A cell: what a tool does. What is wrong is tried again, since a sum over threads may round differently once."""
    try:
        _ = training.stock
    except Exception as error:  # noqa: BLE001  KerasHub's or Keras' own
        return Found(FAILS, "", f"{type(error).__name__}: {' '.join(str(error).split())}")
    first = _found(training, tool)
    if first.verdict != WRONG:
        return first
    second = _found(training, tool)
    if second.verdict == WRONG:
        return first
    return second._replace(said=f"{second.said} only in a second run".strip(), why=first.said)


def _found(training: Training, tool: str) -> Found:
    try:
        return TOOLS[tool](training)
    except Exception as error:  # noqa: BLE001  it is what is looked for
        text = " ".join(str(error).split())
        if isinstance(error, tfopt.errors.TfoptError | ValueError | TypeError) and text.startswith("Expected"):
            return Found(REFUSED, "", text)
        return Found(WRONG, f"{type(error).__name__}: {text}")


def _inputs(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple) else batch
