"""Where memory binds: values are computed again, the batch goes through in parts, or both.

The search plans the program as it is first. Where the fastest plan is over the budget, the choices that `recompute`
offers form a ladder of less memory for more time, and so do 2, 4, 8, … micro-batches (`microbatch`): together a
table. The program as it is, is fitted by a price of memory first (`fitting`): often that costs next to nothing, and
an entry that takes longer by what it computes again alone is not planned at all, nor is one on meshes where the
program as it is takes longer than what fits already, or longer than on another mesh and no less memory. Then for each
number of micro-batches a bisection, which begins where what is saved should be enough, finds the first rung whose
fastest plan fits as it is, or the rung that promises most is fitted by a price; higher ones only take longer, and
those below are fitted by a price as long as they nearly fit. Others are fitted by a price, those first that promise
most; the bound that comes with every price ends that soon where it leads to nothing faster. Entries that promise
little are left out, so that another one could still be faster: the plan's bound is of its own entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from shardwright.errors import AnnotationError, PlanError
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.memory.lagrangian import HOPELESS_RATIO, NEAR_FIT_RATIO
from shardwright.planner.memory.messages import summarize_error
from shardwright.planner.memory.recompute import MIN_SAVING, Recomputation, list_recomputations
from shardwright.planner.search.min_memory_plan import MAX_MICRO_BATCHES, find_fallback_plan
from shardwright.planner.warm_start.search_records import RematChoice
from shardwright.plans import Candidate
from shardwright.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search
    from shardwright.planner.search.solutions import MeshSolution, SearchResult
    from shardwright.planner.warm_start.replanning import SearchRestriction

#: Part of the step time that a choice must save over one tried before it.
MIN_GAIN = 1e-3

#: The same of more micro-batches than before. What they add is priced least well: of GPT-2 124M on 8 devices two were
#: predicted to take 1.8 % less than computing again, and counted in XLA's program took 2.9 % more.
MIN_MICRO_BATCH_GAIN = 3e-2

#: Part of the step time by which a plan that fits as it is may be slower than one that does not, for nothing else to be
#: tried. What fits may be of a mesh that is much slower.
NEAR_FASTEST = 1e-2

#: Part of the step time that the rest of the table must be able to save to be searched at all: each of its entries is
#: a search of its own.
MIN_TABLE_GAIN = 3e-3

#: Part of the step time that the fastest plan of more micro-batches must save, for one that fits to be looked for by a
#: price of memory there before there are even more of them.
MIN_FITTING_GAIN = 0.1

#: The ratio of what the fastest plans of two meshes need up to which the slower mesh saves nothing worth a search.
SIMILAR_MEMORY_RATIO = 1.05

#: Entries that are fitted by a price of memory besides the program as it is, at most. What one promises: its fastest
#: plan's time, times the ratio of what that needs to the budget.
MAX_FITTED = 2

#: The rung of the ladder on which nothing is computed again.
NO_REMAT = -1


def fit_with_remat(outcome: SearchResult) -> SearchResult:
    """`outcome` with the fastest plan that fits, or that of the program computing otherwise, where that is faster under
    the budget."""
    search = outcome.search
    outcome.base_result, outcome.remat_choice = (
        outcome,
        RematChoice(rung=NO_REMAT, rungs=0, micro_batches=search.program.micro_batches),
    )
    best = _fit_unrestricted(outcome) if search.restriction is None else _fit_restricted(outcome, search.restriction)
    best.search.polish(best)
    return best


def _fit_unrestricted(outcome: SearchResult) -> SearchResult:
    """The same, of a search that follows nothing."""
    search = outcome.search
    options = search.options
    if options.remat != "full":
        if search.fit_memory(outcome, at_once=True) and not _is_much_faster_without_limit(outcome):
            return outcome
        if options.remat == "none" and options.micro_batches is not None:
            search.fit_memory(outcome)
            return outcome
    ladder = _remat_levels(outcome) if options.remat != "none" else []
    if options.remat == "full":
        if not ladder:
            outcome.notes.append("remat='full': there is nothing that could be computed again")
        made = search.search_variant(ladder[-1], search.program.micro_batches) if ladder else outcome
        made.search.fit_memory(made)
        return made
    return _TradeoffTable(search, ladder, {(search.program.micro_batches, NO_REMAT): outcome}).find_best()


def _is_much_faster_without_limit(outcome: SearchResult) -> bool:
    """Whether a plan that does not fit promises to be much faster than the one that was found."""
    search = outcome.search
    faster = (each for each in outcome.solutions if each.step_s * (1 + NEAR_FASTEST) < outcome.step_s)
    return any(not search.fits(outcome.evaluate(each)) for each in faster)


def _fit_restricted(outcome: SearchResult, route: SearchRestriction) -> SearchResult:
    """The outcome of the first entry of a route that a plan fits with, or of the program as it is, where it fits
    now; without a plan where nothing fits.

    Raises MicroBatchError where the step does not split.
    """
    made = outcome
    if route.without_multipliers and outcome.search.fit_memory(outcome, at_once=True):
        return outcome
    ladder = _remat_levels(outcome) if any(entry.rung != NO_REMAT for entry in route.remat_choices) else []
    for entry in route.remat_choices:
        rung = _matching_level(entry, ladder)
        if rung is None:
            continue
        made = _search_choice(outcome, ladder, rung, entry.micro_batches)
        if made is not outcome:
            outcome.search.restricted_results.append(made)
        if made.search.fit_memory(made, at_once=True):
            break
        made.used_multipliers = not route.without_multipliers or (
            made is not outcome and _memory_ratio(made) <= NEAR_FIT_RATIO
        )
        if made.used_multipliers and made.search.fit_memory(made):
            break
    return made


def _search_choice(
    outcome: SearchResult, ladder: Sequence[Recomputation], rung: int, micro_batches: int
) -> SearchResult:
    """The outcome of an entry, where that of the program as it is is known. Raises MicroBatchError."""
    search, made = outcome.search, outcome
    if rung != NO_REMAT or micro_batches != search.program.micro_batches:
        made = search.search_variant(None if rung == NO_REMAT else ladder[rung], micro_batches)
    made.base_result, made.remat_choice = outcome, _remat_choice(ladder, rung, micro_batches)
    return made


def _remat_choice(ladder: Sequence[Recomputation], rung: int, micro_batches: int) -> RematChoice:
    saved = 0.0 if rung == NO_REMAT else ladder[rung].saved_bytes / ladder[-1].saved_bytes
    return RematChoice(rung=rung, rungs=len(ladder), micro_batches=micro_batches, saved=saved)


def _matching_level(entry: RematChoice, ladder: Sequence[Recomputation]) -> int | None:
    """The first rung that saves no smaller part than that of an entry of another ladder; None where there is none."""
    if entry.rung == NO_REMAT:
        return NO_REMAT
    if len(ladder) == entry.rungs:
        return entry.rung
    least = entry.saved - MIN_SAVING
    return next((rung for rung, each in enumerate(ladder) if each.saved_bytes >= least * ladder[-1].saved_bytes), None)


def _remat_levels(outcome: SearchResult) -> list[Recomputation]:
    """What may be computed again, by the fastest plan of the whole batch, memory aside."""
    search = outcome.search
    if search.program.micro_batches > 1:
        outcome = search.search_variant(None, 1)
    plan = outcome.evaluate(outcome.fastest)
    return list_recomputations(plan.decisions, plan.chain, plan.cost.step_s, plan.memory.peak_bytes)


@dataclass(slots=True, eq=False)
class _TradeoffTable:
    """Outcomes by number of micro-batches and rung, made when asked for.

    found: the fastest that fits. followed: those of an earlier search's entry and of ones near it, on some meshes.
    """

    search: Search
    levels: Sequence[Recomputation]
    results: dict[tuple[int, int], SearchResult]
    best_result: SearchResult | None = None
    fitted_entries: set[tuple[int, int]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    restricted_results: list[SearchResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        share = self.search.hidden_share
        self.restricted_results = [each for each in self.search.restricted_results if each.search.hidden_share == share]
        self.best_result = min(
            (each for each in self.restricted_results if each.best_plan), key=lambda each: each.step_s, default=None
        )

    def find_best(self) -> SearchResult:
        """The fastest of the outcomes that fit, or the one that needs least."""
        plain = self.search.program.micro_batches
        if self.search.is_fast:
            self._find_fitting(plain)
        else:
            self._find_fastest(plain)
        best = self.best_result or self._fallback_result()
        best.base_result = self.results[self.search.program.micro_batches, NO_REMAT]
        best.remat_choice = self._choice_of(best)
        best.notes += self.notes
        best.other_candidates = [
            each for outcome in self.results.values() if outcome is not best for each in _summarize(outcome)
        ]
        return best

    def _find_fastest(self, plain: int) -> None:
        self._fit_with_multiplier(plain, NO_REMAT)
        if self._is_near_fastest(plain):
            return
        for number in self._micro_batch_counts():
            if number != plain and self._try_to_fit(number, NO_REMAT, at_once=True):  # more parts need not even less
                break
            self._bisect_levels(number)
        self._fit_promising()

    def _find_fitting(self, plain: int) -> None:
        """By a price of memory, where the program as it is nearly fits. Else with the fewest micro-batches that do,
        what of the ladder is enough by its own account, or all of it; by prices again where none does."""
        if _memory_ratio(self.results[plain, NO_REMAT]) <= NEAR_FIT_RATIO:
            self._fit_with_multiplier(plain, NO_REMAT)
        for number in self._micro_batch_counts():
            rungs = (self._predict_level(number, 0, len(self.levels)), len(self.levels) - 1) if self.levels else ()
            for rung in (NO_REMAT, *dict.fromkeys(rungs)):
                if self.best_result is not None or self._try_to_fit(number, rung, at_once=True):
                    return
        self._fit_promising()

    def _is_near_fastest(self, number: int) -> bool:
        """Whether what fits is as fast as the program as it is, memory aside, or nearly: nothing else takes less."""
        return self.best_result is not None and self.best_result.step_s * (1 - MIN_TABLE_GAIN) <= self._fastest_step_s(
            number, NO_REMAT
        )

    def _fallback_result(self) -> SearchResult:
        """A plan that takes little whatever else it takes, or a faster one of the program computing like it; where not
        even that one fits, the refusal that needs least."""
        made = self.search.fallback_result or find_fallback_plan(self.search)
        if made is None or made.best_plan is None:
            refused = [self._smallest_refusal(), *([made] if made is not None else [])]
            return min(refused, key=attrgetter("least_bytes"))
        if self.search.must_stop():
            return made
        outcome = self.search.search_variant(made.search.recomputation, made.search.program.micro_batches)
        return outcome if outcome.search.fit_memory(outcome, below_s=made.step_s * (1 - MIN_GAIN)) else made

    def _choice_of(self, outcome: SearchResult) -> RematChoice | None:
        """What an outcome computes otherwise; None for one that is none of the table's and was not known before."""
        for (number, rung), tried in self.results.items():
            if tried is outcome:
                return _remat_choice(self.levels, rung, number)
        return outcome.remat_choice

    def _micro_batch_counts(self) -> Iterator[int]:
        """Numbers of micro-batches, as long as the step splits into as many and may be faster than what fits."""
        plain = number = self.search.program.micro_batches
        yield number
        while self.search.options.micro_batches is None and number < MAX_MICRO_BATCHES and not self.search.must_stop():
            number *= 2
            if self._is_hopeless(number):
                continue
            if self._fastest_step_s(plain, NO_REMAT) >= self._step_limit_s(number):  # parts take no less than the whole
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
        """Whether so many parts need far too much even if, with all computed again, they need as much less than what
        was tried as they are more: what is stored for the whole batch stays."""
        last = len(self.levels) - 1
        tried = (
            _memory_ratio(outcome) * parts / number
            for (parts, rung), outcome in self.results.items()
            if rung == last and parts < number
        )
        return number < MAX_MICRO_BATCHES and max(tried, default=0.0) > HOPELESS_RATIO

    def _result_at(self, number: int, rung: int) -> SearchResult:
        if (number, rung) not in self.results:
            self.results[number, rung] = self._search_variant(number, self.levels[rung])
        return self.results[number, rung]

    def _search_variant(self, number: int, again: Recomputation | None) -> SearchResult:
        """What the search gives on the meshes where the program as it is might take less than what fits, for computing
        again and parts of a batch only add to that. Raises as `Search.search_variant` does."""
        below_s = self._step_limit_s(number)
        slow = frozenset(mesh for mesh, least_s in self._min_step_by_mesh_s(number).items() if least_s >= below_s)
        without = slow | self._find_dominated_meshes(slow)
        known = next((each for each in self.restricted_results if each.search.is_variant(again, number)), None)
        return (
            known.add_remaining_meshes(without)
            if known is not None
            else self.search.search_variant(again, number, without)
        )

    def _find_dominated_meshes(self, without: frozenset[Mesh]) -> frozenset[Mesh]:
        """Meshes on which the program as it is takes longer than on another one, and no less memory, its fastest plans
        compared; the other is none of those of `without`."""
        outcome = self.results[self.search.program.micro_batches, NO_REMAT]
        plans = [outcome.evaluate(each) for each in outcome.solutions if each.coarse_solution is None]
        known = [(found.mesh, found.cost.step_s, self.search.bytes_needed(found)) for found in plans]
        left = [(step_s, needed) for mesh, step_s, needed in known if mesh not in without]
        return frozenset(
            mesh
            for mesh, step_s, needed in known
            if any(
                less_s * (1 + NEAR_FASTEST) < step_s and less <= SIMILAR_MEMORY_RATIO * needed for less_s, less in left
            )
        )

    def _min_step_by_mesh_s(self, number: int) -> dict[Mesh, float]:
        """Seconds that the program, nothing computed again, takes at least on each mesh: in so many parts where that is
        known, which may be a little faster than the whole, else in one."""
        least: dict[Mesh, float] = {}
        for parts in (self.search.program.micro_batches, number):
            outcome = self.results.get((parts, NO_REMAT))
            least |= _min_step_by_mesh(outcome.solutions) if outcome is not None else {}
        return least

    def _fastest_step_s(self, number: int, rung: int) -> float:
        """What a plan takes at least, memory aside: what is computed again adds to what the program takes without."""
        known = self.results.get((number, rung))
        if known is not None:
            return known.fastest.step_s
        return self._fastest_step_s(number, NO_REMAT) + self.levels[rung].seconds

    def _is_too_slow(self, number: int, rung: int) -> bool:
        return self._fastest_step_s(number, rung) >= self._step_limit_s(number)

    def _step_limit_s(self, number: int) -> float:
        """What a plan in so many micro-batches must take less than."""
        if self.best_result is None:
            return math.inf
        in_more_parts = number > self.best_result.search.program.micro_batches
        return self.best_result.step_s * (1 - (MIN_MICRO_BATCH_GAIN if in_more_parts else MIN_GAIN))

    def _try_to_fit(self, number: int, rung: int, *, at_once: bool) -> bool:
        """Whether something there fits, and is faster than what is known: then it is what is known."""
        outcome = self._result_at(number, rung)
        if not outcome.search.fit_memory(outcome, at_once=at_once, below_s=self._step_limit_s(number)):
            return False
        self.best_result = outcome
        return True

    def _bisect_levels(self, number: int) -> None:
        """Find the first rung whose fastest plan fits as it is, as far as that can be faster than what is known. Where
        none does and nothing is known, the most promising one is fitted by a price: what the fastest plan needs does
        not tell what others do, and more parts of the batch are a search each."""
        low, high = 0, len(self.levels)
        while low < high and not self.search.must_stop():
            rung = self._predict_level(number, low, high)
            fits = not self._is_too_slow(number, rung) and self._try_to_fit(number, rung, at_once=True)
            if fits or self._is_too_slow(number, rung):  # as may only be known once it was planned
                high = rung
            else:
                low = rung + 1
        rungs = self._much_faster_levels(number) if not self.search.must_stop() else []
        if rungs:
            low = min(rungs, key=lambda rung: self._estimate_step_s(self.results[number, rung]))
            if not self._fit_with_multiplier(number, low):
                return
        while low and not self.search.must_stop():  # what nearly fits may take no longer and do so
            low -= 1
            if self._is_too_slow(number, low) or _memory_ratio(self._result_at(number, low)) > NEAR_FIT_RATIO:
                break
            if not self._fit_with_multiplier(number, low):
                break

    def _much_faster_levels(self, number: int) -> list[int]:
        """Rungs whose fastest plans do not fit, but would be far faster than what does, if that is of fewer parts."""
        if self.best_result is not None and self.best_result.search.program.micro_batches == number:
            return []
        below_s = self._step_limit_s(number) * (1 - MIN_FITTING_GAIN)
        rungs = [rung for parts, rung in self.results if parts == number and rung != NO_REMAT]
        return [rung for rung in rungs if self._fastest_step_s(number, rung) < below_s]

    def _predict_level(self, number: int, low: int, high: int) -> int:
        """The first rung from `low` and below `high` that saves what is too much without; the middle, where that is
        known not to be enough, as what is computed again takes memory, too."""
        if low:
            return (low + high) // 2
        outcome = self.results[number, NO_REMAT]
        too_much = (_memory_ratio(outcome) - 1) * outcome.search.limit_bytes
        return next((rung for rung in range(high) if self.levels[rung].saved_bytes >= too_much), high - 1)

    def _fit_promising(self) -> None:
        """Fit what does not fit as it is by a price of memory, the most promising first."""
        left = {
            key: outcome
            for key, outcome in self.results.items()
            if key not in self.fitted_entries and not outcome.best_plan
        }
        promised = sorted((self._estimate_step_s(outcome), key) for key, outcome in left.items())
        for attempt, (promise_s, key) in enumerate(promised):
            if attempt == MAX_FITTED or promise_s >= self._step_limit_s(key[0]) or self.search.must_stop():
                break
            self._fit_with_multiplier(*key)
        most = max(number for number, _ in self.results), len(self.levels) - 1  # that was tried to save memory
        if self.best_result is None and most not in self.fitted_entries and not self.search.must_stop():
            self._fit_with_multiplier(*most)

    def _fit_with_multiplier(self, number: int, rung: int) -> bool:
        self.fitted_entries.add((number, rung))
        known = self._result_at(number, rung)
        if not known.used_multipliers:
            return self._try_to_fit(number, rung, at_once=False)
        if known.step_s >= self._step_limit_s(number):
            return False
        self.best_result = known
        return True

    def _estimate_step_s(self, outcome: SearchResult) -> float:
        return outcome.fastest.step_s * max(1.0, _memory_ratio(outcome))

    def _smallest_refusal(self) -> SearchResult:
        """Of the outcomes that are refused the one that needs least."""
        refused = [outcome for outcome in self.results.values() if outcome.memory_error is not None]
        if not refused:  # the deadline has passed
            refused = [next(iter(self.results.values()))]
            refused[0].search.fit_memory(refused[0])
        return min(refused, key=attrgetter("least_bytes"))


def _min_step_by_mesh(tried: Sequence[MeshSolution]) -> dict[Mesh, float]:
    """The least bound of the plans on each mesh, or that began there; seconds."""
    least: dict[Mesh, float] = {}
    for each in tried:
        bound_s = each.step_s - (each.solution.value - each.solution.tied_bound)
        for mesh in {each.mesh, each.coarse_solution.mesh if each.coarse_solution is not None else each.mesh}:
            least[mesh] = min(least.get(mesh, math.inf), bound_s)
    return least


def _memory_ratio(outcome: SearchResult) -> float:
    """What the fastest plan needs, as a multiple of what there is."""
    search = outcome.search
    return search.bytes_needed(outcome.evaluate(outcome.fastest)) / search.limit_bytes


def _summarize(outcome: SearchResult) -> Iterator[Candidate]:
    """What came out, as something else was chosen."""
    search, name = outcome.search, "search"
    again = len(search.recomputation.instructions) if search.recomputation else 0
    note = f"{again} values computed again" if again else "nothing computed again"
    if search.program.micro_batches > 1:
        note += f", {search.program.micro_batches} micro-batches"
    if outcome.best_plan is not None:
        yield Candidate(mesh=outcome.best_plan.mesh, step_s=outcome.best_plan.cost.step_s, name=name, note=note)
    elif outcome.memory_error is not None:
        mesh = next(iter(outcome.mesh_errors))
        yield Candidate(mesh=mesh, step_s=None, name=name, note=f"{note}: {summarize_error(outcome.memory_error)}")
