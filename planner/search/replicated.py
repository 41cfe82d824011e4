"""The program computed whole on every device: what no plan that is handed out is slower than, where it fits.

    seconds a step = Σ executions × seconds of the whole instruction + arrival of what the client sends, whole

It has no collectives, so that it is a sum over instructions, with no problem to solve: its price is known as soon as
any plan is. The plan itself is only made where that sum is less than what another plan takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.planner.search import experts
from shardwright.planner.search.solutions import MIN_GAIN
from shardwright.shardings import TensorSharding

if TYPE_CHECKING:
    from shardwright.cost.compute import Traffic
    from shardwright.hlo import Instruction
    from shardwright.planner.search.search import Search
    from shardwright.planner.search.solutions import CandidatePlan
    from shardwright.planner.segments.cost_graph import CostGraph


def compute_replicated_step_s(graph: CostGraph) -> float:
    """Seconds a step of the program computed whole on every device; where pins forbid that, no plan that keeps to them
    and computes everything whole takes less."""
    layout, flow, prices = graph.variables, graph.flow, graph.prices
    once: dict[tuple[int, bool, Traffic | None], float] = {}  # equal instructions have one number
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
    """Operands and results of an instruction, nothing split."""
    inputs = [leaf for operand in instruction.operands for leaf in operand.shape.leaves]
    return (
        [TensorSharding.replicated(leaf.rank) for leaf in inputs],
        [TensorSharding.replicated(leaf.rank) for leaf in instruction.shape.leaves],
    )


def replicate_if_faster(
    search: Search, found: CandidatePlan, why: str = experts.BEST_AT_DEADLINE
) -> CandidatePlan | None:
    """The plan that computes everything on every device, where it fits the memory and is faster than `found`."""
    step_s = found.cost.step_s * (1 - MIN_GAIN)
    if compute_replicated_step_s(found.chain.graph) >= step_s:
        return None
    whole = experts.build_expert_plan(search, experts.REPLICATED, why)
    is_faster = whole is not None and whole.cost.step_s < step_s
    return whole if whole is not None and is_faster and search.fits(whole) else None


def choose_first_plan(search: Search, first: CandidatePlan | None) -> CandidatePlan | None:
    """`first`, the plan of an expert, or that which computes everything on every device, if it is the faster one; None
    where neither fits the memory."""
    if first is not None and search.fits(first):
        return replicate_if_faster(search, first) or first
    if not experts.is_likely_to_fit(search, devices=1):
        return None
    whole = experts.build_expert_plan(search, experts.REPLICATED, experts.BEST_AT_DEADLINE)
    return whole if whole is not None and search.fits(whole) else None
