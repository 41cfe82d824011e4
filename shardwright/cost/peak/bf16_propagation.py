"""bfloat16 storage of values read only by products that multiply in bfloat16.

After XLA's BFloat16Propagation (xla/service/bfloat16_propagation.cc), through instructions that pass elements on
unchanged: moves, tuples, and the carried values of loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwright.cost.opcodes import IDENTITIES, PRODUCTS, TUPLE_VIEWS
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.inline import bodies, first_leaf, inline_calls
from shardwright.cost.rounding import rounds_operand
from shardwright.hlo import Computation, Instruction
from shardwright.hlo.shapes import TupleShape

#: Opcodes that pass elements on unchanged, also between devices.
_MOVING = IDENTITIES | {
    "transpose", "copy", "slice", "dynamic-slice", "dynamic-update-slice", "all-gather", "all-to-all",
    "collective-permute",
}  # fmt: skip

#: Leaves of a computation's result reached by a value; None with a reader other than a product.
_Reached = frozenset[int] | None


def round_for_products(program: DeviceProgram) -> None:
    """Store in bfloat16 every float32 value read only by products: they multiply in bfloat16 anyway."""
    reached = _LeafConsumers(program.opcodes, program.instructions, program.operands, program.root).trace_leaves()
    for node, opcode in enumerate(program.opcodes):
        if opcode == "while":
            leaves = program.instructions[node].shape.leaves
            program.sizes_bytes[node] = tuple(
                size // 2 if leaves[leaf].element_type == "f32" and reached[node, leaf] == frozenset() else size
                for leaf, size in enumerate(program.sizes_bytes[node])
            )
        elif (
            opcode != "parameter"
            and program.sizes_bytes[node] == (4 * program.elements[node],)
            and reached[node, 0] == frozenset()
        ):
            program.sizes_bytes[node] = (2 * program.elements[node],)


@dataclass(slots=True)
class _LeafConsumers:
    """Readers of each leaf of each node of a program."""

    opcodes: Sequence[str]
    instructions: Sequence[Instruction]
    operands: Sequence[tuple[int, ...]]
    root: int
    users: list[list[int]] = field(default_factory=list)
    found: dict[tuple[int, int], _Reached] = field(default_factory=dict)
    rounded: dict[int, frozenset[int]] = field(default_factory=dict)

    def trace_leaves(self) -> dict[tuple[int, int], _Reached]:
        """(node, leaf) → the result's leaves it is passed on to; None with readers other than these and products."""
        self.users = [[] for _ in self.opcodes]
        for node, operands in enumerate(self.operands):
            for operand in dict.fromkeys(operands):
                self.users[operand].append(node)
        for node in range(len(self.opcodes) - 1, -1, -1):
            for leaf in range(len(self.instructions[node].shape.leaves)):
                self.found[node, leaf] = self._merge_users(node, leaf)
        return self.found

    def _merge_users(self, node: int, leaf: int) -> _Reached:
        joined: frozenset[int] = frozenset({leaf}) if node == self.root else frozenset()
        is_unread = not self.users[node] and node != self.root
        if is_unread or (self.opcodes[node] == "while" and leaf not in self._find_rounded_in(node)):
            return None
        for user in self.users[node]:
            for reached in self._trace_user(user, node, leaf):
                if reached is None:
                    return None
                joined |= reached
        return joined

    def _trace_user(self, user: int, node: int, leaf: int) -> Iterator[_Reached]:
        opcode = self.opcodes[user]
        if opcode in _MOVING:
            yield self.found[user, 0]
        elif opcode == "tuple":
            first = 0
            for operand in self.operands[user]:
                if operand == node:
                    yield self.found[user, first + leaf]
                first += len(self.instructions[operand].shape.leaves)
        elif opcode == "get-tuple-element":
            shape = self.instructions[node].shape
            assert isinstance(shape, TupleShape)
            inside = leaf - first_leaf(shape, self.instructions[user].index)
            if 0 <= inside < len(self.instructions[user].shape.leaves):
                yield self.found[user, inside]
        elif opcode == "while":
            yield self.found[user, leaf]
        elif opcode in TUPLE_VIEWS:
            yield self.found[user, leaf] if len(self.operands[user]) == 1 else None
        elif opcode in PRODUCTS:
            read = [i for i, operand in enumerate(self.operands[user]) if operand == node]
            if not all(rounds_operand(self.instructions[user], position) for position in read):
                yield None
        elif not self._is_rounding(user):
            yield None

    def _find_rounded_in(self, loop: int) -> frozenset[int]:
        if loop not in self.rounded:
            (body,) = bodies(self.instructions[loop])
            self.rounded[loop] = _find_rounded_leaves(body)
        return self.rounded[loop]

    def _is_rounding(self, node: int) -> bool:
        """Whether a node is a conversion added by the compiler before products, absent from the text."""
        return self.opcodes[node] == "convert" and self.instructions[node].opcode != "convert"


def _find_rounded_leaves(body: Computation) -> frozenset[int]:
    """Leaves of a loop's carried value that its body only passes on or reads in products."""
    flat = inline_calls(body)
    opcodes = [instruction.opcode for instruction in flat.instructions]
    reached = _LeafConsumers(opcodes, flat.instructions, flat.operands, flat.root).trace_leaves()
    (parameter,) = flat.parameters
    return frozenset(
        leaf
        for leaf in range(len(flat.instructions[parameter].shape.leaves))
        if (handed_on := reached[parameter, leaf]) is not None and handed_on <= {leaf}
    )
