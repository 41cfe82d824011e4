"""The parts of a pipelined step, and the names of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.microbatch import Ahead, Along, Argument, Input, PartModule, StepSplit
from shardwright.planner.pipeline.layouts import StageLayouts
from shardwright.planner.pipeline.program_assignment import ProgramAssignment
from shardwright.plans.shardings import TensorSharding
from shardwright.tasks import MICRO_BATCH


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """A step in two parts, with their placement.

    split: the step's split.
    micro: the part that runs for every micro-batch.
    once: the part that runs after all of them.
    micro_batches: number of micro-batches.
    program_assignment: programs of the micro part.
    stage_of_chunk: the stage of every chunk.
    layouts: of every stage.
    meeting: see `StepParts`.
    ahead: what is computed before the first micro-batch, by each stage that reads it.
    """

    split: StepSplit
    micro: PartModule
    once: PartModule
    micro_batches: int
    program_assignment: ProgramAssignment
    stage_of_chunk: tuple[int, ...]
    layouts: tuple[StageLayouts, ...]
    ahead: PartModule
    meeting: Mapping[Instruction, Instruction] = field(default_factory=dict)

    @property
    def stage_count(self) -> int:
        return len(self.layouts)

    @cached_property
    def arguments(self) -> Sequence[Instruction]:
        """The step's arguments, flat: parameters of the entry computation, all of them arrays."""
        return sorted(self.split.module.entry.parameters, key=lambda parameter: parameter.index)

    @cached_property
    def aliases(self) -> dict[int, int]:
        """Output → argument that it may replace."""
        return {alias.output_index[0] if alias.output_index else 0: alias.parameter_number
                for alias in self.split.module.aliases}  # fmt: skip

    @cached_property
    def made_ahead(self) -> Mapping[Ahead, Instruction]:
        """What is computed ahead → the instruction of `ahead` that it is."""
        results = zip(self.ahead.outputs, self.ahead.module.entry.root.operands, strict=True)
        return {output: result for output, result in results if isinstance(output, Ahead)}

    def sources_of(self, value: Ahead) -> frozenset[int]:
        """The arguments that a value computed ahead is made of."""
        numbers, todo, seen = set(), [self.made_ahead[value]], set()
        while todo:
            instruction = todo.pop()
            if instruction in seen:
                continue
            seen.add(instruction)
            todo += instruction.operands
            if instruction.opcode == "parameter":
                given = self.input_of(self.ahead, instruction)
                assert isinstance(given, Argument)
                numbers.add(given.number)
        return frozenset(numbers)

    def input_of(self, part: PartModule, parameter: Instruction) -> Input:
        return part.inputs[parameter.index]


def argument_value(number: int) -> str:
    """An argument of the step, whole."""
    return f"argument.{number}"


def used_value(number: int, stage: int) -> str:
    """An argument resharded once a step to its layout in the micro-batches, if stored in another."""
    return f"argument.{number}.used.{stage}"


def ahead_value(value: Ahead, stage: int) -> str:
    """A value computed ahead of the micro-batches, by each stage that reads it."""
    return f"ahead.{value.name}.{stage}"


def batch_stack_value(number: int) -> str:
    """A batch argument, its micro-batches along a separate dimension."""
    return f"batch.{number}"


def batch_value(number: int, stage: int) -> str:
    """One micro-batch's part of a batch argument; every stage that reads it has the argument."""
    return f"batch.{number}.{stage}"


def total_value(name: str) -> str:
    """A total over micro-batches: they add to it, or write their part of it."""
    return f"total.{name}"


def sum_value(total: str) -> str:
    """A total that was a partial sum, reduced."""
    return f"{total}.sum"


def output_value(number: int) -> str:
    """An output of the step."""
    return f"output.{number}"


INDEX = MICRO_BATCH


# ---- arrays that hold all micro-batches ------------------------------------------


def stack_dims(whole: tuple[int, ...], along: Along, micro_batches: int) -> tuple[int, ...]:
    """Dimensions of an array with its micro-batches along a separate one: `[M, B/M, …]` for `[B, …]`."""
    inner = whole[along.dim] // along.outer // micro_batches
    outer = (along.outer,) if along.outer > 1 else ()
    return (*whole[: along.dim], *outer, micro_batches, inner, *whole[along.dim + 1 :])


def micro_dim(along: Along) -> int:
    """The dimension of such an array that counts micro-batches."""
    return along.dim + (along.outer > 1)


def stack_sharding(local: TensorSharding, along: Along, dims: tuple[int, ...], devices: int) -> TensorSharding:
    """The layout of an array of all micro-batches, given the layout `local` of one micro-batch's part.

    devices: number of parts of the cut dimension in `local`.
    """
    cut = local.dims[along.dim]
    if along.outer == 1:
        between: tuple[tuple[str, ...], ...] = ((), cut)
    else:
        between = (cut if along.outer % devices == 0 else (), (), ())
    return TensorSharding((*local.dims[: along.dim], *between, *local.dims[along.dim + 1 :]))


def array(instruction: Instruction) -> ArrayShape:
    """The shape of an instruction with one array as its result."""
    assert isinstance(instruction.shape, ArrayShape)
    return ArrayShape(instruction.shape.element_type, instruction.shape.dimensions)


def elements(shape: ArrayShape) -> int:
    return prod(shape.dimensions)
