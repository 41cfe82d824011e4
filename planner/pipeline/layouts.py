"""Layouts of values on the devices of one stage, from the plan of the whole step on the stage's mesh.

This plan, of the step with its micro-batches in a loop (`microbatch.accumulate_step`), chose the layouts with the whole
step in view. The programs of a pipeline hold the same instructions under the same names: each keeps its layout from
the plan. Loop-carried values (arguments as used by micro-batches, sums) keep the loop's layout.

The whole step may have been planned before its loops over layers were split at the stages' borders. Instructions for
some of the layers (`while.3.rows0_12`) then take the layout of their original (`while.3`), if their fewer rows
divide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shardwright.hlo import ArrayShape, Instruction, Module, TupleShape
from shardwright.planner.microbatch import SharedValue, StepSplit
from shardwright.planner.plans.verify import CALLING
from shardwright.planner.strategies.legality import rule_problems
from shardwright.plans.plan import InstructionPlan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding, ValueSharding

#: Suffix that `rewrites.split_loops` adds to the names of instructions for some of the layers.
_OF_ROWS = re.compile(r"\.rows\d+_\d+")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeStep:
    """A plan of the whole step on the mesh of a stage.

    mesh: of the stage.
    instructions, parameters, outputs: entries of the plan.
    module: the planned step, a loop over micro-batches.
    split: the split that `module` was made from.
    argument_numbers, output_numbers: per flat argument and output of the pipelined program, the number of the argument
        or output of `module` that it is (rows of).
    """

    mesh: Mesh
    instructions: Sequence[InstructionPlan]
    parameters: Sequence[VariablePlan]
    outputs: Sequence[VariablePlan]
    module: Module
    split: StepSplit
    argument_numbers: Sequence[int]
    output_numbers: Sequence[int]


class _LoopLayouts(NamedTuple):
    """Of the loop over micro-batches: arguments by number, values computed ahead by name, sums by name and leaf."""

    arguments: Mapping[int, TensorSharding]
    ahead: Mapping[str, TensorSharding]
    totals: Mapping[tuple[str, int], TensorSharding]


class StageLayouts:
    """The layouts of one stage. split: of the pipelined program."""

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
    def _loop(self) -> _LoopLayouts:
        """Layouts of what the loop over micro-batches carries."""
        shared, module = self._whole.split.shared, self._whole.module
        loops = [i for i in module.entry if i.opcode == "while" and len(i.shape.leaves) > len(shared)]
        if module is self._whole.split.module or not loops:
            return _LoopLayouts({}, {}, {})
        loop = loops[0]
        shardings = self._entries[loop.name].result
        arguments, ahead = {}, {}
        for position, value in enumerate(loop.operands[0].operands):
            if value.opcode == "parameter":
                arguments[value.index] = shardings[position]
            else:
                ahead[value.name] = shardings[position]
        keys = [(shared_value.name, shared_value.leaf) for shared_value in shared]
        totals = dict(zip(keys, shardings[len(shardings) - len(shared) :], strict=True))
        return _LoopLayouts(arguments, ahead, totals)

    # ---- instructions ------------------------------------------------------
    def entry(self, instruction: Instruction, computation: str) -> InstructionPlan:
        """The plan's entry of an instruction, in its present computation; replicated if the plan has none.

        Instructions rewritten for one part of the step (the offset of an iota, a slice of a constant) may have none.
        """
        planned = self._entries.get(instruction.name)
        if planned is not None and _fits(planned, instruction):
            return replace(planned, computation=computation)
        planned = self._entries.get(_OF_ROWS.sub("", instruction.name))
        if planned is not None and _fits(planned, instruction):
            entry = self._refit(replace(planned, name=instruction.name, computation=computation), instruction)
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
        """The entry, with splits too large for its arrays moved to other dimensions."""
        operands = tuple(
            self._fit_value(sharding, operand.shape.leaves)
            for sharding, operand in zip(entry.operands, instruction.operands, strict=True)
        )
        result = self._fit_value(entry.result, instruction.shape.leaves)
        if operands == entry.operands and result == entry.result:
            return entry
        return replace(entry, operands=operands, result=result, shared=())

    def _fit_value(self, value: ValueSharding, leaves: Sequence[ArrayShape]) -> ValueSharding:
        return tuple(fit_sharding(sharding, leaf, self.mesh) for sharding, leaf in zip(value, leaves, strict=True))

    def producer_sharding(self, value: Instruction) -> TensorSharding:
        """The layout of an array at its producer; it may be a partial sum."""
        if value.opcode != "get-tuple-element":
            return self.entry(value, "").result[0]
        first, maker = leaves_before(value), value.operands[0]
        while maker.opcode == "get-tuple-element":
            first, maker = first + leaves_before(maker), maker.operands[0]
        return self.entry(maker, "").result[first]

    def boundary_sharding(self, value: Instruction) -> TensorSharding:
        """The layout of an array between two programs: reduced."""
        return TensorSharding(self.producer_sharding(value).dims)

    def consumer_sharding(self, reader: Instruction, operand: int) -> TensorSharding:
        """The layout in which an instruction uses an array operand."""
        return self.entry(reader, "").operands[operand][0]

    # ---- arguments and totals ----------------------------------------------
    def argument(self, number: int) -> TensorSharding:
        """The layout of an argument between steps."""
        return _of_rows(self._parameter(number), self._argument_shapes[number], self.mesh)

    def argument_in_loop(self, number: int) -> TensorSharding:
        """The layout of an argument during the micro-batches."""
        sharding = self._loop.arguments.get(self._whole.argument_numbers[number])
        if sharding is None:
            return self.argument(number)
        variable = replace(self._parameter(number), sharding=TensorSharding(sharding.dims))
        return _of_rows(variable, self._argument_shapes[number], self.mesh)

    def ahead(self, value: Instruction) -> TensorSharding:
        """The layout of an array computed ahead, during the micro-batches."""
        (leaf,) = value.shape.leaves
        carried = self._loop.ahead.get(value.name) or self._loop.ahead.get(_OF_ROWS.sub("", value.name))
        if carried is None or len(carried.dims) != leaf.rank:
            return self.boundary_sharding(value)
        return fit_sharding(TensorSharding(carried.dims), leaf, self.mesh)

    def _parameter(self, number: int) -> VariablePlan:
        return self._whole.parameters[self._whole.argument_numbers[number]]

    def total(self, shared: SharedValue, term: Instruction) -> TensorSharding:
        """The layout of a term's sum over the micro-batches during accumulation."""
        totals = self._loop.totals
        (leaf,) = term.shape.leaves
        exact = totals.get((shared.name, shared.leaf))
        if exact is not None:
            return exact
        sharding = totals.get((_OF_ROWS.sub("", shared.name), shared.leaf))
        return (
            fit_sharding(sharding, leaf, self.mesh)
            if sharding is not None and len(sharding.dims) == leaf.rank
            else self.producer_sharding(term)
        )

    def output(self, number: int) -> TensorSharding:
        """The layout of an output between steps."""
        variable = self._whole.outputs[self._whole.output_numbers[number]]
        return _of_rows(variable, self._output_shapes[number], self.mesh)


def _of_rows(variable: VariablePlan, shape: ArrayShape, mesh: Mesh) -> TensorSharding:
    """The layout of some rows of a variable, or all of it; a batch argument has an extra dimension of micro-batches."""
    sharding = variable.sharding
    if variable.shape == shape.dimensions or len(sharding.dims) != shape.rank:
        return sharding
    return fit_sharding(sharding, shape, mesh)


def fit_sharding(sharding: TensorSharding, shape: ArrayShape, mesh: Mesh) -> TensorSharding:
    """The sharding, or a similar one if it does not divide the shape.

    Each axis of a dimension with too many moves to the largest unsplit dimension that it divides, or is dropped.
    Dimensions that are split already are excluded: their shards would be in another order than a reduce-scattered sum.
    """
    if all(size % mesh.size(axes) == 0 for size, axes in zip(shape.dimensions, sharding.dims, strict=True)):
        return sharding
    new_dims: list[tuple[str, ...]] = []
    homeless: list[str] = []
    for size, axes in zip(shape.dimensions, sharding.dims, strict=True):
        fits = size % mesh.size(axes) == 0
        new_dims.append(axes if fits else ())
        homeless += () if fits else axes
    for axis in homeless:
        for dim in sorted(range(shape.rank), key=lambda dim: -shape.dimensions[dim]):
            if not new_dims[dim] and shape.dimensions[dim] % mesh.size((axis,)) == 0:
                new_dims[dim] = (axis,)
                break
    return TensorSharding(tuple(new_dims), sharding.unreduced)


def whole_sharding(shape: ArrayShape) -> TensorSharding:
    return TensorSharding.replicated(shape.rank)


def leaves_before(element: Instruction) -> int:
    """Array leaves of a tuple before the element that a get-tuple-element reads."""
    shape = element.operands[0].shape
    assert isinstance(shape, TupleShape)
    return sum(len(part.leaves) for part in shape.elements[: element.index])


def _whole(value: Instruction) -> ValueSharding:
    return tuple(whole_sharding(leaf) for leaf in value.shape.leaves)


def _fits(entry: InstructionPlan, instruction: Instruction) -> bool:
    """Whether an entry fits an instruction's ranks: a rewritten instruction may bear another one's name."""
    if entry.opcode != instruction.opcode or len(entry.operands) != len(instruction.operands):
        return False
    values = [*zip(entry.operands, instruction.operands, strict=True), (entry.result, instruction)]
    return all(
        [len(sharding.dims) for sharding in shardings] == [leaf.rank for leaf in value.shape.leaves]
        for shardings, value in values
    )
