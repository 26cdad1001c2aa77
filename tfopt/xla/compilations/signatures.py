"""Notes every input signature that a function compiled by XLA runs with for the first time.

XLA compiles a traced function once for the shapes and dtypes of its inputs, and TensorFlow does not tell Python. So,
while anyone watches, calls of such functions are noted: those from Python by their arguments; those from another
`tf.function`, as in Keras' `fit`, whose batches never pass through Python, by an operation that is traced beside the
call. A `tf.function` with such calls has two sets of traces; the one with these operations is used in watches only.
"""

import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfopt.internals.graphs import (
    AtomicFunction,
    Function,
    calls_compiled,
    compiled_inputs,
    exchange_traces,
    in_xla,
)
from tfopt.internals.patches import Patch, put, undo
from tfopt.xla.compilations.compilation import Compilation, History
from tfopt.xla.compilations.traced_functions import TracedFunction, traced_function

_TRACED = re.compile(r"(?:__inference_|__forward_|__backward_)*(.*?)(?:_\d+)?")

Inputs = tuple[tuple[int, str], ...]
"""Numbers of a function's inputs, each with its dtype, or with its dtype and shape."""


class Signatures:
    """The signatures noted in this process, shared by all open watches."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.events: list[Compilation] = []
        self.after_call: list[Callable[[], None]] = []
        """Called when a traced function that Python called has ended."""
        self._clock = clock
        self._lock = threading.RLock()
        self._watches = 0
        self._history = History()
        self._seen: set[tuple[str, Inputs]] = set()
        self._inputs: dict[bytes, Inputs | None] = {}
        self._found: dict[str, TracedFunction | None] = {}
        # Of each tf.function with calls to note: the traces that are not in use. Those in use are noted if switched.
        self._traces: weakref.WeakKeyDictionary[Function, Any] = weakref.WeakKeyDictionary()
        self._switched: weakref.WeakKeyDictionary[Function, bool] = weakref.WeakKeyDictionary()
        # Of each graph with calls that are noted: the shapes with which they have run, a table for each call.
        self._ran: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._calls = 0
        self._compiling = threading.local()  # .graph: where a call of a tf.function(jit_compile=True) is being traced
        self._patches = [
            Patch(Function, "__call__", self._calling, "xla.watch"),
            Patch(AtomicFunction, "call_flat", self._running, "xla.watch"),
        ]

    def open(self) -> None:
        """Starts noting."""
        with self._lock:
            if self._watches == 0:
                put(self._patches)
            self._watches += 1

    def close(self) -> None:
        """Stops noting, once for each `open`."""
        with self._lock:
            self._watches -= 1
            if self._watches == 0:
                undo(self._patches)
                for function, switched in list(self._switched.items()):
                    if switched or calls_compiled(function):
                        self._exchange(function)
                self._switched.clear()

    def _calling(self, original: Any) -> Any:
        """Replaces `tf.function`'s `__call__`: notes the compiled functions that are called while it is traced."""

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not function._jit_compile:
                self._switch(function)
                with self._called():
                    return original(function, *args, **kwargs)
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            # TensorFlow marks the graph as part of XLA during the call, as if the caller were compiled, too.
            with self._traced_in(None if graph is None or in_xla(graph) else graph):
                return original(function, *args, **kwargs)

        return call

    def _running(self, original: Any) -> Any:
        """Replaces a traced function's `call_flat`: notes the call, now or in the graph that is being traced."""

        def run(function: Any, *args: Any) -> Any:
            inputs = self._inputs_of(function)
            if not tf.executing_eagerly():
                graph = tf.compat.v1.get_default_graph()
                own = graph is getattr(self._compiling, "graph", None) or not in_xla(graph)
                if inputs is None or not self._calls or not own:
                    return original(function, *args)
                return self._trace(original, function, args, inputs)
            if inputs is None:
                results = original(function, *args)
            else:
                name, shapes = function.name.decode(), [args[number].shape for number, _ in inputs]
                begun = self._begin(name, inputs, shapes)
                results = original(function, *args)
                if begun:
                    self._end(name, inputs, shapes, begun)
            for react in tuple(self.after_call):
                react()
            return results

        return run

    def _trace(self, original: Any, function: Any, args: Sequence[Any], inputs: Inputs) -> Any:
        """Adds a call to the graph, between operations that note it."""
        name = function.name.decode()

        def begin(*shapes: Any) -> float:
            return self._begin(name, inputs, shapes)

        def end(begun: float, *values: Any) -> bool:
            if begun:
                self._end(name, inputs, values[: len(inputs)], float(begun))
            return True

        graph = tf.compat.v1.get_default_graph()
        shapes = [tf.shape(args[number]) for number, _ in inputs]
        # A look at a table takes less time than a call of Python.
        numbers = tf.concat([part for shape in shapes for part in (tf.shape(shape), shape)], 0)
        key = tf.strings.reduce_join(tf.as_string(numbers), separator=",")
        with tf.init_scope():
            ran = tf.lookup.experimental.MutableHashTable(tf.string, tf.bool, default_value=False)
        self._ran.setdefault(graph, []).append(ran)
        is_new = tf.logical_not(ran.lookup(key))
        begun = tf.cond(
            is_new,
            lambda: tf.ensure_shape(tf.numpy_function(begin, shapes, tf.float64), ()),
            lambda: tf.constant(0.0, tf.float64),
        )
        with tf.control_dependencies([begun]):
            results = original(function, *args)
        called = graph.get_operations()[-1]
        # TensorFlow drops a call whose results nobody uses, and would still run what only waits for it.
        used = [result for result in results if result.dtype not in (tf.resource, tf.variant)][:1]

        def noted() -> Any:
            with tf.control_dependencies([tf.numpy_function(end, [begun, *shapes, *used], tf.bool)]):
                ran.insert(key, True)
            return False

        with tf.control_dependencies([called]):
            tf.cond(is_new, noted, lambda: False)
        return results

    def _begin(self, name: str, inputs: Inputs, shapes: Sequence[Any]) -> float:
        """Returns the time if a signature is new, and 0 otherwise."""
        return 0.0 if _signature(name, inputs, shapes) in self._seen else self._clock()

    def _end(self, name: str, inputs: Inputs, shapes: Sequence[Any], begun: float) -> None:
        """Adds a signature, whose first run has ended without an error."""
        seconds, signature = self._clock() - begun, _signature(name, inputs, shapes)
        with self._lock:
            if signature in self._seen:  # two threads ran it at once
                return
            self._seen.add(signature)
            if name not in self._found:
                self._found[name] = traced_function(name)
            found = self._found[name]
            known: dict[str, Any] = {}
            if found:
                known = {"step": found.step, "variables": found.variables, "names": dict(enumerate(found.inputs))}
            function = _TRACED.fullmatch(name)[1]  # type: ignore[index]
            self.events.append(self._history.add(function, name, seconds, dict(signature[1]), **known))

    def _inputs_of(self, function: Any) -> Inputs | None:
        name = function.name
        if name not in self._inputs:
            self._inputs[name] = compiled_inputs(function)
        return self._inputs[name]

    def _switch(self, function: Any) -> None:
        """Has a `tf.function` use its noted traces until the last watch ends."""
        if function not in self._switched:
            with self._lock:
                switched = calls_compiled(function)
                if switched:
                    self._exchange(function)
                self._switched[function] = switched

    def _exchange(self, function: Any) -> None:
        self._traces[function] = exchange_traces(function, self._traces.get(function))

    @contextmanager
    def _called(self) -> Iterator[None]:
        """Only what is called is noted: another trace may be examined, or saved."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1

    @contextmanager
    def _traced_in(self, graph: Any) -> Iterator[None]:
        before = getattr(self._compiling, "graph", None)
        self._compiling.graph = graph
        try:
            yield
        finally:
            self._compiling.graph = before


def _signature(name: str, inputs: Inputs, shapes: Sequence[Any]) -> tuple[str, Inputs]:
    texts = [f"{dtype} {tuple(map(int, shape))}" for (_, dtype), shape in zip(inputs, shapes, strict=True)]
    return name, tuple((number, text) for (number, _), text in zip(inputs, texts, strict=True))


SIGNATURES = Signatures()
