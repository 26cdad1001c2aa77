"""Traced functions and the operations of their graphs."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.function.polymorphism.function_cache import FunctionCache
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import compiler_ir
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.eager.polymorphic_function.attributes import XLA_COMPILE
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework import kernels, op_def_registry, ops
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.framework.tensor_util import try_evaluate_constant
from tensorflow.python.ops import custom_gradient
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.control_flow_util_v2 import in_while_loop_defun
from tensorflow.python.ops.handle_data_util import get_resource_handle_data, set_handle_data
from tensorflow.python.util import nest

__all__ = [
    "AtomicFunction",  # a function of TensorFlow's runtime: a trace, or its gradient
    "ConcreteFunction",  # one trace of a tf.function
    "FuncGraph",  # the graph of a trace
    "Function",  # what tf.function returns
    "calls_compiled",
    "compiled_inputs",
    "definition_of",
    "devices_with_kernel",
    "exchange_traces",
    "forget_gradient",
    "get_resource_handle_data",  # what a variable, list or table holds, as a graph knows it
    "gradient_function",
    "gradient_functions",
    "hlo",
    "in_loop",
    "in_xla",
    "is_recorded",
    "is_second_run",
    "may_be_recorded",
    "paths_and_leaves",
    "set_handle_data",
    "value_of",
]

value_of = try_evaluate_constant
"""The value of a tensor that follows from constants alone, also through shapes and arithmetic, or None."""

may_be_recorded = record.could_possibly_record
"""Whether any gradient tape is open."""


def definition_of(operation: str) -> Any:
    """What TensorFlow says of a kind of operation (an OpDef); None if it is none of its operations."""
    return op_def_registry.get(operation)


def devices_with_kernel(operation: str) -> set[str]:
    """The kinds of device for which an operation has a kernel, such as "CPU" or, once XLA has run, "XLA_GPU_JIT"."""
    return {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(operation).kernel}


def gradient_functions() -> dict[str, Any]:
    """The functions registered as gradients, by name. TensorFlow keeps them, and all they hold, for good."""
    return {name: entry["type"] for name, entry in list(ops.gradient_registry._registry.items())}


def forget_gradient(name: str) -> None:
    """Takes a registered gradient back, which TensorFlow cannot."""
    del ops.gradient_registry._registry[name]


def gradient_function(name: str) -> Any:
    """The function registered as the gradient of this name."""
    return ops.gradient_registry.lookup(name)


def is_second_run(code: Any) -> bool:
    """Whether this is the code with which `tf.recompute_grad` runs its function again, in the backward pass."""
    return code.co_name == "inner_recompute_grad" and code.co_filename == custom_gradient.__file__


def is_recorded(tensor: tf.Tensor) -> bool:
    """Whether an open gradient tape records what is done with a tensor."""
    return bool(record.should_record_backprop([tensor]))


def in_xla(graph: Any) -> bool:
    """Whether a graph becomes part of a function with `jit_compile=True`."""
    return bool(GraphOrParentsInXlaContext(graph))


def in_loop(graph: Any) -> bool:
    """Whether a graph is the condition or the body of a `tf.while_loop`."""
    return bool(in_while_loop_defun(graph))


def hlo(function: ConcreteFunction, stage: str, device: str) -> bytes:
    """What XLA makes of a function at a stage of its compilation."""
    found: bytes = compiler_ir.from_concrete_function(function)(stage=stage, device_name=device)
    return found


def compiled_inputs(function: AtomicFunction) -> tuple[tuple[int, str], ...] | None:
    """Numbers and dtypes of the inputs, without variables, of a function that XLA compiles; None for another one."""
    if not _is_compiled(function):
        return None
    dtypes = [tf.as_dtype(argument.type) for argument in function.cached_definition.signature.input_arg]
    return tuple((number, dtype.name) for number, dtype in enumerate(dtypes) if dtype not in (tf.resource, tf.variant))


def calls_compiled(function: Function) -> bool:
    """Whether a trace of a `tf.function` calls a function that XLA compiles."""
    return any(_calls_compiled(concrete.inference_fn) for concrete in function._function_cache.values())


def _calls_compiled(function: AtomicFunction) -> bool:
    return any(_is_compiled(child) or _calls_compiled(child) for child in function.children)


def _is_compiled(function: AtomicFunction) -> bool:
    attribute = function.cached_definition.attr.get(XLA_COMPILE)
    return attribute is not None and bool(attribute.b)


def exchange_traces(function: Function, traces: Any = None) -> Any:
    """Gives a `tf.function` other traces, or none, and returns those it had; it adds new ones to what it has."""
    before, function._function_cache = function._function_cache, traces or FunctionCache()
    for config in (function._variable_creation_config, function._no_variable_creation_config):
        if config is not None:
            config.function_cache = function._function_cache
    return before


def paths_and_leaves(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of a structure, composite tensors taken apart, each with the keys that lead to it."""
    yield from nest.flatten_with_tuple_paths(value, expand_composites=True)
