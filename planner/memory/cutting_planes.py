"""A price of memory for each peak, where one for all of them leaves too much open.

`fitting` prices all peaks alike, so that a plan which takes too much at one of them makes bytes at all others dearer,
too. Here each has a price of its own. Of any prices, a plan that is known says what its seconds and the bytes that it
takes beyond what there is would cost: a plane over the prices. What is cheapest at some prices costs no more than the
lowest of these planes there, so the prices at which that is highest are tried next (Kelley's cutting planes, 1960).
With few planes these jump about: what is tried lies between them and the prices that promised most so far (Wentges,
"Weighted Dantzig-Wolfe decomposition for linear mixed-integer programming", 1997). It ends where prices promise what
the planes allow.

Where plans peak (`improve_plan`), plans that are nearly the cheapest at the same prices differ little: parts of them
make one that fits (`LagrangianSearch.merge_plans`). What the positions that all plans store promise (`improve_bound`)
is a bound.
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
from shardwright.planner.solver.pbqp import FloatArray

if TYPE_CHECKING:
    from shardwright.planner.memory.lagrangian import LagrangianSearch
    from shardwright.planner.search.solutions import CandidatePlan

#: Prices that are tried for a plan, at most, and after how many of them plans are merged; and those for a bound.
MAX_EVALUATIONS, MERGE_EVERY = 16, 4
MAX_BOUND_EVALUATIONS = 10

#: Plans that are merged, at most, and mixtures of all of them, before those that do not fit are merged with the best.
MAX_MERGED, MAX_MERGES_OF_ALL = 8, 3

#: Seconds of CPU that one mixture's integer program may take, and those after which no more are begun.
MAX_CPU_S, MAX_TOTAL_CPU_S = 5.0, 20.0

#: How often in a row plans are merged in vain before nothing more is tried.
MAX_FAILED_MERGES = 3

#: The dearest price of a byte, as a part of what the bytes that there are would cost at the fastest plan's time.
MAX_MULTIPLIER = 32.0

#: Relative gap between what prices promise and what the planes allow at which there is nothing left to learn; and the
#: one to the lowest plane within which a plan is nearly the cheapest.
GAP_TOLERANCE = 1e-3

#: How far prices are tried towards those that the planes allow most at, as long as that gives plans that are new.
STEP_FRACTION = 0.5

#: Part of the room at a peak that counts as taken, so that prices which no plan tells apart from lower ones stay low.
_ROOM_MARGIN = 1e-3


def improve_plan(fitting: LagrangianSearch, known: CandidatePlan, enough_s: float) -> CandidatePlan:
    """A plan that fits, or a faster one that does.

    fitting: the search for such plans; what it has tried may take more than there is. known: a plan of the same mesh
    that fits. enough_s: what a plan may take to be taken at once.
    """
    best, planes, in_vain = known, _CuttingPlanes(fitting, fitting.room_at_peak), 0
    for plan in (known, fitting.start_plan, *(each.candidate for each in fitting.evaluations)):
        planes.add(plan)
    try:
        for number in range(1, MAX_EVALUATIONS + 1):
            allowed_s, highest = planes.maximize_model()
            made, promised_s, _ = planes.evaluate_towards(highest)
            best = made if fitting.fits(made) and made.cost.step_s < best.cost.step_s else best
            is_last = number == MAX_EVALUATIONS or planes.is_converged or promised_s >= allowed_s * (1 - GAP_TOLERANCE)
            if is_last or number % MERGE_EVERY == 0:
                known, best = best, planes.merge_plans(highest, best)
                in_vain = in_vain + 1 if best is known else 0
            if is_last or in_vain == MAX_FAILED_MERGES or best.cost.step_s <= enough_s or fitting.search.must_stop():
                break
    except OutOfTimeError:  # in the middle of a price
        pass
    return best


def improve_bound(fitting: LagrangianSearch, known: CandidatePlan, enough_s: float) -> tuple[float, Multipliers]:
    """What all plans that fit take at least, seconds, and the prices that say so.

    fitting: the search for such plans, among all strategies of a mesh. known: one that fits. enough_s: no more is asked
    for.
    """
    best_s, best = 0.0, Multipliers(constraints=())
    planes = _CuttingPlanes(fitting, fitting.bounding_room)
    for plan in (known, fitting.start_plan, *(each.candidate for each in fitting.evaluations)):
        planes.add(plan)
    try:
        for _ in range(MAX_BOUND_EVALUATIONS if planes.constraints else 0):
            allowed_s, highest = planes.maximize_model()
            _, promised_s, terms = planes.evaluate_towards(highest)
            if promised_s > best_s:
                best_s, best = promised_s, terms
            is_last = planes.is_converged or allowed_s <= best_s * (1 + GAP_TOLERANCE)
            if is_last or best_s >= enough_s or fitting.search.must_stop():
                break
    except OutOfTimeError:
        pass
    fits = [plan for plan in planes.plans if fitting.fits(plan)]
    is_over = any(fitting.excess_bytes(peak, plan) > 0 for peak, _ in best.constraints for plan in fits)
    return (
        (0.0, Multipliers(constraints=())) if is_over else (best_s, best)
    )  # what a plan that fits may take bounds none


@dataclass(slots=True, eq=False)
class _CuttingPlanes:
    """Plans, and what each costs at any prices of the peaks that are known.

    room: of a plan and others, a peak of it and the bytes that there are at it; None where that says nothing. peaks,
    rooms: the same of all plans. best: the prices that promised most, in seconds per byte, by peak; promised_s: that.
    part: how far from those towards the prices that the planes allow most at the next are tried. is_known: whether what
    is the cheapest there was known, so that planes say nothing more. merging_s: CPU seconds that merging took.
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
        """A plan, and where it peaks, if they are new."""
        if any(plan is each for each in self.plans):
            return
        self.plans.append(plan)
        found = self.room_of(plan, self.plans)
        if found is not None and found[0] not in self.constraints:
            self.constraints.append(found[0])
            self.rooms.append(found[1])

    def maximize_model(self) -> tuple[float, FloatArray]:
        """What no prices promise more than, as far as planes say, and the prices that do, by peak; seconds."""
        excess, scale = self._excess_bytes(), float(max(self.rooms))  # both are near 1 in the program
        seconds = min(plan.cost.step_s for plan in self.plans)
        program = pulp.LpProblem("planes", pulp.LpMaximize)
        least = program.add_variable("least")
        prices = [
            program.add_variable(f"price_{i}", lowBound=0, upBound=MAX_MULTIPLIER) for i in range(len(self.constraints))
        ]
        program += least
        for plan, row in zip(self.plans, excess, strict=True):
            terms = [(price, float(-taken / scale)) for price, taken in zip(prices, row, strict=True)]
            program.addConstraint(pulp.LpAffineExpression([(least, 1), *terms]) <= plan.cost.step_s / seconds)
        program.solve(pulp.HiGHS(msg=False, threads=1))
        found = np.array([max(price.value() or 0.0, 0.0) for price in prices])
        return float(least.value()) * seconds, found * (seconds / scale)

    def evaluate_towards(self, highest: FloatArray) -> tuple[CandidatePlan, float, Multipliers]:
        """The cheapest plan on the way to some prices, which is known then; what is promised there, seconds; and the
        prices there."""
        fitting, best, number = self.fitting, np.zeros(len(self.constraints)), len(self.plans)
        best[: len(self.best_multipliers)] = self.best_multipliers
        at = best + self.step_fraction * (highest - best)
        priced = [(peak, float(price)) for peak, price in zip(self.constraints, at, strict=True) if price > 0]
        terms = Multipliers(constraints=tuple(priced), branching_bounds=fitting.branching_bounds)
        made, costs_s = fitting.evaluate_multipliers(terms)
        promised_s = costs_s - float(at @ np.array(self.rooms))
        if promised_s > self.dual_bound_s:
            self.dual_bound_s, self.best_multipliers = promised_s, at.tolist()
        self.add(made)
        is_new = len(self.plans) > number
        self.is_converged = self.step_fraction == 1.0 and not is_new
        self.step_fraction = STEP_FRACTION if is_new else 1.0
        return made, promised_s, terms

    def merge_plans(self, prices: FloatArray, best: CandidatePlan) -> CandidatePlan:
        """The fastest plan that fits of parts of the cheapest ones at some prices, of the latest and of the best that
        fits; that one, where there is none faster. Mixtures that do not fit are known then, too."""
        steps_s = np.array([plan.cost.step_s for plan in self.plans])
        costs_s = steps_s + self._excess_bytes()[:, : len(prices)] @ prices
        nearly = costs_s <= costs_s.min() + GAP_TOLERANCE * steps_s.min()
        cheapest = [self.plans[i] for i in np.argsort(costs_s, kind="stable") if nearly[i]]
        latest = self.plans[-MERGE_EVERY:]
        if self.merging_s > MAX_TOTAL_CPU_S:
            return best
        begun_s = thread_time()
        end_s = begun_s + MAX_TOTAL_CPU_S - self.merging_s
        for made in self.fitting.iterate_merges([*cheapest, *latest][:MAX_MERGED], best, MAX_MERGES_OF_ALL, MAX_CPU_S):
            self.add(made)
            if self.fitting.fits(made):
                best = min(best, made, key=lambda plan: plan.cost.step_s)
                break
            if thread_time() > end_s:
                break
        self.merging_s += thread_time() - begun_s
        return best

    def _excess_bytes(self) -> FloatArray:
        """Bytes that each plan takes at each peak beyond what there is."""
        model = self.fitting.model
        self._bytes += [[] for _ in self.plans[len(self._bytes) :]]
        for plan, taken in zip(self.plans, self._bytes, strict=True):
            taken += [model.bytes_at(peak, plan.decisions) for peak in self.constraints[len(taken) :]]
        taken_there: FloatArray = np.array(self._bytes).reshape(len(self.plans), -1)
        return np.subtract(taken_there, np.array(self.rooms) * (1 - _ROOM_MARGIN))
