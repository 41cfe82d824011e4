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
from shardwright.planner.again.trails import Entry
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.memory.fitting import HOPELESS, NEARLY
from shardwright.planner.memory.recompute import LEAST_SAVING, Recomputation, recomputations
from shardwright.planner.memory.words import briefly
from shardwright.planner.search.sparing import MOST_MICRO_BATCHES, sparing_plan
from shardwright.plans import Candidate
from shardwright.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.again.follow import Route
    from shardwright.planner.search.found import Outcome, Tried
    from shardwright.planner.search.search import Search

#: Part of the step time that a choice must save over one tried before it.
LEAST_GAIN = 1e-3

#: The same of more micro-batches than before. What they add is priced least well: of GPT-2 124M on 8 devices two were
#: predicted to take 1.8 % less than computing again, and counted in XLA's program took 2.9 % more.
GAIN_OF_PARTS = 3e-2

#: Part of the step time by which a plan that fits as it is may be slower than one that does not, for nothing else to be
#: tried. What fits may be of a mesh that is much slower.
NEAR_ENOUGH = 1e-2

#: Part of the step time that the rest of the table must be able to save to be searched at all: each of its entries is
#: a search of its own.
WORTH_A_TABLE = 3e-3

#: Part of the step time that the fastest plan of more micro-batches must save, for one that fits to be looked for by a
#: price of memory there before there are even more of them.
WORTH_A_PRICE = 0.1

#: The ratio of what the fastest plans of two meshes need up to which the slower mesh saves nothing worth a search.
MUCH_ALIKE = 1.05

#: Entries that are fitted by a price of memory besides the program as it is, at most. What one promises: its fastest
#: plan's time, times the ratio of what that needs to the budget.
MOST_PRICED = 2

#: The rung of the ladder on which nothing is computed again.
NOTHING = -1


def relieved(outcome: Outcome) -> Outcome:
    """`outcome` with the fastest plan that fits, or that of the program computing otherwise, where that is faster under
    the budget."""
    search = outcome.search
    outcome.plain, outcome.entry = outcome, Entry(rung=NOTHING, rungs=0, micro_batches=search.program.micro_batches)
    best = _relieved(outcome) if search.route is None else _followed(outcome, search.route)
    best.search.polish(best)
    return best


def _relieved(outcome: Outcome) -> Outcome:
    """The same, of a search that follows nothing."""
    search = outcome.search
    options = search.options
    if options.remat != "full":
        if search.fit(outcome, at_once=True) and not _is_much_faster_without_limit(outcome):
            return outcome
        if options.remat == "none" and options.micro_batches is not None:
            search.fit(outcome)
            return outcome
    ladder = _ladder(outcome) if options.remat != "none" else []
    if options.remat == "full":
        if not ladder:
            outcome.notes.append("remat='full': there is nothing that could be computed again")
        made = search.variant(ladder[-1], search.program.micro_batches) if ladder else outcome
        made.search.fit(made)
        return made
    return _Table(search, ladder, {(search.program.micro_batches, NOTHING): outcome}).best()


def _is_much_faster_without_limit(outcome: Outcome) -> bool:
    """Whether a plan that does not fit promises to be much faster than the one that was found."""
    search = outcome.search
    faster = (each for each in outcome.tried if each.step_s * (1 + NEAR_ENOUGH) < outcome.step_s)
    return any(not search.fits(outcome.plan(each)) for each in faster)


def _followed(outcome: Outcome, route: Route) -> Outcome:
    """The outcome of the first entry of a route that a plan fits with, or of the program as it is, where it fits
    now; without a plan where nothing fits.

    Raises MicroBatchError where the step does not split.
    """
    made = outcome
    if route.at_once and outcome.search.fit(outcome, at_once=True):
        return outcome
    ladder = _ladder(outcome) if any(entry.rung != NOTHING for entry in route.entries) else []
    for entry in route.entries:
        rung = _rung_like(entry, ladder)
        if rung is None:
            continue
        made = _entered(outcome, ladder, rung, entry.micro_batches)
        if made is not outcome:
            outcome.search.followed.append(made)
        if made.search.fit(made, at_once=True):
            break
        made.is_priced = not route.at_once or (made is not outcome and _excess(made) <= NEARLY)
        if made.is_priced and made.search.fit(made):
            break
    return made


def _entered(outcome: Outcome, ladder: Sequence[Recomputation], rung: int, micro_batches: int) -> Outcome:
    """The outcome of an entry, where that of the program as it is is known. Raises MicroBatchError."""
    search, made = outcome.search, outcome
    if rung != NOTHING or micro_batches != search.program.micro_batches:
        made = search.variant(None if rung == NOTHING else ladder[rung], micro_batches)
    made.plain, made.entry = outcome, _entry(ladder, rung, micro_batches)
    return made


def _entry(ladder: Sequence[Recomputation], rung: int, micro_batches: int) -> Entry:
    saved = 0.0 if rung == NOTHING else ladder[rung].saved_bytes / ladder[-1].saved_bytes
    return Entry(rung=rung, rungs=len(ladder), micro_batches=micro_batches, saved=saved)


def _rung_like(entry: Entry, ladder: Sequence[Recomputation]) -> int | None:
    """The first rung that saves no smaller part than that of an entry of another ladder; None where there is none."""
    if entry.rung == NOTHING:
        return NOTHING
    if len(ladder) == entry.rungs:
        return entry.rung
    least = entry.saved - LEAST_SAVING
    return next((rung for rung, each in enumerate(ladder) if each.saved_bytes >= least * ladder[-1].saved_bytes), None)


def _ladder(outcome: Outcome) -> list[Recomputation]:
    """What may be computed again, by the fastest plan of the whole batch, memory aside."""
    search = outcome.search
    if search.program.micro_batches > 1:
        outcome = search.variant(None, 1)
    plan = outcome.plan(outcome.fastest)
    return recomputations(plan.decisions, plan.chain, plan.cost.step_s, plan.memory.peak_bytes)


@dataclass(slots=True, eq=False)
class _Table:
    """Outcomes by number of micro-batches and rung, made when asked for.

    found: the fastest that fits. followed: those of an earlier search's entry and of ones near it, on some meshes.
    """

    search: Search
    ladder: Sequence[Recomputation]
    tried: dict[tuple[int, int], Outcome]
    found: Outcome | None = None
    priced: set[tuple[int, int]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    followed: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        share = self.search.hidden_share
        self.followed = [each for each in self.search.followed if each.search.hidden_share == share]
        self.found = min((each for each in self.followed if each.found), key=lambda each: each.step_s, default=None)

    def best(self) -> Outcome:
        """The fastest of the outcomes that fit, or the one that needs least."""
        plain = self.search.program.micro_batches
        if self.search.is_fast:
            self._find_what_fits(plain)
        else:
            self._find_the_fastest(plain)
        best = self.found or self._sparing()
        best.plain = self.tried[self.search.program.micro_batches, NOTHING]
        best.entry = self._entry(best)
        best.notes += self.notes
        best.others = [each for outcome in self.tried.values() if outcome is not best for each in _summary(outcome)]
        return best

    def _find_the_fastest(self, plain: int) -> None:
        self._fit_by_price(plain, NOTHING)
        if self._is_near_the_fastest(plain):
            return
        for number in self._numbers():
            if number != plain and self._fits(number, NOTHING, at_once=True):  # more parts need not even less
                break
            self._bisect(number)
        self._price()

    def _find_what_fits(self, plain: int) -> None:
        """By a price of memory, where the program as it is nearly fits. Else with the fewest micro-batches that do,
        what of the ladder is enough by its own account, or all of it; by prices again where none does."""
        if _excess(self.tried[plain, NOTHING]) <= NEARLY:
            self._fit_by_price(plain, NOTHING)
        for number in self._numbers():
            rungs = (self._foretold(number, 0, len(self.ladder)), len(self.ladder) - 1) if self.ladder else ()
            for rung in (NOTHING, *dict.fromkeys(rungs)):
                if self.found is not None or self._fits(number, rung, at_once=True):
                    return
        self._price()

    def _is_near_the_fastest(self, number: int) -> bool:
        """Whether what fits is as fast as the program as it is, memory aside, or nearly: nothing else takes less."""
        return self.found is not None and self.found.step_s * (1 - WORTH_A_TABLE) <= self._fastest_s(number, NOTHING)

    def _sparing(self) -> Outcome:
        """A plan that takes little whatever else it takes, or a faster one of the program computing like it; where not
        even that one fits, the refusal that needs least."""
        made = self.search.spared or sparing_plan(self.search)
        if made is None or made.found is None:
            refused = [self._least(), *([made] if made is not None else [])]
            return min(refused, key=attrgetter("least_bytes"))
        if self.search.is_late():
            return made
        outcome = self.search.variant(made.search.recomputation, made.search.program.micro_batches)
        return outcome if outcome.search.fit(outcome, below_s=made.step_s * (1 - LEAST_GAIN)) else made

    def _entry(self, outcome: Outcome) -> Entry | None:
        """What an outcome computes otherwise; None for one that is none of the table's and was not known before."""
        for (number, rung), tried in self.tried.items():
            if tried is outcome:
                return _entry(self.ladder, rung, number)
        return outcome.entry

    def _numbers(self) -> Iterator[int]:
        """Numbers of micro-batches, as long as the step splits into as many and may be faster than what fits."""
        plain = number = self.search.program.micro_batches
        yield number
        while self.search.options.micro_batches is None and number < MOST_MICRO_BATCHES and not self.search.is_late():
            number *= 2
            if self._is_hopeless(number):
                continue
            if self._fastest_s(plain, NOTHING) >= self._below_s(number):  # parts take no less than the whole
                return
            try:
                self.tried[number, NOTHING] = self._variant(number, None)
            except OutOfTimeError:
                raise
            except (PlanError, AnnotationError) as error:
                self.notes.append(f"not in {number} micro-batches: {error.message}")
                return
            if self._is_too_slow(number, NOTHING):
                return
            yield number

    def _is_hopeless(self, number: int) -> bool:
        """Whether so many parts need far too much even if, with all computed again, they need as much less than what
        was tried as they are more: what is stored for the whole batch stays."""
        last = len(self.ladder) - 1
        tried = (
            _excess(outcome) * parts / number
            for (parts, rung), outcome in self.tried.items()
            if rung == last and parts < number
        )
        return number < MOST_MICRO_BATCHES and max(tried, default=0.0) > HOPELESS

    def _at(self, number: int, rung: int) -> Outcome:
        if (number, rung) not in self.tried:
            self.tried[number, rung] = self._variant(number, self.ladder[rung])
        return self.tried[number, rung]

    def _variant(self, number: int, again: Recomputation | None) -> Outcome:
        """What the search gives on the meshes where the program as it is might take less than what fits, for computing
        again and parts of a batch only add to that. Raises as `Search.variant` does."""
        below_s = self._below_s(number)
        slow = frozenset(mesh for mesh, least_s in self._least_s(number).items() if least_s >= below_s)
        without = slow | self._dominated(slow)
        known = next((each for each in self.followed if each.search.computes(again, number)), None)
        return known.widened(without) if known is not None else self.search.variant(again, number, without)

    def _dominated(self, without: frozenset[Mesh]) -> frozenset[Mesh]:
        """Meshes on which the program as it is takes longer than on another one, and no less memory, its fastest plans
        compared; the other is none of those of `without`."""
        outcome = self.tried[self.search.program.micro_batches, NOTHING]
        plans = [outcome.plan(each) for each in outcome.tried if each.start is None]
        known = [(found.mesh, found.cost.step_s, self.search.needed_bytes(found)) for found in plans]
        left = [(step_s, needed) for mesh, step_s, needed in known if mesh not in without]
        return frozenset(
            mesh
            for mesh, step_s, needed in known
            if any(less_s * (1 + NEAR_ENOUGH) < step_s and less <= MUCH_ALIKE * needed for less_s, less in left)
        )

    def _least_s(self, number: int) -> dict[Mesh, float]:
        """Seconds that the program, nothing computed again, takes at least on each mesh: in so many parts where that is
        known, which may be a little faster than the whole, else in one."""
        least: dict[Mesh, float] = {}
        for parts in (self.search.program.micro_batches, number):
            outcome = self.tried.get((parts, NOTHING))
            least |= _least_by_mesh(outcome.tried) if outcome is not None else {}
        return least

    def _fastest_s(self, number: int, rung: int) -> float:
        """What a plan takes at least, memory aside: what is computed again adds to what the program takes without."""
        known = self.tried.get((number, rung))
        if known is not None:
            return known.fastest.step_s
        return self._fastest_s(number, NOTHING) + self.ladder[rung].seconds

    def _is_too_slow(self, number: int, rung: int) -> bool:
        return self._fastest_s(number, rung) >= self._below_s(number)

    def _below_s(self, number: int) -> float:
        """What a plan in so many micro-batches must take less than."""
        if self.found is None:
            return math.inf
        in_more_parts = number > self.found.search.program.micro_batches
        return self.found.step_s * (1 - (GAIN_OF_PARTS if in_more_parts else LEAST_GAIN))

    def _fits(self, number: int, rung: int, *, at_once: bool) -> bool:
        """Whether something there fits, and is faster than what is known: then it is what is known."""
        outcome = self._at(number, rung)
        if not outcome.search.fit(outcome, at_once=at_once, below_s=self._below_s(number)):
            return False
        self.found = outcome
        return True

    def _bisect(self, number: int) -> None:
        """Find the first rung whose fastest plan fits as it is, as far as that can be faster than what is known. Where
        none does and nothing is known, the most promising one is fitted by a price: what the fastest plan needs does
        not tell what others do, and more parts of the batch are a search each."""
        low, high = 0, len(self.ladder)
        while low < high and not self.search.is_late():
            rung = self._foretold(number, low, high)
            fits = not self._is_too_slow(number, rung) and self._fits(number, rung, at_once=True)
            if fits or self._is_too_slow(number, rung):  # as may only be known once it was planned
                high = rung
            else:
                low = rung + 1
        rungs = self._far_faster(number) if not self.search.is_late() else []
        if rungs:
            low = min(rungs, key=lambda rung: self._promise_s(self.tried[number, rung]))
            if not self._fit_by_price(number, low):
                return
        while low and not self.search.is_late():  # what nearly fits may take no longer and do so
            low -= 1
            if self._is_too_slow(number, low) or _excess(self._at(number, low)) > NEARLY:
                break
            if not self._fit_by_price(number, low):
                break

    def _far_faster(self, number: int) -> list[int]:
        """Rungs whose fastest plans do not fit, but would be far faster than what does, if that is of fewer parts."""
        if self.found is not None and self.found.search.program.micro_batches == number:
            return []
        below_s = self._below_s(number) * (1 - WORTH_A_PRICE)
        rungs = [rung for parts, rung in self.tried if parts == number and rung != NOTHING]
        return [rung for rung in rungs if self._fastest_s(number, rung) < below_s]

    def _foretold(self, number: int, low: int, high: int) -> int:
        """The first rung from `low` and below `high` that saves what is too much without; the middle, where that is
        known not to be enough, as what is computed again takes memory, too."""
        if low:
            return (low + high) // 2
        outcome = self.tried[number, NOTHING]
        too_much = (_excess(outcome) - 1) * outcome.search.limit_bytes
        return next((rung for rung in range(high) if self.ladder[rung].saved_bytes >= too_much), high - 1)

    def _price(self) -> None:
        """Fit what does not fit as it is by a price of memory, the most promising first."""
        left = {key: outcome for key, outcome in self.tried.items() if key not in self.priced and not outcome.found}
        promised = sorted((self._promise_s(outcome), key) for key, outcome in left.items())
        for attempt, (promise_s, key) in enumerate(promised):
            if attempt == MOST_PRICED or promise_s >= self._below_s(key[0]) or self.search.is_late():
                break
            self._fit_by_price(*key)
        most = max(number for number, _ in self.tried), len(self.ladder) - 1  # that was tried to save memory
        if self.found is None and most not in self.priced and not self.search.is_late():
            self._fit_by_price(*most)

    def _fit_by_price(self, number: int, rung: int) -> bool:
        self.priced.add((number, rung))
        known = self._at(number, rung)
        if not known.is_priced:
            return self._fits(number, rung, at_once=False)
        if known.step_s >= self._below_s(number):
            return False
        self.found = known
        return True

    def _promise_s(self, outcome: Outcome) -> float:
        return outcome.fastest.step_s * max(1.0, _excess(outcome))

    def _least(self) -> Outcome:
        """Of the outcomes that are refused the one that needs least."""
        refused = [outcome for outcome in self.tried.values() if outcome.refusal is not None]
        if not refused:  # the deadline has passed
            refused = [next(iter(self.tried.values()))]
            refused[0].search.fit(refused[0])
        return min(refused, key=attrgetter("least_bytes"))


def _least_by_mesh(tried: Sequence[Tried]) -> dict[Mesh, float]:
    """The least bound of the plans on each mesh, or that began there; seconds."""
    least: dict[Mesh, float] = {}
    for each in tried:
        bound_s = each.step_s - (each.solved.value - each.solved.rolled_bound)
        for mesh in {each.mesh, each.start.mesh if each.start is not None else each.mesh}:
            least[mesh] = min(least.get(mesh, math.inf), bound_s)
    return least


def _excess(outcome: Outcome) -> float:
    """What the fastest plan needs, as a multiple of what there is."""
    search = outcome.search
    return search.needed_bytes(outcome.plan(outcome.fastest)) / search.limit_bytes


def _summary(outcome: Outcome) -> Iterator[Candidate]:
    """What came out, as something else was chosen."""
    search, name = outcome.search, "search"
    again = len(search.recomputation.instructions) if search.recomputation else 0
    note = f"{again} values computed again" if again else "nothing computed again"
    if search.program.micro_batches > 1:
        note += f", {search.program.micro_batches} micro-batches"
    if outcome.found is not None:
        yield Candidate(mesh=outcome.found.mesh, step_s=outcome.found.cost.step_s, name=name, note=note)
    elif outcome.refusal is not None:
        mesh = next(iter(outcome.refusals))
        yield Candidate(mesh=mesh, step_s=None, name=name, note=f"{note}: {briefly(outcome.refusal)}")
