"""Plans under a binding memory budget: rematerialization, micro-batches, or both.

The search plans the unchanged program first. When its fastest plan exceeds the budget, two ladders trade time against
memory: the levels of `recompute`, and 2, 4, 8, … micro-batches (`microbatch`). Together they form a table; an entry is
(micro-batches, rung).

1. The unchanged program is fitted with a memory multiplier (`lagrangian`), often at almost no cost.
2. An entry is skipped when its recompute time alone exceeds the incumbent. Its meshes exclude those with an unchanged
   program slower than the incumbent, and those dominated by another mesh in time and memory.
3. Per number of micro-batches, a bisection finds the first rung whose fastest plan fits without a multiplier. It starts
   at the predicted sufficient saving. When no rung fits, the most promising one is fitted with a multiplier. Higher
   rungs only take longer; lower ones are fitted with a multiplier while they nearly fit.
4. Other entries are fitted with a multiplier, the most promising first. Each multiplier yields a bound; it soon ends
   hopeless attempts.
5. With the optimizer's state on the host (`offload`) the program needs less memory, and its transfers are part of every
   step. Its fastest plan, where that fits, is an incumbent of all entries above; where nothing fits, or it promises
   more, it has a table of its own.

Unpromising entries are left out, and one of them could still be faster: a plan's lower bound covers its own entry only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from shardwright.errors import AnnotationError, PlanError
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.memory.messages import summarize_error
from shardwright.planner.memory.recompute import Recomputation, list_recomputations
from shardwright.planner.memory.tuning import HOPELESS_RATIO, MIN_SAVING, NEAR_FIT_RATIO
from shardwright.planner.search.min_memory_plan import find_fallback_plan
from shardwright.planner.search.tuning import (
    MAX_FITTED,
    MAX_MICRO_BATCHES,
    MIN_ENTRY_GAIN,
    MIN_FITTING_GAIN,
    MIN_MICRO_BATCH_GAIN,
    MIN_TABLE_GAIN,
    NEAR_FASTEST,
    SIMILAR_MEMORY_RATIO,
)
from shardwright.planner.warm_start.search_records import RematChoice
from shardwright.plans.plan import Candidate
from shardwright.plans.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search
    from shardwright.planner.search.solutions import MeshSolution, SearchResult
    from shardwright.planner.warm_start.replanning import SearchRestriction


#: Rung without rematerialization.
NO_REMAT = -1


def fit_with_remat(outcome: SearchResult) -> SearchResult:
    """`outcome` with the fastest plan that fits, or the result of a rematerialized or micro-batched variant when that
    is faster within the budget."""
    search = outcome.search
    outcome.base_result, outcome.remat_choice = (
        outcome,
        RematChoice(rung=NO_REMAT, rungs=0, micro_batches=search.program.micro_batches),
    )
    offloaded = _fit_offloaded_at_once(outcome)
    below_s = offloaded.step_s if offloaded is not None else math.inf
    if search.restriction is None:
        best = _fit_unrestricted(outcome, below_s)
    else:
        best = _fit_restricted(outcome, search.restriction)
    if search.may_offload:
        best = _choose_with_offload(outcome, best, offloaded)
    best.search.polish(best)
    return best


def _fit_unrestricted(outcome: SearchResult, below_s: float = math.inf) -> SearchResult:
    """`fit_with_remat` of a search without restriction.

    below_s: plans at or above this step time are useless.
    """
    search = outcome.search
    options = search.options
    if options.remat != "full":
        if search.fit_memory(outcome, at_once=True, below_s=below_s) and not _is_much_faster_without_limit(outcome):
            return outcome
        if options.remat == "none" and options.micro_batches is not None:
            search.fit_memory(outcome, below_s=below_s)
            return outcome
    ladder = _remat_levels(outcome) if options.remat != "none" else []
    if options.remat == "full":
        if not ladder:
            outcome.notes.append("remat='full': there is nothing that could be computed again")
        result = search.search_variant(ladder[-1], search.program.micro_batches) if ladder else outcome
        result.search.fit_memory(result)
        return result
    table = _TradeoffTable(search, ladder, {(search.program.micro_batches, NO_REMAT): outcome}, below_s)
    return table.find_best()


def _is_much_faster_without_limit(outcome: SearchResult) -> bool:
    """Whether a plan over the budget promises to be much faster than the chosen one."""
    search = outcome.search
    faster = (
        solution
        for solution in outcome.solutions
        if outcome.predict_step_s(solution) * (1 + NEAR_FASTEST) < outcome.step_s
    )
    return any(not search.fits(outcome.evaluate(solution)) for solution in faster)


def _fit_restricted(outcome: SearchResult, route: SearchRestriction) -> SearchResult:
    """Result of the restriction's first remat choice with a plan that fits, or of the unchanged program when that fits
    now; without a plan when nothing fits.

    Raises MicroBatchError when the step does not split.
    """
    result = outcome
    if route.without_multipliers and outcome.search.fit_memory(outcome, at_once=True):
        return outcome
    ladder = _remat_levels(outcome) if any(entry.rung != NO_REMAT for entry in route.remat_choices) else []
    for entry in route.remat_choices:
        rung = _matching_level(entry, ladder)
        if rung is None:
            continue
        result = _search_choice(outcome, ladder, rung, entry.micro_batches)
        if result is not outcome:
            outcome.search.restricted_results.append(result)
        if result.search.fit_memory(result, at_once=True):
            break
        result.used_multipliers = not route.without_multipliers or (
            result is not outcome and _memory_ratio(result) <= NEAR_FIT_RATIO
        )
        if result.used_multipliers and result.search.fit_memory(result):
            break
    return result


def _search_choice(
    outcome: SearchResult, ladder: Sequence[Recomputation], rung: int, micro_batches: int
) -> SearchResult:
    """Result of one remat choice, given the unchanged program's result. Raises MicroBatchError."""
    search, result = outcome.search, outcome
    if rung != NO_REMAT or micro_batches != search.program.micro_batches:
        result = search.search_variant(None if rung == NO_REMAT else ladder[rung], micro_batches)
    result.base_result, result.remat_choice = outcome, _remat_choice(ladder, rung, micro_batches)
    return result


def _remat_choice(ladder: Sequence[Recomputation], rung: int, micro_batches: int) -> RematChoice:
    saved = 0.0 if rung == NO_REMAT else ladder[rung].saved_bytes / ladder[-1].saved_bytes
    return RematChoice(rung=rung, rungs=len(ladder), micro_batches=micro_batches, saved=saved)


def _matching_level(entry: RematChoice, ladder: Sequence[Recomputation]) -> int | None:
    """First rung with at least the saved fraction of a choice from another ladder; None without one."""
    if entry.rung == NO_REMAT:
        return NO_REMAT
    if len(ladder) == entry.rungs:
        return entry.rung
    least = entry.saved - MIN_SAVING
    return next(
        (rung for rung, level in enumerate(ladder) if level.saved_bytes >= least * ladder[-1].saved_bytes), None
    )


def _remat_levels(outcome: SearchResult) -> list[Recomputation]:
    """Rematerialization levels, derived from the fastest plan of the whole batch, memory aside."""
    search = outcome.search
    if search.program.micro_batches > 1:
        outcome = search.search_variant(None, 1)
    plan = outcome.evaluate(outcome.fastest)
    return list_recomputations(plan.decisions, plan.chain, plan.cost.step_s, plan.memory.peak_bytes)


@dataclass(slots=True, eq=False)
class _TradeoffTable:
    """Search results by (micro-batches, rung), computed on demand.

    search: of the unchanged program.
    levels: rematerialization levels; the rung is the index.
    results: the results so far.
    below_s: plans at or above this step time are useless.
    best_result: the one with the fastest plan that fits.
    fitted_entries: entries already fitted with a multiplier.
    notes: remarks on entries without a result.
    restricted_results: results of an earlier search's choice and its neighbors, on some meshes.
    """

    search: Search
    levels: Sequence[Recomputation]
    results: dict[tuple[int, int], SearchResult]
    below_s: float = math.inf
    best_result: SearchResult | None = None
    fitted_entries: set[tuple[int, int]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    restricted_results: list[SearchResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        share = self.search.hidden_share
        self.restricted_results = [
            result for result in self.search.restricted_results if result.search.hidden_share == share
        ]
        self.best_result = min(
            (result for result in self.restricted_results if result.best_plan),
            key=lambda result: result.step_s,
            default=None,
        )

    def find_best(self) -> SearchResult:
        """The fastest result that fits, or the one needing least memory."""
        plain = self.search.program.micro_batches
        if self.search.is_fast:
            self._find_fitting(plain)
        else:
            self._find_fastest(plain)
        best = self.best_result or (self._fallback_result() if self.below_s == math.inf else self._smallest_refusal())
        best.base_result = self.results[self.search.program.micro_batches, NO_REMAT]
        best.remat_choice = self._choice_of(best)
        best.notes += self.notes
        best.other_candidates = [
            candidate for outcome in self.results.values() if outcome is not best for candidate in _summarize(outcome)
        ]
        return best

    def _find_fastest(self, plain: int) -> None:
        self._fit_with_multiplier(plain, NO_REMAT)
        if self._is_near_fastest(plain):
            return
        for number in self._micro_batch_counts():
            if number != plain and self._try_to_fit(number, NO_REMAT, at_once=True):  # more parts cannot be faster
                break
            self._bisect_levels(number)
        self._fit_promising()

    def _find_fitting(self, plain: int) -> None:
        """Fit with a multiplier when the unchanged program nearly fits. Otherwise take the fewest micro-batches that
        fit, with the rung predicted to suffice or the last one; with multipliers when none fits."""
        if _memory_ratio(self.results[plain, NO_REMAT]) <= NEAR_FIT_RATIO:
            self._fit_with_multiplier(plain, NO_REMAT)
        for number in self._micro_batch_counts():
            rungs = (self._predict_level(number, 0, len(self.levels)), len(self.levels) - 1) if self.levels else ()
            for rung in (NO_REMAT, *dict.fromkeys(rungs)):
                if self.best_result is not None or self._try_to_fit(number, rung, at_once=True):
                    return
        self._fit_promising()

    def _is_near_fastest(self, number: int) -> bool:
        """Whether the incumbent is about as fast as the unchanged program, memory aside: nothing else takes less."""
        return self.best_result is not None and self.best_result.step_s * (1 - MIN_TABLE_GAIN) <= self._fastest_step_s(
            number, NO_REMAT
        )

    def _fallback_result(self) -> SearchResult:
        """The minimum-memory plan, or a faster plan of the same variant; when neither fits, the refusal needing least
        memory."""
        fallback = self.search.fallback_result or find_fallback_plan(self.search)
        if fallback is None or fallback.best_plan is None:
            refused = [self._smallest_refusal(), *([fallback] if fallback is not None else [])]
            return min(refused, key=attrgetter("min_needed_bytes"))
        if self.search.must_stop():
            return fallback
        outcome = self.search.search_variant(fallback.search.recomputation, fallback.search.program.micro_batches)
        return (
            outcome if outcome.search.fit_memory(outcome, below_s=fallback.step_s * (1 - MIN_ENTRY_GAIN)) else fallback
        )

    def _choice_of(self, outcome: SearchResult) -> RematChoice | None:
        """The remat choice of a result; None when it is outside the table and has none of its own."""
        for (number, rung), result in self.results.items():
            if result is outcome:
                return _remat_choice(self.levels, rung, number)
        return outcome.remat_choice

    def _micro_batch_counts(self) -> Iterator[int]:
        """Numbers of micro-batches, while the step splits into that many and may beat the incumbent."""
        plain = number = self.search.program.micro_batches
        yield number
        while self.search.options.micro_batches is None and number < MAX_MICRO_BATCHES and not self.search.must_stop():
            number *= 2
            if self._is_hopeless(number):
                continue
            if self._fastest_step_s(plain, NO_REMAT) >= self._step_limit_s(
                number
            ):  # parts are no faster than the whole
                return
            try:
                self.results[number, NO_REMAT] = self._search_variant(number, None)
            except OutOfTimeError:
                raise
            except (PlanError, AnnotationError) as error:
                self.notes.append(f"not in {number} micro-batches: {error.message}")
                return
            if self._is_too_slow(number, NO_REMAT):
                return
            yield number

    def _is_hopeless(self, number: int) -> bool:
        """Whether this many micro-batches need far too much memory even with full rematerialization, assuming memory
        inversely proportional to the number. Whole-batch values do not shrink, hence the assumption is optimistic."""
        last = len(self.levels) - 1
        memory_ratios = (
            _memory_ratio(outcome) * parts / number
            for (parts, rung), outcome in self.results.items()
            if rung == last and parts < number
        )
        return number < MAX_MICRO_BATCHES and max(memory_ratios, default=0.0) > HOPELESS_RATIO

    def _result_at(self, number: int, rung: int) -> SearchResult:
        if (number, rung) not in self.results:
            self.results[number, rung] = self._search_variant(number, self.levels[rung])
        return self.results[number, rung]

    def _search_variant(self, number: int, again: Recomputation | None) -> SearchResult:
        """Result on the meshes with an unchanged program that may beat the incumbent: rematerialization and
        micro-batches only add time. Raises like `Search.search_variant`."""
        below_s = self._step_limit_s(number)
        slow = frozenset(mesh for mesh, least_s in self._min_step_by_mesh_s(number).items() if least_s >= below_s)
        without = slow | self._find_dominated_meshes(slow)
        earlier_result = next(
            (result for result in self.restricted_results if result.search.is_variant(again, number)), None
        )
        return (
            earlier_result.add_remaining_meshes(without)
            if earlier_result is not None
            else self.search.search_variant(again, number, without)
        )

    def _find_dominated_meshes(self, without: frozenset[Mesh]) -> frozenset[Mesh]:
        """Meshes whose fastest plan of the unchanged program is slower and no smaller in memory, compared with another
        mesh outside `without`."""
        outcome = self.results[self.search.program.micro_batches, NO_REMAT]
        plans = [outcome.evaluate(solution) for solution in outcome.solutions if solution.coarse_solution is None]
        mesh_costs = [(plan.mesh, plan.cost.step_s, self.search.bytes_needed(plan)) for plan in plans]
        competitors = [(step_s, needed) for mesh, step_s, needed in mesh_costs if mesh not in without]
        return frozenset(
            mesh
            for mesh, step_s, needed in mesh_costs
            if any(
                less_s * (1 + NEAR_FASTEST) < step_s and less <= SIMILAR_MEMORY_RATIO * needed
                for less_s, less in competitors
            )
        )

    def _min_step_by_mesh_s(self, number: int) -> dict[Mesh, float]:
        """Lower bound on the step per mesh without rematerialization, seconds: with this many micro-batches once known
        (possibly a little faster), otherwise of the whole batch."""
        least: dict[Mesh, float] = {}
        for parts in (self.search.program.micro_batches, number):
            outcome = self.results.get((parts, NO_REMAT))
            least |= _min_step_by_mesh(outcome.solutions) if outcome is not None else {}
        return least

    def _fastest_step_s(self, number: int, rung: int) -> float:
        """Lower bound on an entry's step, memory aside: recompute time adds to the step of the same micro-batches."""
        result = self.results.get((number, rung))
        if result is not None:
            return result.fastest.step_s
        return self._fastest_step_s(number, NO_REMAT) + self.levels[rung].seconds

    def _is_too_slow(self, number: int, rung: int) -> bool:
        return self._fastest_step_s(number, rung) >= self._step_limit_s(number)

    def _step_limit_s(self, number: int) -> float:
        """Upper limit on the step of a useful plan with this many micro-batches, seconds."""
        if self.best_result is None:
            return self.below_s
        in_more_parts = number > self.best_result.search.program.micro_batches
        return self.best_result.step_s * (1 - (MIN_MICRO_BATCH_GAIN if in_more_parts else MIN_ENTRY_GAIN))

    def _try_to_fit(self, number: int, rung: int, *, at_once: bool) -> bool:
        """Whether a plan of the entry fits and beats the incumbent; it then becomes the incumbent."""
        outcome = self._result_at(number, rung)
        if not outcome.search.fit_memory(outcome, at_once=at_once, below_s=self._step_limit_s(number)):
            return False
        self.best_result = outcome
        return True

    def _bisect_levels(self, number: int) -> None:
        """Find the first rung whose fastest plan fits without a multiplier and can beat the incumbent. With no such
        rung and no incumbent, fit the most promising one with a multiplier: the fastest plan's memory says little about
        other plans, and each further micro-batch count costs a search."""
        low, high = 0, len(self.levels)
        while low < high and not self.search.must_stop():
            rung = self._predict_level(number, low, high)
            fits = not self._is_too_slow(number, rung) and self._try_to_fit(number, rung, at_once=True)
            if fits or self._is_too_slow(number, rung):  # possibly known only after planning it
                high = rung
            else:
                low = rung + 1
        rungs = self._much_faster_levels(number) if not self.search.must_stop() else []
        if rungs:
            low = min(rungs, key=lambda rung: self._estimate_step_s(self.results[number, rung]))
            if not self._fit_with_multiplier(number, low):
                return
        while low and not self.search.must_stop():  # a nearly fitting rung may fit at no cost
            low -= 1
            if self._is_too_slow(number, low) or _memory_ratio(self._result_at(number, low)) > NEAR_FIT_RATIO:
                break
            if not self._fit_with_multiplier(number, low):
                break

    def _much_faster_levels(self, number: int) -> list[int]:
        """Rungs with fastest plans over the budget, yet far faster than an incumbent of fewer micro-batches."""
        if self.best_result is not None and self.best_result.search.program.micro_batches == number:
            return []
        below_s = self._step_limit_s(number) * (1 - MIN_FITTING_GAIN)
        rungs = [rung for parts, rung in self.results if parts == number and rung != NO_REMAT]
        return [rung for rung in rungs if self._fastest_step_s(number, rung) < below_s]

    def _predict_level(self, number: int, low: int, high: int) -> int:
        """First rung in [`low`, `high`) that saves the excess of the plain entry; the middle once that has proven
        insufficient (rematerialized values take memory, too)."""
        if low:
            return (low + high) // 2
        outcome = self.results[number, NO_REMAT]
        too_much = (_memory_ratio(outcome) - 1) * outcome.search.limit_bytes
        return next((rung for rung in range(high) if self.levels[rung].saved_bytes >= too_much), high - 1)

    def _fit_promising(self) -> None:
        """Fit the remaining entries with a multiplier, the most promising first."""
        unfitted = {
            key: outcome
            for key, outcome in self.results.items()
            if key not in self.fitted_entries and not outcome.best_plan
        }
        promised = sorted((self._estimate_step_s(outcome), key) for key, outcome in unfitted.items())
        for attempt, (promise_s, key) in enumerate(promised):
            if attempt == MAX_FITTED or promise_s >= self._step_limit_s(key[0]) or self.search.must_stop():
                break
            self._fit_with_multiplier(*key)
        most = max(number for number, _ in self.results), len(self.levels) - 1  # the largest saving tried
        if self.best_result is None and most not in self.fitted_entries and not self.search.must_stop():
            self._fit_with_multiplier(*most)

    def _fit_with_multiplier(self, number: int, rung: int) -> bool:
        self.fitted_entries.add((number, rung))
        result = self._result_at(number, rung)
        if not result.used_multipliers:
            return self._try_to_fit(number, rung, at_once=False)
        if result.step_s >= self._step_limit_s(number):
            return False
        self.best_result = result
        return True

    def _estimate_step_s(self, outcome: SearchResult) -> float:
        return outcome.fastest.step_s * max(1.0, _memory_ratio(outcome))

    def _smallest_refusal(self) -> SearchResult:
        """Among the refused results, the one needing least memory."""
        refused = [outcome for outcome in self.results.values() if outcome.memory_error is not None]
        if not refused:  # the deadline has passed
            refused = [next(iter(self.results.values()))]
            refused[0].search.fit_memory(refused[0])
        return min(refused, key=attrgetter("min_needed_bytes"))


def _fit_offloaded_at_once(outcome: SearchResult) -> SearchResult | None:
    """The result with the optimizer's state on the host, fitted without a multiplier; None where the unchanged program
    fits as it is, or its user decided."""
    search = outcome.search
    if not search.may_offload or search.options.remat == "full" or search.is_fast:
        return None
    if search.fit_memory(outcome, at_once=True) and not _is_much_faster_without_limit(outcome):
        return None
    offloaded = _search_offloaded(outcome)
    if offloaded is not None:
        offloaded.search.fit_memory(offloaded, at_once=True)
    return offloaded


def _search_offloaded(outcome: SearchResult) -> SearchResult | None:
    """The result with the optimizer's state on the host, memory aside; None where the program has none."""
    search = outcome.search
    state = search.offloadable_state
    if not state:
        return None
    try:
        return search.with_state_on_host(state).search_meshes()
    except OutOfTimeError:
        raise
    except (PlanError, AnnotationError):
        return None


def _choose_with_offload(outcome: SearchResult, best: SearchResult, offloaded: SearchResult | None) -> SearchResult:
    """The faster result that fits, without optimizer state on the host or with it; or the refusal needing least memory.

    outcome: of the unchanged program. best: of its variants. offloaded: see `_fit_offloaded_at_once`.
    """
    search, limit_s = outcome.search, best.step_s * (1 - MIN_TABLE_GAIN)
    if best.best_plan is not None and (search.is_fast or search.must_stop() or outcome.fastest.step_s >= limit_s):
        return best
    if offloaded is None:
        offloaded = _search_offloaded(outcome)
    if offloaded is None or offloaded.fastest.step_s >= limit_s:
        return best
    if offloaded.best_plan is None:
        offloaded = _fit_unrestricted(offloaded, limit_s)
    if offloaded.step_s >= limit_s:
        is_refused = best.best_plan is None
        return min(best, offloaded, key=attrgetter("min_needed_bytes")) if is_refused else best
    offloaded.base_result = offloaded.base_result or offloaded
    offloaded.remat_choice = offloaded.remat_choice or _remat_choice((), NO_REMAT, outcome.search.program.micro_batches)
    offloaded.other_candidates += [*_summarize(best), *best.other_candidates]
    return offloaded


def _min_step_by_mesh(solutions: Sequence[MeshSolution]) -> dict[Mesh, float]:
    """Smallest lower bound of the plans on each mesh or refined from it, seconds."""
    least: dict[Mesh, float] = {}
    for solution in solutions:
        bound_s = solution.step_s - (solution.solution.value - solution.solution.tied_bound)
        for mesh in {
            solution.mesh,
            solution.coarse_solution.mesh if solution.coarse_solution is not None else solution.mesh,
        }:
            least[mesh] = min(least.get(mesh, math.inf), bound_s)
    return least


def _memory_ratio(outcome: SearchResult) -> float:
    """Memory need of the fastest plan over the limit."""
    search = outcome.search
    return search.bytes_needed(outcome.evaluate(outcome.fastest)) / search.limit_bytes


def _summarize(outcome: SearchResult) -> Iterator[Candidate]:
    """Candidates of a result that was not chosen."""
    search, name = outcome.search, "search"
    again = len(search.recomputation.instructions) if search.recomputation else 0
    note = f"{again} values computed again" if again else "nothing computed again"
    if search.program.micro_batches > 1:
        note += f", {search.program.micro_batches} micro-batches"
    if search.chose_offload:
        note += ", optimizer state on the host"
    if outcome.best_plan is not None:
        yield Candidate(mesh=outcome.best_plan.mesh, step_s=outcome.best_plan.cost.step_s, name=name, note=note)
    elif outcome.memory_error is not None:
        mesh = next(iter(outcome.mesh_errors))
        yield Candidate(mesh=mesh, step_s=None, name=name, note=f"{note}: {summarize_error(outcome.memory_error)}")
