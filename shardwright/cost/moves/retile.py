"""XLA's intermediate tilings of a reshard (`xla/service/spmd/spmd_partitioner.cc`).

`partitioner.py` tries them in its order; None: no tiling of that kind exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from shardwright.cost.moves.tilings import AtomOrder, Tiling, cut, make_tiling, reshape_tiling


class DividesByZero(ArithmeticError):
    """XLA's partitioner ends its process (SIGFPE) on this reshard."""


def atoms_to_gather(start: Tiling, goal: Tiling, dim: int) -> AtomOrder:
    """Atoms that split a dimension in `start` but not in `goal`."""
    return start.parts[dim][len(goal.parts[dim]) :]


def find_displaced(before: AtomOrder, after: AtomOrder) -> AtomOrder:
    """Atoms in different positions."""
    return tuple(a for a, b in zip(before, after, strict=True) if a != b)


def swaps_between(start: Sequence[int], goal: Sequence[int]) -> list[tuple[int, int]] | None:
    """Pairs of dimensions whose tile counts, swapped pair by pair, turn `start` into `goal`; else None."""
    tiles = list(start)
    if list(goal) == tiles or sorted(goal) != sorted(tiles):
        return None
    swaps: list[tuple[int, int]] = []
    while (pair := _next_swap(tiles, goal, swaps[-1][0] if swaps else -1)) is not None:
        source, target = pair
        if tiles[source] % tiles[target]:
            return None
        swaps.append(pair)
        tiles[source], tiles[target] = tiles[target], tiles[source]
    return swaps


def _next_swap(tiles: Sequence[int], goal: Sequence[int], recent: int) -> tuple[int, int] | None:
    """A dimension with the smallest count left to change, and the giver of its new count.

    Receiver: the previous giver, if among them, else the last one. Giver: preferably a dimension that needs the
    smallest count itself; with a smallest count of 1, one that still needs another count.
    """
    wrong = [dim for dim in range(len(tiles)) if tiles[dim] != goal[dim]]
    if not wrong:
        return None
    least = min(tiles[dim] for dim in wrong)
    lowest = [dim for dim in wrong if tiles[dim] == least]
    target = recent if recent in lowest else lowest[-1]
    givers = [dim for dim in wrong if tiles[dim] == goal[target]]
    fitting = [dim for dim in givers if (goal[dim] != 1 if least == 1 else goal[dim] == least)]
    return (fitting or givers[-1:])[0], target


def move_shards(start: Tiling, source: int, target: int) -> tuple[Tiling, AtomOrder]:
    """The tiling after turning minor shards of `source` into minor shards of `target`, and the moved atoms."""
    parts = list(start.parts)
    tiles = start.tiles
    if tiles[source] % tiles[target]:
        raise DividesByZero(f"{tiles[source]} shards become {tiles[target]}")
    parts[source], moved = cut(parts[source], (tiles[target], tiles[source] // tiles[target]))
    parts[target] += moved
    return make_tiling(parts[:-1], parts[-1]), moved


def refine(coarse: Tiling, fine: Tiling) -> Tiling | None:
    """A tiling with the counts of `fine` and tiles within those of `coarse` on every device: `fine` itself if it
    qualifies, else one built from shared devices; None if the counts do not divide.
    """
    if any(b % a for a, b in zip(coarse.tiles, fine.tiles, strict=True)):
        return None
    parts, wanted = coarse.parts, fine.parts
    if all(b[: len(a)] == a for a, b in zip(parts[:-1], wanted[:-1], strict=True)):
        return fine
    factors = [b // a for a, b in zip(coarse.tiles, fine.tiles, strict=True)]
    *added, shared = cut(parts[-1], (*factors, coarse.shared // prod(factors)))
    return make_tiling([a + b for a, b in zip(parts[:-1], added, strict=True)], shared)


def split_dimension(shape: tuple[int, ...], start: Tiling, goal: Tiling) -> tuple[Tiling, Tiling, int] | None:
    """`start` and `goal` with one dimension split in two, and its number; covers two dimensions with shards joined in
    one, or the reverse.
    """
    if start.shared != goal.shared:
        return None
    for pair in _differing_dims(start.tiles, goal.tiles):
        split = _split_of(shape, start.tiles, goal.tiles, *pair)
        if split is None:
            continue
        dim, outer = split
        tiles = [*start.tiles[:dim], outer, start.tiles[dim] // outer, *start.tiles[dim + 1 :]]
        split_goal = [*goal.tiles[:dim], outer, goal.tiles[dim] // outer, *goal.tiles[dim + 1 :]]
        return reshape_tiling(start, tiles), reshape_tiling(goal, split_goal), dim
    return None


def _differing_dims(start: Sequence[int], goal: Sequence[int]) -> Iterator[tuple[int, int]]:
    dims = [dim for dim, (a, b) in enumerate(zip(start, goal, strict=True)) if a != b]
    return ((a, b) for i, a in enumerate(dims) for b in dims[i + 1 :])


def _split_of(
    shape: tuple[int, ...], start: Sequence[int], goal: Sequence[int], dim: int, other: int
) -> tuple[int, int] | None:
    """(the one of the two dimensions to split, tiles of its outer half), or None."""
    ones = [start[dim], start[other], goal[dim], goal[other]].count(1)
    same_product = start[dim] * start[other] == goal[dim] * goal[other]
    if ones > 1:
        return None
    if (1 in (start[dim], goal[dim])) if ones else start[dim] < goal[dim]:
        dim, other = other, dim
    if goal[other] == 1:
        local = -(-shape[dim] // start[dim])
        return (dim, start[dim]) if same_product and local % start[other] == 0 else None
    parts = goal[dim] * goal[other] if start[other] == 1 else goal[dim]
    fits = (same_product or start[other] == 1) and start[dim] % parts == 0
    padded_alike = fits and -(-shape[dim] // start[dim]) * (start[dim] // goal[dim]) == -(-shape[dim] // goal[dim])
    return (dim, goal[dim]) if padded_alike else None


def with_dimension_shared(start: Tiling, goal: Tiling) -> Tiling | None:
    """`start` with one dimension no longer split, chosen to equal `goal` in devices per shared tile."""
    if not goal.is_partial:
        return None
    for dim, tiles in enumerate(start.tiles):
        if tiles > 1 and tiles * start.shared == goal.shared:
            return with_shared(start, dim)
    return None


def with_shared(tiling: Tiling, dim: int) -> Tiling:
    """The same tiling without the split of a dimension; its devices share shards."""
    parts = list(tiling.parts)
    shared = parts[dim] + parts[-1]
    parts[dim] = ()
    return make_tiling(parts[:-1], shared)


def without_sharing(start: Tiling, goal: Tiling) -> Tiling | None:
    """`start` with the sharing devices split over a whole dimension that is split in `goal`."""
    if not start.is_partial or goal.is_partial:
        return None
    for dim, (a, b) in enumerate(zip(start.tiles, goal.tiles, strict=True)):
        if a == 1 != b and b % start.shared == 0:
            parts = list(start.parts)
            parts[dim] = parts[-1]
            return make_tiling(parts[:-1], ())
    return None


def without_dimensions(tiling: Tiling, dims: Sequence[int]) -> Tiling:
    """The tiling within one group of devices that agree on `dims`."""
    parts = tiling.parts
    return make_tiling([() if dim in dims else part for dim, part in enumerate(parts[:-1])], parts[-1])
