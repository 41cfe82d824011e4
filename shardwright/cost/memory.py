"""Peak bytes on one device, by liveness over the program in its own order.

What XLA does to buffers is modelled as far as it decides the peak:
views share their operand's memory; elementwise values and re-indexing that one fusible
instruction reads are never stored, so what they read stays live in their stead; an
instruction may write over an operand of the same size that nobody reads later; a loop's
carried values are updated in place and its body adds its own peak; a donated
argument's buffer is taken over by what is computed from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shardwright.cost.opcodes import ELEMENTWISE, FUSED_INDEXING, MARKER_TARGETS, VIEWS
from shardwright.cost.reshard import reshard
from shardwright.hlo import Computation, Instruction, Module
from shardwright.hlo.shapes import ELEMENT_BITS, ArrayShape, TupleShape
from shardwright.plans import InstructionPlan, MemorySummary, Mesh, TensorSharding, ValueSharding, VariablePlan

_FUSIBLE = ELEMENTWISE | FUSED_INDEXING

#: Instructions that can compute their operands inside their own kernel.
_FUSING = _FUSIBLE | {
    "reduce",
    "dynamic-slice",
    "dynamic-update-slice",
    "gather",
    "bitcast-convert",
    "reshape",
    "bitcast",
}

#: Too dear for XLA to compute them again for every reader: stored where several read them.
_COMPUTED_ONCE = frozenset({
    "acos", "acosh", "asin", "asinh", "atan2", "atanh", "cbrt", "complex", "cos", "cosh", "divide", "erf",
    "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "map", "power", "remainder", "rsqrt",
    "sine", "sinh", "sqrt", "tan", "tanh", "concatenate",
})  # fmt: skip

_IN_PLACE = ELEMENTWISE | {"dynamic-update-slice", "scatter", "while", "conditional", "call", "copy", "sort"}


def memory(
    module: Module,
    instructions: Iterable[InstructionPlan],
    parameters: Sequence[VariablePlan],
    outputs: Sequence[VariablePlan],
    mesh: Mesh,
) -> MemorySummary:
    """Predicted bytes on one device for a program planned as given.

    instructions: one entry per instruction of the entry computation and of the bodies of
    while, conditional and call; an instruction without an entry counts as replicated.
    """
    estimate = _Estimate(mesh, {entry.name: entry for entry in instructions})
    donated = {variable.number for variable in parameters if variable.alias is not None}
    return MemorySummary(
        arguments_bytes=sum(_stored_bytes(variable, mesh) for variable in parameters),
        outputs_bytes=sum(_stored_bytes(variable, mesh) for variable in outputs if variable.alias is None),
        temporaries_bytes=estimate.peak_bytes(module.entry, donated=donated),
    )


def shard_bytes(element_type: str, shape: tuple[int, ...], sharding: TensorSharding, mesh: Mesh) -> int:
    """Bytes of one device's shard of an array."""
    return (prod(sharding.shard_shape(shape, mesh)) * ELEMENT_BITS[element_type] + 7) // 8


def _stored_bytes(variable: VariablePlan, mesh: Mesh) -> int:
    return shard_bytes(variable.element_type, variable.stored_shape, variable.sharding, mesh)


@dataclass(slots=True)
class _Buffers:
    """Storage of one computation: buffers are numbered; a value's leaf is a set of them."""

    bytes: list[int] = field(default_factory=list)
    last_use: list[int] = field(default_factory=list)
    leaves: dict[Instruction, tuple[frozenset[int], ...]] = field(default_factory=dict)

    def new(self, size_bytes: int) -> int:
        self.bytes.append(size_bytes)
        self.last_use.append(-1)
        return len(self.bytes) - 1


class _Estimate:
    def __init__(self, mesh: Mesh, plans: Mapping[str, InstructionPlan]) -> None:
        self._mesh = mesh
        self._plans = plans
        self._sizes: dict[tuple[ArrayShape, TensorSharding], int] = {}
        self._peaks: dict[Computation, int] = {}

    def peak_bytes(self, computation: Computation, donated: set[int]) -> int:
        """Most bytes of intermediate values at once; parameters and results are the caller's."""
        buffers = self._place(computation)
        end = len(computation.instructions)
        for parameter in computation.parameters:
            if parameter.index not in donated:
                for leaf in buffers.leaves[parameter]:
                    for buffer in leaf:
                        buffers.last_use[buffer] = end
        charged = [-1] * len(buffers.bytes)  # bytes this computation pays for a buffer; -1: not yet stored
        for leaf in buffers.leaves[computation.root]:
            for buffer in leaf:
                buffers.last_use[buffer] = end
                charged[buffer] = 0
        return self._sweep(computation, buffers, charged)

    def _place(self, computation: Computation) -> _Buffers:
        """Which buffers hold each value, and the last position that reads each buffer."""
        buffers = _Buffers()
        readers = _readers(computation)
        for position, instruction in enumerate(computation.instructions):
            operands = [buffers.leaves[operand] for operand in instruction.operands]
            flat = [leaf for leaves in operands for leaf in leaves]
            if _is_view(instruction):
                leaves = self._view(instruction, flat)
            elif _is_fused(instruction, readers.get(instruction, ())):
                leaves = (frozenset().union(*flat),)
            else:
                kept = _invariant_leaves(instruction)
                leaves = tuple(
                    flat[i] if i in kept else frozenset((buffers.new(size),))
                    for i, size in enumerate(self._result_bytes(instruction))
                )
            buffers.leaves[instruction] = leaves
            for leaf in flat:
                for buffer in leaf:
                    buffers.last_use[buffer] = position
        return buffers

    @staticmethod
    def _view(instruction: Instruction, flat: list[frozenset[int]]) -> tuple[frozenset[int], ...]:
        first = 0
        shape = instruction.operands[0].shape if instruction.operands else None
        if instruction.opcode == "get-tuple-element" and isinstance(shape, TupleShape):
            first = sum(len(element.leaves) for element in shape.elements[: instruction.index])
        return tuple(flat[first : first + len(instruction.shape.leaves)])

    def _sweep(self, computation: Computation, buffers: _Buffers, charged: list[int]) -> int:
        live = peak = 0
        for position, instruction in enumerate(computation.instructions):
            read = {buffer for operand in instruction.operands for leaf in buffers.leaves[operand] for buffer in leaf}
            dying = [buffer for buffer in read if buffers.last_use[buffer] == position]
            own = instruction.opcode in _IN_PLACE or instruction.opcode == "custom-call"
            reusable = {buffers.bytes[buffer]: buffer for buffer in sorted(dying)} if own else {}
            for leaf in buffers.leaves[instruction]:
                for buffer in leaf:
                    if charged[buffer] >= 0:
                        continue
                    size = buffers.bytes[buffer]
                    old = reusable.pop(size, None)
                    if instruction.opcode == "parameter":
                        charged[buffer] = 0
                    elif old is not None:
                        charged[buffer], charged[old] = charged[old], 0
                    else:
                        charged[buffer] = size
                        live += size
            peak = max(peak, live + self._transient_bytes(instruction))
            for buffer in dying:
                live -= charged[buffer]
                charged[buffer] = 0
        return peak

    def _transient_bytes(self, instruction: Instruction) -> int:
        """What the instruction needs only while it runs: loop bodies and gathered operands."""
        inner = [
            self._body_peak(computation)
            for name in ("body", "to_apply", "true_computation", "false_computation", "branch_computations", "calls")
            if instruction.opcode in ("while", "call", "conditional")
            for computation in instruction.called.get(name, ())
        ]
        return max(inner, default=0) + self._gathered_bytes(instruction)

    def _body_peak(self, computation: Computation) -> int:
        if computation not in self._peaks:
            self._peaks[computation] = self.peak_bytes(computation, donated={p.index for p in computation.parameters})
        return self._peaks[computation]

    def _gathered_bytes(self, instruction: Instruction) -> int:
        plan = self._plans.get(instruction.name)
        if plan is None or instruction.opcode in VIEWS:
            return 0
        total = 0
        for operand, wanted in zip(instruction.operands, plan.operands, strict=True):
            have = self._result_of(operand)
            for shape, source, target in zip(operand.shape.leaves, have, wanted, strict=True):
                if source != target and reshard(shape.element_type, shape.dimensions, source, target, self._mesh):
                    total += self._leaf_bytes(shape, target)
        return total

    def _result_of(self, instruction: Instruction) -> ValueSharding:
        plan = self._plans.get(instruction.name)
        if plan is not None:
            return plan.result
        return tuple(TensorSharding.replicated(leaf.rank) for leaf in instruction.shape.leaves)

    def _result_bytes(self, instruction: Instruction) -> list[int]:
        leaves = instruction.shape.leaves
        return [self._leaf_bytes(*pair) for pair in zip(leaves, self._result_of(instruction), strict=True)]

    def _leaf_bytes(self, shape: ArrayShape, sharding: TensorSharding) -> int:
        key = (shape, sharding)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = shard_bytes(shape.element_type, shape.dimensions, sharding, self._mesh)
        return size


def _readers(computation: Computation) -> dict[Instruction, list[Instruction]]:
    readers: dict[Instruction, list[Instruction]] = {}
    for instruction in computation.instructions:
        for operand in instruction.operands:
            readers.setdefault(operand, []).append(instruction)
    return readers


def _invariant_leaves(instruction: Instruction) -> set[int]:
    """Leaves that a loop hands on unchanged: they stay where they were before it."""
    kept: set[int] = set()
    if instruction.opcode != "while":
        return kept
    (body,) = instruction.called["body"]
    first = 0
    for index, value in enumerate(body.root.operands if body.root.opcode == "tuple" else ()):
        count = len(value.shape.leaves)
        is_parameter = value.opcode == "get-tuple-element" and value.operands[0] is body.parameters[0]
        if is_parameter and value.index == index:
            kept.update(range(first, first + count))
        first += count
    return kept


def _is_view(instruction: Instruction) -> bool:
    if instruction.opcode == "custom-call":
        return instruction.get("custom_call_target") in MARKER_TARGETS
    return instruction.opcode in VIEWS


def _is_fused(instruction: Instruction, readers: Sequence[Instruction]) -> bool:
    """Whether the value lives only inside the kernels that read it."""
    if instruction.opcode in ("constant", "after-all"):
        return instruction.opcode == "constant" and instruction.shape.size_bytes <= 16
    if instruction.opcode not in _FUSIBLE or not readers:
        return False
    if len(readers) > 1 and instruction.opcode in _COMPUTED_ONCE:
        return False
    return all(reader.opcode in _FUSING for reader in readers)
