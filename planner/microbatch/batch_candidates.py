"""Candidates for the batch: the argument that carries it, its dimension, and the dimensions tied to it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from shardwright.options.plan_options import PlanOptions
from shardwright.planner.constraints.forced import state_arguments
from shardwright.planner.graph.batch_dim_analysis import TiedDims
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.microbatch.kinds import Along
from shardwright.planner.segments.variables import cheap_nodes
from shardwright.planner.strategies.rule_cache import RuleCache
from shardwright.planner.tuning import MAX_BATCH_ARGUMENTS


def tie_dims(flow: Dataflow, rules: RuleCache | None = None) -> TiedDims:
    """Dimensions tied by rules, in a program without constraints."""
    return TiedDims(flow, cheap_nodes(flow, {}), rules or RuleCache())


def batch_candidates(flow: Dataflow, options: PlanOptions, ties: TiedDims | None = None) -> Iterator[dict[int, Along]]:
    """Candidates for the batch, the likeliest first: per flat argument that would carry it, the dimension.

    A candidate starts from a dimension of an argument not kept between steps: the first dimensions of the largest
    arguments first. Rules tie dimensions of other such arguments to it. ties: `tie_dims(flow)`, or None.
    """
    state = state_arguments(flow, options)
    shapes = {
        number: flow.nodes[node].shapes[0]
        for number, node in enumerate(flow.parameters)
        if number not in state and flow.nodes[node].shapes[0].rank
    }
    largest = sorted(shapes, key=lambda number: -prod(shapes[number].dimensions))[:MAX_BATCH_ARGUMENTS]
    ties = ties or tie_dims(flow)
    pairs = [(dim, number) for number in largest for dim in range(shapes[number].rank)]
    for dim, number in sorted(pairs, key=lambda pair: (pair[0] > 0, largest.index(pair[1]), pair[0])):
        if shapes[number].dimensions[dim] < 2:
            continue
        tied = ties.dims([(flow.parameters[number], dim)])
        batch = {number: Along(dim)}
        for other in shapes:
            dims = tied[flow.parameters[other]][0]
            if other != number and dims:
                batch[other] = Along(dim if dim in dims else min(dims))
        yield dict(sorted(batch.items()))
