"""Batch dimensions of the arguments.

A step is the same for each batch element: cut along the batch, each part computes its share of all part-specific
values. Hence the batch is a dimension along which `planner.microbatch` can cut a step. A sequence's time (consecutive
steps) or the rows of a lookup table are none. Sometimes no cut covers more product work (batch-norm statistics span the
whole batch; a loss can be cut along the target's features). Then the batch is the dimension with the most product work.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from shardwright.cost.compute import flops
from shardwright.hlo import Module
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.constraints.forced import state_arguments
from shardwright.planner.graph.batch_dim_analysis import TiedDims
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.microbatch.batch_candidates import batch_candidates, tie_dims
from shardwright.planner.microbatch.kinds import Along, Term
from shardwright.planner.microbatch.labels import HEAVY
from shardwright.planner.microbatch.split import label_step
from shardwright.planner.strategies.rule_cache import RuleCache

#: Instructions without computation of their own.
_FORWARDING_OPCODES = frozenset({"parameter", "tuple", "get-tuple-element"})


def find_batch_dims(
    module: Module, flow: Dataflow, options: PlanOptions, rules: RuleCache | None = None
) -> dict[int, int]:
    """Batch arguments: flat number → batch dimension; empty without any.

    flow: of `module`.
    rules: of its instructions, when some are cached.
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
    """Dimension 0 of every non-state argument with the largest argument's leading size."""
    state = state_arguments(flow, options)
    shapes = {number: flow.nodes[node].shapes[0].dimensions for number, node in enumerate(flow.parameters)}
    arrays = {number: shape for number, shape in shapes.items() if shape and number not in state}
    size = max(arrays.values(), key=prod)[0] if arrays else 0
    return {number: 0 for number, shape in arrays.items() if shape[0] == size}


def _is_cut_along(module: Module, batch: Mapping[int, int], rules: RuleCache) -> bool:
    """Whether a step can be cut there, with some value computed part by part."""
    _, labels = label_step(module, {number: Along(dim) for number, dim in batch.items()}, rules=rules)
    return not labels.conflicts and any(
        isinstance(kind, Along | Term)
        for instruction, kinds in labels.kinds.items()
        if instruction.opcode not in _FORWARDING_OPCODES
        for kind in kinds
    )


def _work_along(flow: Dataflow, ties: TiedDims, batch: Mapping[int, int]) -> float:
    """Operations a step of the products with a dimension tied to the batch."""
    dims = ties.dims([(flow.parameters[number], dim) for number, dim in batch.items()])
    total = 0.0
    for node in flow.nodes:
        if node.is_value or node.instruction.opcode not in HEAVY:
            continue
        if any(dims[node.index]) or any(dims[source][leaf] for source, leaf in (use.source for use in node.uses)):
            given = [flow.nodes[source].shapes[leaf].dimensions for source, leaf in (use.source for use in node.uses)]
            total += node.weight * flops(node.instruction, given, [shape.dimensions for shape in node.shapes])
    return total
