"""How values lie on the devices of one stage: read from the plan of the whole step on the stage's mesh.

That plan, of the step with its micro-batches in a loop (`microbatch.accumulated`), chose a layout for every instruction
with the whole step in view. The programs of a pipeline hold the same instructions under the same names, so each lies as
it does there; what the loop carries (arguments as micro-batches use them, sums) lies as it is carried.

The whole step may have been planned before its loops over layers were split at the stages' borders. What was made for
some of the layers (`while.3.rows0_12`) then lies as what it is a part of (`while.3`), as far as its fewer rows divide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.hlo import ArrayShape, Instruction, Module, TupleShape
from shardwright.planner.microbatch import SharedValue, StepSplit
from shardwright.planner.plans.verify import CALLING
from shardwright.planner.strategies.legality import rule_problems
from shardwright.plans import InstructionPlan, VariablePlan
from shardwright.shardings import Mesh, TensorSharding, ValueSharding

#: What `rewrites.split_loops` adds to the names of what it makes for some of the layers.
_OF_ROWS = re.compile(r"\.rows\d+_\d+")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeStep:
    """A plan of the whole step on the mesh of a stage.

    module: the step as a loop over micro-batches, which the entries are of. split: what it was made from.
    arguments / outputs: for each flat argument and output of the pipelined program, which one of this it is (rows of).
    """

    mesh: Mesh
    instructions: Sequence[InstructionPlan]
    parameters: Sequence[VariablePlan]
    outputs: Sequence[VariablePlan]
    module: Module
    split: StepSplit
    argument_numbers: Sequence[int]
    output_numbers: Sequence[int]


class StageLayouts:
    """The layouts of one stage. split: of the program that is pipelined."""

    def __init__(self, whole: WholeStep, split: StepSplit) -> None:
        self.mesh = whole.mesh
        self._whole = whole
        parameters = sorted(split.module.entry.parameters, key=lambda parameter: parameter.index)
        self._argument_shapes = [leaf for parameter in parameters for leaf in parameter.shape.leaves]
        self._output_shapes = split.module.entry.root.shape.leaves

    @cached_property
    def _entries(self) -> Mapping[str, InstructionPlan]:
        return {entry.name: entry for entry in self._whole.instructions}

    @cached_property
    def _loop(self) -> tuple[Mapping[int, TensorSharding], Mapping[tuple[str, int], TensorSharding]]:
        """How the loop over micro-batches carries arguments, by number, and what is shared with the once part."""
        shared, module = self._whole.split.shared, self._whole.module
        loops = [i for i in module.entry if i.opcode == "while" and len(i.shape.leaves) > len(shared)]
        if module is self._whole.split.module or not loops:
            return {}, {}
        loop = loops[0]
        lies = self._entries[loop.name].result
        carried = {
            value.index: lies[position]
            for position, value in enumerate(loop.operands[0].operands)
            if value.opcode == "parameter"
        }
        keys = [(each.name, each.leaf) for each in shared]
        return carried, dict(zip(keys, lies[len(lies) - len(shared) :], strict=True))

    # ---- instructions ------------------------------------------------------
    def entry(self, instruction: Instruction, computation: str) -> InstructionPlan:
        """The plan's entry of an instruction, in the computation where it stands now; whole where it has none.

        What is written anew for one part of the step (the offset of an iota, a slice of a constant) may have none.
        """
        found = self._entries.get(instruction.name)
        if found is not None and _fits(found, instruction):
            return replace(found, computation=computation)
        found = self._entries.get(_OF_ROWS.sub("", instruction.name))
        if found is not None and _fits(found, instruction):
            entry = self._refit(replace(found, name=instruction.name, computation=computation), instruction)
            if entry.opcode in CALLING or not rule_problems(instruction, entry, self.mesh):
                return entry
        return InstructionPlan(
            computation=computation,
            name=instruction.name,
            opcode=instruction.opcode,
            operands=tuple(_whole(operand) for operand in instruction.operands),
            result=_whole(instruction),
        )

    def _refit(self, entry: InstructionPlan, instruction: Instruction) -> InstructionPlan:
        """The entry, with splits that its arrays are too small for moved to other dimensions."""
        operands = tuple(
            self._fit_value(lies, operand.shape.leaves)
            for lies, operand in zip(entry.operands, instruction.operands, strict=True)
        )
        result = self._fit_value(entry.result, instruction.shape.leaves)
        if operands == entry.operands and result == entry.result:
            return entry
        return replace(entry, operands=operands, result=result, shared=())

    def _fit_value(self, value: ValueSharding, leaves: Sequence[ArrayShape]) -> ValueSharding:
        return tuple(fit_sharding(lies, leaf, self.mesh) for lies, leaf in zip(value, leaves, strict=True))

    def producer_sharding(self, value: Instruction) -> TensorSharding:
        """How an array lies where it is made; it may be a partial sum."""
        if value.opcode != "get-tuple-element":
            return self.entry(value, "").result[0]
        first, maker = leaves_before(value), value.operands[0]
        while maker.opcode == "get-tuple-element":
            first, maker = first + leaves_before(maker), maker.operands[0]
        return self.entry(maker, "").result[first]

    def boundary_sharding(self, value: Instruction) -> TensorSharding:
        """How an array lies that one program hands to another: reduced."""
        return TensorSharding(self.producer_sharding(value).dims)

    def consumer_sharding(self, reader: Instruction, operand: int) -> TensorSharding:
        """How an instruction uses an array that is its operand."""
        return self.entry(reader, "").operands[operand][0]

    # ---- arguments and totals ----------------------------------------------
    def argument(self, number: int) -> TensorSharding:
        """How an argument is stored between steps."""
        return _of_rows(self._parameter(number), self._argument_shapes[number], self.mesh)

    def argument_in_loop(self, number: int) -> TensorSharding:
        """How an argument lies for the micro-batches."""
        carried, _ = self._loop
        lies = carried.get(self._whole.argument_numbers[number])
        if lies is None:
            return self.argument(number)
        variable = replace(self._parameter(number), sharding=TensorSharding(lies.dims))
        return _of_rows(variable, self._argument_shapes[number], self.mesh)

    def _parameter(self, number: int) -> VariablePlan:
        return self._whole.parameters[self._whole.argument_numbers[number]]

    def total(self, shared: SharedValue, term: Instruction) -> TensorSharding:
        """How the sum of a term over the micro-batches lies while they add to it."""
        _, totals = self._loop
        (leaf,) = term.shape.leaves
        exact = totals.get((shared.name, shared.leaf))
        if exact is not None:
            return exact
        lies = totals.get((_OF_ROWS.sub("", shared.name), shared.leaf))
        return (
            fit_sharding(lies, leaf, self.mesh)
            if lies is not None and len(lies.dims) == leaf.rank
            else self.producer_sharding(term)
        )

    def output(self, number: int) -> TensorSharding:
        """How an output is stored between steps."""
        variable = self._whole.outputs[self._whole.output_numbers[number]]
        return _of_rows(variable, self._output_shapes[number], self.mesh)


def _of_rows(variable: VariablePlan, shape: ArrayShape, mesh: Mesh) -> TensorSharding:
    """How some rows of a variable lie, or all of it; a batch argument has a dimension for micro-batches besides."""
    lies = variable.sharding
    if variable.shape == shape.dimensions or len(lies.dims) != shape.rank:
        return lies
    return fit_sharding(lies, shape, mesh)


def fit_sharding(lies: TensorSharding, shape: ArrayShape, mesh: Mesh) -> TensorSharding:
    """The sharding, or a like one where it does not divide the shape: axes that are too many for a dimension split the
    largest one that they divide and nothing splits, or nothing: split twice over, its parts would lie in another order
    than a sum leaves that is scattered over them."""
    if all(size % mesh.size(axes) == 0 for size, axes in zip(shape.dimensions, lies.dims, strict=True)):
        return lies
    kept: list[tuple[str, ...]] = []
    homeless: list[str] = []
    for size, axes in zip(shape.dimensions, lies.dims, strict=True):
        fits = size % mesh.size(axes) == 0
        kept.append(axes if fits else ())
        homeless += () if fits else axes
    for axis in homeless:
        for dim in sorted(range(shape.rank), key=lambda dim: -shape.dimensions[dim]):
            if not kept[dim] and shape.dimensions[dim] % mesh.size((axis,)) == 0:
                kept[dim] = (axis,)
                break
    return TensorSharding(tuple(kept), lies.unreduced)


def whole_sharding(shape: ArrayShape) -> TensorSharding:
    return TensorSharding.replicated(shape.rank)


def leaves_before(element: Instruction) -> int:
    """Array leaves of a tuple ahead of the element that a get-tuple-element takes."""
    shape = element.operands[0].shape
    assert isinstance(shape, TupleShape)
    return sum(len(each.leaves) for each in shape.elements[: element.index])


def _whole(value: Instruction) -> ValueSharding:
    return tuple(whole_sharding(leaf) for leaf in value.shape.leaves)


def _fits(entry: InstructionPlan, instruction: Instruction) -> bool:
    """Whether an entry is of an instruction of these ranks: what is written anew may have the name of another."""
    if entry.opcode != instruction.opcode or len(entry.operands) != len(instruction.operands):
        return False
    values = [*zip(entry.operands, instruction.operands, strict=True), (entry.result, instruction)]
    return all(
        [len(lies.dims) for lies in found] == [leaf.rank for leaf in value.shape.leaves] for found, value in values
    )
