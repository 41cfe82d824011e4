"""Common subexpression elimination, after XLA's HloCSE.

Frameworks trace an instruction anew at each use, mainly in the backward pass. XLA retains the first one, and its value
lives until the last reader; modeling duplicates with two short lives would miss that memory. An optimization barrier's
result differs from its operand: recomputation behind one stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.hlo import Computation, Instruction, Shape

#: Opcodes never merged by XLA: effects, calls of other programs, barriers.
_NEVER_MERGED = frozenset({
    "after-all", "async-done", "async-start", "async-update", "call", "conditional", "custom-call", "domain", "infeed",
    "opt-barrier", "optimization-barrier", "outfeed", "parameter", "partition-id", "recv", "recv-done", "replica-id",
    "rng", "rng-bit-generator", "rng-get-and-update-state", "send", "send-done", "while",
})  # fmt: skip

_COMMUTATIVE = frozenset({"add", "and", "maximum", "minimum", "multiply", "or", "xor"})

#: Attributes without influence on the value.
_COMMENTS = frozenset({"metadata", "sharding", "frontend_attributes", "backend_config"})

_Key = tuple[object, ...]


def eliminate_duplicates(program: DeviceProgram) -> DeviceProgram:
    """The program with the first of each set of equal nodes in place of all of them."""
    signatures = InstructionKeys()
    first: dict[_Key, int] = {}
    merged = list(range(len(program.opcodes)))
    for node, opcode in enumerate(program.opcodes):
        operands = tuple([merged[operand] for operand in program.operands[node]])
        program.operands[node] = operands
        if opcode in _NEVER_MERGED:
            continue
        key_operands = tuple(sorted(operands)) if opcode in _COMMUTATIVE else operands
        key = (opcode, signatures.of(program, node), program.sizes_bytes[node], key_operands)
        merged[node] = first.setdefault(key, node)
    program.root = merged[program.root]
    return program.without_dead()


class EqualValues:
    """Equal nodes of a computation, in any sharding; queried in program order.

    XLA:TPU merges them before partitioning: other shardings are resharded from the first one, even of an iota that each
    device could compute.
    """

    def __init__(self) -> None:
        self._signatures = InstructionKeys()
        self._first: dict[_Key, int] = {}
        self._merged: list[int] = []

    def first(self, node: int, instruction: Instruction, operands: Sequence[int]) -> int:
        """The first node equal to `node`: itself if no earlier one is."""
        first = node
        if instruction.opcode not in _NEVER_MERGED:
            merged = tuple(self._merged[operand] for operand in operands)
            key = (instruction.opcode, self._signatures.of_instruction(instruction), merged)
            first = self._first.setdefault(key, node)
        self._merged.append(first)
        return first


class InstructionKeys:
    """Keys that distinguish the instructions of one program, operands aside."""

    def __init__(self) -> None:
        self._computations: dict[Computation, _Key] = {}
        #: Text of shapes without layouts, by identity; referenced here to stay alive.
        self._shapes: dict[int, tuple[Shape, _Key]] = {}

    def of(self, program: DeviceProgram, node: int) -> object:
        instruction = program.instructions[node]
        if program.opcodes[node] == instruction.opcode:
            return (*self.of_instruction(instruction), program.marks.get(node))
        return program.marks.get(node, node)

    def key_of_hoisted(self, program: DeviceProgram, node: int) -> object:
        """A key valid across loop bodies: instructions added by a plan or compiler are distinguished by mark alone."""
        instruction = program.instructions[node]
        said = self.of_instruction(instruction) if program.opcodes[node] == instruction.opcode else ()
        return (*said, program.marks.get(node))

    def of_instruction(self, instruction: Instruction) -> _Key:
        regions, shape = instruction.called, instruction.shape
        if id(shape) not in self._shapes:
            self._shapes[id(shape)] = shape, tuple([(leaf.element_type, leaf.dimensions) for leaf in shape.leaves])
        attributes = [
            part.text for name, part in instruction.attributes.items() if name not in _COMMENTS and name not in regions
        ]
        value = instruction.name if instruction.is_elided else instruction.payload
        said = (value, instruction.index, self._shapes[id(shape)][1], *attributes)
        if not regions:
            return said
        return (*said, *[self._computation(part) for group in regions.values() for part in group])

    def _computation(self, computation: Computation) -> _Key:
        if computation not in self._computations:
            place = {instruction: i for i, instruction in enumerate(computation)}
            self._computations[computation] = tuple(
                (member.opcode, *self.of_instruction(member), *(place[operand] for operand in member.operands))
                for member in computation
            )
        return self._computations[computation]
