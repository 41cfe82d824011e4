"""Batch dimensions of the arguments.

A step is the same for each batch element: cut along the batch, each part computes its share of all part-specific
values. Hence the batch is a dimension along which `planner.microbatch` can cut a step. A sequence's time (consecutive
steps) or the rows of a lookup table are none. Sometimes no cut covers more product work (batch-norm statistics span the
whole batch; a loss can be cut along the target's features). Then the batch is the dimension with the most product work.

An argument whose type a result has counts as state, and state has no batch. Inference, Jacobians, samplers and decoding
hand on results of their batch's type, too. They are told from training by their results: all of them run along the
batch, none is summed over it. Such a dimension of any argument is the batch when more product work runs along it than
along the one found elsewhere, or as much and it is the first of its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from shardwright.cost.compute import flops
from shardwright.hlo import Module
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.constraints.forced import state_arguments
from shardwright.planner.graph.batch_dim_analysis import TiedDims
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.microbatch.batch_candidates import batch_candidates, tie_dims
from shardwright.planner.microbatch.kinds import Along, Term, Whole
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
    ties = tie_dims(flow, rules)
    fed = _batch_of_fed_arguments(module, flow, options, ties, rules)
    return _batch_of_results(module, flow, ties, rules, fed) or fed


def _batch_of_fed_arguments(
    module: Module, flow: Dataflow, options: PlanOptions, ties: TiedDims, rules: RuleCache
) -> dict[int, int]:
    """The batch of the arguments that are no state; empty without any."""
    usual = _first_dims(flow, options)
    if usual and _is_cut_along(module, usual, rules):
        return usual
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


def _batch_of_results(
    module: Module, flow: Dataflow, ties: TiedDims, rules: RuleCache, fed: Mapping[int, int]
) -> dict[int, int]:
    """The batch along which all results run, state included, when it beats that of the other arguments; else empty."""
    work, fed_work = _work_by_tied_dims(flow, ties), _work_along(flow, ties, fed)
    batches: dict[int, dict[int, int]] = {}
    for number, node in enumerate(flow.parameters):
        for dim, size in enumerate(flow.nodes[node].shapes[0].dimensions):
            if size > 1:
                batches.setdefault(ties.find(ties.of((node, 0), dim)), {}).setdefault(number, dim)
    first = {tied: batch for tied, batch in batches.items() if work.get(tied, 0.0) >= fed_work and batch != fed}
    for tied, batch in sorted(first.items(), key=lambda item: (-work.get(item[0], 0.0), any(item[1].values()))):
        is_better = work.get(tied, 0.0) > fed_work or not any(batch.values())
        if is_better and _runs_along_all_results(module, batch, rules):
            return batch
    return {}


def _runs_along_all_results(module: Module, batch: Mapping[int, int], rules: RuleCache) -> bool:
    """Whether a step can be cut there, and puts its results together from those of the parts."""
    _, labels = label_step(module, {number: Along(dim) for number, dim in batch.items()}, rules=rules)
    kinds = set(map(type, labels.root))
    return not labels.conflicts and Along in kinds and kinds <= {Along, Whole}


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
    tied = {ties.find(ties.of((flow.parameters[number], 0), dim)) for number, dim in batch.items()}
    return sum(work for dims, work in _products(flow, ties) if not tied.isdisjoint(dims))


def _work_by_tied_dims(flow: Dataflow, ties: TiedDims) -> dict[int, float]:
    """Operations a step of the products, by the representative of each of their dimensions."""
    total: dict[int, float] = {}
    for dims, work in _products(flow, ties):
        for tied in sorted(dims):
            total[tied] = total.get(tied, 0.0) + work
    return total


def _products(flow: Dataflow, ties: TiedDims) -> Iterator[tuple[set[int], float]]:
    """Every product: the representatives of its dimensions, and its operations a step."""
    for node in flow.nodes:
        if node.is_value or node.instruction.opcode not in HEAVY:
            continue
        leaves = [(use.source, flow.nodes[use.source[0]].shapes[use.source[1]].dimensions) for use in node.uses]
        results = [((node.index, leaf), shape.dimensions) for leaf, shape in enumerate(node.shapes)]
        dims = {ties.find(ties.of(leaf, dim)) for leaf, sizes in (*leaves, *results) for dim in range(len(sizes))}
        given, handed_on = ([sizes for _, sizes in each] for each in (leaves, results))
        yield dims, node.weight * flops(node.instruction, given, handed_on)
