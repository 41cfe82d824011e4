"""What a loop's body computes the same way every time, and XLA therefore computes once before the loop.

After XLA's WhileLoopInvariantCodeMotion (xla/service/while_loop_invariant_code_motion.cc), the innermost loops first.
Hoisted values are carried by the loop. They are made as soon as what they are made of is there, whatever runs before
the loop, and take memory until it ends; what two loops hoist alike, or what runs beside them too, is made once. What a
loop's body then only hands on, and nobody reads behind it, is not carried any more (while_loop_simplifier.cc).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwright.cost.peak.cse import InstructionKeys
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.inline import bodies, inline_calls
from shardwright.hlo import Computation, Instruction

#: Computed where they are read: nothing is gained by hoisting them for themselves.
_FREE = frozenset({
    "bitcast", "broadcast", "constant", "get-tuple-element", "iota", "reshape", "reverse", "slice", "transpose",
})  # fmt: skip

#: Never computed ahead: effects, programs of their own, values that are to be kept apart or that several may write.
_NEVER_HOISTED = frozenset({
    "after-all", "call", "conditional", "custom-call", "domain", "infeed", "opt-barrier", "optimization-barrier",
    "outfeed", "parameter", "recv", "rng", "rng-bit-generator", "rng-get-and-update-state", "send", "tuple", "while",
})  # fmt: skip


def find_invariants(body: DeviceProgram, what: str) -> frozenset[int]:
    """Nodes of a loop's body whose values are made before the loop and read in it.

    what: `all`, or a part of it, as hardware profiles name it (`Compiler.hoists_loop_invariants`).
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
    """The elements of its argument that a body hands on as they are."""
    return {
        node
        for index, node in enumerate(body.operands[body.root])
        if body.opcodes[node] == "get-tuple-element"
        and body.operands[node][0] in body.parameters
        and body.instructions[node].index == index
    }


def _read_by_worthy(body: DeviceProgram, worth: set[int]) -> set[int]:
    """What runs before the loop: the nodes worth it, and all that they are made of."""
    needed = set(worth)
    for node in range(len(body.opcodes) - 1, -1, -1):
        if node in needed:
            needed.update(body.operands[node])
    return needed


class Loop(NamedTuple):
    """A loop's body, what it hoists, and what is left of it.

    body: whole. hoisted: its nodes that are made before the loop, in order. rest: the body with those as further
    parameters, in the same order. unread: positions of elements of its argument that it only hands on then.
    """

    body: DeviceProgram
    hoisted: tuple[int, ...]
    rest: DeviceProgram
    unread: frozenset[int]


def loop_of(body: DeviceProgram, what: str) -> Loop:
    """The body of a loop with what it hoists apart. what: as for `hoisted`."""
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
    """The same program with what its loops hoist ahead of them, as further operands, and without what they carry in
    vain. loop: of a loop's body."""
    loops = {node: loop(body_of(program.instructions[node])) for node in loops_of(program)}
    if not any(each.hoisted or each.unread for each in loops.values()):
        return program
    return _Hoisting(program, loops).run()


def loop_operands(program: DeviceProgram, loop: int) -> tuple[int, ...]:
    """What a loop takes: the elements of its argument, and behind them what it hoisted."""
    first, *more = program.operands[loop]
    return (*program.operands[first], *more)


class _Hoisting:
    """Writes a program again, node by node."""

    def __init__(self, program: DeviceProgram, loops: dict[int, Loop]) -> None:
        self.program = program
        self.loops = loops
        self.users = program.users()
        self.made = DeviceProgram()
        self.place: list[int] = []
        self.signatures = InstructionKeys()
        self.ahead: dict[object, int] = {}  # what is hoisted
        self.known: dict[object, int] = {}  # what the program makes itself

    def run(self) -> DeviceProgram:
        program, made, place = self.program, self.made, self.place
        for node, operands in enumerate(program.operands):
            read: Sequence[int] = [place[operand] for operand in operands]
            if node in self.loops:
                read = self._read_by_loop(node)
            place.append(self._of_program(node, read))
        made.parameters = [place[node] for node in program.parameters]
        made.root = place[program.root]
        return made.without_dead()

    def _of_program(self, node: int, read: Sequence[int]) -> int:
        """The node of one of the program's own: what was hoisted alike serves for it too, and lives until then; and
        what is hoisted later is not made again."""
        program = self.program
        is_told_apart = program.opcodes[node] == program.instructions[node].opcode or node in program.marks
        if program.opcodes[node] in _NEVER_HOISTED or not is_told_apart:
            return self._add_copy(program, node, read)
        key = self._key(program, node, read)
        if key in self.ahead:
            return self.ahead[key]
        self.known[key] = made = self._add_copy(program, node, read)
        return made

    def _key(self, program: DeviceProgram, node: int, read: Sequence[int]) -> object:
        opcode, sizes = program.opcodes[node], program.sizes_bytes[node]
        return opcode, tuple(read), sizes, self.signatures.key_of_hoisted(program, node)

    def _add_copy(self, program: DeviceProgram, node: int, read: Sequence[int]) -> int:
        made = self.made.add_like(program, node, read)
        if node in program.marks:
            self.made.marks[made] = program.marks[node]
        return made

    def _read_by_loop(self, node: int) -> list[int]:
        program, loop = self.program, self.loops[node]
        (argument,) = program.operands[node]
        elements = [self.place[element] for element in program.operands[argument]]
        ahead = [self._add_before_loop(loop.body, each, elements) for each in loop.hoisted]
        for index in loop.unread - _read_of(program, self.users, node):
            elements[index] = self._add_placeholder(program.operands[argument][index])
        return [self.made.add_like(program, argument, elements), *ahead]

    def _add_before_loop(self, body: DeviceProgram, node: int, elements: Sequence[int]) -> int:
        """The node of what a body makes of elements of its argument."""
        instruction = body.instructions[node]
        if body.opcodes[node] == "get-tuple-element" and body.operands[node][0] in body.parameters:
            return elements[instruction.index]
        read = tuple(self._add_before_loop(body, operand, elements) for operand in body.operands[node])
        key = self._key(body, node, read)
        if key not in self.ahead:
            self.ahead[key] = self.known[key] if key in self.known else self._add_copy(body, node, read)
        return self.ahead[key]

    def _add_placeholder(self, element: int) -> int:
        """What is carried in the place of what nobody reads."""
        sizes = (0,) * len(self.program.sizes_bytes[element])
        return self.made.add("constant", self.program.instructions[element], (), sizes, 0)


def loops_of(program: DeviceProgram) -> list[int]:
    """The loops whose argument is a tuple that the program makes."""
    return [
        node
        for node, opcode in enumerate(program.opcodes)
        if opcode == "while" and program.opcodes[program.operands[node][0]] == "tuple"
    ]


def body_of(loop: Instruction) -> Computation:
    """What a loop runs again and again."""
    (body,) = bodies(loop)
    return body


def _read_of(program: DeviceProgram, users: Sequence[Sequence[int]], loop: int) -> set[int]:
    """Positions of the elements of a loop's result that are read behind it, and of those that tell it to go on."""
    instruction = program.instructions[loop]
    (condition,) = instruction.called["condition"]
    needed = inline_calls(condition).instructions
    read = {each.index for each in needed if each.opcode == "get-tuple-element"}
    for user in users[loop]:
        if program.opcodes[user] != "get-tuple-element":
            return set(range(len(program.operands[program.operands[loop][0]])))
        read.add(program.instructions[user].index)
    return read
