"""Calls written out: every call site gets instructions of its own.

JAX lowers nested `jit`s (`jnp.where`, `jnp.tril`, a block reused by every layer) to one computation that
several sites call. Planned as one, it would tie layers together that have nothing to do with each other. So calls are
replaced by copies of what they call, before anything is planned; loops inside a copy get copies of their bodies.
Scalar functions that `reduce`, `scatter` or `sort` apply stay shared: nothing in them is planned.
"""

from __future__ import annotations

from shardwright.hlo import Computation, Instruction, Module
from shardwright.hlo.ir import Attribute

#: A program does not grow beyond this many times its instructions: what is called oftener stays a call.
MOST_GROWTH = 8

#: Control flow whose computations are planned like the entry, by the attributes that name them.
_BODIES = {
    "while": ("condition", "body"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}


def inline_calls(module: Module) -> Module:
    """`module` without calls; itself where it has none, or where copies would make it `MOST_GROWTH` times as long.

    Copies are named after the call, in text order: the result is the same for the same text.
    """
    if not any(i.opcode == "call" for i in module.instructions()):
        return module
    total = sum(len(c.instructions) for c in module.computations)
    if _size(module.entry, {}) > MOST_GROWTH * total:
        return module
    return _Inliner(module).run()


def _size(computation: Computation, known: dict[Computation, int]) -> int:
    """Instructions of a computation with everything it calls written out."""
    if computation not in known:
        known[computation] = len(computation.instructions) + sum(
            _size(callee, known) for instruction in computation for callee in _callees(instruction)
        )
    return known[computation]


def _callees(instruction: Instruction) -> list[Computation]:
    names = ("to_apply",) if instruction.opcode == "call" else _BODIES.get(instruction.opcode, ())
    return [callee for name in names for callee in instruction.called.get(name, ())]


class _Inliner:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._names = {i.name for i in module.instructions()}
        self._computation_names = {c.name for c in module.computations}
        self._made: list[Computation] = []
        self._used: set[Computation] = set()  # planned computations that one site has taken as they are

    def run(self) -> Module:
        entry = self._rewritten(self._module.entry, "")
        made = [*self._made, entry]
        applied = _named_by(made) - set(made)
        kept = [c for c in self._module.computations if c in applied]
        return Module(
            name=self._module.name,
            header=self._module.header,
            computations=[*kept, *made],
            entry=entry,
            tables=self._module.tables,
        )

    def _rewritten(self, computation: Computation, suffix: str) -> Computation:
        """A copy of a computation without calls, its names ending in `suffix`."""
        instructions: list[Instruction] = []
        copies: dict[Instruction, Instruction] = {}
        self._copy_into(computation, suffix, instructions, copies)
        root = copies[computation.root]
        root.is_root = True
        return Computation(
            name=_fresh(computation.name, suffix, self._computation_names),
            instructions=instructions,
            root=root,
            parameters=tuple(copies[p] for p in computation.parameters),
            is_entry=computation.is_entry,
            attributes=computation.attributes,
        )

    def _copy_into(
        self,
        computation: Computation,
        suffix: str,
        instructions: list[Instruction],
        copies: dict[Instruction, Instruction],
    ) -> None:
        for instruction in computation:
            if instruction in copies:  # a parameter that the call site has given
                continue
            if instruction.opcode == "call":
                copies[instruction] = self._called(instruction, suffix, instructions, copies)
                continue
            copy = Instruction(
                _fresh(instruction.name, suffix, self._names),
                instruction.opcode,
                instruction.shape,
                tuple([copies[operand] for operand in instruction.operands]),
                instruction.attributes,
                instruction.called,
                instruction.payload,
                instruction.index,
                line=instruction.line,
            )
            if instruction.opcode in _BODIES:
                self._copy_bodies(copy)
            copies[instruction] = copy
            instructions.append(copy)

    def _called(
        self, call: Instruction, suffix: str, instructions: list[Instruction], copies: dict[Instruction, Instruction]
    ) -> Instruction:
        """What the call site's value is once the callee is written out there."""
        (callee,) = call.called["to_apply"]
        inner = {parameter: copies[call.operands[parameter.index]] for parameter in callee.parameters}
        self._copy_into(callee, f".{call.name}{suffix}", instructions, inner)
        return inner[callee.root]

    def _copy_bodies(self, instruction: Instruction) -> None:
        """Give control flow computations of its own."""
        called, attributes = dict(instruction.called), dict(instruction.attributes)
        for name in _BODIES[instruction.opcode]:
            if name not in called:
                continue
            bodies = tuple(self._body(body, instruction) for body in called[name])
            called[name] = bodies
            names = [f"%{body.name}" for body in bodies]
            text = "{" + ", ".join(names) + "}" if name == "branch_computations" else names[0]
            attributes[name] = Attribute(name, text, attributes[name].value)
        instruction.called, instruction.attributes = called, attributes

    def _body(self, body: Computation, user: Instruction) -> Computation:
        suffix = f".{user.name}" if body in self._used else ""
        self._used.add(body)
        self._made.append(self._rewritten(body, suffix))
        return self._made[-1]


def _fresh(name: str, suffix: str, taken: set[str]) -> str:
    """`name` with `suffix`, and a number where that is taken; `name` itself without a suffix."""
    if not suffix:
        return name
    candidate, number = f"{name}{suffix}", 1
    while candidate in taken:
        number += 1
        candidate = f"{name}{suffix}.{number}"
    taken.add(candidate)
    return candidate


def _named_by(computations: list[Computation]) -> set[Computation]:
    """Every computation that instructions of `computations` name, directly or not."""
    found: set[Computation] = set()
    todo = list(computations)
    while todo:
        for instruction in todo.pop():
            for callees in instruction.called.values():
                for callee in callees:
                    if callee not in found:
                        found.add(callee)
                        todo.append(callee)
    return found
