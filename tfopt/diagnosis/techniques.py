"""What makes a training faster and keeps its result: each technique as a value, to apply, to undo and to write down.

It loads neither TensorFlow nor Keras, so that a report can name techniques without them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
    during: Change
    """Applies it to the functions that are traced in a block."""
    for_good: Change | None = None
    """Applies it as `code` does until the end of a block, if `during` does not."""

    @property
    def lines(self) -> str:
        """The lines to paste before `fit`."""
        return f"import tfopt\n{self.code}" if "tfopt." in self.code else self.code

    def apply(self, model: "keras.Model") -> Callable[[], None]:
        """Applies it as `code` does; returns what undoes it."""
        stack = ExitStack()
        stack.enter_context((self.for_good or self.during)(model))
        return stack.close


@contextmanager
def _overlapped(model: "keras.Model") -> Iterator[None]:
    fit.overlap(model)
    try:
        yield
    finally:
        fit.undo(model)


@contextmanager
def _in_a_graph(model: "keras.Model") -> Iterator[None]:
    import tensorflow as tf

    before, everywhere = model.run_eagerly, tf.config.functions_run_eagerly()
    model.run_eagerly = False
    tf.config.run_functions_eagerly(False)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(everywhere)
        model.run_eagerly = before


@contextmanager
def _compiled(on: bool, model: "keras.Model") -> Iterator[None]:
    before, model.jit_compile = model.jit_compile, on
    try:
        yield
    finally:
        model.jit_compile = before


@contextmanager
def _switched(on: bool, model: "keras.Model") -> Iterator[None]:
    before = bool(model.jit_compile)
    xla.set_jit(model, on)
    try:
        yield
    finally:
        xla.set_jit(model, before)


@contextmanager
def _with_kernel(use: str, model: "keras.Model") -> Iterator[None]:
    from tfopt.kernels.replacing import restored

    with restored(model):
        getattr(kernels, use)(model)
        yield


def _under(name: str, model: "keras.Model") -> AbstractContextManager[Any]:
    from tfopt.precision.layer_policies import assign_policies, under_policies

    return under_policies(model, assign_policies(model, name).policies)


@contextmanager
def _with_policy(name: str, model: "keras.Model") -> Iterator[None]:
    from tfopt.model.layers import layer_paths
    from tfopt.precision.layer_policies import assign_policies, current_policy

    before = {layer_paths(model)[layer]: current_policy(layer) for layer in assign_policies(model, name).policies}
    precision.apply(model, name)
    try:
        yield
    finally:
        precision.apply(model, before)


def policy(name: str) -> Technique:
    """A dtype policy for a model that was built under another one."""
    return Technique(
        name=name,
        cause=catalogue.SIXTEEN_BITS if name == "float32" else catalogue.FLOAT32,
        kind="precision",
        code=f'tfopt.precision.apply(model, "{name}")',
        page="precision",
        during=partial(_under, name),
        for_good=partial(_with_policy, name),
    )


def _xla(on: bool, name: str, cause: Cause) -> Technique:
    return Technique(
        name=name,
        cause=cause,
        kind="xla",
        code=f"tfopt.xla.set_jit(model, {on})",
        page="xla",
        during=partial(_compiled, on),
        for_good=partial(_switched, on),
    )


def _kernel(name: str, cause: Cause, use: str) -> Technique:
    return Technique(
        name=name,
        cause=cause,
        kind="kernels",
        code=f"tfopt.kernels.{use}(model)",
        page="kernels",
        during=partial(_with_kernel, use),
    )


PREFETCH = Technique(
    name="prefetch",
    cause=catalogue.NO_PREFETCH,
    kind="input",
    code="dataset = dataset.prefetch(2)",
    page="pipelines",
    during=nullcontext,  # it changes the data
)
OVERLAP = Technique(
    name="overlap",
    cause=catalogue.WAITS,
    kind="overlap",
    code="tfopt.fit.overlap(model)",
    page="fit",
    during=_overlapped,
)
GRAPH = Technique(
    name="graph",
    cause=catalogue.EAGER,
    kind="",
    code="model.compile(..., run_eagerly=False)",
    page="diagnosis",
    during=_in_a_graph,
)
XLA = _xla(True, "XLA", catalogue.XLA_OFF)
NO_XLA = _xla(False, "no XLA", catalogue.XLA_ON)
FLASH_ATTENTION = _kernel("flash attention", catalogue.ATTENTION, "use_flash_attention")
FUSED_BATCH_NORM = _kernel("fused batch norm", catalogue.BATCH_NORM, "fuse_batch_norm")


def against(cause: str) -> Technique:
    """The technique that takes a cause of this name away on this machine."""
    if cause in (catalogue.FLOAT32.name, catalogue.SIXTEEN_BITS.name):
        return policy(precision.recommend().policy)
    known = (PREFETCH, OVERLAP, GRAPH, XLA, NO_XLA, FLASH_ATTENTION, FUSED_BATCH_NORM)
    return next(one for one in known if one.cause.name == cause)
