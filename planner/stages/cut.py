"""Cuts a stage graph into stages: minimal bytes between them, subject to balance and memory.

Balance comes first: the slowest chunk decides the time of every micro-batch; most transfers overlap with compute.
Given a single order of the nodes, its intervals (`intervals`) are all possible cuts, and quick to search; otherwise
the integer program (`cut_ilp`) decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.errors import MemoryBudgetError, PlanError
from shardwright.planner.stages import cut_ilp
from shardwright.planner.stages.intervals import Intervals, has_one_order, is_exact
from shardwright.planner.stages.stage_graph import CutProblem, StageCut, StageGraph, StageSlot
from shardwright.planner.stages.tuning import MAX_STAGE_SLOTS, SLACK


def cut(
    graph: StageGraph,
    places: Sequence[StageSlot],
    *,
    chunks: int = 1,
    micro_batches: int = 1,
    imbalance: float | None = None,
    most_cpu_s: float = 20.0,
) -> StageCut:
    """Cut `graph` into `chunks` parts for each of `places`; chunk c runs on stage c % len(places).

    imbalance: allowed excess of the slowest chunk over the average one, relative to the average; None: 2 % over the
    best balanced cut. most_cpu_s: CPU seconds of the integer programs; the best cut by then is used.

    Raises PlanError: fewer nodes than chunks, or no cut with the requested balance. MemoryBudgetError: no cut fits the
    memory.
    """
    problem = CutProblem(graph=graph, stage_slots=tuple(places), chunks=chunks, micro_batches=micro_batches)
    if len(graph.nodes) < problem.chunk_count:
        raise PlanError(
            f"{problem.chunk_count} stage parts were asked for, the model can be cut into {len(graph.nodes)} at most",
            where="stages",
            remedy="ask for fewer stages",
        )
    intervals = Intervals(problem)
    straight_s = intervals.fastest_s()
    straight = None if straight_s is None else intervals.min_crossing(straight_s)
    is_large = len(graph.nodes) * problem.chunk_count > MAX_STAGE_SLOTS
    if straight is not None and (is_exact(problem) or (is_large and has_one_order(problem))):
        limit_s = _limit_s(problem, imbalance, max(straight.chunk_s))
        return intervals.min_crossing(limit_s) or _refuse(problem, imbalance, max(straight.chunk_s))
    is_hopeless = straight is None and chunks == 1 and is_exact(problem)
    best_s = None if is_hopeless else _faster(straight, cut_ilp.fastest(problem, most_cpu_s=most_cpu_s / 2))
    if best_s is None:
        raise MemoryBudgetError(
            f"no cut into {len(places)} stages fits the memory of their devices",
            where="stages",
            remedy="use more devices a stage, smaller micro-batches, or a schedule that keeps fewer of them",
        )
    limit_s = _limit_s(problem, imbalance, best_s)
    best = cut_ilp.min_crossing(problem, limit_s, most_cpu_s=most_cpu_s / 2)
    if best is None or not best.is_optimal:
        straight = intervals.min_crossing(limit_s)
        if straight is not None and (best is None or straight.crossing_bytes < best.crossing_bytes):
            best = straight
    return best or _refuse(problem, imbalance, best_s)


def _faster(*cuts: StageCut | None) -> float | None:
    return min((max(cut.chunk_s) for cut in cuts if cut is not None), default=None)


def _limit_s(problem: CutProblem, imbalance: float | None, best_s: float) -> float:
    return best_s * (1 + SLACK) if imbalance is None else problem.average_s * (1 + imbalance)


def _refuse(problem: CutProblem, imbalance: float | None, best_s: float) -> StageCut:
    if imbalance is None:
        raise PlanError("no cut into stages was found in time", where="stages", remedy="ask for fewer stages")
    least = best_s / problem.average_s - 1
    raise PlanError(
        f"no cut into {problem.chunk_count} parts is as balanced as imbalance={imbalance:g} asks: in the best one the "
        f"slowest part takes {100 * least:.1f} % more than the average",
        where="imbalance",
        remedy=f"allow imbalance={least + 0.005:.2f}, or ask for fewer stages",
    )
