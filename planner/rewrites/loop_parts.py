"""Body and condition of a loop over stacked layers, for some of its layers (see split_loops.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.hlo import Computation, Instruction, TupleShape
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.stacked_loops import StackedLoop

_REGIONS = frozenset({"condition", "body", "branch_computations", "true_computation", "false_computation"})


class Rows(NamedTuple):
    """Rows start … stop-1 of a stack; label: the caller's name for them."""

    start: int
    stop: int
    label: int = 0


@dataclass(slots=True, eq=False)
class PartialLoopBody:
    """A loop's body written for some of its rows, with copies of the loops and branches in it."""

    names: edit.Names
    stacked: StackedLoop
    shape: TupleShape
    rows: Rows
    suffix: str

    def copy(self, source: Computation, *, is_body: bool = True) -> Computation:
        """A copy of the computation, with names of its own; the body itself (`is_body`) reads the shorter stacks."""
        new: dict[Instruction, Instruction] = {}
        out: list[Instruction] = []
        shifted: dict[Instruction, Instruction] = {}
        takers = {t: k for k, indices in self.stacked.indices.items() for t in indices} if is_body else {}
        for instruction in source:
            operands = [new[operand] for operand in instruction.operands]
            name = self.names.like(instruction.name, self.suffix)
            duplicate = new[instruction] = edit.copy_of(instruction, operands, name=name)
            if not _REGIONS.isdisjoint(instruction.called):
                self._regions(duplicate)
            if is_body:
                self._fit(instruction, duplicate, takers, shifted, out)
            out.append(duplicate)
        root = new[source.root]
        for instruction in out:
            instruction.is_root = instruction is root
        parameters = tuple(sorted((i for i in out if i.opcode == "parameter"), key=lambda i: i.index))
        name = f"{source.name}.{self.suffix}"
        return Computation(self.names.like(name, "part"), out, root, parameters, attributes=source.attributes)

    def _regions(self, instruction: Instruction) -> None:
        instruction.called = {
            which: tuple(self.copy(callee, is_body=False) for callee in callees) if which in _REGIONS else callees
            for which, callees in instruction.called.items()
        }
        for which, callees in instruction.called.items():
            if which in _REGIONS:
                text = ", ".join(f"%{callee.name}" for callee in callees)
                is_list = instruction.attributes[which].text.startswith("{")
                instruction.attributes[which] = edit.attribute(which, f"{{{text}}}" if is_list else text)

    def _fit(
        self,
        source: Instruction,
        instruction: Instruction,
        takers: Mapping[Instruction, int],
        shifted: dict[Instruction, Instruction],
        out: list[Instruction],
    ) -> None:
        """Shorter stacks' shapes, and rows counted from the first one (in place)."""
        if source.opcode == "parameter" or source is self._root_of(source):
            instruction.shape = self.shape
        elif source.opcode == "get-tuple-element" and source.operands[0].opcode == "parameter":
            instruction.shape = self.shape.elements[source.index]
        if source not in takers:
            return
        if source.opcode == "dynamic-update-slice":
            instruction.shape = self.shape.elements[takers[source]]
        at = 1 if source.opcode == "dynamic-slice" else 2
        row = instruction.operands[at]
        if row not in shifted:
            first = Instruction(self.names.like(row.name, "first"), "constant", row.shape, payload=str(self.rows[0]))
            shifted[row] = Instruction(self.names.like(row.name, "row"), "subtract", row.shape, (row, first))
            out += [first, shifted[row]]
        instruction.operands = (*instruction.operands[:at], shifted[row], *instruction.operands[at + 1 :])

    def _root_of(self, source: Instruction) -> Instruction:
        (body,) = self.stacked.loop.called["body"]
        return body.root


def loop_condition(
    names: edit.Names, source: Computation, shape: TupleShape, stacked: StackedLoop, end: int, suffix: str
) -> Computation:
    """The condition of a part: its counter is below the part's last trip, exclusive."""
    (old,) = source.parameters
    parameter = edit.copy_of(old, (), name=names.like(old.name, suffix), shape=shape)
    counter = element_of(names.like(old.name, "trip"), parameter, stacked.counter)
    limit = Instruction(names.like(old.name, "end"), "constant", counter.shape, payload=str(end))
    test = edit.copy_of(source.root, (counter, limit), name=names.like(source.root.name, suffix), is_root=True)
    name = names.like(f"{source.name}.{suffix}", "part")
    return Computation(name, [parameter, counter, limit, test], test, (parameter,), attributes=source.attributes)


def element_of(name: str, value: Instruction, element: int) -> Instruction:
    """An element of a tuple."""
    assert isinstance(value.shape, TupleShape)
    attributes = {"index": edit.attribute("index", str(element))}
    return Instruction(
        name, "get-tuple-element", value.shape.elements[element], (value,), attributes, index=element, line=value.line
    )
