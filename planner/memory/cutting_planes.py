"""Cutting planes: one multiplier per peak, for gaps left by a single multiplier.

`lagrangian` prices all peaks alike: a plan too large at one of them makes bytes at all others more expensive. Here each
peak has its own multiplier. At any multipliers, a known plan costs its seconds plus its priced excess bytes: a plane
over the multipliers. The cheapest plan at some multipliers costs no more than the lowest plane there; the multipliers
with the highest such minimum are tried next (Kelley's cutting planes, 1960). With few planes these jump; the next trial
lies between them and the multipliers of the best dual bound (Wentges, "Weighted Dantzig-Wolfe decomposition for linear
mixed-integer programming", 1997). It ends when the dual bound meets the planes' maximum.

At the peaks of plans (`improve_plan`), nearly cheapest plans at equal multipliers differ little: their parts merge into
a feasible one (`LagrangianSearch.merge_plans`). At positions stored by all plans (`improve_bound`), the dual value is a
bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np
import pulp

from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.memory.constraint import MemoryConstraint, Multipliers
from shardwright.planner.memory.tuning import (
    MAX_BOUND_EVALUATIONS,
    MAX_FAILED_MERGES,
    MAX_MERGE_CPU_S,
    MAX_MERGED,
    MAX_MERGES_OF_ALL,
    MAX_PLANE_EVALUATIONS,
    MAX_PLANE_MULTIPLIER,
    MAX_TOTAL_MERGE_CPU_S,
    MERGE_EVERY,
    PLANE_GAP,
    ROOM_MARGIN,
    STEP_FRACTION,
)
from shardwright.planner.solver.pbqp import FloatArray

if TYPE_CHECKING:
    from shardwright.planner.memory.lagrangian import LagrangianSearch
    from shardwright.planner.search.solutions import CandidatePlan


def improve_plan(fitting: LagrangianSearch, incumbent: CandidatePlan, enough_s: float) -> CandidatePlan:
    """A feasible plan, `incumbent` or a faster one.

    fitting: the Lagrangian search; its evaluations may exceed the limit.
    incumbent: a feasible plan of the same mesh.
    enough_s: a plan this fast ends the search.
    """
    best, planes, in_vain = incumbent, _CuttingPlanes(fitting, fitting.room_at_peak), 0
    for plan in (incumbent, fitting.start_plan, *(evaluation.candidate for evaluation in fitting.evaluations)):
        planes.add(plan)
    try:
        for number in range(1, MAX_PLANE_EVALUATIONS + 1):
            allowed_s, highest = planes.maximize_model()
            cheapest, promised_s, _ = planes.evaluate_towards(highest)
            best = cheapest if fitting.fits(cheapest) and cheapest.cost.step_s < best.cost.step_s else best
            is_last = (
                number == MAX_PLANE_EVALUATIONS or planes.is_converged or promised_s >= allowed_s * (1 - PLANE_GAP)
            )
            if is_last or number % MERGE_EVERY == 0:
                incumbent, best = best, planes.merge_plans(highest, best)
                in_vain = in_vain + 1 if best is incumbent else 0
            if is_last or in_vain == MAX_FAILED_MERGES or best.cost.step_s <= enough_s or fitting.search.must_stop():
                break
    except OutOfTimeError:  # during an evaluation
        pass
    return best


def improve_bound(fitting: LagrangianSearch, incumbent: CandidatePlan, enough_s: float) -> tuple[float, Multipliers]:
    """Lower bound on feasible plans, seconds, and its multipliers.

    fitting: the Lagrangian search, over all strategies of a mesh.
    incumbent: a feasible plan.
    enough_s: a bound this high ends the search.
    """
    best_s, best = 0.0, Multipliers(constraints=())
    planes = _CuttingPlanes(fitting, fitting.bounding_room)
    for plan in (incumbent, fitting.start_plan, *(evaluation.candidate for evaluation in fitting.evaluations)):
        planes.add(plan)
    try:
        for _ in range(MAX_BOUND_EVALUATIONS if planes.constraints else 0):
            allowed_s, highest = planes.maximize_model()
            _, promised_s, terms = planes.evaluate_towards(highest)
            if promised_s > best_s:
                best_s, best = promised_s, terms
            is_last = planes.is_converged or allowed_s <= best_s * (1 + PLANE_GAP)
            if is_last or best_s >= enough_s or fitting.search.must_stop():
                break
    except OutOfTimeError:
        pass
    fits = [plan for plan in planes.plans if fitting.fits(plan)]
    is_over = any(fitting.excess_bytes(peak, plan) > 0 for peak, _ in best.constraints for plan in fits)
    return (
        (0.0, Multipliers(constraints=())) if is_over else (best_s, best)
    )  # a peak that a feasible plan may exceed bounds none


@dataclass(slots=True, eq=False)
class _CuttingPlanes:
    """Plans, and the cost of each at any multipliers of the known peaks.

    room_of: (plan, plans) → a peak of the plan and the bytes available there; None when it says nothing.
    constraints, rooms: the peaks of all plans, and the bytes available there.
    best_multipliers: the multipliers of the best dual bound, seconds per byte, by peak.
    dual_bound_s: that bound.
    step_fraction: step from the best multipliers towards the planes' maximum.
    is_converged: whether the cheapest plan there was known: the planes say nothing more.
    merging_s: CPU seconds of merging.
    """

    fitting: LagrangianSearch
    room_of: Callable[[CandidatePlan, Sequence[CandidatePlan]], tuple[MemoryConstraint, float] | None]
    plans: list[CandidatePlan] = field(default_factory=list)
    constraints: list[MemoryConstraint] = field(default_factory=list)
    rooms: list[float] = field(default_factory=list)
    best_multipliers: list[float] = field(default_factory=list)
    dual_bound_s: float = 0.0
    step_fraction: float = STEP_FRACTION
    is_converged: bool = False
    merging_s: float = 0.0
    _bytes: list[list[float]] = field(default_factory=list)  # bytes of each plan at each peak

    def add(self, plan: CandidatePlan) -> None:
        """Add a plan and its peak, if new."""
        if any(plan is other for other in self.plans):
            return
        self.plans.append(plan)
        peak_and_room = self.room_of(plan, self.plans)
        if peak_and_room is not None and peak_and_room[0] not in self.constraints:
            self.constraints.append(peak_and_room[0])
            self.rooms.append(peak_and_room[1])

    def maximize_model(self) -> tuple[float, FloatArray]:
        """The maximum of the planes' minimum, seconds, and its multipliers by peak."""
        excess, scale = self._excess_bytes(), float(max(self.rooms))  # both are near 1 in the program
        seconds = min(plan.cost.step_s for plan in self.plans)
        program = pulp.LpProblem("planes", pulp.LpMaximize)
        least = program.add_variable("least")
        prices = [
            program.add_variable(f"price_{i}", lowBound=0, upBound=MAX_PLANE_MULTIPLIER)
            for i in range(len(self.constraints))
        ]
        program += least
        for plan, row in zip(self.plans, excess, strict=True):
            terms = [(price, float(-excess_bytes / scale)) for price, excess_bytes in zip(prices, row, strict=True)]
            program.addConstraint(pulp.LpAffineExpression([(least, 1), *terms]) <= plan.cost.step_s / seconds)
        program.solve(pulp.HiGHS(msg=False, threads=1))
        solution = np.array([max(price.value() or 0.0, 0.0) for price in prices])
        return float(least.value()) * seconds, solution * (seconds / scale)

    def evaluate_towards(self, highest: FloatArray) -> tuple[CandidatePlan, float, Multipliers]:
        """The cheapest plan on the way to some multipliers, added to the plans; the dual bound there, seconds; the
        multipliers there."""
        fitting, best, number = self.fitting, np.zeros(len(self.constraints)), len(self.plans)
        best[: len(self.best_multipliers)] = self.best_multipliers
        at = best + self.step_fraction * (highest - best)
        priced = [(peak, float(price)) for peak, price in zip(self.constraints, at, strict=True) if price > 0]
        terms = Multipliers(constraints=tuple(priced), branching_bounds=fitting.branching_bounds)
        cheapest, costs_s = fitting.evaluate_multipliers(terms)
        promised_s = costs_s - float(at @ np.array(self.rooms))
        if promised_s > self.dual_bound_s:
            self.dual_bound_s, self.best_multipliers = promised_s, at.tolist()
        self.add(cheapest)
        is_new = len(self.plans) > number
        self.is_converged = self.step_fraction == 1.0 and not is_new
        self.step_fraction = STEP_FRACTION if is_new else 1.0  # nothing new on the way: try its end
        return cheapest, promised_s, terms

    def merge_plans(self, prices: FloatArray, best: CandidatePlan) -> CandidatePlan:
        """The fastest feasible plan merged from the cheapest ones at some multipliers, the latest ones and `best`;
        `best` when none is faster. Infeasible merged plans are added to the plans."""
        steps_s = np.array([plan.cost.step_s for plan in self.plans])
        costs_s = steps_s + self._excess_bytes()[:, : len(prices)] @ prices
        nearly = costs_s <= costs_s.min() + PLANE_GAP * steps_s.min()
        cheapest = [self.plans[i] for i in np.argsort(costs_s, kind="stable") if nearly[i]]
        latest = self.plans[-MERGE_EVERY:]
        if self.merging_s > MAX_TOTAL_MERGE_CPU_S:
            return best
        begun_s = thread_time()
        end_s = begun_s + MAX_TOTAL_MERGE_CPU_S - self.merging_s
        for merged in self.fitting.iterate_merges(
            [*cheapest, *latest][:MAX_MERGED], best, MAX_MERGES_OF_ALL, MAX_MERGE_CPU_S
        ):
            self.add(merged)
            if self.fitting.fits(merged):
                best = min(best, merged, key=lambda plan: plan.cost.step_s)
                break
            if thread_time() > end_s:
                break
        self.merging_s += thread_time() - begun_s
        return best

    def _excess_bytes(self) -> FloatArray:
        """Bytes over the room: plans × peaks."""
        model = self.fitting.model
        self._bytes += [[] for _ in self.plans[len(self._bytes) :]]
        # Only new pairs: each walks over all buffers of a peak.
        for plan, plan_bytes in zip(self.plans, self._bytes, strict=True):
            plan_bytes += [model.bytes_at(peak, plan.decisions) for peak in self.constraints[len(plan_bytes) :]]
        peak_bytes: FloatArray = np.array(self._bytes).reshape(len(self.plans), -1)
        return np.subtract(peak_bytes, np.array(self.rooms) * (1 - ROOM_MARGIN))
