"""Making a plan fit the memory: a price of a byte at which one does, then as low a one as still gives one.

`budget` has the idea and its bound. Where the fastest plan needs far more than there is, the search begins with a dear
price: if what that gives needs far more, too, nothing fits. Two plans, one that fits and a faster one that does not,
cost the same at one price: what the search finds there lies between them (Kelley's cutting planes, 1960, for a dual of
one variable). A plan may need more than its priced bytes: where the crossing gives one that does not fit, the next
price lies halfway to that which does. Where the program is small, `exact_fit` takes over.
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
from shardwright.planner.segments.bound import solve_tied
from shardwright.planner.segments.descent import descend
from shardwright.planner.segments.segment_chain import Chain, ChainSolution, Key
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver.dual import TIGHT
from shardwright.planner.solver.ilp import MAX_CPU_S
from shardwright.planner.solver.warm_start import WarmStart

if TYPE_CHECKING:
    from shardwright.planner.search.mesh_search import MeshSearch
    from shardwright.planner.search.solutions import CandidatePlan

#: Prices of a byte at which a first plan that fits is looked for, as parts of what the plan's own bytes would cost at
#: its own time. Where memory is nearly free, what takes less for nothing is found; where it is dear, what takes least,
#: of what has a price: then prices rise from one between them, with the peaks that each plan has instead.
MIN_MULTIPLIER, MAX_MULTIPLIER = 8e-3, 32.0
RISING_MULTIPLIERS = (0.5, 1.0, 2.0, 4.0)

#: How many times as many bytes as the last of those saved each further one may save: where that is not enough for a
#: plan to fit, none is tried.
MAX_SAVING_GROWTH = 2.0

#: Peaks that have a price, at most, and of those that bound: the latest.
MAX_CONSTRAINTS, MAX_BOUNDING_CONSTRAINTS = 8, 3

#: What a plan may need, as a multiple of what there is, that nearly fits. Where memory is dear, a plan that needs more
#: is the end of it, unless another peak than those that were priced explains that: then one that needs `HOPELESS_RATIO`
#: times. Where the fastest plan needs as much, the dear price comes first.
NEAR_FIT_RATIO, HOPELESS_RATIO = 1.25, 1.6

#: Prices that are tried once a plan fits, at most, and the ratio of two at which they are close enough; and mixtures of
#: all plans that are tried then.
MAX_EVALUATIONS = 3
CLOSE_MULTIPLIER_RATIO = 1.05
MAX_MERGES = 24

#: The ratio of two prices between which plans hardly take less time than the line between the two that they give says.
NEAR_MULTIPLIER_RATIO = 2.0

#: Part of what prices promise of plans that are descended to by which such a plan may take less: what is near another
#: one was not looked at.
LOCAL_BOUND_SLACK = 0.02

#: Relative gap to which the program is solved at each price; the last one that fits is solved to the end. A plan as
#: near to the fastest one of all is as good.
GAP_TOLERANCE = 1e-3


def fit_plan(
    search: MeshSearch,
    found: CandidatePlan,
    below_s: float = math.inf,
    within: tuple[BranchingBound, ...] = (),
    known: CandidatePlan | None = None,
) -> CandidatePlan:
    """`found`, or the fastest plan that fits.

    below_s: a plan that takes as long is no use. within: prices are tried for plans alone that keep to it, as `found`
    does. known: a plan on the same mesh that fits, of which parts may be taken where no price gives one. Raises
    MemoryBudgetError where none fits, or none below that.
    """
    if search.fits(found):
        return found
    return LagrangianSearch(search, found, below_s, within, known).find_best()


@dataclass(frozen=True, slots=True)
class _PricedPlan:
    """A plan, and the price that it is the cheapest at."""

    multiplier: float
    candidate: CandidatePlan


@dataclass(slots=True, eq=False)
class LagrangianSearch:
    """The search for a plan of one chain that fits; of one mesh, where the chain is a neighbourhood on three axes.
    Where the chain has all strategies of its mesh, message passing solves it at each price: nothing is descended to.

    start: its fastest plan. within: what the plans that prices give keep to, as it does. known: one that fits. peaks:
    where bytes have a price: of what plans are predicted to take. any_peaks: the same, of what the unsplit program
    takes there, which nearly every plan does. tried: what prices gave. promised_s: what those say that a plan that fits
    takes at least, besides what is made anew for its readers, if what they price is stored in all plans. least_s: the
    same, and all it computes, of what nearly every plan stores. Where plans are descended to, both are of what is near
    one: good for giving up, and no bound. is_hopeless: whether nothing fits by far, however dear memory is.
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
        """The fastest plan that fits. Raises MemoryBudgetError."""
        self._add_constraint(self.start_plan)
        if self.incumbent is not None and self._has_all_strategies:
            self._add_constraint(self.incumbent)
        first = self._find_feasible()
        is_fast = self.search.is_fast
        exact = (
            None if is_fast else _solve_exactly(self.search, self.start_plan, self.model, self.bounding_constraints())
        )
        is_close = (
            exact is not None and exact.solution.value - exact.dual_bound_s <= GAP_TOLERANCE * exact.solution.value
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
        except OutOfTimeError:  # in the middle of a price
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

    def _bounding_multipliers(self, best: CandidatePlan) -> Multipliers:
        """The price that promised most, of what is live where the unsplit program peaks, free where a plan fits that
        stores less than that: it bounds all that fit and store it."""
        peaks = self.bounding_constraints([best])
        return Multipliers.split_equally(peaks, self.best_multiplier)

    def bounding_constraints(self, known: Sequence[CandidatePlan] = ()) -> list[MemoryConstraint]:
        """Those of `universal_constraints` at which no plan that fits would take more than there is; as much of the
        others as none does, if what each of those plans stores is all that counts.

        What a compiler fuses, it does not store, and that may hang on how it is split.
        """
        fitting = [*known, *(each.candidate for each in self.evaluations if self.fits(each.candidate))]
        bounding = (self._bounding_part(whole, fitting) for whole in self.universal_constraints)
        return [peak for peak in bounding if peak is not None]

    def _bounding_part(self, whole: MemoryConstraint, fitting: Sequence[CandidatePlan]) -> MemoryConstraint | None:
        """A peak, or as much of it as bounds, of plans that fit; None where none of that does."""
        model, limit = self.model, self.search.limit_bytes
        stored = reduce(model.restrict_to_stored, (each.stored_leaves for each in fitting), whole)
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
        self, plan: CandidatePlan, known: Sequence[CandidatePlan]
    ) -> tuple[MemoryConstraint, float] | None:
        """Where a plan takes most of what nearly all store, and the bytes that there are; None where a known plan that
        fits has more."""
        peak = self._bounding_part(
            self.model.constraint_at_peak(plan.decisions), [each for each in known if self.fits(each)]
        )
        return (peak, float(self.search.limit_bytes)) if peak is not None else None

    @property
    def smallest_plan(self) -> CandidatePlan:
        """Of all plans that were looked at, the one that needs least."""
        return min((self.start_plan, *(each.candidate for each in self.evaluations)), key=self.search.bytes_needed)

    def _fastest_feasible(self) -> CandidatePlan:
        """Of the plans that prices gave and that fit, the fastest."""
        return min(
            (each.candidate for each in self.evaluations if self.fits(each.candidate)), key=lambda f: f.cost.step_s
        )

    @property
    def _is_local(self) -> bool:
        """Whether the chain is only what is near the plan on three axes that begins."""
        return self.start_plan.is_from_coarser_mesh

    @property
    def _has_all_strategies(self) -> bool:
        """Whether the chain has all strategies of its mesh, of which a price is solved by message passing."""
        return self.start_plan.chain.is_for_bound

    def _add_constraint(self, found: CandidatePlan) -> None:
        """Price bytes where a plan takes most, too."""
        of_all, of_this = (
            self.model.constraint_at_peak(found.decisions),
            self.model.constraint_of_buffers(found.live_buffers, found.decisions),
        )
        self.constraints = _append_latest(
            _append_latest(self.constraints, of_all, MAX_CONSTRAINTS), of_this, MAX_CONSTRAINTS
        )
        self.universal_constraints = _append_latest(self.universal_constraints, of_all, MAX_BOUNDING_CONSTRAINTS)

    def fits(self, found: CandidatePlan) -> bool:
        return self.search.fits(found)

    def _evaluate(self, price: float, close: float = GAP_TOLERANCE) -> _PricedPlan:
        """The cheapest plan at a price, the same object for equal plans.

        Raises MemoryBudgetError where what fits is known to take too long.
        """
        search, terms = self.search, Multipliers.split_equally(self.constraints, price, self.branching_bounds)
        chain, solved = self._solve_at(terms, close)
        bound_s = solved.tied_bound - price * search.limit_bytes
        if bound_s > self.dual_bound_s:
            self.dual_bound_s, self.best_multiplier = bound_s, price
        if not self._has_all_strategies:  # else it is bounded by whoever asks
            self._give_up_if_too_slow(chain, price)
        made = _PricedPlan(price, self._to_plan(chain, solved))
        self.evaluations.append(made)
        return made

    def _solve_at(self, terms: Multipliers, close: float) -> tuple[Chain, ChainSolution]:
        """The cheapest plan at a price, and the chain that it is of; where plans are descended to, the one that is
        reached from the cheapest that is known."""
        start, time_limit_s = self.start_plan, self.search.time_limit_s()
        if start.coarse_solution is None or not self._is_local:
            return start.chain, self._solve_chain(start.chain, terms, close)
        known = min(
            (start, *(each.candidate for each in self.evaluations)), key=lambda found: self._lagrangian_s(found, terms)
        )
        axes = [axis.name for axis in start.mesh.axes]
        return descend(
            start.coarse_solution.chain,
            known.chain.strategies(known.solution.states),
            start.chain.graph,
            axes,
            time_limit_s=time_limit_s,
            price=terms,
        )

    def _give_up_if_too_slow(self, chain: Chain, price: float) -> None:
        """Raises MemoryBudgetError where prices promise that what fits takes too long."""
        free_s = chain.graph.min_recompute_s()
        if self.dual_bound_s + free_s < self.step_limit_s:
            return
        self.universal_bound_s = max(
            self.universal_bound_s, self._universal_bound_s(chain, price) + free_s
        )  # other plans may store less
        if self.universal_bound_s >= self.step_limit_s * (1 + LOCAL_BOUND_SLACK * self._is_local):
            raise too_slow_error(self.start_plan, self.universal_bound_s)

    def evaluate_multipliers(self, terms: Multipliers) -> tuple[CandidatePlan, float]:
        """The cheapest plan at a price, the same object for equal plans, and what all cost at least there; seconds."""
        chain, solved = self._solve_at(terms, GAP_TOLERANCE)
        begun = [
            each
            for each in (self.start_plan, self.incumbent)
            if each is not None and _is_same_plan(each, chain, solved)
        ]
        made = _PricedPlan(terms.total, begun[0] if begun else self._to_plan(chain, solved))
        self.evaluations.append(made)
        return made.candidate, solved.tied_bound

    def _to_plan(self, chain: Chain, solved: ChainSolution) -> CandidatePlan:
        known = (each.candidate for each in self.evaluations if _is_same_plan(each.candidate, chain, solved))
        return next(known, None) or self.search.evaluate(chain, solved, self.start_plan.notes)

    def _solve_chain(self, chain: Chain, terms: Multipliers, close: float) -> ChainSolution:
        """The cheapest plan of a chain at a price. Message passing begins where it ended at the last one."""
        priced = chain.with_multipliers(terms)
        priced.warm_start = (
            self._last_messages[1]
            if self._last_messages is not None and self._last_messages[0] is chain
            else WarmStart()
        )
        solved = solve_tied(priced) if chain.is_for_bound else priced.solve(self.search.time_limit_s(), close)
        self._last_messages = chain, priced.warm_start
        return solved

    def _lagrangian_s(self, found: CandidatePlan, terms: Multipliers) -> float:
        """Seconds a step of a plan, with its memory at a price."""
        taken_s = (price * self.model.bytes_at(peak, found.decisions) for peak, price in terms.constraints)
        return found.cost.step_s + sum(taken_s)

    def _universal_bound_s(self, chain: Chain, price: float) -> float:
        """What a price promises of all plans of a chain that store what is live where the unsplit program takes
        most."""
        terms = Multipliers.split_equally(self.bounding_constraints(), price, self.branching_bounds)
        solved = self._solve_chain(chain, terms, GAP_TOLERANCE)
        return solved.tied_bound - terms.total * self.search.limit_bytes

    def _find_feasible(self) -> _PricedPlan | None:
        """A plan that fits, at as low a price as one is found at soon."""
        unit = self.start_plan.cost.step_s / self.start_plan.memory.peak_bytes
        asked: tuple[float, list[MemoryConstraint]] | None = None
        risen: list[int] = []
        for part in self._initial_multipliers():
            if (part * unit, self.constraints) == asked:  # of which the answer is known
                continue
            asked = part * unit, self.constraints
            made = self._evaluate(part * unit)
            if self.fits(made.candidate):
                return made
            if part in RISING_MULTIPLIERS:
                risen.append(self.search.bytes_needed(made.candidate))
                is_too_slow = made.candidate.cost.step_s >= self.step_limit_s  # what takes less memory takes longer
                if is_too_slow or not _may_reach(self.search.limit_bytes, risen):
                    return None
            self._add_constraint(made.candidate)
            explains = asked[1] != self.constraints
            if part == MAX_MULTIPLIER and self._memory_ratio(self.smallest_plan) > (
                HOPELESS_RATIO if explains else NEAR_FIT_RATIO
            ):
                return None
        return None

    def _initial_multipliers(self) -> tuple[float, ...]:
        """The prices at which a plan that fits is looked for first, as parts of what `MIN_MULTIPLIER` and
        `MAX_MULTIPLIER` are parts of. Where something fits most likely, a dear price is only asked if the first that
        rises does not say."""
        excess = self._memory_ratio(self.start_plan)
        nearly_free = (MIN_MULTIPLIER,) if excess <= HOPELESS_RATIO else ()
        if self.incumbent is not None:  # something does
            return (*nearly_free, *RISING_MULTIPLIERS)
        if excess <= NEAR_FIT_RATIO:
            return (*nearly_free, RISING_MULTIPLIERS[0], MAX_MULTIPLIER, *RISING_MULTIPLIERS[1:])
        return (*nearly_free, MAX_MULTIPLIER, *RISING_MULTIPLIERS)

    def _memory_ratio(self, found: CandidatePlan) -> float:
        """What a plan needs, as a multiple of what there is."""
        return self.search.bytes_needed(found) / self.search.limit_bytes

    def _search_multipliers(self, fits: _PricedPlan) -> CandidatePlan:
        """From a plan that fits to the fastest that some price gives."""
        below = [
            each for each in self.evaluations if each.multiplier < fits.multiplier and not self.fits(each.candidate)
        ]
        over = below[-1] if below else _PricedPlan(0.0, self.start_plan)
        best = fits.candidate
        halves = False  # the crossing moves little where the plan takes more than what is priced
        for _ in range(1 if self.search.is_fast else MAX_EVALUATIONS):
            if best.cost.step_s <= self.start_plan.cost.step_s * (1 + GAP_TOLERANCE) or self.search.must_stop():
                return best
            price = self._next_multiplier(over, fits, halves)
            if price is None or self._is_unpromising(over, fits, best):
                break
            made = self._evaluate(price)
            does_fit = self.fits(made.candidate)
            halves = not (does_fit or halves)
            if does_fit:
                fits, best = made, _choose_faster(best, made.candidate)
            else:
                over = made
                self._add_constraint(made.candidate)
        best = self._merge_with_incumbent(best)
        solved = fits.candidate.solution
        is_final = self.search.is_large or self._is_local or self._has_all_strategies
        if not is_final and solved.value - solved.tied_bound > TIGHT * abs(solved.value):
            last = self._evaluate(fits.multiplier, close=0.0).candidate
            best = _choose_faster(best, last) if self.fits(last) else best
        return best

    def _is_unpromising(self, over: _PricedPlan, fits: _PricedPlan, best: CandidatePlan) -> bool:
        """Whether plans at prices between two seem to take too long where the memory ends, as the best that fits does.

        At near prices they are near the line between both. Among all strategies a price takes little, and plans at near
        prices are what merges well: of distant ones the integer program takes minutes.
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
        """The fastest plan that fits of parts of all that prices gave, and of the one that is known to fit; `best`
        where there is none faster than both.

        Among all strategies prices give plans that have little in common with the one that is known: they are merged
        with one another first, and with it where that leads to nothing faster.
        """
        plans = [self.start_plan, *(each.candidate for each in self.evaluations)]
        if self.incumbent is None:
            return self.merge_plans(plans, best)
        if self._has_all_strategies:
            best = self.merge_plans(plans, best)
            if best.cost.step_s < self.step_limit_s:
                return best
        mixture = self.merge_plans(plans, _choose_faster(best, self.incumbent))
        return mixture if mixture is not self.incumbent else best

    def _merge_near_feasible(self) -> CandidatePlan | None:
        """A plan that takes parts of the one that is known to fit and of those that nearly do, and is faster; None
        where there is none."""
        best = self.incumbent
        if best is None:
            return None
        faster = [each.candidate for each in self.evaluations if each.candidate.cost.step_s < best.cost.step_s]
        mixture = self.merge_plans(faster, best)
        return mixture if mixture is not best else None

    def merge_plans(self, plans: Sequence[CandidatePlan], best: CandidatePlan) -> CandidatePlan:
        """The fastest plan that fits of those that do what some plan does, variable by variable; `best`, which fits, if
        there is none faster."""
        *_, last = (best, *self.iterate_merges(plans, best))
        return _choose_faster(best, last) if self.fits(last) else best

    def iterate_merges(
        self, plans: Sequence[CandidatePlan], best: CandidatePlan, most_of_all: int = 1, most_cpu_s: float = MAX_CPU_S
    ) -> Iterator[CandidatePlan]:
        """Plans that do what some plan or the best one does, variable by variable, the fastest first; the last may fit.

        What plans take where they peak bounds a mixture, as far as those that fit keep to it. A mixture may peak
        elsewhere: where it does not fit its own peak bounds the next one, which is of it and of the best one alone,
        once there were `most_of_all`. most_cpu_s: for the integer program of each.
        """
        search, model = self.search, self.model
        known = list({id(plan): plan for plan in (best, *plans)}.values())
        if min(plan.cost.step_s for plan in known) >= best.cost.step_s:
            return
        chain, of_plans = to_one_chain([(plan.chain, plan.solution.states) for plan in known])

        def beside(peak: MemoryConstraint, room: float) -> tuple[MemoryConstraint, float]:
            """A peak, and what a mixture may take there besides the best one."""
            return peak, room - model.bytes_at(peak, best.decisions)

        left, parts, tried = [beside(*self.room_at_peak(plan, known)) for plan in known], of_plans, list(of_plans)
        for number in range(1, MAX_MERGES + 1):
            states = (
                None
                if search.must_stop()
                else merge_solutions(chain, parts, left, search.time_limit_s(), most_cpu_s=most_cpu_s)
            )
            if states is None or states in tried:
                return
            made = search.evaluate(
                chain, ChainSolution(states=states, value=math.inf, tied_bound=0.0), self.start_plan.notes
            )
            yield made
            if self.fits(made):
                return
            tried.append(states)
            left.append(beside(*self.room_at_peak(made, known)))
            if number >= most_of_all:
                parts = [of_plans[0], states]

    def excess_bytes(self, peak: MemoryConstraint, plan: CandidatePlan) -> float:
        """What a plan takes at a peak beyond what there is."""
        return self.model.bytes_at(peak, plan.decisions) - self.search.limit_bytes

    def room_at_peak(self, plan: CandidatePlan, known: Sequence[CandidatePlan]) -> tuple[MemoryConstraint, float]:
        """Where a plan takes most, and the bytes that one may take there.

        What it needs besides those that count at the peak, others need as well; but no known plan that fits is over.
        """
        limit, model = self.search.limit_bytes, self.model
        peak = model.constraint_of_buffers(plan.live_buffers, plan.decisions)
        counted = limit - self.search.bytes_needed(plan) + model.bytes_at(peak, plan.decisions)
        return peak, max(counted, *(model.bytes_at(peak, each.decisions) for each in known if self.fits(each)))

    def _next_multiplier(self, over: _PricedPlan, fits: _PricedPlan, halves: bool) -> float | None:
        """The price at which both cost the same, or halfway between theirs; None where these are close."""
        if fits.multiplier < over.multiplier * CLOSE_MULTIPLIER_RATIO:
            return None
        price = 0.0 if halves else self._crossing_multiplier(over, fits)
        if over.multiplier * CLOSE_MULTIPLIER_RATIO < price < fits.multiplier / CLOSE_MULTIPLIER_RATIO:
            return price
        return math.sqrt(over.multiplier * fits.multiplier) if over.multiplier else fits.multiplier / 8

    def _crossing_multiplier(self, over: _PricedPlan, fits: _PricedPlan) -> float:
        """The price at which both cost the same, of the bytes that have one; 0 where there is none."""
        saved = self._mean_constraint_bytes(over.candidate) - self._mean_constraint_bytes(fits.candidate)
        return (fits.candidate.cost.step_s - over.candidate.cost.step_s) / saved if saved > 0 else 0.0

    def _mean_constraint_bytes(self, found: CandidatePlan) -> float:
        return sum(self.model.bytes_at(peak, found.decisions) for peak in self.constraints) / len(self.constraints)


def _may_reach(limit_bytes: int, risen: Sequence[int]) -> bool:
    """Whether plans at the rest of the rising prices may need no more than that, by what those at the first of them
    need."""
    if len(risen) < 2:
        return True
    saved, left = max(risen[-2] - risen[-1], 0), len(RISING_MULTIPLIERS) - len(risen)
    return risen[-1] - MAX_SAVING_GROWTH * left * saved <= limit_bytes


def _append_latest(peaks: list[MemoryConstraint], peak: MemoryConstraint, most: int) -> list[MemoryConstraint]:
    """`peaks` and another one, the latest of them."""
    return peaks if peak in peaks else [*peaks, peak][-most:]


def _is_same_plan(found: CandidatePlan, chain: Chain, solved: ChainSolution) -> bool:
    """Whether a plan is the one that a chain's states are."""
    if found.chain.graph is chain.graph:
        return found.solution.states == solved.states
    return found.chain.strategies(found.solution.states) == chain.strategies(solved.states)


def _choose_faster(best: CandidatePlan, tried: CandidatePlan) -> CandidatePlan:
    return tried if tried.cost.step_s < best.cost.step_s else best


def _solve_exactly(
    search: MeshSearch, found: CandidatePlan, model: MemoryModel, peaks: Sequence[MemoryConstraint]
) -> CandidatePlan | None:
    """The fastest plan that fits, or nearly, where the program is small enough to solve whole. Else, or if none was
    found to fit, None."""

    def judge(states: Mapping[Variable, int]) -> tuple[int, MemoryConstraint]:
        solved = ChainSolution(states=dict(states), value=0.0, tied_bound=0.0)
        tried = search.evaluate(found.chain, solved, found.notes)
        return search.bytes_needed(tried), model.constraint_at_peak(tried.decisions)

    best = solve_with_memory_rows(found.chain, search.limit_bytes, peaks, judge, search.time_limit_s())
    if best is None:
        return None
    return replace(search.evaluate(found.chain, best, found.notes), dual_bound_s=best.tied_bound)
