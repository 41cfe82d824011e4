"""A program in which nothing is computed twice from the same operands, as XLA's HloCSE leaves it.

Frameworks trace the same instruction again wherever it is needed, in the backward pass above all. XLA keeps the
first one, so its value stays until the last reader: memory that is missed where duplicates count as two short lives.
What an optimization barrier hands on is another value than what it took, so computing again behind one stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.hlo import Computation, Instruction, Shape

#: What XLA does not merge: it has effects, runs other programs, or is there to keep values apart.
_NEVER_MERGED = frozenset({
    "after-all", "async-done", "async-start", "async-update", "call", "conditional", "custom-call", "domain", "infeed",
    "opt-barrier", "optimization-barrier", "outfeed", "parameter", "partition-id", "recv", "recv-done", "replica-id",
    "rng", "rng-bit-generator", "rng-get-and-update-state", "send", "send-done", "while",
})  # fmt: skip

_COMMUTATIVE = frozenset({"add", "and", "maximum", "minimum", "multiply", "or", "xor"})

#: Attributes that say nothing of what is computed.
_COMMENTS = frozenset({"metadata", "sharding", "frontend_attributes", "backend_config"})

_Key = tuple[object, ...]


def eliminate_duplicates(program: DeviceProgram) -> DeviceProgram:
    """The same program with the first of each set of equal nodes in place of all of them."""
    signatures = InstructionKeys()
    first: dict[_Key, int] = {}
    merged = list(range(len(program.opcodes)))
    for node, opcode in enumerate(program.opcodes):
        operands = tuple([merged[operand] for operand in program.operands[node]])
        program.operands[node] = operands
        if opcode in _NEVER_MERGED:
            continue
        read = tuple(sorted(operands)) if opcode in _COMMUTATIVE else operands
        key = (opcode, signatures.of(program, node), program.sizes_bytes[node], read)
        merged[node] = first.setdefault(key, node)
    program.root = merged[program.root]
    return program.without_dead()


class EqualValues:
    """Which nodes of a computation are equal, however they lie; asked in their order.

    XLA:TPU makes them one before it partitions: what lies otherwise than the first of them is brought from there, be it
    an iota that each device could make.
    """

    def __init__(self) -> None:
        self._signatures = InstructionKeys()
        self._first: dict[_Key, int] = {}
        self._merged: list[int] = []

    def first(self, node: int, instruction: Instruction, operands: Sequence[int]) -> int:
        """The first node that is equal to `node`, which is itself where none before it is."""
        found = node
        if instruction.opcode not in _NEVER_MERGED:
            read = tuple(self._merged[operand] for operand in operands)
            key = (instruction.opcode, self._signatures.of_instruction(instruction), read)
            found = self._first.setdefault(key, node)
        self._merged.append(found)
        return found


class InstructionKeys:
    """What tells the instructions of one program apart, operands aside."""

    def __init__(self) -> None:
        self._computations: dict[Computation, _Key] = {}
        #: What shapes say, their layouts aside, by their identities: they live as long as they are here.
        self._shapes: dict[int, tuple[Shape, _Key]] = {}

    def of(self, program: DeviceProgram, node: int) -> object:
        instruction = program.instructions[node]
        if program.opcodes[node] == instruction.opcode:
            return (*self.of_instruction(instruction), program.marks.get(node))
        return program.marks.get(node, node)

    def key_of_hoisted(self, program: DeviceProgram, node: int) -> object:
        """The same across the bodies of loops, where what a plan or a compiler adds is told apart by its mark alone."""
        instruction = program.instructions[node]
        said = self.of_instruction(instruction) if program.opcodes[node] == instruction.opcode else ()
        return (*said, program.marks.get(node))

    def of_instruction(self, instruction: Instruction) -> _Key:
        regions, shape = instruction.called, instruction.shape
        if id(shape) not in self._shapes:
            self._shapes[id(shape)] = shape, tuple([(leaf.element_type, leaf.dimensions) for leaf in shape.leaves])
        attributes = [
            each.text for name, each in instruction.attributes.items() if name not in _COMMENTS and name not in regions
        ]
        value = instruction.name if instruction.is_elided else instruction.payload
        said = (value, instruction.index, self._shapes[id(shape)][1], *attributes)
        if not regions:
            return said
        return (*said, *[self._computation(each) for group in regions.values() for each in group])

    def _computation(self, computation: Computation) -> _Key:
        if computation not in self._computations:
            place = {instruction: i for i, instruction in enumerate(computation)}
            self._computations[computation] = tuple(
                (each.opcode, *self.of_instruction(each), *(place[operand] for operand in each.operands))
                for each in computation
            )
        return self._computations[computation]
