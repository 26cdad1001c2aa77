"""What makes a training faster and keeps its result: each technique as a value, to apply, to undo and to write down.

It loads neither TensorFlow nor Keras, so that a report can name techniques without them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tfopt import fit, kernels, precision, xla
from tfopt.causes import catalogue
from tfopt.causes.catalogue import Cause

if TYPE_CHECKING:
    import keras

Change = Callable[["keras.Model"], AbstractContextManager[Any]]
"""Changes a model for a block of code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """A change of a model that makes its training faster."""

    name: str
    """As benchmarks call it."""
    cause: Cause
    """What it takes away."""
    kind: str
    """What `tune` calls it in `allow`; empty if `tune` leaves it to the user."""
    code: str
    """The line that applies it."""
    page: str
    """The guide in docs."""
    apply: Callable[["keras.Model"], Callable[[], object]]
    """Applies it as `code` does; returns what undoes it."""
    in_traces: Change | None = None
    """Applies it to the functions that are traced in a block only, if that is cheaper."""

    @property
    def lines(self) -> str:
        """The lines to paste before `fit`."""
        return f"import tfopt\n{self.code}" if "tfopt." in self.code else self.code

    @contextmanager
    def during(self, model: "keras.Model") -> Iterator[None]:
        """Applies it to the functions that are traced in a block."""
        with ExitStack() as stack:
            if self.in_traces:
                stack.enter_context(self.in_traces(model))
            else:
                stack.callback(self.apply(model))
            yield


def _overlap(model: "keras.Model") -> Callable[[], object]:
    fit.overlap(model)
    return partial(fit.undo, model)


def _launch_several(model: "keras.Model") -> Callable[[], object]:
    from tfopt.fit.launching import overlap_of

    before = overlap_of(model)
    fit.overlap(model, steps_per_launch=8)
    return partial(fit.undo, model) if before is None else partial(fit.overlap, model)


def _run_in_a_graph(model: "keras.Model") -> Callable[[], object]:
    import tensorflow as tf

    before, everywhere = model.run_eagerly, tf.config.functions_run_eagerly()

    def undo() -> None:
        tf.config.run_functions_eagerly(everywhere)
        model.run_eagerly = before

    model.run_eagerly = False
    tf.config.run_functions_eagerly(False)
    return undo


def _switch(on: bool, model: "keras.Model") -> Callable[[], object]:
    before = bool(model.jit_compile)
    xla.set_jit(model, on)
    return partial(xla.set_jit, model, before)


@contextmanager
def _compiled(on: bool, model: "keras.Model") -> Iterator[None]:
    before, model.jit_compile = model.jit_compile, on
    try:
        yield
    finally:
        model.jit_compile = before


def _use(kernel: str, model: "keras.Model") -> Callable[[], object]:
    from tfopt.kernels.replacing import restorer

    restore = restorer(model)
    getattr(kernels, kernel)(model)
    return restore


def _apply_policy(name: str, model: "keras.Model") -> Callable[[], object]:
    from tfopt.model.layers import layer_paths
    from tfopt.precision.layer_policies import assign_policies, current_policy

    before = {layer_paths(model)[layer]: current_policy(layer) for layer in assign_policies(model, name).policies}
    precision.apply(model, name)
    return partial(precision.apply, model, before)


def _under(name: str, model: "keras.Model") -> AbstractContextManager[Any]:
    from tfopt.precision.layer_policies import assign_policies, under_policies

    return under_policies(model, assign_policies(model, name).policies)


def policy(name: str) -> Technique:
    """A dtype policy for a model that was built under another one."""
    return Technique(
        name=name,
        cause=catalogue.SIXTEEN_BITS if name == "float32" else catalogue.FLOAT32,
        kind="precision",
        code=f'tfopt.precision.apply(model, "{name}")',
        page="precision",
        apply=partial(_apply_policy, name),
        in_traces=partial(_under, name),
    )


def _xla(on: bool, name: str, cause: Cause) -> Technique:
    return Technique(
        name=name,
        cause=cause,
        kind="xla",
        code=f"tfopt.xla.set_jit(model, {on})",
        page="xla",
        apply=partial(_switch, on),
        in_traces=partial(_compiled, on),
    )


def _kernel(name: str, cause: Cause, use: str) -> Technique:
    return Technique(
        name=name,
        cause=cause,
        kind="kernels",
        code=f"tfopt.kernels.{use}(model)",
        page="kernels",
        apply=partial(_use, use),
    )


PREFETCH = Technique(
    name="prefetch",
    cause=catalogue.NO_PREFETCH,
    kind="input",
    code="dataset = dataset.prefetch(2)",
    page="pipelines",
    apply=lambda model: lambda: None,  # it changes the data
)
OVERLAP = Technique(
    name="overlap",
    cause=catalogue.WAITS,
    kind="overlap",
    code="tfopt.fit.overlap(model)",
    page="fit",
    apply=_overlap,
)
LAUNCHES = Technique(
    name="launches of several steps",
    cause=catalogue.LAUNCHED_ALONE,
    kind="overlap",
    code="tfopt.fit.overlap(model, steps_per_launch=8)",
    page="fit",
    apply=_launch_several,
)
"""Includes `OVERLAP`."""
GRAPH = Technique(
    name="graph",
    cause=catalogue.EAGER,
    kind="",
    code="model.compile(..., run_eagerly=False)",
    page="diagnosis",
    apply=_run_in_a_graph,
)
XLA = _xla(True, "XLA", catalogue.XLA_OFF)
NO_XLA = _xla(False, "no XLA", catalogue.XLA_ON)
FLASH_ATTENTION = _kernel("flash attention", catalogue.ATTENTION, "use_flash_attention")
FUSED_BATCH_NORM = _kernel("fused batch norm", catalogue.BATCH_NORM, "fuse_batch_norm")


def against(cause: str) -> Technique:
    """The technique that takes a cause of this name away on this machine."""
    if cause in (catalogue.FLOAT32.name, catalogue.SIXTEEN_BITS.name):
        return policy(precision.recommend().policy)
    known = (PREFETCH, OVERLAP, LAUNCHES, GRAPH, XLA, NO_XLA, FLASH_ATTENTION, FUSED_BATCH_NORM)
    return next(one for one in known if one.cause.name == cause)
