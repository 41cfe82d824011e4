"""How values lie on the devices of one stage: read from the plan of the whole step on the stage's mesh.

That plan, of the step with its micro-batches in a loop (`microbatch.accumulated`), chose a layout for every
instruction with the whole step in view. The programs of a pipeline hold the same instructions under the same names,
so each lies as it does there; what the loop carries (arguments as micro-batches use them, sums) lies as it is
carried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from shardwright.hlo import ArrayShape, Instruction, Module, TupleShape
from shardwright.planner.microbatch import Shared, StepSplit
from shardwright.plans import InstructionPlan, Mesh, Plan, TensorSharding, ValueSharding


class StageLayouts:
    """The layouts of one stage. plan: of `module`, the whole step as a loop over micro-batches, on the stage's mesh."""

    def __init__(self, plan: Plan, module: Module, split: StepSplit) -> None:
        self.plan = plan
        self.mesh: Mesh = plan.mesh
        self._split = split
        self._module = module

    @cached_property
    def _entries(self) -> Mapping[str, InstructionPlan]:
        return {entry.name: entry for entry in self.plan.instructions}

    @cached_property
    def _loop(self) -> tuple[Mapping[int, TensorSharding], Mapping[Shared, TensorSharding]]:
        """How the loop over micro-batches carries arguments, by number, and what is shared with the once part."""
        shared = self._split.shared
        entry = self._module.entry
        loops = [i for i in entry if i.opcode == "while" and len(i.shape.leaves) > len(shared)]
        if self._module is self._split.module or not loops:
            return {}, {}
        loop = loops[0]
        lies = self._entries[loop.name].result
        carried = {
            value.index: lies[position]
            for position, value in enumerate(loop.operands[0].operands)
            if value.opcode == "parameter"
        }
        return carried, dict(zip(shared, lies[len(lies) - len(shared) :], strict=True))

    # ---- instructions ------------------------------------------------------
    def entry(self, instruction: Instruction, computation: str) -> InstructionPlan:
        """The plan's entry of an instruction, in the computation where it stands now; whole where it has none.

        What is written anew for one part of the step (the offset of an iota, a slice of a constant) may have none.
        """
        found = self._entries.get(instruction.name)
        if found is not None and _fits(found, instruction):
            return replace(found, computation=computation)
        return InstructionPlan(
            computation=computation,
            name=instruction.name,
            opcode=instruction.opcode,
            operands=tuple(_whole(operand) for operand in instruction.operands),
            result=_whole(instruction),
        )

    def made(self, value: Instruction) -> TensorSharding:
        """How an array lies where it is made; it may be a partial sum."""
        if value.opcode != "get-tuple-element":
            return self.entry(value, "").result[0]
        first, maker = leaves_before(value), value.operands[0]
        while maker.opcode == "get-tuple-element":
            first, maker = first + leaves_before(maker), maker.operands[0]
        return self.entry(maker, "").result[first]

    def between(self, value: Instruction) -> TensorSharding:
        """How an array lies that one program hands to another: reduced."""
        return TensorSharding(self.made(value).dims)

    def used(self, reader: Instruction, operand: int) -> TensorSharding:
        """How an instruction uses an array that is its operand."""
        return self.entry(reader, "").operands[operand][0]

    # ---- arguments and totals ----------------------------------------------
    def argument(self, number: int) -> TensorSharding:
        """How an argument is stored between steps."""
        return self.plan.parameters[number].sharding

    def used_argument(self, number: int) -> TensorSharding:
        """How an argument lies for the micro-batches."""
        carried, _ = self._loop
        return TensorSharding(carried.get(number, self.argument(number)).dims)

    def total(self, shared: Shared, term: Instruction) -> TensorSharding:
        """How the sum of a term over the micro-batches lies while they add to it."""
        _, totals = self._loop
        return totals[shared] if shared in totals else self.made(term)

    def output(self, number: int) -> TensorSharding:
        return self.plan.outputs[number].sharding


def replicated(shape: ArrayShape) -> TensorSharding:
    return TensorSharding.replicated(shape.rank)


def leaves_before(element: Instruction) -> int:
    """Array leaves of a tuple ahead of the element that a get-tuple-element takes."""
    shape = element.operands[0].shape
    assert isinstance(shape, TupleShape)
    return sum(len(each.leaves) for each in shape.elements[: element.index])


def _whole(value: Instruction) -> ValueSharding:
    return tuple(replicated(leaf) for leaf in value.shape.leaves)


def _fits(entry: InstructionPlan, instruction: Instruction) -> bool:
    """Whether an entry is of an instruction of these ranks: what is written anew may have the name of another."""
    if entry.opcode != instruction.opcode or len(entry.operands) != len(instruction.operands):
        return False
    values = [*zip(entry.operands, instruction.operands, strict=True), (entry.result, instruction)]
    return all(
        [len(lies.dims) for lies in found] == [leaf.rank for leaf in value.shape.leaves] for found, value in values
    )
