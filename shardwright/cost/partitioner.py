"""What XLA's SPMD partitioner does to bring an array from one tiling to another.

It tries ways in a fixed order and takes the first that fits; the ways below are in that order, each
with the conditions of XLA's (`xla/service/spmd/spmd_partitioner.cc`, `PartitionedHlo::ReshardNoCache` and what it
calls). Not every way is a good one, and some moves that a cheap way exists for gather everything: that is the
point of following XLA instead of theory.
`benchmarks/probe_moves.py` holds every move against XLA's own program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from shardwright.cost.edges import evenly, parts_of, sent_rows
from shardwright.cost.tilings import Order, Tiling, arranged, cut, reshaped


class DividesByZero(ArithmeticError):
    """XLA's partitioner ends its process (SIGFPE) on this resharding."""


class Joined(NamedTuple):
    """A shard and what neighbours sent of theirs, concatenated.

    elements: of both. is_minor: whether along the last dimension.
    """

    elements: int
    is_minor: bool


class Step(NamedTuple):
    """One collective over the devices that differ in `atoms`; elements: of its payload on one device.

    joined: what each device makes of its shard and the result; None where the result takes the shard's place.
    """

    kind: str
    atoms: Order
    elements: int
    joined: Joined | None = None


class Resharding:
    """The steps of one resharding.

    shape: dimensions of the array in elements. alike: dimensions along which all elements are equal.
    """

    def __init__(
        self, shape: tuple[int, ...], steps: list[Step] | None = None, alike: frozenset[int] = frozenset()
    ) -> None:
        self.shape = shape
        self.alike = alike
        self.steps: list[Step] = [] if steps is None else steps

    def run(self, have: Tiling, want: Tiling, *, may_gather_all: bool = True) -> bool:
        """Add the steps from `have` to `want`; False, and none, where all would have to be gathered but may not.

        Raises DividesByZero where XLA does.
        """
        if have == want or have.is_replicated:
            return True
        for way in _WAYS:
            before = len(self.steps)
            if way(self, have, want):
                return True
            del self.steps[before:]  # XLA drops what an attempt left behind
        if not may_gather_all:
            return False
        self._gather(have, reshaped(have, (1,) * len(have.tiles)))
        return True

    # ---- the ways, in XLA's order ----------------------------------------------
    def permute(self, have: Tiling, want: Tiling) -> bool:
        """The same tiles on other devices."""
        if want.is_replicated or have.sizes != want.sizes:
            return False
        if have != want and not self._is_alike(have, want):
            self._add("collective-permute", _displaced(have.order, want.order), self._local(have))
        return True

    def all_to_all(self, have: Tiling, want: Tiling) -> bool:
        """The same numbers of tiles on other dimensions."""
        if want.is_replicated or have.is_partial != want.is_partial:
            return False
        swaps = _swaps(have.tiles, want.tiles)
        return swaps is not None and self._swap(have, want, swaps)

    def slice_of_shared(self, have: Tiling, want: Tiling) -> bool:
        """Every device keeps a part of a tile that it shares; free, but for a permute if other devices want it."""
        if not have.is_partial or want.is_replicated:
            return False
        sliced = refined(have, want)
        if sliced is None:
            return False
        self._exchange_edges(have, sliced, have)
        return self.permute(sliced, want)

    def gather_to_shared(self, have: Tiling, want: Tiling) -> bool:
        """All-gathers to larger tiles, after a permute if other devices share them."""
        if not want.is_partial:
            return False
        held = refined(want, have)
        if held is None:
            return False
        self.permute(have, held)
        gathered = [dim for dim in range(len(self.shape)) if not self._is_summed(held, want, dim)]
        self._exchange_edges(held, want, held, gathered)
        self._gather(held, want)
        return True

    def rotate(self, have: Tiling, want: Tiling) -> bool:
        """[1, a, b] shared by c, to [a, b, c] and back: one dimension is shared on the way."""
        if want.is_replicated or have.is_partial == want.is_partial:
            return False
        shared, whole = (have, want) if have.is_partial else (want, have)
        if shared.tiles[0] != 1 or shared.sizes[1:] != whole.tiles or shared.order != whole.order:
            return False
        between = reshaped(whole, (*whole.tiles[:-1], 1))
        if have.is_partial:
            return self.all_to_all(have, between) and self.run(between, want)
        return self.run(have, between) and self.all_to_all(between, want)

    def in_pieces(self, have: Tiling, want: Tiling) -> bool:
        """Ways that take two reshardings."""
        if want.is_replicated:
            return False
        if (split := _split_dimension(self.shape, have, want)) is not None:
            return self._through_split(*split, want)
        between = _with_dimension_shared(have, want) or _without_sharing(have, want)
        return between is not None and self.run(have, between) and self.run(between, want, may_gather_all=False)

    def in_groups(self, have: Tiling, want: Tiling) -> bool:
        """Dimensions with as many tiles before as after stay as they are; the rest is resharded between them."""
        same = [dim for dim, (a, b) in enumerate(zip(have.tiles, want.tiles, strict=True)) if a == b > 1]
        if not same or want.is_replicated:
            return False
        inner_have, inner_want = _without_dimensions(have, same), _without_dimensions(want, same)
        kept = [have.parts[dim] for dim in same]
        if kept != [want.parts[dim] for dim in same]:
            inner_want = reshaped(inner_have, inner_want.tiles)
        local = tuple(-(-n // have.tiles[dim]) if dim in same else n for dim, n in enumerate(self.shape))
        Resharding(local, self.steps, self.alike).run(inner_have, inner_want)
        parts = list(inner_want.parts)
        for dim, part in zip(same, kept, strict=True):
            parts[dim] = part
        return self.run(arranged(parts[:-1], parts[-1]), want)

    # ---- what the ways are made of -----------------------------------------------
    def _swap(self, have: Tiling, want: Tiling, swaps: Sequence[tuple[int, int]]) -> bool:
        """All-to-alls that move shards from the first dimension of each pair to the second; then a permute.

        Pairs of even dimensions that do not meet go in one all-to-all, ahead of the others: out of the order in which
        each pair's first dimension is split enough.
        """
        together = self._together(have, want, swaps)
        if len(together) < 2:
            together = []
        rest = [pair for pair in swaps if pair not in together]
        for pairs in [together, *([pair] for pair in rest)]:
            if pairs:
                moved: Order = ()
                before, elements = have, self._local(have) if len(pairs) > 1 else self._padded(have, pairs[0])
                for source, target in pairs:
                    have, atoms = _moved(have, source, target)
                    moved += atoms
                self._exchange_edges(before, have, before, {target for _, target in pairs})
                self._add("all-to-all", moved, elements)
                self._exchange_edges(before, have, have, {source for source, _ in pairs})
        return self.permute(have, want)

    def _together(self, have: Tiling, want: Tiling, swaps: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        chosen: list[tuple[int, int]] = []
        seen: set[int] = set()
        for source, target in sorted(swaps, key=lambda pair: pair[1]):
            even = self.shape[source] % have.tiles[source] == 0 == self.shape[target] % want.tiles[target]
            if even and not {source, target} & seen:
                chosen.append((source, target))
                seen |= {source, target}
        return chosen

    def _gather(self, have: Tiling, want: Tiling) -> None:
        """All-gathers of the dimensions that `want` splits less, the last one first; padding travels along.

        A dimension of fewer elements than half its shards is summed from zeros instead.
        """
        parts, kept = have.parts, want.parts
        local = [-(-n // tiles) for n, tiles in zip(self.shape, have.tiles, strict=True)]
        summed: Order = ()
        for dim in reversed(range(len(local))):
            factor = have.tiles[dim] // want.tiles[dim]
            if factor == 1:
                continue
            atoms = parts[dim][len(kept[dim]) :] if want.tiles[dim] > 1 else parts[dim]
            whole = -(-self.shape[dim] // want.tiles[dim])
            if self._is_summed(have, want, dim):
                summed += atoms
                local[dim] = whole
            else:
                local[dim] *= factor
                self._add("all-gather", atoms, prod(local))
        if summed:
            self._add("all-reduce", summed, prod(local))

    def _is_summed(self, have: Tiling, want: Tiling, dim: int) -> bool:
        """Whether shards of a dimension are summed from zeros instead of gathered."""
        whole = -(-self.shape[dim] // want.tiles[dim])
        return whole == -(-self.shape[dim] // have.tiles[dim]) or whole <= have.tiles[dim] // want.tiles[dim] // 2

    def _exchange_edges(self, have: Tiling, want: Tiling, held: Tiling, dims: Iterable[int] | None = None) -> None:
        """What neighbours exchange where padded shards of one size take the place of another's: along some dimensions,
        or all, that both tilings split, one of them more.

        held: the one of them whose devices exchange; those that share a shard of it do the same.
        """
        for dim in range(len(self.shape)) if dims is None else dims:
            few, many = sorted((have.tiles[dim], want.tiles[dim]))
            whole, part = -(-self.shape[dim] // few), -(-self.shape[dim] // many)
            gap = part * (many // few) - whole
            if few == 1 or many == few or not gap:
                continue
            size = -(-self.shape[dim] // held.tiles[dim])
            row = self._local(held) // size
            # Slices of a coarse shard reach past its end, by one gap more than what the last one's is moved by.
            edge = gap * (few - 1) if held.tiles[dim] == many else gap * few
            joined = Joined((size + edge) * row, dim == len(self.shape) - 1)
            if held.tiles[dim] == many:
                sent = sent_rows(self.shape[dim], part, parts_of(whole, part, few, many // few))
            elif have.tiles[dim] == few:
                sent = sent_rows(self.shape[dim], whole, evenly(whole + gap, few))
            else:
                sent = sent_rows(self.shape[dim], whole + gap, evenly(whole, few))
            for left, rows in zip(reversed(range(len(sent))), sent, strict=True):
                self._add("collective-permute", held.parts[dim], rows * row, None if left else joined)

    def _through_split(self, before: Tiling, goal: Tiling, dim: int, want: Tiling) -> bool:
        """Reshard with dimension `dim` seen as two, and see them as one again."""
        inner = -(-self.shape[dim] // prod(before.tiles[dim : dim + 2])) * before.tiles[dim + 1]
        shape = (*self.shape[:dim], self.shape[dim] // inner, inner, *self.shape[dim + 1 :])
        if not Resharding(shape, self.steps).run(before, goal, may_gather_all=False):
            return False
        tiles = (*goal.tiles[:dim], goal.tiles[dim] * goal.tiles[dim + 1], *goal.tiles[dim + 2 :])
        return self.run(reshaped(goal, tiles), want, may_gather_all=False)

    def _is_alike(self, have: Tiling, want: Tiling) -> bool:
        """Whether every device holds already what it wants: tiles differ along dimensions of equal elements only.
        XLA knows that of a value, not of what a collective has made of it."""
        pairs = enumerate(zip(have.parts[:-1], want.parts[:-1], strict=True))
        return not self.steps and all(dim in self.alike or before == after for dim, (before, after) in pairs)

    def _local(self, tiling: Tiling) -> int:
        return prod(-(-n // tiles) for n, tiles in zip(self.shape, tiling.tiles, strict=True))

    def _padded(self, have: Tiling, pair: tuple[int, int]) -> int:
        """Elements of one shard before an all-to-all, its target dimension padded so that it can be split."""
        source, target = pair
        local = [-(-n // tiles) for n, tiles in zip(self.shape, have.tiles, strict=True)]
        local[target] = -(-self.shape[target] // have.tiles[source]) * have.tiles[source] // have.tiles[target]
        return prod(local)

    def _add(self, kind: str, atoms: Order, elements: int, joined: Joined | None = None) -> None:
        self.steps.append(Step(kind, atoms, elements, joined))


_Way = Callable[[Resharding, Tiling, Tiling], bool]

_WAYS: tuple[_Way, ...] = (
    Resharding.permute,
    Resharding.all_to_all,
    Resharding.slice_of_shared,
    Resharding.gather_to_shared,
    Resharding.rotate,
    Resharding.in_pieces,
    Resharding.in_groups,
)


def _displaced(before: Order, after: Order) -> Order:
    """Atoms that stand elsewhere."""
    return tuple(a for a, b in zip(before, after, strict=True) if a != b)


def _swaps(have: Sequence[int], want: Sequence[int]) -> list[tuple[int, int]] | None:
    """Pairs of dimensions whose tile counts, swapped one pair after the other, turn `have` into `want`; else None."""
    tiles = list(have)
    if list(want) == tiles or sorted(want) != sorted(tiles):
        return None
    swaps: list[tuple[int, int]] = []
    while (pair := _next_swap(tiles, want, swaps[-1][0] if swaps else -1)) is not None:
        source, target = pair
        if tiles[source] % tiles[target]:
            return None
        swaps.append(pair)
        tiles[source], tiles[target] = tiles[target], tiles[source]
    return swaps


def _next_swap(tiles: Sequence[int], want: Sequence[int], recent: int) -> tuple[int, int] | None:
    """A dimension of the least count that is to change, and who gives it the count it shall have.

    Receives: the dimension that gave last, if it is among them, else the last one. Gives: one that
    needs the least count itself, if there is any; where that is 1, one that still needs another.
    """
    wrong = [dim for dim in range(len(tiles)) if tiles[dim] != want[dim]]
    if not wrong:
        return None
    least = min(tiles[dim] for dim in wrong)
    lowest = [dim for dim in wrong if tiles[dim] == least]
    target = recent if recent in lowest else lowest[-1]
    givers = [dim for dim in wrong if tiles[dim] == want[target]]
    fitting = [dim for dim in givers if (want[dim] != 1 if least == 1 else want[dim] == least)]
    return (fitting or givers[-1:])[0], target


def _moved(have: Tiling, source: int, target: int) -> tuple[Tiling, Order]:
    """The tiling after minor shards of `source` have become minor shards of `target`, and the atoms that moved."""
    parts = list(have.parts)
    tiles = have.tiles
    if tiles[source] % tiles[target]:
        raise DividesByZero(f"{tiles[source]} shards become {tiles[target]}")
    parts[source], moved = cut(parts[source], (tiles[target], tiles[source] // tiles[target]))
    parts[target] += moved
    return arranged(parts[:-1], parts[-1]), moved


def refined(coarse: Tiling, fine: Tiling) -> Tiling | None:
    """A tiling with the counts of `fine` whose tiles lie within those of `coarse` on every device: `fine` itself
    where that is so, else what shared devices make of it; None where the counts do not divide."""
    if any(b % a for a, b in zip(coarse.tiles, fine.tiles, strict=True)):
        return None
    parts, wanted = coarse.parts, fine.parts
    if all(b[: len(a)] == a for a, b in zip(parts[:-1], wanted[:-1], strict=True)):
        return fine
    factors = [b // a for a, b in zip(coarse.tiles, fine.tiles, strict=True)]
    *added, shared = cut(parts[-1], (*factors, coarse.shared // prod(factors)))
    return arranged([a + b for a, b in zip(parts[:-1], added, strict=True)], shared)


def _split_dimension(shape: tuple[int, ...], have: Tiling, want: Tiling) -> tuple[Tiling, Tiling, int] | None:
    """Two dimensions whose shards are joined in one, or the reverse: `have` and `want` with that dimension
    seen as two, and its number."""
    if have.shared != want.shared:
        return None
    for pair in _differing(have.tiles, want.tiles):
        found = _split_of(shape, have.tiles, want.tiles, *pair)
        if found is None:
            continue
        dim, outer = found
        tiles = [*have.tiles[:dim], outer, have.tiles[dim] // outer, *have.tiles[dim + 1 :]]
        goal = [*want.tiles[:dim], outer, want.tiles[dim] // outer, *want.tiles[dim + 1 :]]
        return reshaped(have, tiles), reshaped(want, goal), dim
    return None


def _differing(have: Sequence[int], want: Sequence[int]) -> Iterator[tuple[int, int]]:
    dims = [dim for dim, (a, b) in enumerate(zip(have, want, strict=True)) if a != b]
    return ((a, b) for i, a in enumerate(dims) for b in dims[i + 1 :])


def _split_of(
    shape: tuple[int, ...], have: Sequence[int], want: Sequence[int], dim: int, other: int
) -> tuple[int, int] | None:
    """(which of the two dimensions to split, tiles of its outer half), or None."""
    ones = [have[dim], have[other], want[dim], want[other]].count(1)
    same_product = have[dim] * have[other] == want[dim] * want[other]
    if ones > 1:
        return None
    if (1 in (have[dim], want[dim])) if ones else have[dim] < want[dim]:
        dim, other = other, dim
    if want[other] == 1:
        local = -(-shape[dim] // have[dim])
        return (dim, have[dim]) if same_product and local % have[other] == 0 else None
    parts = want[dim] * want[other] if have[other] == 1 else want[dim]
    fits = (same_product or have[other] == 1) and have[dim] % parts == 0
    padded_alike = fits and -(-shape[dim] // have[dim]) * (have[dim] // want[dim]) == -(-shape[dim] // want[dim])
    return (dim, want[dim]) if padded_alike else None


def _with_dimension_shared(have: Tiling, want: Tiling) -> Tiling | None:
    """`have` without the split of a dimension that makes as many devices share as in `want`."""
    if not want.is_partial:
        return None
    for dim, tiles in enumerate(have.tiles):
        if tiles > 1 and tiles * have.shared == want.shared:
            parts = list(have.parts)
            shared = parts[dim] + parts[-1]
            parts[dim] = ()
            return arranged(parts[:-1], shared)
    return None


def _without_sharing(have: Tiling, want: Tiling) -> Tiling | None:
    """`have` with the devices that share split over a whole dimension that is split in `want`."""
    if not have.is_partial or want.is_partial:
        return None
    for dim, (a, b) in enumerate(zip(have.tiles, want.tiles, strict=True)):
        if a == 1 != b and b % have.shared == 0:
            parts = list(have.parts)
            parts[dim] = parts[-1]
            return arranged(parts[:-1], ())
    return None


def _without_dimensions(tiling: Tiling, dims: Sequence[int]) -> Tiling:
    """The tiling within one group of devices that agree on `dims`."""
    parts = tiling.parts
    return arranged([() if dim in dims else part for dim, part in enumerate(parts[:-1])], parts[-1])
