"""Peak bytes on one device, by liveness over the program in its own order.

What XLA does to buffers is modelled as far as it decides the peak:
views share their operand's memory; elementwise values and re-indexing that one fusible
instruction reads are never stored, so what they read stays live in their stead; an
instruction may write over an operand of the same size that nobody reads later; a loop's
carried values are updated in place and its body adds its own peak; a donated
argument's buffer is taken over by what is computed from it. Not modelled: XLA:CPU's merging
of all all-reduces into one, which keeps their operands until the last is ready, and
workspace inside kernels (convolutions).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shardwright.cost.inline import FlatComputation, Node, inlined
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

#: Cheap and small enough in what they read that XLA computes them again for every reader.
_RECOMPUTED = frozenset({"broadcast", "iota", "constant", "compare", "convert", "slice", "not", "reverse", "pad"})

_IN_PLACE = ELEMENTWISE | {
    "dynamic-update-slice", "scatter", "while", "conditional", "call", "copy", "sort", "custom-call",
}  # fmt: skip

#: Attributes that name the computations an instruction runs, by opcode.
_BODIES = {
    "while": ("body",),
    "call": ("to_apply",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}


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
    leaves: dict[Node, tuple[frozenset[int], ...]] = field(default_factory=dict)

    def new(self, size_bytes: int) -> int:
        self.bytes.append(size_bytes)
        self.last_use.append(-1)
        return len(self.bytes) - 1

    def of(self, nodes: Iterable[Node]) -> set[int]:
        """All buffers that hold the nodes' values."""
        return {buffer for node in nodes for leaf in self.leaves[node] for buffer in leaf}


class _Estimate:
    def __init__(self, mesh: Mesh, plans: Mapping[str, InstructionPlan]) -> None:
        self._mesh = mesh
        self._plans = plans
        self._sizes: dict[tuple[ArrayShape, TensorSharding], int] = {}
        self._peaks: dict[Computation, int] = {}

    def peak_bytes(self, computation: Computation, donated: set[int]) -> int:
        """Most bytes of intermediate values at once; parameters and results are the caller's."""
        flat = inlined(computation)
        buffers = self._place(flat)
        charged = [-1] * len(buffers.bytes)  # bytes this computation pays for a buffer; -1: not yet stored
        for parameter in flat.parameters:
            for buffer in buffers.of([parameter]):
                charged[buffer] = 0
                if parameter.instruction.index not in donated:
                    buffers.last_use[buffer] = len(flat.nodes)
        for buffer in buffers.of([flat.root] if flat.root else []):
            charged[buffer] = 0
            buffers.last_use[buffer] = len(flat.nodes)
        return self._sweep(flat, buffers, charged)

    def _place(self, flat: FlatComputation) -> _Buffers:
        """Which buffers hold each value, and the last position that reads each buffer."""
        buffers = _Buffers()
        readers = _readers(flat)
        for position, node in enumerate(flat.nodes):
            instruction = node.instruction
            read = [leaf for operand in node.operands for leaf in buffers.leaves[operand]]
            if _is_view(instruction):
                leaves = _viewed(instruction, read)
            elif _is_fused(instruction, readers.get(node, ())):
                leaves = (frozenset().union(*read),)
            else:
                kept = _invariant_leaves(instruction)
                leaves = tuple(
                    read[i] if i in kept else frozenset((buffers.new(size),))
                    for i, size in enumerate(self._result_bytes(instruction))
                )
            buffers.leaves[node] = leaves
            for leaf in read:
                for buffer in leaf:
                    buffers.last_use[buffer] = position
        return buffers

    def _sweep(self, flat: FlatComputation, buffers: _Buffers, charged: list[int]) -> int:
        live = peak = 0
        for position, node in enumerate(flat.nodes):
            dying = [buffer for buffer in buffers.of(node.operands) if buffers.last_use[buffer] == position]
            in_place = node.instruction.opcode in _IN_PLACE
            reusable = {buffers.bytes[buffer]: buffer for buffer in sorted(dying)} if in_place else {}
            for buffer in sorted(buffers.of([node])):
                if charged[buffer] >= 0:
                    continue
                old = reusable.pop(buffers.bytes[buffer], None)
                if old is not None:
                    charged[buffer], charged[old] = charged[old], 0
                else:
                    charged[buffer] = buffers.bytes[buffer]
                    live += charged[buffer]
            peak = max(peak, live + self._transient_bytes(node))
            for buffer in dying:
                live -= charged[buffer]
                charged[buffer] = 0
        return peak

    def _transient_bytes(self, node: Node) -> int:
        """What an instruction needs only while it runs: bodies, gathered operands, unreduced results."""
        instruction = node.instruction
        bodies = [
            self._body_peak(computation)
            for name in _BODIES.get(instruction.opcode, ())
            for computation in instruction.called.get(name, ())
        ]
        plan = self._plans.get(instruction.name)
        if plan is None or instruction.opcode in VIEWS:
            return max(bodies, default=0)
        return max(bodies, default=0) + self._gathered_bytes(node, plan) + self._unreduced_bytes(instruction, plan)

    def _body_peak(self, computation: Computation) -> int:
        if computation not in self._peaks:
            self._peaks[computation] = self.peak_bytes(computation, donated={p.index for p in computation.parameters})
        return self._peaks[computation]

    def _gathered_bytes(self, node: Node, plan: InstructionPlan) -> int:
        """Copies of operands that are used in another layout than they have."""
        total = 0
        for operand, wanted in zip(node.operands, plan.operands, strict=True):
            have = self._result_of(operand.instruction)
            for shape, source, target in zip(operand.instruction.shape.leaves, have, wanted, strict=True):
                if source != target and reshard(shape.element_type, shape.dimensions, source, target, self._mesh):
                    total += self._leaf_bytes(shape, target)
        return total

    def _unreduced_bytes(self, instruction: Instruction, plan: InstructionPlan) -> int:
        """What a partial result takes beyond the shard that a reduce-scatter leaves of it."""
        total = 0
        for shape, result in zip(instruction.shape.leaves, plan.result, strict=True):
            if not set(plan.partial) & set(result.axes):
                continue
            before = TensorSharding(tuple(tuple(a for a in dim if a not in plan.partial) for dim in result.dims))
            total += self._leaf_bytes(shape, before) - self._leaf_bytes(shape, result)
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


def _readers(flat: FlatComputation) -> dict[Node, list[Instruction]]:
    readers: dict[Node, list[Instruction]] = {}
    for node in flat.nodes:
        for operand in node.operands:
            readers.setdefault(operand, []).append(node.instruction)
    return readers


def _viewed(instruction: Instruction, read: Sequence[frozenset[int]]) -> tuple[frozenset[int], ...]:
    """The operands' leaves that a view shows."""
    first = 0
    shape = instruction.operands[0].shape if instruction.operands else None
    if instruction.opcode == "get-tuple-element" and isinstance(shape, TupleShape):
        first = sum(len(element.leaves) for element in shape.elements[: instruction.index])
    return tuple(read[first : first + len(instruction.shape.leaves)])


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
    if len(readers) > 1 and instruction.opcode not in _RECOMPUTED:
        return False
    return all(reader.opcode in _FUSING for reader in readers)
