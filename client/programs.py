"""A function of one signature, planned and loaded on the servers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwright import wire
from shardwright.client.frontends.jax import LoweredProgram
from shardwright.config import PlanOptions
from shardwright.dtypes import to_dtype
from shardwright.layouts import Layout
from shardwright.plans import Plan
from shardwright.proto.v1 import common_pb2, master_pb2

#: Outputs of at most so many bytes come back with the reply of their step, …
READ_BACK_BYTES = 4 << 10
#: … for at most so many outputs.
READ_BACK_OUTPUTS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedPlan:
    """What the servers hold for all functions that lower to one program under one plan."""

    plan: Plan
    load: master_pb2.LoadResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """What a step needs to run: an executable on the servers and how its numbers are laid out.

    arguments / outputs: layouts by flat number; equal layouts are the same object within a session.
    leaf_numbers: flat argument number of each leaf of the call.
    leaf_layouts: `arguments` in the order of the call's leaves.
    constants: ids of the hoisted constants on the servers.
    read_back: outputs small enough to come with the reply.
    load: what the servers said when they loaded it.
    """

    lowered: LoweredProgram
    plan: Plan
    executable_id: str
    load: master_pb2.LoadResult
    arguments: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    leaf_numbers: tuple[int, ...]
    leaf_layouts: tuple[Layout, ...]
    leaf_protos: tuple[common_pb2.ArrayLayout, ...]
    constants: tuple[int, ...]
    read_back: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.lowered.name


def leaf_numbers(lowered: LoweredProgram) -> tuple[int, ...]:
    """Flat argument number of each leaf of the call: all but the hoisted constants."""
    constants = range(lowered.constants_at, lowered.constants_at + len(lowered.constants))
    return tuple(number for number in range(len(lowered.arguments)) if number not in constants)


def outputs_to_read_back(lowered: LoweredProgram) -> tuple[int, ...]:
    """Small results, such as a loss; state that is updated in place is not read."""
    small = [
        number
        for number, output in enumerate(lowered.outputs)
        if number not in lowered.aliases and _size_bytes(output.element_type, output.shape) <= READ_BACK_BYTES
    ]
    return tuple(small[:READ_BACK_OUTPUTS])


def protos_of(layouts: tuple[Layout, ...]) -> tuple[common_pb2.ArrayLayout, ...]:
    return tuple(wire.layout_to_proto(layout) for layout in layouts)


def options_key(options: PlanOptions) -> str:
    """Equal for options that ask for the same plan."""
    by_number = (options.argument_axes, options.output_axes, options.argument_views, options.output_views)
    pins = [sorted(settled.items()) for settled in by_number]
    mesh = list((options.mesh or {}).items())
    limits = (options.memory_budget, options.memory_fraction, options.deadline_s)
    ways = (options.effort, options.rewrites, options.mode, options.micro_batches, options.micro_batch_inexact)
    return repr((mesh, options.force, pins, options.argument_names, options.output_names, limits, ways))


def _size_bytes(element_type: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * to_dtype(element_type).itemsize
