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
from shardwright.planner.memory.budget import Memory, MemoryPrice, Peak, SizeRange
from shardwright.planner.memory.exact_fit import fit_exactly
from shardwright.planner.memory.mixing import mixed, of_one_chain
from shardwright.planner.memory.words import too_large, too_slow
from shardwright.planner.segments.bound import best_alike
from shardwright.planner.segments.chain import Chain, Key, SolvedChain
from shardwright.planner.segments.descent import descend
from shardwright.planner.segments.layout import Variable
from shardwright.planner.solver.dual import TIGHT
from shardwright.planner.solver.ilp import MAX_CPU_S
from shardwright.planner.solver.warm_start import WarmStart

if TYPE_CHECKING:
    from shardwright.planner.search.found import Found
    from shardwright.planner.search.mesh_search import MeshSearch

#: Prices of a byte at which a first plan that fits is looked for, as parts of what the plan's own bytes would cost at
#: its own time. Where memory is nearly free, what takes less for nothing is found; where it is dear, what takes least,
#: of what has a price: then prices rise from one between them, with the peaks that each plan has instead.
NEARLY_FREE, DEAR = 8e-3, 32.0
RISING = (0.5, 1.0, 2.0, 4.0)

#: How many times as many bytes as the last of those saved each further one may save: where that is not enough for a
#: plan to fit, none is tried.
MOST_MORE_SAVED = 2.0

#: Peaks that have a price, at most, and of those that bound: the latest.
MOST_PEAKS, MOST_THAT_BOUND = 8, 3

#: What a plan may need, as a multiple of what there is, that nearly fits. Where memory is dear, a plan that needs more
#: is the end of it, unless another peak than those that were priced explains that: then one that needs `HOPELESS`
#: times. Where the fastest plan needs as much, the dear price comes first.
NEARLY, HOPELESS = 1.25, 1.6

#: Prices that are tried once a plan fits, at most, and the ratio of two at which they are close enough; and mixtures of
#: all plans that are tried then.
MOST_PRICES = 3
CLOSE_PRICES = 1.05
MOST_MIXTURES = 24

#: The ratio of two prices between which plans hardly take less time than the line between the two that they give says.
NEAR_PRICES = 2.0

#: Part of what prices promise of plans that are descended to by which such a plan may take less: what is near another
#: one was not looked at.
PROMISES_OFF = 0.02

#: Relative gap to which the program is solved at each price; the last one that fits is solved to the end. A plan as
#: near to the fastest one of all is as good.
CLOSE = 1e-3


def fitted(
    search: MeshSearch,
    found: Found,
    below_s: float = math.inf,
    within: tuple[SizeRange, ...] = (),
    known: Found | None = None,
) -> Found:
    """`found`, or the fastest plan that fits.

    below_s: a plan that takes as long is no use. within: prices are tried for plans alone that keep to it, as `found`
    does. known: a plan on the same mesh that fits, of which parts may be taken where no price gives one. Raises
    MemoryBudgetError where none fits, or none below that.
    """
    if search.fits(found):
        return found
    return Fitting(search, found, below_s, within, known).best()


@dataclass(frozen=True, slots=True)
class _Priced:
    """A plan, and the price that it is the cheapest at."""

    price: float
    found: Found


@dataclass(slots=True, eq=False)
class Fitting:
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
    start: Found
    below_s: float
    within: tuple[SizeRange, ...] = ()
    known: Found | None = None
    peaks: list[Peak] = field(default_factory=list)
    any_peaks: list[Peak] = field(default_factory=list)
    tried: list[_Priced] = field(default_factory=list)
    promised_s: float = 0.0
    best_price: float = 0.0
    least_s: float = 0.0
    is_hopeless: bool = False
    _end: tuple[Chain, WarmStart[Key]] | None = None
    model: Memory = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.search.memory_model(self.start.chain.graph.layout.hubs)

    def best(self) -> Found:
        """The fastest plan that fits. Raises MemoryBudgetError."""
        self._add_peak(self.start)
        if self.known is not None and self._is_among_all:
            self._add_peak(self.known)
        first = self._first()
        is_fast = self.search.is_fast
        exact = None if is_fast else _exactly(self.search, self.start, self.model, self.held_by_all())
        is_close = exact is not None and exact.solved.value - exact.price_bound_s <= CLOSE * exact.solved.value
        if exact is not None and (first is None or (is_close and not self._descends)):
            return replace(exact, price=self._bounding(exact))
        if first is None:
            mixture = self._mixed_with_known()
            if mixture is None:
                self.is_hopeless = self._excess(self.thriftiest) > HOPELESS
                raise too_large(self.search, self.thriftiest)
            return mixture
        try:
            best = self._fastest(first)
        except OutOfTimeError:  # in the middle of a price
            best = self._fastest_that_fits()
        if exact is not None:
            return replace(_faster(best, exact), price=self._bounding(best), price_bound_s=exact.price_bound_s)
        fastest = self.start.solved
        return replace(best, price=self._bounding(best), price_bound_s=fastest.rolled_bound, fastest=fastest)

    def _bounding(self, best: Found) -> MemoryPrice:
        """The price that promised most, of what is live where the unsplit program peaks, free where a plan fits that
        stores less than that: it bounds all that fit and store it."""
        peaks = self.held_by_all([best])
        return MemoryPrice.shared(peaks, self.best_price)

    def held_by_all(self, known: Sequence[Found] = ()) -> list[Peak]:
        """Those of `any_peaks` at which no plan that fits would take more than there is; as much of the others as none
        does, if what each of those plans stores is all that counts.

        What a compiler fuses, it does not store, and that may hang on how it is split.
        """
        fitting = [*known, *(each.found for each in self.tried if self.fits(each.found))]
        bounding = (self._bounding_of(whole, fitting) for whole in self.any_peaks)
        return [peak for peak in bounding if peak is not None]

    def _bounding_of(self, whole: Peak, fitting: Sequence[Found]) -> Peak | None:
        """A peak, or as much of it as bounds, of plans that fit; None where none of that does."""
        model, limit = self.model, self.search.limit_bytes
        stored = reduce(model.only_stored, (each.stored for each in fitting), whole)
        for peak in (whole, replace(whole, turned=frozenset()), stored, replace(stored, turned=frozenset())):
            if all(model.taken_at(peak, f.decisions) <= limit for f in fitting):
                return peak
        return None

    def bounding_room(self, plan: Found, known: Sequence[Found]) -> tuple[Peak, float] | None:
        """Where a plan takes most of what nearly all store, and the bytes that there are; None where a known plan that
        fits has more."""
        peak = self._bounding_of(self.model.peak(plan.decisions), [each for each in known if self.fits(each)])
        return (peak, float(self.search.limit_bytes)) if peak is not None else None

    @property
    def thriftiest(self) -> Found:
        """Of all plans that were looked at, the one that needs least."""
        return min((self.start, *(each.found for each in self.tried)), key=self.search.needed_bytes)

    def _fastest_that_fits(self) -> Found:
        """Of the plans that prices gave and that fit, the fastest."""
        return min((each.found for each in self.tried if self.fits(each.found)), key=lambda f: f.cost.step_s)

    @property
    def _descends(self) -> bool:
        """Whether the chain is only what is near the plan on three axes that begins."""
        return self.start.is_from_another_mesh

    @property
    def _is_among_all(self) -> bool:
        """Whether the chain has all strategies of its mesh, of which a price is solved by message passing."""
        return self.start.chain.is_for_bound

    def _add_peak(self, found: Found) -> None:
        """Price bytes where a plan takes most, too."""
        of_all, of_this = self.model.peak(found.decisions), self.model.peak_of_buffers(found.held, found.decisions)
        self.peaks = _with(_with(self.peaks, of_all, MOST_PEAKS), of_this, MOST_PEAKS)
        self.any_peaks = _with(self.any_peaks, of_all, MOST_THAT_BOUND)

    def fits(self, found: Found) -> bool:
        return self.search.fits(found)

    def _at(self, price: float, close: float = CLOSE) -> _Priced:
        """The cheapest plan at a price, the same object for equal plans.

        Raises MemoryBudgetError where what fits is known to take too long.
        """
        search, terms = self.search, MemoryPrice.shared(self.peaks, price, self.within)
        chain, solved = self._cheapest(terms, close)
        bound_s = solved.rolled_bound - price * search.limit_bytes
        if bound_s > self.promised_s:
            self.promised_s, self.best_price = bound_s, price
        if not self._is_among_all:  # else it is bounded by whoever asks
            self._give_up_if_too_slow(chain, price)
        made = _Priced(price, self._plan_of(chain, solved))
        self.tried.append(made)
        return made

    def _cheapest(self, terms: MemoryPrice, close: float) -> tuple[Chain, SolvedChain]:
        """The cheapest plan at a price, and the chain that it is of; where plans are descended to, the one that is
        reached from the cheapest that is known."""
        start, time_limit_s = self.start, self.search.time_limit_s()
        if start.start is None or not self._descends:
            return start.chain, self._solved(start.chain, terms, close)
        known = min((start, *(each.found for each in self.tried)), key=lambda found: self._costs_s(found, terms))
        axes = [axis.name for axis in start.mesh.axes]
        return descend(
            start.start.chain,
            known.chain.strategies(known.solved.states),
            start.chain.graph,
            axes,
            time_limit_s=time_limit_s,
            price=terms,
        )

    def _give_up_if_too_slow(self, chain: Chain, price: float) -> None:
        """Raises MemoryBudgetError where prices promise that what fits takes too long."""
        free_s = chain.graph.least_of_free_s()
        if self.promised_s + free_s < self.below_s:
            return
        self.least_s = max(self.least_s, self._promised_of_all_s(chain, price) + free_s)  # other plans may store less
        if self.least_s >= self.below_s * (1 + PROMISES_OFF * self._descends):
            raise too_slow(self.start, self.least_s)

    def cheapest_plan(self, terms: MemoryPrice) -> tuple[Found, float]:
        """The cheapest plan at a price, the same object for equal plans, and what all cost at least there; seconds."""
        chain, solved = self._cheapest(terms, CLOSE)
        begun = [each for each in (self.start, self.known) if each is not None and _is_same(each, chain, solved)]
        made = _Priced(terms.total, begun[0] if begun else self._plan_of(chain, solved))
        self.tried.append(made)
        return made.found, solved.rolled_bound

    def _plan_of(self, chain: Chain, solved: SolvedChain) -> Found:
        known = (each.found for each in self.tried if _is_same(each.found, chain, solved))
        return next(known, None) or self.search.found(chain, solved, self.start.notes)

    def _solved(self, chain: Chain, terms: MemoryPrice, close: float) -> SolvedChain:
        """The cheapest plan of a chain at a price. Message passing begins where it ended at the last one."""
        priced = chain.with_price(terms)
        priced.start = self._end[1] if self._end is not None and self._end[0] is chain else WarmStart()
        solved = best_alike(priced) if chain.is_for_bound else priced.solve(self.search.time_limit_s(), close)
        self._end = chain, priced.start
        return solved

    def _costs_s(self, found: Found, terms: MemoryPrice) -> float:
        """Seconds a step of a plan, with its memory at a price."""
        taken_s = (price * self.model.taken_at(peak, found.decisions) for peak, price in terms.peaks)
        return found.cost.step_s + sum(taken_s)

    def _promised_of_all_s(self, chain: Chain, price: float) -> float:
        """What a price promises of all plans of a chain that store what is live where the unsplit program takes
        most."""
        terms = MemoryPrice.shared(self.held_by_all(), price, self.within)
        solved = self._solved(chain, terms, CLOSE)
        return solved.rolled_bound - terms.total * self.search.limit_bytes

    def _first(self) -> _Priced | None:
        """A plan that fits, at as low a price as one is found at soon."""
        unit = self.start.cost.step_s / self.start.memory.peak_bytes
        asked: tuple[float, list[Peak]] | None = None
        risen: list[int] = []
        for part in self._first_parts():
            if (part * unit, self.peaks) == asked:  # of which the answer is known
                continue
            asked = part * unit, self.peaks
            made = self._at(part * unit)
            if self.fits(made.found):
                return made
            if part in RISING:
                risen.append(self.search.needed_bytes(made.found))
                is_too_slow = made.found.cost.step_s >= self.below_s  # what takes less memory takes longer
                if is_too_slow or not _may_fall_to(self.search.limit_bytes, risen):
                    return None
            self._add_peak(made.found)
            explains = asked[1] != self.peaks
            if part == DEAR and self._excess(self.thriftiest) > (HOPELESS if explains else NEARLY):
                return None
        return None

    def _first_parts(self) -> tuple[float, ...]:
        """The prices at which a plan that fits is looked for first, as parts of what `NEARLY_FREE` and `DEAR` are parts
        of. Where something fits most likely, a dear price is only asked if the first that rises does not say."""
        excess = self._excess(self.start)
        nearly_free = (NEARLY_FREE,) if excess <= HOPELESS else ()
        if self.known is not None:  # something does
            return (*nearly_free, *RISING)
        if excess <= NEARLY:
            return (*nearly_free, RISING[0], DEAR, *RISING[1:])
        return (*nearly_free, DEAR, *RISING)

    def _excess(self, found: Found) -> float:
        """What a plan needs, as a multiple of what there is."""
        return self.search.needed_bytes(found) / self.search.limit_bytes

    def _fastest(self, fits: _Priced) -> Found:
        """From a plan that fits to the fastest that some price gives."""
        below = [each for each in self.tried if each.price < fits.price and not self.fits(each.found)]
        over = below[-1] if below else _Priced(0.0, self.start)
        best = fits.found
        halves = False  # the crossing moves little where the plan takes more than what is priced
        for _ in range(1 if self.search.is_fast else MOST_PRICES):
            if best.cost.step_s <= self.start.cost.step_s * (1 + CLOSE) or self.search.is_late():
                return best
            price = self._between(over, fits, halves)
            if price is None or self._is_in_vain(over, fits, best):
                break
            made = self._at(price)
            does_fit = self.fits(made.found)
            halves = not (does_fit or halves)
            if does_fit:
                fits, best = made, _faster(best, made.found)
            else:
                over = made
                self._add_peak(made.found)
        best = self._merged_with_known(best)
        solved = fits.found.solved
        is_final = self.search.is_large or self._descends or self._is_among_all
        if not is_final and solved.value - solved.rolled_bound > TIGHT * abs(solved.value):
            last = self._at(fits.price, close=0.0).found
            best = _faster(best, last) if self.fits(last) else best
        return best

    def _is_in_vain(self, over: _Priced, fits: _Priced, best: Found) -> bool:
        """Whether plans at prices between two seem to take too long where the memory ends, as the best that fits does.

        At near prices they are near the line between both. Among all strategies a price takes little, and plans at near
        prices are what merges well: of distant ones the integer program takes minutes.
        """
        if self._is_among_all or best.cost.step_s < self.below_s or fits.price > NEAR_PRICES * over.price:
            return False
        over_s, over_bytes = over.found.cost.step_s, self.search.needed_bytes(over.found)
        saved, added_s = over_bytes - self.search.needed_bytes(fits.found), fits.found.cost.step_s - over_s
        return over_s + added_s * (over_bytes - self.search.limit_bytes) / saved >= self.below_s

    def _merged_with_known(self, best: Found) -> Found:
        """The fastest plan that fits of parts of all that prices gave, and of the one that is known to fit; `best`
        where there is none faster than both.

        Among all strategies prices give plans that have little in common with the one that is known: they are merged
        with one another first, and with it where that leads to nothing faster.
        """
        plans = [self.start, *(each.found for each in self.tried)]
        if self.known is None:
            return self.merged(plans, best)
        if self._is_among_all:
            best = self.merged(plans, best)
            if best.cost.step_s < self.below_s:
                return best
        mixture = self.merged(plans, _faster(best, self.known))
        return mixture if mixture is not self.known else best

    def _mixed_with_known(self) -> Found | None:
        """A plan that takes parts of the one that is known to fit and of those that nearly do, and is faster; None
        where there is none."""
        best = self.known
        if best is None:
            return None
        faster = [each.found for each in self.tried if each.found.cost.step_s < best.cost.step_s]
        mixture = self.merged(faster, best)
        return mixture if mixture is not best else None

    def merged(self, plans: Sequence[Found], best: Found) -> Found:
        """The fastest plan that fits of those that do what some plan does, variable by variable; `best`, which fits, if
        there is none faster."""
        *_, last = (best, *self.mixtures(plans, best))
        return _faster(best, last) if self.fits(last) else best

    def mixtures(
        self, plans: Sequence[Found], best: Found, most_of_all: int = 1, most_cpu_s: float = MAX_CPU_S
    ) -> Iterator[Found]:
        """Plans that do what some plan or the best one does, variable by variable, the fastest first; the last may fit.

        What plans take where they peak bounds a mixture, as far as those that fit keep to it. A mixture may peak
        elsewhere: where it does not fit its own peak bounds the next one, which is of it and of the best one alone,
        once there were `most_of_all`. most_cpu_s: for the integer program of each.
        """
        search, model = self.search, self.model
        known = list({id(plan): plan for plan in (best, *plans)}.values())
        if min(plan.cost.step_s for plan in known) >= best.cost.step_s:
            return
        chain, of_plans = of_one_chain([(plan.chain, plan.solved.states) for plan in known])

        def beside(peak: Peak, room: float) -> tuple[Peak, float]:
            """A peak, and what a mixture may take there besides the best one."""
            return peak, room - model.taken_at(peak, best.decisions)

        left, parts, tried = [beside(*self.room(plan, known)) for plan in known], of_plans, list(of_plans)
        for number in range(1, MOST_MIXTURES + 1):
            states = (
                None if search.is_late() else mixed(chain, parts, left, search.time_limit_s(), most_cpu_s=most_cpu_s)
            )
            if states is None or states in tried:
                return
            made = search.found(chain, SolvedChain(states=states, value=math.inf, rolled_bound=0.0), self.start.notes)
            yield made
            if self.fits(made):
                return
            tried.append(states)
            left.append(beside(*self.room(made, known)))
            if number >= most_of_all:
                parts = [of_plans[0], states]

    def bytes_beyond(self, peak: Peak, plan: Found) -> float:
        """What a plan takes at a peak beyond what there is."""
        return self.model.taken_at(peak, plan.decisions) - self.search.limit_bytes

    def room(self, plan: Found, known: Sequence[Found]) -> tuple[Peak, float]:
        """Where a plan takes most, and the bytes that one may take there.

        What it needs besides those that count at the peak, others need as well; but no known plan that fits is over.
        """
        limit, model = self.search.limit_bytes, self.model
        peak = model.peak_of_buffers(plan.held, plan.decisions)
        counted = limit - self.search.needed_bytes(plan) + model.taken_at(peak, plan.decisions)
        return peak, max(counted, *(model.taken_at(peak, each.decisions) for each in known if self.fits(each)))

    def _between(self, over: _Priced, fits: _Priced, halves: bool) -> float | None:
        """The price at which both cost the same, or halfway between theirs; None where these are close."""
        if fits.price < over.price * CLOSE_PRICES:
            return None
        price = 0.0 if halves else self._crossing(over, fits)
        if over.price * CLOSE_PRICES < price < fits.price / CLOSE_PRICES:
            return price
        return math.sqrt(over.price * fits.price) if over.price else fits.price / 8

    def _crossing(self, over: _Priced, fits: _Priced) -> float:
        """The price at which both cost the same, of the bytes that have one; 0 where there is none."""
        saved = self._priced_bytes(over.found) - self._priced_bytes(fits.found)
        return (fits.found.cost.step_s - over.found.cost.step_s) / saved if saved > 0 else 0.0

    def _priced_bytes(self, found: Found) -> float:
        return sum(self.model.taken_at(peak, found.decisions) for peak in self.peaks) / len(self.peaks)


def _may_fall_to(limit_bytes: int, risen: Sequence[int]) -> bool:
    """Whether plans at the rest of the rising prices may need no more than that, by what those at the first of them
    need."""
    if len(risen) < 2:
        return True
    saved, left = max(risen[-2] - risen[-1], 0), len(RISING) - len(risen)
    return risen[-1] - MOST_MORE_SAVED * left * saved <= limit_bytes


def _with(peaks: list[Peak], peak: Peak, most: int) -> list[Peak]:
    """`peaks` and another one, the latest of them."""
    return peaks if peak in peaks else [*peaks, peak][-most:]


def _is_same(found: Found, chain: Chain, solved: SolvedChain) -> bool:
    """Whether a plan is the one that a chain's states are."""
    if found.chain.graph is chain.graph:
        return found.solved.states == solved.states
    return found.chain.strategies(found.solved.states) == chain.strategies(solved.states)


def _faster(best: Found, tried: Found) -> Found:
    return tried if tried.cost.step_s < best.cost.step_s else best


def _exactly(search: MeshSearch, found: Found, model: Memory, peaks: Sequence[Peak]) -> Found | None:
    """The fastest plan that fits, or nearly, where the program is small enough to solve whole. Else, or if none was
    found to fit, None."""

    def judge(states: Mapping[Variable, int]) -> tuple[int, Peak]:
        solved = SolvedChain(states=dict(states), value=0.0, rolled_bound=0.0)
        tried = search.found(found.chain, solved, found.notes)
        return search.needed_bytes(tried), model.peak(tried.decisions)

    best = fit_exactly(found.chain, search.limit_bytes, peaks, judge, search.time_limit_s())
    if best is None:
        return None
    return replace(search.found(found.chain, best, found.notes), price_bound_s=best.rolled_bound)
