"""Traced functions and the operations of their graphs."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfopt.internals.sources import private

AtomicFunction: Any = private("tensorflow.python.eager.polymorphic_function.atomic_function:AtomicFunction")
"""A function of TensorFlow's runtime: a trace, or its gradient."""

ConcreteFunction: Any = private("tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction")
"""One trace of a tf.function."""

FuncGraph: Any = private("tensorflow.python.framework.func_graph:FuncGraph")
"""The graph of a trace."""

Function: Any = private("tensorflow.python.eager.polymorphic_function.polymorphic_function:Function")
"""What tf.function returns."""

get_resource_handle_data = private("tensorflow.python.ops.handle_data_util:get_resource_handle_data")
"""What a variable, list or table holds, as a graph knows it."""

set_handle_data = private("tensorflow.python.ops.handle_data_util:set_handle_data")

value_of = private("tensorflow.python.framework.tensor_util:try_evaluate_constant")
"""The value of a tensor that follows from constants alone, also through shapes and arithmetic, or None."""

may_be_recorded = private("tensorflow.python.eager.record:could_possibly_record")
"""Whether any gradient tape is open."""

_FunctionCache = private("tensorflow.core.function.polymorphism.function_cache:FunctionCache")
_XLA_COMPILE = private("tensorflow.python.eager.polymorphic_function.attributes:XLA_COMPILE")
_compiler_ir = private("tensorflow.python.eager.polymorphic_function.compiler_ir")
_custom_gradient = private("tensorflow.python.ops.custom_gradient")
_gradients = private("tensorflow.python.framework.ops:gradient_registry")
_in_xla = private("tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext")
_in_loop = private("tensorflow.python.ops.control_flow_util_v2:in_while_loop_defun")
_kernels_of = private("tensorflow.python.framework.kernels:get_registered_kernels_for_op")
_nest = private("tensorflow.python.util.nest")
_operations = private("tensorflow.python.framework.op_def_registry")
_records = private("tensorflow.python.eager.record:should_record_backprop")


def definition_of(operation: str) -> Any:
    """What TensorFlow says of a kind of operation (an OpDef); None if it is none of its operations."""
    return _operations.get(operation)


def devices_with_kernel(operation: str) -> set[str]:
    """The kinds of device for which an operation has a kernel, such as "CPU" or, once XLA has run, "XLA_GPU_JIT"."""
    return {kernel.device_type for kernel in _kernels_of(operation).kernel}


def gradient_functions() -> dict[str, Any]:
    """The functions registered as gradients, by name. TensorFlow keeps them, and all they hold, for good."""
    return {name: entry["type"] for name, entry in list(_gradients._registry.items())}


def forget_gradient(name: str) -> None:
    """Takes a registered gradient back, which TensorFlow cannot."""
    del _gradients._registry[name]


def gradient_function(name: str) -> Any:
    """The function registered as the gradient of this name."""
    return _gradients.lookup(name)


def is_second_run(code: Any) -> bool:
    """Whether this is the code with which `tf.recompute_grad` runs its function again, in the backward pass."""
    return code.co_name == "inner_recompute_grad" and code.co_filename == _custom_gradient.__file__


def is_recorded(tensor: tf.Tensor) -> bool:
    """Whether an open gradient tape records what is done with a tensor."""
    return bool(_records([tensor]))


def in_xla(graph: Any) -> bool:
    """Whether a graph becomes part of a function with `jit_compile=True`."""
    return bool(_in_xla(graph))


def in_loop(graph: Any) -> bool:
    """Whether a graph is the condition or the body of a `tf.while_loop`."""
    return bool(_in_loop(graph))


def hlo(function: ConcreteFunction, stage: str, device: str) -> bytes:
    """What XLA makes of a function at a stage of its compilation."""
    found: bytes = _compiler_ir.from_concrete_function(function)(stage=stage, device_name=device)
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
    attribute = function.cached_definition.attr.get(_XLA_COMPILE)
    return attribute is not None and bool(attribute.b)


def exchange_traces(function: Function, traces: Any = None) -> Any:
    """Gives a `tf.function` other traces, or none, and returns those it had; it adds new ones to what it has."""
    before, function._function_cache = function._function_cache, traces or _FunctionCache()
    for config in (function._variable_creation_config, function._no_variable_creation_config):
        if config is not None:
            config.function_cache = function._function_cache
    return before


def paths_and_leaves(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of a structure, composite tensors taken apart, each with the keys that lead to it."""
    yield from _nest.flatten_with_tuple_paths(value, expand_composites=True)
