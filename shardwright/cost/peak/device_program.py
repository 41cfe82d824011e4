"""Per-device program: input of the memory prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.hlo import ArrayShape, Instruction
from shardwright.hlo.shapes import Shape


@dataclass(slots=True, kw_only=True)
class DeviceProgram:
    """Instructions of one device, operands before users; a node is its position.

    opcodes: HLO's, or a collective's kind if added by a plan.
    instructions: the instruction computed, or the one an added node belongs to.
    sizes_bytes: per array leaf of the result.
    elements: of all leaves.
    marks: on nodes added by a plan or a compiler, their key besides opcode, operands and sizes.
    """

    opcodes: list[str] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    operands: list[tuple[int, ...]] = field(default_factory=list)
    sizes_bytes: list[tuple[int, ...]] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    root: int = -1
    marks: dict[int, object] = field(default_factory=dict)

    def add(
        self, opcode: str, instruction: Instruction, operands: tuple[int, ...], sizes: tuple[int, ...], elements: int
    ) -> int:
        """Append a node; returns it."""
        self.opcodes.append(opcode)
        self.instructions.append(instruction)
        self.operands.append(operands)
        self.sizes_bytes.append(sizes)
        self.elements.append(elements)
        return len(self.opcodes) - 1

    def add_like(self, program: DeviceProgram, node: int, operands: Sequence[int], opcode: str | None = None) -> int:
        """Append a copy of another program's node, with its instruction and sizes; returns it."""
        sizes, elements = program.sizes_bytes[node], program.elements[node]
        return self.add(opcode or program.opcodes[node], program.instructions[node], tuple(operands), sizes, elements)

    def copy(self) -> DeviceProgram:
        """A copy to extend without changing this program."""
        return DeviceProgram(
            opcodes=[*self.opcodes],
            instructions=[*self.instructions],
            operands=[*self.operands],
            sizes_bytes=[*self.sizes_bytes],
            elements=[*self.elements],
            parameters=[*self.parameters],
            root=self.root,
            marks=dict(self.marks),
        )

    def without_dead(self) -> DeviceProgram:
        """The program without nodes unreachable from the root; parameters stay."""
        is_live = [False] * len(self.opcodes)
        todo = [self.root, *self.parameters]
        while todo:
            node = todo.pop()
            if not is_live[node]:
                is_live[node] = True
                todo += self.operands[node]
        if all(is_live):
            return self
        live_nodes = [node for node, live in enumerate(is_live) if live]
        place = dict(zip(live_nodes, range(len(live_nodes)), strict=True))
        return DeviceProgram(
            opcodes=[self.opcodes[node] for node in live_nodes],
            instructions=[self.instructions[node] for node in live_nodes],
            operands=[tuple([place[operand] for operand in self.operands[node]]) for node in live_nodes],
            sizes_bytes=[self.sizes_bytes[node] for node in live_nodes],
            elements=[self.elements[node] for node in live_nodes],
            parameters=[place[node] for node in self.parameters],
            root=place[self.root],
            marks={place[node]: mark for node, mark in self.marks.items() if is_live[node]},
        )

    def post_order(self) -> list[int]:
        """Transitive operands of the root, each after its operands, the first operand's first: the visiting order of
        XLA's passes (HloInstruction::Accept in xla/hlo/ir/hlo_instruction.cc).
        """
        order: list[int] = []
        is_entered = [False] * len(self.opcodes)
        todo = [self.root]
        while todo:
            node = todo.pop()
            if node < 0:  # after all its operands
                order.append(~node)
            elif not is_entered[node]:
                is_entered[node] = True
                todo.append(~node)
                todo += reversed(self.operands[node])
        return order

    def rank(self, node: int) -> int:
        """Number of dimensions larger than one of a node's instruction; the maximum over its leaves."""
        return _rank(self.instructions[node].shape)

    def constant_of(self, node: int) -> int | None:
        """The constant behind a node, through broadcasts and conversions; None without one."""
        while self.opcodes[node] in ("broadcast", "convert"):
            (node,) = self.operands[node]
        return node if self.opcodes[node] == "constant" else None

    def users(self) -> list[list[int]]:
        """Nodes that read each node, in program order, each once."""
        users: list[list[int]] = [[] for _ in self.opcodes]
        for node, operands in enumerate(self.operands):
            for operand in operands:
                if not users[operand] or users[operand][-1] != node:
                    users[operand].append(node)
        return users


def _rank(shape: Shape) -> int:
    """Number of dimensions larger than one; the maximum over leaves."""
    if isinstance(shape, ArrayShape):
        return len(shape.dimensions) - shape.dimensions.count(1)
    return max((_rank(leaf) for leaf in shape.leaves), default=0)
