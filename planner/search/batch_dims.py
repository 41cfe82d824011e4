"""Which dimension of which argument is the batch.

A step is the same for every element of its batch: cut along it, each part computes its share of everything that is not
the same for all parts. So the batch is what `planner.microbatch` can cut a step along, and not, say, the time of a
sequence, whose steps follow each other, or the rows of a table that any element may look up. Where no cut exists that
more work in products runs along (a batch norm's statistics are of the whole batch, and a loss can be cut along the
features of what is wanted), it is the dimension that most of that work runs along.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from shardwright.config import PlanOptions
from shardwright.cost.compute import flops
from shardwright.hlo import Module
from shardwright.planner.constraints.forced import state_arguments
from shardwright.planner.graph.batch_dim_analysis import TiedDims
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.microbatch.batch_candidates import batch_candidates, tie_dims
from shardwright.planner.microbatch.kinds import Along, Term
from shardwright.planner.microbatch.labels import HEAVY
from shardwright.planner.microbatch.split import label_step
from shardwright.planner.strategies.rule_cache import RuleCache

#: Instructions that compute nothing of their own.
_FORWARDING_OPCODES = frozenset({"parameter", "tuple", "get-tuple-element"})


def find_batch_dims(
    module: Module, flow: Dataflow, options: PlanOptions, rules: RuleCache | None = None
) -> dict[int, int]:
    """By flat number, the arguments that carry the batch, each with the dimension; empty where none does.

    flow: of `module`. rules: of its instructions, where some are known.
    """
    rules = rules or RuleCache()
    usual = _first_dims(flow, options)
    if usual and _is_cut_along(module, usual, rules):
        return usual
    ties = tie_dims(flow, rules)
    guesses = [
        {number: along.dim for number, along in batch.items()} for batch in batch_candidates(flow, options, ties)
    ]
    work = [_work_along(flow, ties, batch) for batch in guesses]
    usual_work = _work_along(flow, ties, usual)
    for batch, along in zip(guesses, work, strict=True):
        if batch != usual and along >= usual_work and _is_cut_along(module, batch, rules):
            return batch
    return guesses[work.index(max(work))] if any(work) else usual


def _first_dims(flow: Dataflow, options: PlanOptions) -> dict[int, int]:
    """Dimension 0 of every argument, not kept between steps, that is as long as that of the largest of them."""
    state = state_arguments(flow, options)
    shapes = {number: flow.nodes[node].shapes[0].dimensions for number, node in enumerate(flow.parameters)}
    arrays = {number: shape for number, shape in shapes.items() if shape and number not in state}
    size = max(arrays.values(), key=prod)[0] if arrays else 0
    return {number: 0 for number, shape in arrays.items() if shape[0] == size}


def _is_cut_along(module: Module, batch: Mapping[int, int], rules: RuleCache) -> bool:
    """Whether a step can be cut there, and something is computed part by part."""
    _, labels = label_step(module, {number: Along(dim) for number, dim in batch.items()}, rules=rules)
    return not labels.conflicts and any(
        isinstance(kind, Along | Term)
        for instruction, kinds in labels.kinds.items()
        if instruction.opcode not in _FORWARDING_OPCODES
        for kind in kinds
    )


def _work_along(flow: Dataflow, ties: TiedDims, batch: Mapping[int, int]) -> float:
    """Operations a step of the products that have a dimension tied to the batch."""
    dims = ties.dims([(flow.parameters[number], dim) for number, dim in batch.items()])
    total = 0.0
    for node in flow.nodes:
        if node.is_value or node.instruction.opcode not in HEAVY:
            continue
        if any(dims[node.index]) or any(dims[source][leaf] for source, leaf in (use.source for use in node.uses)):
            given = [flow.nodes[source].shapes[leaf].dimensions for source, leaf in (use.source for use in node.uses)]
            total += node.weight * flops(node.instruction, given, [shape.dimensions for shape in node.shapes])
    return total
