"""Loop-invariant code motion: values equal in all iterations, computed once before the loop.

After XLA's WhileLoopInvariantCodeMotion (xla/service/while_loop_invariant_code_motion.cc), innermost loops first. The
loop carries hoisted values. They are computed directly after their operands, whatever precedes the loop, and are live
until it ends; equal values of two loops, or of a loop and its surroundings, are computed once. An element then only
passed through a body, with no reader after the loop, is no longer carried (while_loop_simplifier.cc).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwright.cost.peak.cse import InstructionKeys
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.inline import bodies, inline_calls
from shardwright.hlo import Computation, Instruction

#: Computed in their readers: not worth hoisting alone.
_FREE = frozenset({
    "bitcast", "broadcast", "constant", "get-tuple-element", "iota", "reshape", "reverse", "slice", "transpose",
})  # fmt: skip

#: Never hoisted: effects, calls of programs, barriers, values with several writers.
_NEVER_HOISTED = frozenset({
    "after-all", "call", "conditional", "custom-call", "domain", "infeed", "opt-barrier", "optimization-barrier",
    "outfeed", "parameter", "recv", "rng", "rng-bit-generator", "rng-get-and-update-state", "send", "tuple", "while",
})  # fmt: skip


def find_invariants(body: DeviceProgram, what: str) -> frozenset[int]:
    """Nodes of a loop's body computed before the loop and read in it.

    what: `all`, or a part of it, by the names in hardware profiles (`Compiler.hoists_loop_invariants`).
    """
    if what == "none":
        return frozenset()
    invariant = _find_unchanged(body)
    worth: set[int] = set()
    for node, opcode in enumerate(body.opcodes):
        if opcode in _NEVER_HOISTED or not all(operand in invariant for operand in body.operands[node]):
            continue
        invariant.add(node)
        if _is_worth(opcode, what):
            worth.add(node)
    needed = _read_by_worthy(body, worth)
    return frozenset(
        node for node, users in enumerate(body.users()) if node in worth and any(user not in needed for user in users)
    )


def _is_worth(opcode: str, what: str) -> bool:
    return opcode == "convert" if what == "roundings" else opcode not in _FREE


def _find_unchanged(body: DeviceProgram) -> set[int]:
    """The elements of its argument passed through a body unchanged."""
    return {
        node
        for index, node in enumerate(body.operands[body.root])
        if body.opcodes[node] == "get-tuple-element"
        and body.operands[node][0] in body.parameters
        and body.instructions[node].index == index
    }


def _read_by_worthy(body: DeviceProgram, worth: set[int]) -> set[int]:
    """The nodes computed before the loop: those worth hoisting, and their transitive operands."""
    needed = set(worth)
    for node in range(len(body.opcodes) - 1, -1, -1):
        if node in needed:
            needed.update(body.operands[node])
    return needed


class Loop(NamedTuple):
    """A loop's body, split into hoisted nodes and the rest.

    body: whole.
    hoisted: its nodes computed before the loop, in order.
    rest: the body with the hoisted nodes added to its parameters, in the same order.
    unread: positions of elements of its argument that it then only passes through.
    """

    body: DeviceProgram
    hoisted: tuple[int, ...]
    rest: DeviceProgram
    unread: frozenset[int]


def loop_of(body: DeviceProgram, what: str) -> Loop:
    """The body of a loop, split by hoisting. what: see `find_invariants`."""
    nodes = tuple(sorted(find_invariants(body, what)))
    opcodes, operands = list(body.opcodes), list(body.operands)
    for node in nodes:
        opcodes[node], operands[node] = "parameter", ()
    rest = DeviceProgram(
        opcodes=opcodes,
        instructions=body.instructions,
        operands=operands,
        sizes_bytes=body.sizes_bytes,
        elements=body.elements,
        parameters=[*body.parameters, *nodes],
        root=body.root,
        marks={node: mark for node, mark in body.marks.items() if node not in nodes},
    ).without_dead()
    users = rest.users()
    handed_on = {node for node in _find_unchanged(rest) if users[node] == [rest.root]}
    return Loop(body, nodes, rest, frozenset(rest.instructions[node].index for node in handed_on))


def hoist_invariants(program: DeviceProgram, loop: Callable[[Computation], Loop]) -> DeviceProgram:
    """The program with loop invariants hoisted ahead of their loops, in added operands, and without elements carried in
    vain. loop: body → its split.
    """
    loops = {node: loop(body_of(program.instructions[node])) for node in loops_of(program)}
    if not any(loop_plan.hoisted or loop_plan.unread for loop_plan in loops.values()):
        return program
    return _Hoisting(program, loops).run()


def loop_operands(program: DeviceProgram, loop: int) -> tuple[int, ...]:
    """A loop's operands: the elements of its argument, then the hoisted values."""
    first, *more = program.operands[loop]
    return (*program.operands[first], *more)


class _Hoisting:
    """Rewrites a program, node by node."""

    def __init__(self, program: DeviceProgram, loops: dict[int, Loop]) -> None:
        self.program = program
        self.loops = loops
        self.users = program.users()
        self.made = DeviceProgram()
        self.place: list[int] = []
        self.signatures = InstructionKeys()
        self.ahead: dict[object, int] = {}  # hoisted nodes
        self.known: dict[object, int] = {}  # the program's own nodes

    def run(self) -> DeviceProgram:
        program, output, place = self.program, self.made, self.place
        for node, operands in enumerate(program.operands):
            new_operands: Sequence[int] = [place[operand] for operand in operands]
            if node in self.loops:
                new_operands = self._read_by_loop(node)
            place.append(self._of_program(node, new_operands))
        output.parameters = [place[node] for node in program.parameters]
        output.root = place[program.root]
        return output.without_dead()

    def _of_program(self, node: int, operands: Sequence[int]) -> int:
        """Copy of one of the program's own nodes. An equal hoisted value serves here too, live until then; later hoists
        reuse this node.
        """
        program = self.program
        is_told_apart = program.opcodes[node] == program.instructions[node].opcode or node in program.marks
        if program.opcodes[node] in _NEVER_HOISTED or not is_told_apart:
            return self._add_copy(program, node, operands)
        key = self._key(program, node, operands)
        if key in self.ahead:
            return self.ahead[key]
        self.known[key] = copied = self._add_copy(program, node, operands)
        return copied

    def _key(self, program: DeviceProgram, node: int, operands: Sequence[int]) -> object:
        opcode, sizes = program.opcodes[node], program.sizes_bytes[node]
        return opcode, tuple(operands), sizes, self.signatures.key_of_hoisted(program, node)

    def _add_copy(self, program: DeviceProgram, node: int, operands: Sequence[int]) -> int:
        copied = self.made.add_like(program, node, operands)
        if node in program.marks:
            self.made.marks[copied] = program.marks[node]
        return copied

    def _read_by_loop(self, node: int) -> list[int]:
        program, loop = self.program, self.loops[node]
        (argument,) = program.operands[node]
        elements = [self.place[element] for element in program.operands[argument]]
        ahead = [self._add_before_loop(loop.body, invariant, elements) for invariant in loop.hoisted]
        for index in loop.unread - _read_of(program, self.users, node):
            elements[index] = self._add_placeholder(program.operands[argument][index])
        return [self.made.add_like(program, argument, elements), *ahead]

    def _add_before_loop(self, body: DeviceProgram, node: int, elements: Sequence[int]) -> int:
        """Copy, before the loop, of a body's node computed from elements of its argument."""
        instruction = body.instructions[node]
        if body.opcodes[node] == "get-tuple-element" and body.operands[node][0] in body.parameters:
            return elements[instruction.index]
        new_operands = tuple(self._add_before_loop(body, operand, elements) for operand in body.operands[node])
        key = self._key(body, node, new_operands)
        if key not in self.ahead:
            self.ahead[key] = self.known[key] if key in self.known else self._add_copy(body, node, new_operands)
        return self.ahead[key]

    def _add_placeholder(self, element: int) -> int:
        """Placeholder carried in place of an unread element."""
        sizes = (0,) * len(self.program.sizes_bytes[element])
        return self.made.add("constant", self.program.instructions[element], (), sizes, 0)


def loops_of(program: DeviceProgram) -> list[int]:
    """The loops whose argument is a tuple made by the program."""
    return [
        node
        for node, opcode in enumerate(program.opcodes)
        if opcode == "while" and program.opcodes[program.operands[node][0]] == "tuple"
    ]


def body_of(loop: Instruction) -> Computation:
    """The repeated computation of a loop."""
    (body,) = bodies(loop)
    return body


def _read_of(program: DeviceProgram, users: Sequence[Sequence[int]], loop: int) -> set[int]:
    """Positions of the elements of a loop's result read after it or by its condition."""
    instruction = program.instructions[loop]
    (condition,) = instruction.called["condition"]
    needed = inline_calls(condition).instructions
    indices = {needed_value.index for needed_value in needed if needed_value.opcode == "get-tuple-element"}
    for user in users[loop]:
        if program.opcodes[user] != "get-tuple-element":
            return set(range(len(program.operands[program.operands[loop][0]])))
        indices.add(program.instructions[user].index)
    return indices
