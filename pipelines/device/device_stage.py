"""The device stage: examples kept on the device, batches made there, and the indices that say which examples.

`tfopt.fit.overlap` asks `stage_of(dataset)`, iterates the stage's `elements`, and makes a batch from each: gathered by
index, augmented and padded in functions of their own. XLA compiles the gather, before and apart from the training step.
ResNet-50 on an H200: 37.95 ms per step, of which the gather takes 0.36 ms; 40.4 ms with the gather in the step's own
function; 67 to 69 ms with TensorFlow's kernels, which take uint8 through the host.
"""

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfopt.errors import DeviceMemoryError, PipelineError
from tfopt.model.batches import DEVICE_STAGE
from tfopt.pipelines.device.copying import copy_ahead
from tfopt.pipelines.device.placing import OnDevice, is_gpu
from tfopt.pipelines.shared.elements import element_of, first_line, pad_batch, without_autograph
from tfopt.pipelines.shared.epochs import Epoch, Place, in_epochs
from tfopt.pipelines.shared.options import PipelineOptions, StageFunction
from tfopt.pipelines.shared.seeding import bits_from, call_in_turn, in_batches, of_length, permutation, sequence
from tfopt.text import readable_bytes

NOT_ATTACHED = (
    "Expected tfopt.fit.overlap(model) before `fit`: with cache='device' the examples are kept on the device, and "
    "overlap makes the batches there. Found an iteration of the dataset itself, or of one derived from it, as by .map, "
    ".take or class_weight. Call tfopt.fit.overlap(model) and pass the dataset as it is, or build it with "
    "cache='memory'."
)


class DeviceStage:
    """Makes the batches of a pipeline on the device, where all examples are kept from the first batch on.

    Its `elements` say which examples a batch has; each iteration of them is an epoch, in a new order if the pipeline
    shuffles. On a GPU they are copied ahead of use, and no `tf.data` stage may follow. `batch` may be called from any
    thread. The examples are freed with the dataset.

    Args:
        chunks: A dataset of all examples, in chunks of any size.
        spec: The element spec of an example, static.
        element_spec: The element spec of the batches.
        settings: The `tf.data.Options` of the pipeline.
        place: Where iterations of the `elements` begin.
    """

    def __init__(
        self,
        *,
        chunks: Any,
        spec: Any,
        element_spec: Any,
        count: int,
        options: PipelineOptions,
        held: OnDevice,
        settings: Any,
        steps: int,
        place: Place,
    ):
        self.element_spec = element_spec
        self.steps = steps
        self.device, self.only = held.device, held.only
        self.elements = _elements(count, steps, options, held.device, settings, place)
        self._chunks, self._spec, self._count = chunks, spec, count
        self._first, *self._later = batch_functions(options, held.obstacles, spec, gather_jit=is_gpu(held.device))
        self._by_size: dict[int, Any] = {}
        self._rows: list[Any] | None = None
        self._lock = threading.Lock()

    def batch(self, element: tuple[Any, ...]) -> Any:
        """Returns the batch that an eager element of `elements` stands for; the first call loads the examples.

        Raises:
            PipelineError: If an example cannot be read.
            DeviceMemoryError: If the examples do not fit on the device.
        """
        indices, bits = element if len(element) == 2 else (element[0], None)
        with tf.device(self.device):
            rows = self.load()
            batch = self._traced(rows, indices, bits)(rows, indices, bits)
            for function in self._later:
                batch = function(batch, bits)
        return batch

    def _traced(self, rows: list[Any], indices: Any, bits: Any) -> Any:
        """Returns the first function for this batch size; TensorFlow's own lookup takes as long as the call."""
        size = indices.shape[0]
        if size not in self._by_size:
            self._by_size[size] = self._first.get_concrete_function(rows, indices, bits)
        return self._by_size[size]

    def load(self) -> list[Any]:
        """Returns the leaves of all examples, which the first call puts on the device; raises as `batch` does."""
        if self._rows is None:
            with self._lock:
                if self._rows is None:
                    self._rows = _load(self._chunks, self._spec, self._count, self.device)
        return self._rows


def stage_of(dataset: Any) -> DeviceStage | None:
    """Returns the device stage of a dataset that `build_pipeline` returned, or None if it has none.

    Example:
        >>> import numpy as np
        >>> from tfopt.pipelines import build_pipeline
        >>> stage = stage_of(build_pipeline(np.arange(6), batch_size=3, cache="device", training=False))
        >>> [stage.batch(element).numpy().tolist() for element in stage.elements]
        [[0, 1, 2], [3, 4, 5]]
    """
    return getattr(dataset, DEVICE_STAGE, None)


def batch_functions(
    options: PipelineOptions, obstacles: Sequence[str | None], spec: Any, *, gather_jit: bool = True
) -> tuple[Any, ...]:
    """Returns the `tf.function`s that make a batch, to be called in turn.

    The first takes `(rows, indices, bits)`: the leaves of all examples in their stored dtype, int64 indices of shape
    (batch,), and random bits for the seeds, or None. Each further one takes `(batch, bits)`. Neighbours that XLA
    compiles are fused.

    `obstacles` are those that `find_obstacles` returned; `spec` is the element spec of a row. Without `gather_jit`, XLA
    does not compile a gather alone: on a CPU it only costs time.
    """
    functions = list(options.augmentations)
    jits = [obstacle is None for obstacle in obstacles] or [True] * len(functions)
    if options.remainder == "pad":
        pad = without_autograph(lambda *batch: pad_batch(batch, options.batch_size))
        functions, jits = [*functions, StageFunction("pad", pad)], [*jits, True]
    groups = [
        (jit, [function for _, function in group])
        for jit, group in itertools.groupby(zip(jits, functions, strict=True), key=lambda pair: pair[0])
    ]
    first = groups.pop(0)[1] if groups and groups[0][0] else []
    made, number = [_gathering(first, spec, jit=gather_jit or bool(first))], sum(function.seeded for function in first)
    for jit, group in groups:
        made.append(_passing(group, number, jit=jit))
        number += sum(function.seeded for function in group)
    return tuple(made)


class NotAttached(tf.data.Dataset):
    """A dataset that cannot be iterated, since its stage makes the batches.

    Args:
        dataset: The same batches, from examples that `refusing` makes fail.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        super().__init__(dataset._variant_tensor)

    def __iter__(self) -> Any:
        """Raises a PipelineError."""
        raise PipelineError(NOT_ATTACHED)

    def _inputs(self) -> list[Any]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        """The element spec of the batches."""
        return self._dataset.element_spec


def refusing(dataset: Any) -> Any:
    """Returns a dataset that fails at its first element, in graphs and after further stages too."""

    @without_autograph
    def refuse(*parts: Any) -> Any:
        with tf.control_dependencies([tf.debugging.Assert(False, [NOT_ATTACHED])]):
            return tf.nest.map_structure(tf.identity, element_of(parts, dataset.element_spec))

    return dataset.map(refuse, name="attach")


def _elements(count: int, steps: int, options: PipelineOptions, device: str, settings: Any, place: Place) -> Any:
    """Returns the dataset of what makes a batch: its indices, and random bits if a function of it takes a seed."""
    every_full = options.remainder == "drop" or count % options.batch_size == 0

    def bits_left(epoch: Epoch) -> Any:
        def drawn(first: Any, key: Any) -> Any:
            return bits_from(int(first), max(steps - int(first), 0), key)

        bits = tf.numpy_function(drawn, [epoch.batch, epoch.key("batch")], tf.int64, stateful=False)
        return tf.ensure_shape(bits, [None])

    def of_epoch(epoch: Epoch) -> Any:
        skipped = epoch.batch * options.batch_size
        if options.shuffle:
            indices = permutation(count, epoch.key("shuffle"), skipped=skipped)
        else:
            indices = sequence(count, skipped=skipped)
        elements = in_batches(indices, options.batch_size, full=every_full)
        if any(function.seeded for function in options.augmentations):
            return tf.data.Dataset.zip(elements, tf.data.Dataset.from_tensor_slices(bits_left(epoch)))
        return elements.map(without_autograph(lambda indices: (indices,)), num_parallel_calls=1)

    elements = of_length(in_epochs(place, of_epoch), steps).prefetch(tf.data.AUTOTUNE).with_options(settings)
    return copy_ahead(elements, device, steps) if is_gpu(device) else elements


def _load(chunks: Any, spec: Any, count: int, device: str) -> list[Any]:
    """Returns the leaves of all examples, on the device, where each chunk is written into its place.

    Joining chunks there would take twice the room, and joining them on the host two or three times the room there.
    """
    rows, loaded = _room(tf.nest.flatten(spec), count, device), 0
    try:
        for chunk in chunks:  # as many as `count`: the pipeline's reading asserts it
            for row, part in zip(rows, tf.nest.flatten(chunk), strict=True):
                with tf.device("CPU:0"):
                    stored = part if part.dtype == row.dtype else tf.bitcast(part, row.dtype)
                end = loaded + part.shape[0]
                tf.raw_ops.ResourceStridedSliceAssign(
                    ref=row.handle, begin=[loaded], end=[end], strides=[1], value=stored
                )
            loaded = end
    except tf.errors.OpError as error:
        raise PipelineError(
            f"Expected to read {count:,} examples, to copy them to {device}. Found that it failed after {loaded:,}: "
            f"{first_line(error)}. Fix what it names, or the source's `count`."
        ) from error
    for row in rows:
        tf.raw_ops.DisableCopyOnRead(resource=row.handle)  # set by the assignments; reading would copy the whole
    return [row.read_value() for row in rows]


def _room(specs: Sequence[Any], count: int, device: str) -> list[tf.Variable]:
    try:
        with tf.device(device):
            return [tf.Variable(_zeros((count, *leaf.shape), _stored_dtype(leaf.dtype))) for leaf in specs]
    except tf.errors.ResourceExhaustedError as error:
        size = sum(count * leaf.shape.num_elements() * leaf.dtype.size for leaf in specs)
        raise DeviceMemoryError(
            f"Expected room for {readable_bytes(size)} of examples on {device}. Found that its memory is taken, "
            "perhaps by a model made after the plan. Pass cache='memory', or a smaller data set."
        ) from error


def _zeros(shape: Sequence[int], dtype: Any) -> Any:
    # TensorFlow fills no uint32 and uint64 on a GPU.
    filled = {tf.uint32: tf.float32, tf.uint64: tf.float64}.get(dtype, dtype)
    zeros = tf.zeros(shape, filled)
    return zeros if filled == dtype else tf.bitcast(zeros, dtype)


def _stored_dtype(dtype: Any) -> Any:
    # Eager int32 tensors stay in host memory whatever the device, and would be copied for each batch.
    return tf.uint32 if dtype == tf.int32 else dtype


def _gathering(functions: Sequence[StageFunction], spec: Any, *, jit: bool) -> Any:
    dtypes = [leaf.dtype for leaf in tf.nest.flatten(spec)]

    @without_autograph
    def gathered(rows: Sequence[Any], indices: Any) -> Any:
        chosen = [tf.gather(leaf, indices) for leaf in rows]
        restored = [
            leaf if leaf.dtype == dtype else tf.bitcast(leaf, dtype) for leaf, dtype in zip(chosen, dtypes, strict=True)
        ]
        return tf.nest.pack_sequence_as(spec, restored)

    def gather(rows: Sequence[Any], indices: Any, bits: Any) -> Any:
        return call_in_turn(functions, gathered(rows, indices), bits)

    return tf.function(gather, jit_compile=jit)


def _passing(functions: Sequence[StageFunction], number: int, *, jit: bool) -> Any:
    def pass_on(batch: Any, bits: Any) -> Any:
        return call_in_turn(functions, batch, bits, number)

    return tf.function(pass_on, jit_compile=jit)
