"""Lagrangian search: a multiplier (price per byte) with a feasible plan, then the lowest such multiplier.

`constraint` has the idea and its bound. A fastest plan far over the limit starts the search at a high multiplier; an
answer still far over it ends the search. Two plans, one feasible and one faster but infeasible, cost the
same at one multiplier; the plan found there lies between them (Kelley's cutting planes, 1960, in a dual of one
variable). A plan may need more memory beyond its priced bytes: an infeasible crossing is followed by the geometric mean
of the two multipliers. `ilp_with_memory_rows` takes over in small programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.memory.constraint import BranchingBound, MemoryConstraint, MemoryModel, Multipliers
from shardwright.planner.memory.ilp_with_memory_rows import solve_with_memory_rows
from shardwright.planner.memory.messages import too_large_error, too_slow_error
from shardwright.planner.memory.restricted_master import merge_solutions, to_one_chain
from shardwright.planner.memory.tuning import (
    CLOSE_MULTIPLIER_RATIO,
    HOPELESS_RATIO,
    LOCAL_BOUND_SLACK,
    MAX_BOUNDING_CONSTRAINTS,
    MAX_CONSTRAINTS,
    MAX_EVALUATIONS,
    MAX_MERGES,
    MAX_MULTIPLIER,
    MAX_SAVING_GROWTH,
    MIN_MULTIPLIER,
    MULTIPLIER_GAP,
    NEAR_FIT_RATIO,
    NEAR_MULTIPLIER_RATIO,
    RISING_MULTIPLIERS,
)
from shardwright.planner.segments.bound import solve_tied
from shardwright.planner.segments.descent import descend
from shardwright.planner.segments.segment_chain import Chain, ChainSolution, Key
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver.tuning import MAX_CPU_S, TIGHT
from shardwright.planner.solver.warm_start import WarmStart

if TYPE_CHECKING:
    from shardwright.planner.search.mesh_search import MeshSearch
    from shardwright.planner.search.solutions import CandidatePlan


def fit_plan(
    search: MeshSearch,
    plan: CandidatePlan,
    below_s: float = math.inf,
    within: tuple[BranchingBound, ...] = (),
    incumbent: CandidatePlan | None = None,
) -> CandidatePlan:
    """Return `plan` or, when it does not fit, the fastest feasible plan.

    below_s: a plan with a step this long is useless.
    within: bounds kept by `plan` and by every priced plan.
    incumbent: a feasible plan on the same mesh; parts of it may be merged when no multiplier gives a feasible plan.

    Raises MemoryBudgetError when no plan fits, or none under `below_s`.
    """
    if search.fits(plan):
        return plan
    return search.lagrangian_search(search, plan, below_s, within, incumbent).find_best()


@dataclass(frozen=True, slots=True)
class _PricedPlan:
    """A plan, and the multiplier it is cheapest at."""

    multiplier: float
    candidate: CandidatePlan


@dataclass(slots=True, eq=False)
class LagrangianSearch:
    """The search for a feasible plan of one chain, or of one mesh when the chain is a three-axis neighbourhood. A chain
    with all strategies of its mesh is solved by message passing at each multiplier, without descent.

    start_plan: the fastest plan.
    step_limit_s: a plan with a step this long is useless.
    branching_bounds: bounds kept by `start_plan` and by every priced plan.
    incumbent: a feasible plan.
    constraints: peaks with a price, by the predicted memory of plans.
    universal_constraints: peaks with a price, of the unpartitioned program; nearly every plan stores these bytes.
    evaluations: the plans found, with their multipliers.
    dual_bound_s: lower bound on feasible plans, seconds, without values recomputed per reader; valid if every plan
        stores the priced bytes.
    best_multiplier: the multiplier of `dual_bound_s`.
    universal_bound_s: lower bound from `universal_constraints`, recomputation included.
    is_hopeless: whether every multiplier leaves plans far over the limit.
    model: the program's buffers.

    With descent, both bounds hold only near one plan: reason enough to give up, but no proof.
    """

    search: MeshSearch
    start_plan: CandidatePlan
    step_limit_s: float
    branching_bounds: tuple[BranchingBound, ...] = ()
    incumbent: CandidatePlan | None = None
    constraints: list[MemoryConstraint] = field(default_factory=list)
    universal_constraints: list[MemoryConstraint] = field(default_factory=list)
    evaluations: list[_PricedPlan] = field(default_factory=list)
    dual_bound_s: float = 0.0
    best_multiplier: float = 0.0
    universal_bound_s: float = 0.0
    is_hopeless: bool = False
    _last_messages: tuple[Chain, WarmStart[Key]] | None = None
    model: MemoryModel = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.search.memory_model(self.start_plan.chain.graph.variables.shared_layouts)

    def find_best(self) -> CandidatePlan:
        """The fastest feasible plan. Raises MemoryBudgetError."""
        self._add_constraint(self.start_plan)
        if self.incumbent is not None and self._has_all_strategies:
            self._add_constraint(self.incumbent)
        first = self._find_feasible()
        exact = None if self.search.is_fast else self.solve_exactly()
        is_close = (
            exact is not None and exact.solution.value - exact.dual_bound_s <= MULTIPLIER_GAP * exact.solution.value
        )
        if exact is not None and (first is None or (is_close and not self._is_local)):
            return replace(exact, multipliers=self._bounding_multipliers(exact))
        if first is None:
            mixture = self._merge_near_feasible()
            if mixture is None:
                self.is_hopeless = self._memory_ratio(self.smallest_plan) > HOPELESS_RATIO
                raise too_large_error(self.search, self.smallest_plan)
            return mixture
        try:
            best = self._search_multipliers(first)
        except OutOfTimeError:  # during an evaluation
            best = self._fastest_feasible()
        if exact is not None:
            return replace(
                _choose_faster(best, exact),
                multipliers=self._bounding_multipliers(best),
                dual_bound_s=exact.dual_bound_s,
            )
        fastest = self.start_plan.solution
        return replace(
            best,
            multipliers=self._bounding_multipliers(best),
            dual_bound_s=fastest.tied_bound,
            unconstrained_solution=fastest,
        )

    def solve_exactly(self) -> CandidatePlan | None:
        """The fastest feasible plan, or nearly, by an integer program over the whole program. None when the program is
        too large or no feasible plan was found."""
        search, start = self.search, self.start_plan

        def judge(states: Mapping[Variable, int]) -> tuple[int, MemoryConstraint]:
            solved = ChainSolution(states=dict(states), value=0.0, tied_bound=0.0)
            plan = search.evaluate(start.chain, solved, start.notes)
            return search.bytes_needed(plan), self.model.constraint_at_peak(plan.decisions)

        peaks = self.bounding_constraints()
        best = solve_with_memory_rows(
            start.chain, search.limit_bytes, peaks, judge, search.time_limit_s(), search.limits
        )
        if best is None:
            return None
        return replace(search.evaluate(start.chain, best, start.notes), dual_bound_s=best.tied_bound)

    def _bounding_multipliers(self, best: CandidatePlan) -> Multipliers:
        """The multipliers of the best dual bound, over the unpartitioned program's peak. A peak is left out when a
        feasible plan stores less there. They bound all feasible plans with those buffers."""
        peaks = self.bounding_constraints([best])
        return Multipliers.split_equally(peaks, self.best_multiplier)

    def bounding_constraints(self, plans: Sequence[CandidatePlan] = ()) -> list[MemoryConstraint]:
        """The `universal_constraints` satisfied by every feasible plan found. Of the others, the part satisfied by all
        of them, restricted to buffers stored by each plan.

        XLA does not store fused values, and fusion may depend on the sharding.
        """
        fitting = [
            *plans,
            *(evaluation.candidate for evaluation in self.evaluations if self.fits(evaluation.candidate)),
        ]
        bounding = (self._bounding_part(whole, fitting) for whole in self.universal_constraints)
        return [peak for peak in bounding if peak is not None]

    def _bounding_part(self, whole: MemoryConstraint, fitting: Sequence[CandidatePlan]) -> MemoryConstraint | None:
        """A peak, or the largest part of it satisfied by all feasible plans; None without such a part."""
        model, limit = self.model, self.search.limit_bytes
        stored = reduce(model.restrict_to_stored, (plan.stored_leaves for plan in fitting), whole)
        for peak in (
            whole,
            replace(whole, transposed_operands=frozenset()),
            stored,
            replace(stored, transposed_operands=frozenset()),
        ):
            if all(model.bytes_at(peak, f.decisions) <= limit for f in fitting):
                return peak
        return None

    def bounding_room(
        self, plan: CandidatePlan, plans: Sequence[CandidatePlan]
    ) -> tuple[MemoryConstraint, float] | None:
        """A plan's peak over the buffers of nearly every plan, and the bytes available there; None when a known
        feasible plan needs more."""
        peak = self._bounding_part(
            self.model.constraint_at_peak(plan.decisions), [other for other in plans if self.fits(other)]
        )
        return (peak, float(self.search.limit_bytes)) if peak is not None else None

    @property
    def smallest_plan(self) -> CandidatePlan:
        """The plan with the least memory among all plans seen."""
        return min(
            (self.start_plan, *(evaluation.candidate for evaluation in self.evaluations)), key=self.search.bytes_needed
        )

    def _fastest_feasible(self) -> CandidatePlan:
        """The fastest feasible plan among the evaluations."""
        return min(
            (evaluation.candidate for evaluation in self.evaluations if self.fits(evaluation.candidate)),
            key=lambda f: f.cost.step_s,
        )

    @property
    def _is_local(self) -> bool:
        """Whether the chain is a neighbourhood of the start plan on three axes."""
        return self.start_plan.is_from_coarser_mesh

    @property
    def _has_all_strategies(self) -> bool:
        """Whether the chain has all strategies of its mesh; message passing then solves it at a multiplier."""
        return self.start_plan.chain.is_for_bound

    def _add_constraint(self, plan: CandidatePlan) -> None:
        """Add a price on bytes at a plan's peak."""
        of_all, of_this = (
            self.model.constraint_at_peak(plan.decisions),
            self.model.constraint_of_buffers(plan.live_buffers, plan.decisions),
        )
        self.constraints = _append_latest(
            _append_latest(self.constraints, of_all, MAX_CONSTRAINTS), of_this, MAX_CONSTRAINTS
        )
        self.universal_constraints = _append_latest(self.universal_constraints, of_all, MAX_BOUNDING_CONSTRAINTS)

    def fits(self, plan: CandidatePlan) -> bool:
        return self.search.fits(plan)

    def _evaluate(self, price: float, close: float = MULTIPLIER_GAP) -> _PricedPlan:
        """The cheapest plan at a multiplier, the same object for equal plans.

        Raises MemoryBudgetError when every feasible plan is too slow.
        """
        search, terms = self.search, Multipliers.split_equally(self.constraints, price, self.branching_bounds)
        chain, solved = self._solve_at(terms, close)
        bound_s = solved.tied_bound - price * search.limit_bytes  # a plan that fits pays for no more bytes
        if bound_s > self.dual_bound_s:
            self.dual_bound_s, self.best_multiplier = bound_s, price
        if not self._has_all_strategies:  # else the caller bounds it
            self._give_up_if_too_slow(chain, price)
        evaluation = _PricedPlan(price, self._to_plan(chain, solved))
        self.evaluations.append(evaluation)
        return evaluation

    def _solve_at(self, terms: Multipliers, close: float) -> tuple[Chain, ChainSolution]:
        """The cheapest plan at some multipliers, and its chain. In a neighbourhood search, the plan reached by descent
        from the cheapest plan seen."""
        start, time_limit_s = self.start_plan, self.search.time_limit_s()
        if start.coarse_solution is None or not self._is_local:
            return start.chain, self._solve_chain(start.chain, terms, close)
        cheapest = min(
            (start, *(evaluation.candidate for evaluation in self.evaluations)),
            key=lambda plan: self._lagrangian_s(plan, terms),
        )
        axes = [axis.name for axis in start.mesh.axes]
        return descend(
            start.coarse_solution.chain,
            cheapest.chain.strategies(cheapest.solution.states),
            start.chain.graph,
            axes,
            time_limit_s=time_limit_s,
            price=terms,
        )

    def _give_up_if_too_slow(self, chain: Chain, price: float) -> None:
        """Raises MemoryBudgetError when the dual bound exceeds the step limit."""
        free_s = chain.graph.min_recompute_s()
        if self.dual_bound_s + free_s < self.step_limit_s:
            return
        self.universal_bound_s = max(
            self.universal_bound_s, self._universal_bound_s(chain, price) + free_s
        )  # other plans may store less
        if self.universal_bound_s >= self.step_limit_s * (1 + LOCAL_BOUND_SLACK * self._is_local):
            raise too_slow_error(self.start_plan, self.universal_bound_s)

    def evaluate_multipliers(self, terms: Multipliers) -> tuple[CandidatePlan, float]:
        """The cheapest plan at some multipliers, the same object for equal plans; and a lower bound on the priced cost
        of all plans, seconds."""
        chain, solved = self._solve_at(terms, MULTIPLIER_GAP)
        matches = [
            plan
            for plan in (self.start_plan, self.incumbent)
            if plan is not None and _is_same_plan(plan, chain, solved)
        ]
        evaluation = _PricedPlan(terms.total, matches[0] if matches else self._to_plan(chain, solved))
        self.evaluations.append(evaluation)
        return evaluation.candidate, solved.tied_bound

    def _to_plan(self, chain: Chain, solved: ChainSolution) -> CandidatePlan:
        matches = (
            evaluation.candidate
            for evaluation in self.evaluations
            if _is_same_plan(evaluation.candidate, chain, solved)
        )
        return next(matches, None) or self.search.evaluate(chain, solved, self.start_plan.notes)

    def _solve_chain(self, chain: Chain, terms: Multipliers, close: float) -> ChainSolution:
        """The cheapest plan of a chain at some multipliers. Message passing starts from its last messages."""
        priced = chain.with_multipliers(terms)
        priced.warm_start = (
            self._last_messages[1]
            if self._last_messages is not None and self._last_messages[0] is chain
            else WarmStart()
        )
        solved = solve_tied(priced) if chain.is_for_bound else priced.solve(self.search.time_limit_s(), close)
        self._last_messages = chain, priced.warm_start
        return solved

    def _lagrangian_s(self, plan: CandidatePlan, terms: Multipliers) -> float:
        """Seconds a step of a plan, plus its priced memory."""
        memory_s = (price * self.model.bytes_at(peak, plan.decisions) for peak, price in terms.constraints)
        return plan.cost.step_s + sum(memory_s)

    def _universal_bound_s(self, chain: Chain, price: float) -> float:
        """Lower bound at a multiplier on all plans of a chain with the buffers of the unpartitioned program's peak."""
        terms = Multipliers.split_equally(self.bounding_constraints(), price, self.branching_bounds)
        solved = self._solve_chain(chain, terms, MULTIPLIER_GAP)
        return solved.tied_bound - terms.total * self.search.limit_bytes

    def _find_feasible(self) -> _PricedPlan | None:
        """A feasible plan, at a multiplier kept low."""
        # Seconds per byte at which the memory of the fastest plan costs as much as its step.
        unit = self.start_plan.cost.step_s / self.start_plan.memory.peak_bytes
        asked: tuple[float, list[MemoryConstraint]] | None = None
        rising_bytes: list[int] = []
        for multiplier in self._initial_multipliers():
            if (multiplier * unit, self.constraints) == asked:  # solved already
                continue
            asked = multiplier * unit, self.constraints
            evaluation = self._evaluate(multiplier * unit)
            if self.fits(evaluation.candidate):
                return evaluation
            if multiplier in RISING_MULTIPLIERS:
                rising_bytes.append(self.search.bytes_needed(evaluation.candidate))
                is_too_slow = evaluation.candidate.cost.step_s >= self.step_limit_s  # less memory takes longer
                if is_too_slow or not _may_reach(self.search.limit_bytes, rising_bytes):
                    return None
            self._add_constraint(evaluation.candidate)
            explains = asked[1] != self.constraints
            if multiplier == MAX_MULTIPLIER and self._memory_ratio(self.smallest_plan) > (
                HOPELESS_RATIO if explains else NEAR_FIT_RATIO
            ):
                return None
        return None

    def _initial_multipliers(self) -> tuple[float, ...]:
        """The first multipliers to try, in the units of `MIN_MULTIPLIER` and `MAX_MULTIPLIER`. When a feasible plan is
        likely, the high one comes only after a first inconclusive rising one."""
        excess = self._memory_ratio(self.start_plan)
        nearly_free = (MIN_MULTIPLIER,) if excess <= HOPELESS_RATIO else ()
        if self.incumbent is not None:  # which fits
            return (*nearly_free, *RISING_MULTIPLIERS)
        if excess <= NEAR_FIT_RATIO:
            return (*nearly_free, RISING_MULTIPLIERS[0], MAX_MULTIPLIER, *RISING_MULTIPLIERS[1:])
        return (*nearly_free, MAX_MULTIPLIER, *RISING_MULTIPLIERS)

    def _memory_ratio(self, plan: CandidatePlan) -> float:
        """A plan's memory over the limit."""
        return self.search.bytes_needed(plan) / self.search.limit_bytes

    def _search_multipliers(self, fits: _PricedPlan) -> CandidatePlan:
        """The fastest feasible plan over all multipliers tried, starting from a feasible one."""
        below = [
            evaluation
            for evaluation in self.evaluations
            if evaluation.multiplier < fits.multiplier and not self.fits(evaluation.candidate)
        ]
        over = below[-1] if below else _PricedPlan(0.0, self.start_plan)
        best = fits.candidate
        halves = False  # bytes beyond the priced ones hardly move the crossing
        for _ in range(1 if self.search.is_fast else MAX_EVALUATIONS):
            if best.cost.step_s <= self.start_plan.cost.step_s * (1 + MULTIPLIER_GAP) or self.search.must_stop():
                return best
            price = self._next_multiplier(over, fits, halves)
            if price is None or self._is_unpromising(over, fits, best):
                break
            latest = self._evaluate(price)
            does_fit = self.fits(latest.candidate)
            halves = not (does_fit or halves)
            if does_fit:
                fits, best = latest, _choose_faster(best, latest.candidate)
            else:
                over = latest
                self._add_constraint(latest.candidate)
        best = self._merge_with_incumbent(best)
        solved = fits.candidate.solution
        is_final = self.search.is_large or self._is_local or self._has_all_strategies
        if not is_final and solved.value - solved.tied_bound > TIGHT * abs(solved.value):
            # Nearly solved is enough on the way; the last multiplier is solved to the end.
            last = self._evaluate(fits.multiplier, close=0.0).candidate
            best = _choose_faster(best, last) if self.fits(last) else best
        return best

    def _is_unpromising(self, over: _PricedPlan, fits: _PricedPlan, best: CandidatePlan) -> bool:
        """Whether plans between two multipliers seem too slow at the memory limit, like the best feasible plan.

        Close multipliers give plans near the line between both. With all strategies this never holds: a solve is cheap,
        and plans at close multipliers merge well; distant ones cost the integer program minutes.
        """
        if (
            self._has_all_strategies
            or best.cost.step_s < self.step_limit_s
            or fits.multiplier > NEAR_MULTIPLIER_RATIO * over.multiplier
        ):
            return False
        over_s, over_bytes = over.candidate.cost.step_s, self.search.bytes_needed(over.candidate)
        saved, added_s = over_bytes - self.search.bytes_needed(fits.candidate), fits.candidate.cost.step_s - over_s
        return over_s + added_s * (over_bytes - self.search.limit_bytes) / saved >= self.step_limit_s

    def _merge_with_incumbent(self, best: CandidatePlan) -> CandidatePlan:
        """The fastest feasible plan merged from all evaluations and the incumbent; `best` when none is faster than
        both.

        With all strategies, evaluations have little in common with the incumbent: they are merged with one another
        first, and with the incumbent only when no faster plan results.
        """
        plans = [self.start_plan, *(evaluation.candidate for evaluation in self.evaluations)]
        if self.incumbent is None:
            return self.merge_plans(plans, best)
        if self._has_all_strategies:
            best = self.merge_plans(plans, best)
            if best.cost.step_s < self.step_limit_s:
                return best
        mixture = self.merge_plans(plans, _choose_faster(best, self.incumbent))
        return mixture if mixture is not self.incumbent else best

    def _merge_near_feasible(self) -> CandidatePlan | None:
        """A faster plan merged from the incumbent and nearly feasible plans; None without one."""
        best = self.incumbent
        if best is None:
            return None
        faster = [
            evaluation.candidate
            for evaluation in self.evaluations
            if evaluation.candidate.cost.step_s < best.cost.step_s
        ]
        mixture = self.merge_plans(faster, best)
        return mixture if mixture is not best else None

    def merge_plans(self, plans: Sequence[CandidatePlan], best: CandidatePlan) -> CandidatePlan:
        """The fastest feasible plan with each variable's strategy taken from one of `plans`; the feasible `best` when
        none is faster."""
        *_, last = (best, *self.iterate_merges(plans, best))
        return _choose_faster(best, last) if self.fits(last) else best

    def iterate_merges(
        self, plans: Sequence[CandidatePlan], best: CandidatePlan, most_of_all: int = 1, most_cpu_s: float = MAX_CPU_S
    ) -> Iterator[CandidatePlan]:
        """Merged plans: each variable takes its strategy from `best` or one of `plans`. The fastest come first; the
        last may fit.

        The peaks of the plans constrain a merged plan, within the limits kept by feasible plans. A merged plan may peak
        elsewhere: an infeasible one adds its own peak as a constraint. After `most_of_all` merges, each one combines
        only `best` and the last merged plan.

        most_cpu_s: CPU seconds per integer program.
        """
        search, model = self.search, self.model
        candidates = list({id(plan): plan for plan in (best, *plans)}.values())
        if min(plan.cost.step_s for plan in candidates) >= best.cost.step_s:
            return
        chain, of_plans = to_one_chain([(plan.chain, plan.solution.states) for plan in candidates])

        def beside(peak: MemoryConstraint, room: float) -> tuple[MemoryConstraint, float]:
            """A peak, and what a mixture may take there besides the best one."""
            return peak, room - model.bytes_at(peak, best.decisions)

        rooms, parts, seen = (
            [beside(*self.room_at_peak(plan, candidates)) for plan in candidates],
            of_plans,
            list(of_plans),
        )
        for number in range(1, MAX_MERGES + 1):
            states = (
                None
                if search.must_stop()
                else merge_solutions(chain, parts, rooms, search.time_limit_s(), most_cpu_s=most_cpu_s)
            )
            if states is None or states in seen:
                return
            merged = search.evaluate(
                chain, ChainSolution(states=states, value=math.inf, tied_bound=0.0), self.start_plan.notes
            )
            yield merged
            if self.fits(merged):
                return
            seen.append(states)
            rooms.append(beside(*self.room_at_peak(merged, candidates)))
            if number >= most_of_all:
                parts = [of_plans[0], states]

    def excess_bytes(self, peak: MemoryConstraint, plan: CandidatePlan) -> float:
        """A plan's bytes over the limit at a peak."""
        return self.model.bytes_at(peak, plan.decisions) - self.search.limit_bytes

    def room_at_peak(self, plan: CandidatePlan, plans: Sequence[CandidatePlan]) -> tuple[MemoryConstraint, float]:
        """A plan's peak, and the bytes available there.

        Bytes needed outside the counted buffers are assumed equal in other plans. No known feasible plan exceeds the
        room.
        """
        limit, model = self.search.limit_bytes, self.model
        peak = model.constraint_of_buffers(plan.live_buffers, plan.decisions)
        counted = limit - self.search.bytes_needed(plan) + model.bytes_at(peak, plan.decisions)
        return peak, max(counted, *(model.bytes_at(peak, other.decisions) for other in plans if self.fits(other)))

    def _next_multiplier(self, over: _PricedPlan, fits: _PricedPlan, halves: bool) -> float | None:
        """The multiplier with equal costs of both plans, or the geometric mean of theirs; None when these are close."""
        if fits.multiplier < over.multiplier * CLOSE_MULTIPLIER_RATIO:
            return None
        price = 0.0 if halves else self._crossing_multiplier(over, fits)
        if over.multiplier * CLOSE_MULTIPLIER_RATIO < price < fits.multiplier / CLOSE_MULTIPLIER_RATIO:
            return price
        return math.sqrt(over.multiplier * fits.multiplier) if over.multiplier else fits.multiplier / 8

    def _crossing_multiplier(self, over: _PricedPlan, fits: _PricedPlan) -> float:
        """The multiplier with equal costs of both plans, by their priced bytes; 0 without one."""
        saved = self._mean_constraint_bytes(over.candidate) - self._mean_constraint_bytes(fits.candidate)
        return (fits.candidate.cost.step_s - over.candidate.cost.step_s) / saved if saved > 0 else 0.0

    def _mean_constraint_bytes(self, plan: CandidatePlan) -> float:
        return sum(self.model.bytes_at(peak, plan.decisions) for peak in self.constraints) / len(self.constraints)


def _may_reach(limit_bytes: int, risen: Sequence[int]) -> bool:
    """Whether the remaining rising multipliers may reach the limit, extrapolated from the memory at the first ones."""
    if len(risen) < 2:
        return True
    saved, steps = max(risen[-2] - risen[-1], 0), len(RISING_MULTIPLIERS) - len(risen)
    return risen[-1] - MAX_SAVING_GROWTH * steps * saved <= limit_bytes


def _append_latest(peaks: list[MemoryConstraint], peak: MemoryConstraint, most: int) -> list[MemoryConstraint]:
    """The last `most` of `peaks` and a new one."""
    return peaks if peak in peaks else [*peaks, peak][-most:]


def _is_same_plan(plan: CandidatePlan, chain: Chain, solved: ChainSolution) -> bool:
    """Whether a plan equals a chain's solution."""
    if plan.chain.graph is chain.graph:
        return plan.solution.states == solved.states
    return plan.chain.strategies(plan.solution.states) == chain.strategies(solved.states)


def _choose_faster(best: CandidatePlan, other: CandidatePlan) -> CandidatePlan:
    return other if other.cost.step_s < best.cost.step_s else best
