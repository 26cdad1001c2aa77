"""The variables that a training changes, by name: copied on the device, and restored."""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.checkpoint.folder.blobs import ALIGNMENT
from tfopt.checkpoint.folder.reading import Checkpoint
from tfopt.checkpoint.processes import Processes
from tfopt.distribute.data_check.fits import is_counter
from tfopt.errors import CheckpointError, UnsupportedError
from tfopt.internals.layers import to_snake_case
from tfopt.internals.runtime import DistributedVariable, SyncOnReadVariable
from tfopt.internals.scopes import global_seeds
from tfopt.model.state import trace_train_step, traced_steps
from tfopt.pipelines.shared.frozen_draws import nodes
from tfopt.pipelines.shared.nondeterminism import draws_of_kernels
from tfopt.text import listed

WEIGHTS = "model/"
"""How the names of a model's own variables begin."""
METRICS = "metrics/"
_GROUPS = (WEIGHTS, METRICS, "optimizer/", "seeds/", "step/")
_THREADS = 4  # that restore: copies to a GPU overlap with reading
_SHOWN = 8
_NUMBER = r"_\d+"
_UNSAVED = ("LookupTableImport", "LookupTableInsert", "LookupTableRemove", "QueueDequeue", "QueueEnqueue")
"""How operations begin that change what no variable holds."""


@dataclass(frozen=True, slots=True)
class Part:
    """A variable, as this process holds it."""

    variables: tuple[Any, ...]
    """One per replica of this process."""
    rows: int | None
    """How many replicas in all processes have a value of their own, such as a metric's; None if all have the same."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is saved: with a first axis for replicas that have a value of their own."""
        shape = tuple(self.variables[0].shape)
        return shape if self.rows is None else (self.rows, *shape)

    @property
    def dtype(self) -> str:
        """The dtype of what is saved."""
        return str(self.variables[0].dtype.as_numpy_dtype.__name__)


def parts_of(
    model: keras.Model, processes: Processes | None = None, graphs: Iterable[tf.Graph] = ()
) -> dict[str, Part]:
    """Returns the variables of a training by name: weights, seeds, optimizer, metrics, and others that the step uses.

    Args:
        model: The model, built.
        processes: That train it. Default: this one alone.
        graphs: Graphs of the training step, to find variables Keras does not know: those of `tf.random.Generator`s and
            of gradient accumulation.
    """
    optimizer = getattr(model, "optimizer", None)  # a model that was never compiled has no such attribute
    groups = {
        WEIGHTS: model.variables,
        "optimizer/": getattr(optimizer, "variables", ()),
        METRICS: model.metrics_variables,
    }
    named = [(prefix + each.path, each.value) for prefix, variables in groups.items() for each in variables]
    generator = global_seeds()
    if generator is not None:
        named.append(("seeds/global", generator.state.value))
    parts: dict[str, Part] = {}
    seen: set[int] = set()
    used = {id(each): each for graph in graphs for each in graph.variables if not is_counter(each)}
    in_order = sorted(used.values(), key=lambda variable: variable.handle._id)  # as they were made; a graph has a set
    found = ((f"step/{variable.name}", _whole(variable)) for variable in in_order)
    for name, variable in itertools.chain(named, found):
        components = tuple(getattr(variable, "values", (variable,)))
        if not seen.isdisjoint(map(id, components)):
            continue
        seen.update(map(id, components))
        rows = processes.replicas if processes and _differs(variable, processes) else None
        parts[_free(name, parts)] = Part(components, rows)
    return parts


def saved_in(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype and shape of each variable in a checkpoint, by name."""
    contents = ((name, place.content) for name, place in checkpoint.manifest.arrays.items())
    return {name: (content.dtype, content.shape) for name, content in contents if name.startswith(_GROUPS)}


def _differs(variable: Any, processes: Processes) -> bool:
    """Whether replicas may have different values of a variable."""
    if not isinstance(variable, DistributedVariable):
        return processes.count > 1
    # Each replica updates its own, such as the averages of batch normalization.
    alone = not variable.trainable and variable.aggregation == tf.VariableAggregation.NONE
    return alone or isinstance(variable, SyncOnReadVariable)


def _whole(variable: Any) -> Any:
    """The variable of all replicas that one replica's belongs to."""
    container = getattr(variable, "_distributed_container", None)
    return variable if container is None or container() is None else container()


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """A name that is not taken; layers and metrics may share one."""
    numbered = (f"{name}#{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


def step_graphs(model: keras.Model, element_spec: Any) -> list[tf.Graph]:
    """Returns the graphs of the training step, as `fit` has traced it; otherwise it is traced.

    Raises:
        tfopt.errors.UnsupportedError: If the step draws random numbers from operations whose state cannot be saved, or
            changes a lookup table or a queue.
    """
    concretes = traced_steps(model)
    for concrete in concretes:
        _expect_state_in_variables(model, concrete)
    return [concrete.graph for concrete in concretes] or traced_graphs(model, element_spec)


def _expect_state_in_variables(model: keras.Model, step: Any) -> None:
    for found in draws_of_kernels(step):
        raise UnsupportedError(
            f"Expected random numbers that a resumed training can continue. Found {found} in the training step of "
            f"{model.name!r}, whose state TensorFlow does not expose. Draw with keras.random and a SeedGenerator, or "
            "with a tf.random.Generator."
        )
    for node in nodes(step):
        if node.op.startswith(_UNSAVED):
            raise UnsupportedError(
                f"Expected a training step whose whole state is in variables. Found {node.op} ({node.name}) in that "
                f"of {model.name!r}: it changes a lookup table or a queue, which a checkpoint does not hold. Keep that "
                "state in a tf.Variable or in a weight of the model."
            )


def built_parts(model: keras.Model, processes: Processes, element_spec: Any, saved: Collection[str]) -> dict[str, Part]:
    """Returns the variables of a training that has not begun. Tracing its step creates them all.

    Args:
        model: The model, compiled.
        processes: The processes that train it.
        element_spec: Of its data.
        saved: The names in the checkpoint.
    """
    graphs = traced_graphs(model, element_spec)
    build_optimizer(model, saved)
    return parts_of(model, processes, graphs)


def traced_graphs(model: keras.Model, element_spec: Any) -> list[tf.Graph]:
    """Returns the graph of the training step; none if it only runs eagerly, where Keras knows the variables."""
    # The spec of one replica, if it is a PerReplicaSpec.
    batch = tf.nest.map_structure(lambda spec: (getattr(spec, "_value_specs", None) or [spec])[0], element_spec)
    try:
        return [trace_train_step(model, batch)[1]]
    except UnsupportedError:
        with suppress(Exception):  # whatever the model's own code raises: then its metrics are not known
            model._symbolic_build(data_batch=tf.nest.map_structure(_example, batch))
        return []


def build_optimizer(model: keras.Model, saved: Collection[str]) -> None:
    """Builds a model's optimizer if that of the checkpoint was; models with optimizers of their own do not use it."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or optimizer.built:
        return
    if sum(name.startswith("optimizer/") for name in saved) != len(optimizer.variables):
        optimizer.build(model.trainable_variables)


def _example(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([size or 1 for size in spec.shape], spec.dtype)


def trained_by_optimizers(model: keras.Model) -> set[int]:
    """Returns the ids of the variables that an optimizer trains, or would if their layer were not frozen."""
    weights = (weight.value for layer in model._flatten_layers() for weight in layer._trainable_variables)
    return {id(component) for weight in weights for component in getattr(weight, "values", (weight,))}


class Copies(Mapping[str, np.ndarray]):
    """Values of variables at one moment, copied on their devices; each moves to the host when it is read.

    In several processes, all must make it at the same step.
    """

    def __init__(self, parts: Mapping[str, Part], processes: Processes):
        self._copies = {name: _copied(part, processes) for name, part in parts.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self._copies[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._copies)

    def __len__(self) -> int:
        return len(self._copies)


def _copied(part: Part, processes: Processes) -> Any:
    if part.rows is not None:
        return processes.joined(np.stack([variable.numpy() for variable in part.variables]))
    variable = part.variables[0]
    # What was read shares its memory with the variable until that is written to. On a CPU the next update copies it
    # first, which takes as long as copying it here; on a GPU a step that needs the room for that could run out of it.
    value = variable.read_value()
    if "GPU" not in variable.device:
        return value
    try:
        with tf.device(variable.device):
            return tf.raw_ops.DeepCopy(x=value)
    except (tf.errors.ResourceExhaustedError, tf.errors.NotFoundError, tf.errors.InvalidArgumentError):
        return np.array(value.numpy())  # no room on the GPU, or no kernel for this dtype there


def assign(parts: Mapping[str, Part], arrays: Mapping[str, np.ndarray], first: int = 0) -> None:
    """Assigns arrays to the variables of the same names.

    Args:
        parts: The variables.
        arrays: Their values.
        first: The number of this process's first replica.

    Raises:
        tfopt.errors.CheckpointError: If an array has been removed since.
    """

    def put(name: str) -> None:
        part, array = parts[name], arrays[name]
        for number, variable in enumerate(part.variables):
            variable.assign(_loaded(array if part.rows is None else array[first + number], variable.device))

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(put, parts))


def _loaded(array: np.ndarray, device: str) -> Any:
    """A mapped array as a tensor; others as they are. TensorFlow would copy it in NumPy's memory first."""
    if not isinstance(array.base, np.memmap) or array.ctypes.data % ALIGNMENT or array.dtype.kind not in "fiu":
        return array
    array = array.view()
    array.flags.writeable = True  # or NumPy does not share it; the mapping is private
    mapped = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    if "GPU" in device:
        return mapped
    with tf.device(device):  # a variable on a CPU would take the mapping itself
        return tf.raw_ops.DeepCopy(x=mapped)


def renamed(parts: Mapping[str, Part], names: Iterable[str], model: keras.Model) -> dict[str, Part]:
    """Returns variables under a checkpoint's names, where they differ only in the numbers that Keras appends.

    A model built again in the same process has `dense_1` where it had `dense`; those of one class keep their order. The
    names of layers that were given by hand, such as `block_1`, stand as they are.
    """
    wanted, found = _by_stem(names, model), dict[str, Part]()
    for stem, own in _by_stem(parts, model).items():
        theirs = wanted.get(stem, [])
        renumbered = len(own) == len(theirs) and {*own} != {*theirs}
        found.update(zip(theirs if renumbered else own, (parts[name] for name in own), strict=True))
    return found


def _by_stem(names: Iterable[str], model: keras.Model) -> dict[str, list[str]]:
    """Groups variables' names by what is left without their numbers; those in names given by hand stay."""
    given = [
        re.escape(layer.name)
        for layer in model._flatten_layers()
        if re.sub(rf"{_NUMBER}$", "", layer.name) != to_snake_case(type(layer).__name__)
    ]
    pattern = re.compile(rf"(?<![^/_])({'|'.join(given) or '(?!)'})(?![^/_])|{_NUMBER}(?=[/_]|$)")
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern.sub(lambda match: match[1] or "", name), []).append(name)
    return groups


def require_same(parts: Mapping[str, Part], arrays: Mapping[str, tuple[str, tuple[int, ...]]], where: str) -> None:
    """Raises CheckpointError if variables differ from the arrays of a checkpoint; each difference is named.

    Args:
        parts: The variables.
        arrays: The dtype and shape of each array.
        where: What holds the arrays, in messages.
    """
    found = list(differences(parts, arrays))
    if found:
        raise CheckpointError(
            f"Expected the model, optimizer and metrics of {where}. Found differences: "
            f"{listed(found, _SHOWN)}. Build the model as it was saved, or use "
            "another folder; tfopt.checkpoint.restore(..., partial=True) loads the weights that fit."
        )


def differences(parts: Mapping[str, Part], arrays: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterator[str]:
    """Yields the differences between variables and the arrays of a checkpoint."""
    for name, part in parts.items():
        if name not in arrays:
            yield f"{name} is not in the checkpoint"
        elif (part.dtype, part.shape) != arrays[name]:
            dtype, shape = arrays[name]
            yield f"{name} is {part.dtype} {part.shape} here, {dtype} {shape} in the checkpoint"
    for name in arrays:
        if name not in parts:
            yield f"{name} is only in the checkpoint"
