"""A function of one signature, planned and loaded on the servers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate
from math import prod

import numpy as np

from shardwright.builders.choices import PlanChoice, add_candidates
from shardwright.client.frontends.program import Program
from shardwright.client.limits import DEBUG_READ_BACK_BYTES, READ_BACK_BYTES, READ_BACK_OUTPUTS
from shardwright.client.placement import ExecutableEntry, Placement
from shardwright.dtypes import to_dtype
from shardwright.plans.plan import CallTrees, Candidate
from shardwright.proto.v1 import common_pb2, master_pb2
from shardwright.user_plans import PipelinePlan, Plan, to_user_plan

#: Instructions of HLO whose results are others each time.
_STATEFUL = re.compile(r"= \S+ rng(-get-and-update-state)?\(")
#: Arguments that a message lists, at most.
_MAX_LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedPlan:
    """The servers' part, shared by all functions with one program under one plan.

    choice: name of the strategy builder that the plan is of; "": of none.
    is_first: whether the search ended with the first plan that fits.
    """

    plan: Plan | PipelinePlan
    choice: str
    load: master_pb2.LoadResult
    is_first: bool = False


def to_loaded_plan(
    choice: PlanChoice,
    plan: Plan | PipelinePlan,
    others: Sequence[Candidate],
    load: master_pb2.LoadResult,
    *,
    is_first: bool = False,
) -> LoadedPlan:
    """A loaded plan, with its strategies and the candidates that it was compared with."""
    complete = to_user_plan(add_candidates(choice.record(plan), others))
    return LoadedPlan(plan=complete, choice=choice.name, load=load, is_first=is_first)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArgumentSource:
    """Source of an executable's argument: a leaf of the call, or a hoisted constant.

    leaf: number among the leaves, −1 of a constant. constant: the entry's part of it. proto: the entry's layout.
    """

    entry: ExecutableEntry
    leaf: int
    constant: np.ndarray | None
    proto: common_pb2.ArrayLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepProgram:
    """An executable on the servers, with the user's argument and output numbers mapped to it.

    choice, is_first: see `LoadedPlan`.
    arguments / outputs: places by flat number, None: an unread argument; equal ones are the same object within a
    session.
    leaf_numbers: flat argument number of each leaf of the call.
    leaf_places: `arguments` in the order of the call's leaves.
    donated: numbers of the leaves consumed by a call, ascending.
    sources / results: inputs and outputs of the executable, in its order.
    consumed: numbers of the sources whose arrays it takes over.
    read_back: small outputs, returned with the reply.
    is_repeatable: whether it gives the same results of the same arguments.
    load: the servers' reply to loading it.
    epoch: of the session when it was planned; on another cluster it cannot run.
    """

    lowered: Program
    plan: Plan | PipelinePlan
    choice: str
    executable_id: str
    load: master_pb2.LoadResult
    arguments: tuple[Placement | None, ...]
    outputs: tuple[Placement, ...]
    leaf_numbers: tuple[int, ...]
    leaf_places: tuple[Placement | None, ...]
    donated: tuple[int, ...]
    sources: tuple[ArgumentSource, ...]
    results: tuple[ExecutableEntry, ...]
    consumed: tuple[int, ...]
    read_back: tuple[int, ...]
    is_repeatable: bool
    is_first: bool = False
    epoch: int = 0

    @property
    def name(self) -> str:
        return self.lowered.name


def with_trees(plan: Plan | PipelinePlan, lowered: Program) -> Plan | PipelinePlan:
    """The plan with the structure of its function's calls, where they have one."""
    if isinstance(plan, PipelinePlan) or lowered.argument_tree is None:
        return plan
    numbers = [number for number in lowered.leaf_numbers if number not in lowered.captured]
    calls = CallTrees(
        arguments=lowered.argument_tree,
        results=lowered.result_tree,
        argument_leaves=tuple((number, len(spec.shape)) for number, spec in zip(numbers, lowered.specs, strict=True)),
        result_leaves=tuple((number, len(lowered.results[number].shape)) for number in lowered.result_numbers),
    )
    return replace(plan, call=calls)


def list_donated_leaves(lowered: Program) -> tuple[int, ...]:
    """Numbers of the leaves of a call that it consumes, ascending."""
    return tuple(leaf for leaf, number in enumerate(lowered.leaf_numbers) if number in lowered.donated)


def describe_difference(first: Program, other: Program) -> str:
    """The reason of a program unlike the function's first, in words."""
    before = {argument.name: argument for argument in first.arguments}
    changed = [
        f"{leaf.name} is {leaf.type_text}, was {before[leaf.name].type_text}"
        for leaf in other.arguments
        if leaf.name in before and before[leaf.name] != leaf
    ]
    if changed:
        return "; ".join(changed[:_MAX_LISTED]) + (
            f" and {len(changed) - _MAX_LISTED} more" if len(changed) > _MAX_LISTED else ""
        )
    if first.argument_names != other.argument_names:
        return "its arguments have other leaves"
    return "a static argument, JAX's settings, weak types or how arrays lie differ"


def is_repeatable(lowered: Program) -> bool:
    """Whether it draws no random numbers from a state that the devices keep (HLO's `rng`)."""
    return _STATEFUL.search(lowered.hlo_text) is None


def outputs_to_read_back(lowered: Program) -> tuple[int, ...]:
    """Small results, e.g. a loss, and what `jax.debug` reads; state updated in place is not read."""
    sizes = [_size_bytes(output.element_type, output.shape) for output in lowered.outputs]
    count = lowered.result_count
    small = [n for n, size in enumerate(sizes[:count]) if n not in lowered.aliases and size <= READ_BACK_BYTES]
    totals = accumulate(sizes[count:])
    debug = [n for n, total in enumerate(totals, count) if total <= DEBUG_READ_BACK_BYTES]
    return (*small[:READ_BACK_OUTPUTS], *debug)


def choice_key(choice: PlanChoice) -> str:
    """Equal options, for planning, under one name have equal keys."""
    options = choice.options
    by_number = (options.argument_axes, options.output_axes, options.argument_views, options.output_views)
    pins = [sorted(settled.items()) for settled in by_number]
    mesh = list((options.mesh or {}).items())
    limits = (options.bucket_bytes, options.memory_budget, options.memory_fraction, options.deadline_s)
    rewriting = (options.rewrites, options.remat, options.fused_attention, options.expert_capacity, options.offload)
    ways = (options.effort, *rewriting, options.mode, options.simple, options.constraints)
    batches = (options.micro_batches, options.micro_batch_inexact)
    pipeline = (options.stages, options.schedule, options.imbalance, *batches)
    return repr(
        (
            choice.name,
            mesh,
            options.force,
            options.rest,
            pins,
            options.argument_names,
            options.output_names,
            options.local_arguments,
            limits,
            ways,
            pipeline,
            sha256(options.plan_json.encode()).hexdigest(),
        )
    )


def _size_bytes(element_type: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * to_dtype(element_type).itemsize
