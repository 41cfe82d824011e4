"""The fully replicated program: a baseline no returned plan is slower than, when it fits.

    seconds a step = Σ executions × seconds of the whole instruction + arrival of the client's inputs, whole

Without collectives it is a sum over instructions: its cost is known as soon as any plan is. The plan itself is built
only when that sum is below another plan's step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.planner.search import experts
from shardwright.plans.shardings import TensorSharding

if TYPE_CHECKING:
    from shardwright.cost.compute import Traffic
    from shardwright.hlo import Instruction
    from shardwright.planner.search.search import Search
    from shardwright.planner.search.solutions import CandidatePlan
    from shardwright.planner.segments.cost_graph import CostGraph


def compute_replicated_step_s(graph: CostGraph) -> float:
    """Seconds a step of the fully replicated program; when pins forbid it, a lower bound on plans that respect them and
    compute everything whole."""
    layout, flow, prices = graph.variables, graph.flow, graph.prices
    once: dict[tuple[int, bool, Traffic | None], float] = {}  # seconds by signature of equal instructions
    total = 0.0
    for node in flow.nodes:
        if node.is_value or not node.weight:
            continue
        ends = layout.ends_kernel(node.index)
        traffic = layout.kernels.traffic[node.index]
        key = (layout.signatures[node.index], ends, traffic)
        if key not in once:
            operands, results = _unsplit_shardings(node.instruction)
            once[key] = prices.compute_s(node.instruction, operands, results, ends_kernel=ends, traffic=traffic)
        total += node.weight * layout.kernels.parts[node.index] * once[key]
    arriving = (flow.nodes[node].shapes[0] for node in sorted(graph.fed_arguments))
    return total + sum(prices.arrival_s(shape, TensorSharding.replicated(shape.rank)) for shape in arriving)


def _unsplit_shardings(instruction: Instruction) -> tuple[list[TensorSharding], list[TensorSharding]]:
    """Replicated shardings of an instruction's operands and results."""
    inputs = [leaf for operand in instruction.operands for leaf in operand.shape.leaves]
    return (
        [TensorSharding.replicated(leaf.rank) for leaf in inputs],
        [TensorSharding.replicated(leaf.rank) for leaf in instruction.shape.leaves],
    )


def replicate_if_faster(
    search: Search, incumbent: CandidatePlan, why: str = experts.BEST_AT_DEADLINE
) -> CandidatePlan | None:
    """The fully replicated plan, when it fits the memory and is faster."""
    step_s = incumbent.cost.step_s * (1 - search.min_gain)
    if compute_replicated_step_s(incumbent.chain.graph) >= step_s:
        return None
    whole = experts.build_expert_plan(search, experts.REPLICATED, why)
    is_faster = whole is not None and whole.cost.step_s < step_s
    return whole if whole is not None and is_faster and search.fits(whole) else None


def choose_first_plan(search: Search, first: CandidatePlan | None) -> CandidatePlan | None:
    """The faster of `first` (an expert's plan) and the fully replicated plan; None when neither fits the memory."""
    if first is not None and search.fits(first):
        return replicate_if_faster(search, first) or first
    if not experts.is_likely_to_fit(search, devices=1):
        return None
    whole = experts.build_expert_plan(search, experts.REPLICATED, experts.BEST_AT_DEADLINE)
    return whole if whole is not None and search.fits(whole) else None
