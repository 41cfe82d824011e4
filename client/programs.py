"""A function of one signature, planned and loaded on the servers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from shardwright.client.frontends.jax import ArrayType, LoweredProgram
from shardwright.client.placement import ExecutableEntry, Placement
from shardwright.config import PlanOptions
from shardwright.dtypes import to_dtype
from shardwright.pipelines import PipelinePlan
from shardwright.plans import Plan
from shardwright.proto.v1 import common_pb2, master_pb2

#: Outputs of at most so many bytes come back with the reply of their step, …
READ_BACK_BYTES = 4 << 10
#: … for at most so many outputs.
READ_BACK_OUTPUTS = 16
#: Arguments that a message lists, at most.
_MAX_LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedPlan:
    """What the servers hold for all functions that lower to one program under one plan."""

    plan: Plan | PipelinePlan
    load: master_pb2.LoadResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArgumentSource:
    """Where an argument of the executable comes from: a leaf of the call, or a constant that was hoisted.

    leaf: number among the leaves, −1 of a constant. constant: its part that the entry holds. proto: the entry's layout.
    """

    entry: ExecutableEntry
    leaf: int
    constant: np.ndarray | None
    proto: common_pb2.ArrayLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepProgram:
    """What a step needs to run: an executable on the servers and how its numbers are laid out.

    arguments / outputs: places by flat number, None for an argument that nothing reads; equal ones are the same object
        within a session.
    leaf_numbers: flat argument number of each leaf of the call.
    leaf_places: `arguments` in the order of the call's leaves.
    sources / results: what the executable takes and leaves, in its order.
    read_back: outputs small enough to come with the reply.
    load: what the servers said when they loaded it.
    """

    lowered: LoweredProgram
    plan: Plan | PipelinePlan
    executable_id: str
    load: master_pb2.LoadResult
    arguments: tuple[Placement | None, ...]
    outputs: tuple[Placement, ...]
    leaf_numbers: tuple[int, ...]
    leaf_places: tuple[Placement | None, ...]
    sources: tuple[ArgumentSource, ...]
    results: tuple[ExecutableEntry, ...]
    read_back: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.lowered.name


def leaf_numbers(lowered: LoweredProgram) -> tuple[int, ...]:
    """Flat argument number of each leaf of the call: all but the hoisted constants."""
    constants = range(lowered.constants_at, lowered.constants_at + len(lowered.constants))
    return tuple(number for number in range(len(lowered.arguments)) if number not in constants)


def describe_difference(first: LoweredProgram, other: LoweredProgram) -> str:
    """Why a function has another program than its first, in words."""
    before = {argument.name: argument for argument in first.arguments}
    changed = [
        f"{each.name} is {_describe_type(each)}, was {_describe_type(before[each.name])}"
        for each in other.arguments
        if each.name in before and before[each.name] != each
    ]
    if changed:
        return "; ".join(changed[:_MAX_LISTED]) + (
            f" and {len(changed) - _MAX_LISTED} more" if len(changed) > _MAX_LISTED else ""
        )
    if first.argument_names != other.argument_names:
        return "its arguments have other leaves"
    return "a static argument, JAX's settings, weak types or how arrays lie differ"


def _describe_type(argument: ArrayType) -> str:
    return f"{argument.element_type}[{','.join(map(str, argument.shape))}]"


def outputs_to_read_back(lowered: LoweredProgram) -> tuple[int, ...]:
    """Small results, such as a loss; state that is updated in place is not read."""
    small = [
        number
        for number, output in enumerate(lowered.outputs)
        if number not in lowered.aliases and _size_bytes(output.element_type, output.shape) <= READ_BACK_BYTES
    ]
    return tuple(small[:READ_BACK_OUTPUTS])


def options_key(options: PlanOptions) -> str:
    """Equal for options that ask for the same plan."""
    by_number = (options.argument_axes, options.output_axes, options.argument_views, options.output_views)
    pins = [sorted(settled.items()) for settled in by_number]
    mesh = list((options.mesh or {}).items())
    limits = (options.memory_budget, options.memory_fraction, options.deadline_s)
    ways = (options.effort, options.rewrites, options.remat, options.mode, options.constraints)
    batches = (options.micro_batches, options.micro_batch_inexact)
    pipeline = (options.stages, options.schedule, options.imbalance, *batches)
    return repr((mesh, options.force, pins, options.argument_names, options.output_names, limits, ways, pipeline))


def _size_bytes(element_type: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * to_dtype(element_type).itemsize
