"""XLA's intermediate tilings of a reshard (`xla/service/spmd/spmd_partitioner.cc`).

`partitioner.py` tries them in its order; None: no tiling of that kind exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from shardwright.cost.moves.tilings import AtomOrder, Tiling, cut, make_tiling, reshape_tiling


class DividesByZero(ArithmeticError):
    """XLA's partitioner ends its process (SIGFPE) on this reshard."""


def atoms_to_gather(have: Tiling, want: Tiling, dim: int) -> AtomOrder:
    """Atoms that split a dimension in `have` but not in `want`."""
    return have.parts[dim][len(want.parts[dim]) :]


def find_displaced(before: AtomOrder, after: AtomOrder) -> AtomOrder:
    """Atoms in different positions."""
    return tuple(a for a, b in zip(before, after, strict=True) if a != b)


def swaps_between(have: Sequence[int], want: Sequence[int]) -> list[tuple[int, int]] | None:
    """Pairs of dimensions whose tile counts, swapped pair by pair, turn `have` into `want`; else None."""
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
    """A dimension with the smallest count left to change, and the giver of its new count.

    Receiver: the previous giver, if among them, else the last one. Giver: preferably a dimension that needs the
    smallest count itself; with a smallest count of 1, one that still needs another count.
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


def move_shards(have: Tiling, source: int, target: int) -> tuple[Tiling, AtomOrder]:
    """The tiling after turning minor shards of `source` into minor shards of `target`, and the moved atoms."""
    parts = list(have.parts)
    tiles = have.tiles
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


def split_dimension(shape: tuple[int, ...], have: Tiling, want: Tiling) -> tuple[Tiling, Tiling, int] | None:
    """`have` and `want` with one dimension split in two, and its number; covers two dimensions with shards joined in
    one, or the reverse.
    """
    if have.shared != want.shared:
        return None
    for pair in _differing_dims(have.tiles, want.tiles):
        split = _split_of(shape, have.tiles, want.tiles, *pair)
        if split is None:
            continue
        dim, outer = split
        tiles = [*have.tiles[:dim], outer, have.tiles[dim] // outer, *have.tiles[dim + 1 :]]
        goal = [*want.tiles[:dim], outer, want.tiles[dim] // outer, *want.tiles[dim + 1 :]]
        return reshape_tiling(have, tiles), reshape_tiling(want, goal), dim
    return None


def _differing_dims(have: Sequence[int], want: Sequence[int]) -> Iterator[tuple[int, int]]:
    dims = [dim for dim, (a, b) in enumerate(zip(have, want, strict=True)) if a != b]
    return ((a, b) for i, a in enumerate(dims) for b in dims[i + 1 :])


def _split_of(
    shape: tuple[int, ...], have: Sequence[int], want: Sequence[int], dim: int, other: int
) -> tuple[int, int] | None:
    """(the one of the two dimensions to split, tiles of its outer half), or None."""
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


def with_dimension_shared(have: Tiling, want: Tiling) -> Tiling | None:
    """`have` with one dimension no longer split, chosen to equal `want` in devices per shared tile."""
    if not want.is_partial:
        return None
    for dim, tiles in enumerate(have.tiles):
        if tiles > 1 and tiles * have.shared == want.shared:
            return with_shared(have, dim)
    return None


def with_shared(tiling: Tiling, dim: int) -> Tiling:
    """The same tiling without the split of a dimension; its devices share shards."""
    parts = list(tiling.parts)
    shared = parts[dim] + parts[-1]
    parts[dim] = ()
    return make_tiling(parts[:-1], shared)


def without_sharing(have: Tiling, want: Tiling) -> Tiling | None:
    """`have` with the sharing devices split over a whole dimension that is split in `want`."""
    if not have.is_partial or want.is_partial:
        return None
    for dim, (a, b) in enumerate(zip(have.tiles, want.tiles, strict=True)):
        if a == 1 != b and b % have.shared == 0:
            parts = list(have.parts)
            parts[dim] = parts[-1]
            return make_tiling(parts[:-1], ())
    return None


def without_dimensions(tiling: Tiling, dims: Sequence[int]) -> Tiling:
    """The tiling within one group of devices that agree on `dims`."""
    parts = tiling.parts
    return make_tiling([() if dim in dims else part for dim, part in enumerate(parts[:-1])], parts[-1])
