"""What a training step holds at its peak under XLA, read from the compiler's own assignment of buffers."""

import collections
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from tfopt.internals.graphs import hlo
from tfopt.memory.peak import BACKWARD, FORWARD, UPDATE, Peak, Phases

_ALLOC, _FREE, _SHARE = range(3)  # kinds of events in a trace
_CALLING = ("while", "call", "conditional")


def peak_of_compiled(step: Any, phases: Phases) -> Peak | None:
    """Compiles a traced training step for this machine's device, without running it, and returns what it holds.

    The total is all that XLA allocates beside the step's arguments: temporaries, constants, and results other than new
    values of variables, which replace the old ones in place. None if this TensorFlow keeps no assignment of buffers.
    """
    compiled = hlo_pb2.HloProto.FromString(_stage(step, "optimized_hlo_proto_serialized"))
    assignment = compiled.buffer_assignment
    if not assignment.buffer_allocations:
        return None
    if not compiled.HasField("hlo_module"):  # on a GPU it is not kept together with the buffers
        compiled.hlo_module.ParseFromString(_stage(step, "optimized_hlo_serialized"))
    total = sum(
        one.size
        for one in assignment.buffer_allocations
        if not one.is_thread_local and not one.is_entry_computation_parameter
    )
    module = _Module(compiled.hlo_module, phases)
    buffers = {buffer.id: buffer for buffer in assignment.logical_buffers}
    gradients, activations = 0, collections.Counter[tuple[str, ...]]()
    for trace in assignment.heap_simulator_traces:
        for size, event in _alive_at_peak(trace, buffers):
            index = buffers[event.buffer_id].defined_at.shape_index
            maker = module.instructions.get(event.instruction_name)
            if maker is None:
                continue
            label, phase, readers = module.described(maker, index[0] if index else None)
            if label and phase == FORWARD and readers & {BACKWARD, UPDATE}:
                activations[(label,)] += size
            elif phase == BACKWARD and UPDATE in readers:
                gradients += size
    return Peak(total, gradients, activations)


def _stage(step: Any, stage: str) -> bytes:
    """Has XLA compile a concrete function up to a stage."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    with warnings.catch_warnings():
        # Without a device name TensorFlow draws a random number to pick one, which advances the global seed.
        warnings.filterwarnings("ignore", message="device_name is being deprecated")
        return hlo(step, stage, tf.config.list_logical_devices(kind)[0].name)


def _alive_at_peak(trace: Any, buffers: dict[int, Any]) -> list[tuple[int, Any]]:
    """The pieces of memory in use when most is, each with its size and the event that began its latest use."""
    piece_of: dict[int, int] = {}
    uses: dict[int, dict[int, Any]] = collections.defaultdict(dict)
    live = most = 0
    found: list[tuple[int, Any]] = []
    for event in trace.events:
        if event.kind == _FREE:
            piece = piece_of[event.buffer_id]
            del uses[piece][event.buffer_id]
            if not uses[piece]:
                live -= buffers[piece].size
                del uses[piece]
            continue
        shared = event.kind == _SHARE
        piece = piece_of[event.share_with_canonical_id] if shared else event.buffer_id
        piece_of[event.buffer_id] = piece
        if piece not in uses:
            live += buffers[piece].size
        uses[piece][event.buffer_id] = event
        if live > most:
            most = live
            found = [(buffers[piece].size, list(events.values())[-1]) for piece, events in uses.items()]
    return found


@dataclass(slots=True, eq=False)
class _Instruction:
    """An instruction of the compiled module."""

    opcode: str
    label: str
    """The TensorFlow operation it comes from; empty if XLA made it up."""
    tuple_index: int
    called: list[int]
    callers: list["_Instruction"]
    """Those that call its computation, shared by all in it."""
    is_root: bool = False
    operands: list["_Instruction"] = field(default_factory=list)
    users: list["_Instruction"] = field(default_factory=list)
    phase: int = FORWARD
    is_constant: bool = False
    """Whether it follows from constants alone."""


class _Module:
    """A compiled module: which instruction reads what another makes, and in which phase of the step."""

    def __init__(self, module: Any, phases: Phases):
        self.instructions: dict[str, _Instruction] = {}
        self._phases = phases
        self._computations: dict[int, list[_Instruction]] = {}
        callers: dict[int, list[_Instruction]] = collections.defaultdict(list)
        for computation in module.computations:
            own: dict[int, _Instruction] = {}
            for each in computation.instructions:
                own[each.id] = self.instructions[each.name] = _Instruction(
                    each.opcode,
                    "" if each.opcode == "parameter" else each.metadata.op_name,
                    each.tuple_index,
                    list(each.called_computation_ids),
                    callers[computation.id],
                    each.id == computation.root_id,
                    [own[number] for number in each.operand_ids],
                )
                for operand in own[each.id].operands:
                    operand.users.append(own[each.id])
            self._computations[computation.id] = list(own.values())
        for instruction in self.instructions.values():
            for number in instruction.called:
                callers[number].append(instruction)
            if not instruction.label and instruction.opcode == "fusion":  # the last of those fused that has one
                fused = self._computations[instruction.called[0]]
                instruction.label = next((one.label for one in reversed(fused) if one.label), "")
        self._set_phases(module.entry_computation_id, FORWARD)

    def described(self, maker: _Instruction, index: int | None) -> tuple[str, int, set[int]]:
        """The operation that a buffer belongs to, its phase, and the phases of those that read the buffer."""
        readers = list(self._readers(maker, index))
        source = readers[0] if maker.is_constant and readers else maker  # a constant is made for its first reader
        near = (*source.operands, *(source.callers if source.opcode == "parameter" else ()))
        label = source.label or next((one.label for one in near if one.label), "")
        return label, source.phase, {reader.phase for reader in readers}

    def _set_phases(self, computation: int, least: int) -> None:
        for one in self._computations[computation]:
            one.is_constant = one.opcode != "parameter" and all(operand.is_constant for operand in one.operands)
            follows = any(operand.phase == BACKWARD and not operand.is_constant for operand in one.operands)
            one.phase = max(least, self._phases.named(one.label), BACKWARD if follows else FORWARD)
            if one.opcode in _CALLING:
                for number in one.called:
                    self._set_phases(number, one.phase)

    def _readers(self, maker: _Instruction, index: int | None) -> Iterator[_Instruction]:
        """The instructions that read what another makes, or its part of this index, wherever it is passed on to."""
        waiting: list[tuple[_Instruction, int | None]] = [(maker, index)]
        seen = set(waiting)
        while waiting:
            source, part = waiting.pop(0)
            found: list[tuple[_Instruction, int | None]] = []
            for user in source.users:
                if user.opcode == "tuple":
                    found += [(user, place) for place, one in enumerate(user.operands) if one is source]
                elif user.opcode == "get-tuple-element":
                    found += [(user, None)] if part in (None, user.tuple_index) else []
                elif user.opcode == "bitcast":
                    found.append((user, None))
                else:
                    yield user
                    if user.opcode == "while":
                        found.append((user, part))
            inside = source.opcode == "parameter" or source.is_root
            found += [(caller, part) for caller in source.callers if inside and caller.opcode in _CALLING]
            new = [one for one in found if one not in seen]
            seen.update(new)
            waiting += new
