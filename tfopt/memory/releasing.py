"""Gives back the memory that models leave behind when they are no longer used."""

import ctypes
import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

import psutil
import tensorflow as tf

from tfopt import hardware
from tfopt.hardware.gpu_memory import read_allocator
from tfopt.hardware.host_limits import MIB
from tfopt.internals.graphs import ConcreteFunction, FuncGraph, forget_gradient, gradient_functions
from tfopt.internals.runtime import clear_kernels

_CUSTOM = "CustomGradient-"  # how TensorFlow names the gradients of tf.custom_gradient


def release() -> float:
    """Gives back the memory of models that are no longer used, such as those of earlier trials of a search.

    Call it after the last reference to a model is gone: `del model`, or the end of the function that made it.
    `keras.utils.clear_session` does not do it: it resets the dtype policy and other settings instead, which `release`
    keeps, as it keeps every model still referred to.

    Above all, training leaves behind the weights and the optimizer's state: Keras reduces gradients through a
    `tf.custom_gradient`, and TensorFlow keeps the gradient function of each, with the whole graph around it and all its
    variables, until the process ends. This drops those whose graph nothing uses any more. Programs that XLA has
    compiled stay until the process ends.

    Returns:
        How many MiB less this process takes of the host's memory, and tensors of the GPUs': below 0 if something else
        has taken more meanwhile.

    Example:
        >>> del model
        >>> tfopt.memory.release()
        512.3
    """
    before = _taken_mib()
    gc.collect()  # functions without a model
    for name in list(_forgotten()):
        forget_gradient(name)
    gc.collect()  # what only their gradients referred to
    clear_kernels()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)  # glibc keeps freed pages
    return before - _taken_mib()


def _forgotten() -> Iterator[str]:
    """Names of custom gradients that belong to no graph in use."""
    used = _used()
    for name, function in gradient_functions().items():
        if name.startswith(_CUSTOM):
            graphs = set(map(id, _graphs(function)))
            if graphs and not graphs & used:
                yield name


def _used() -> set[int]:
    """The graphs of all functions that can still be called, and of those that they call."""
    used: set[int] = set()
    waiting = [one.graph for one in gc.get_objects() if issubclass(type(one), ConcreteFunction)]
    while waiting:
        graph = waiting.pop()
        if id(graph) not in used:
            used.add(id(graph))
            inner = (getattr(each, "_cached_graph", None) for each in graph._functions.values())
            waiting += [each for each in inner if each is not None]
    return used


def _graphs(function: Any, seen: frozenset[int] = frozenset()) -> Iterator[FuncGraph]:
    """The graphs of the tensors that a function refers to, and those around them."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            values = tf.nest.flatten(cell.cell_contents)
        except (ValueError, TypeError):  # an unset cell, keys that cannot be sorted
            continue
        for value in values:
            if isinstance(value, types.FunctionType) and id(value) not in seen:
                yield from _graphs(value, seen | {id(value)})
            graph = value.graph if tf.is_symbolic_tensor(value) else None
            while isinstance(graph, FuncGraph):
                yield graph
                graph = graph.outer_graph


def _taken_mib() -> float:
    """Of the host's memory by this process, and of the GPUs' by its tensors."""
    on_gpus = sum(read_allocator(gpu.index).gpu_memory_allocated_mib or 0.0 for gpu in hardware.gpus())
    return psutil.Process().memory_info().rss / MIB + on_gpus
