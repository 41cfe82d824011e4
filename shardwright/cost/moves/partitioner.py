"""Reshards by XLA's SPMD partitioner: the collectives from one tiling to another.

It tries methods in a fixed order and takes the first that fits. The methods below are in that order, each with XLA's
conditions (`xla/service/spmd/spmd_partitioner.cc`, `PartitionedHlo::ReshardNoCache` and its callees). Some are poor: a
move with a cheap alternative may gather everything. The model follows XLA, not theory.
`oracles/moves.py` compares every move with XLA's own program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from shardwright.cost.moves.halo_exchange import even_bounds, halo_permutes, part_bounds, resize_permutes
from shardwright.cost.moves.retile import (
    atoms_to_gather,
    find_displaced,
    move_shards,
    refine,
    split_dimension,
    swaps_between,
    with_dimension_shared,
    with_shared,
    without_dimensions,
    without_sharing,
)
from shardwright.cost.moves.tilings import AtomOrder, Tiling, make_tiling, reshape_tiling


class JoinedShards(NamedTuple):
    """A shard concatenated with the parts received from neighbors.

    elements: of both. is_minor: whether along the last dimension.
    """

    elements: int
    is_minor: bool


class OutermostDim(NamedTuple):
    """The dimension along which a collective splits or joins an array, piece after piece in memory: the outermost one
    there.

    cut: the number of parts of each dimension before it. is_last: whether no dimension follows and the sent data is
        never cut further.
    """

    cut: tuple[int, ...]
    is_last: bool


class PartitionerStep(NamedTuple):
    """One collective over the devices that differ in `atoms`; elements: of its payload on one device.

    joined: each device's concatenation of its shard and the result; None if the result replaces the shard.
    reads, writes: the outermost dimension in the sent and received data; None: the first dimension, or any.
    """

    kind: str
    atoms: AtomOrder
    elements: int
    joined: JoinedShards | None = None
    reads: OutermostDim | None = None
    writes: OutermostDim | None = None


class Resharding:
    """The steps of one reshard.

    shape: dimensions of the array in elements. alike: dimensions along which all elements are equal.
    """

    def __init__(
        self, shape: tuple[int, ...], steps: list[PartitionerStep] | None = None, alike: frozenset[int] = frozenset()
    ) -> None:
        self.shape = shape
        self.alike = alike
        self.steps: list[PartitionerStep] = [] if steps is None else steps

    def run(self, start: Tiling, goal: Tiling, *, may_gather_all: bool = True) -> bool:
        """Add the steps from `start` to `goal`. Returns False, adding none, if a full gather is needed but not allowed.

        Raises DividesByZero on XLA's own division by zero.
        """
        if start == goal or start.is_replicated:
            return True
        for way in _METHODS:
            before = len(self.steps)
            if way(self, start, goal):
                return True
            del self.steps[before:]  # XLA drops what an attempt left behind
        if not may_gather_all:
            return False
        self._gather(start, reshape_tiling(start, (1,) * len(start.tiles)))
        return True

    # ---- the ways, in XLA's order ----------------------------------------------
    def permute(self, start: Tiling, goal: Tiling) -> bool:
        """The same tiles on other devices."""
        if goal.is_replicated or start.sizes != goal.sizes:
            return False
        if start != goal and not self._holds_target(start, goal):
            self._add("collective-permute", find_displaced(start.order, goal.order), self._local(start))
        return True

    def all_to_all(self, start: Tiling, goal: Tiling) -> bool:
        """The same numbers of tiles on other dimensions."""
        if goal.is_replicated or start.is_partial != goal.is_partial:
            return False
        swaps = swaps_between(start.tiles, goal.tiles)
        return swaps is not None and self._swap(start, goal, swaps)

    def slice_of_shared(self, start: Tiling, goal: Tiling) -> bool:
        """Every device slices a tile it shares: free, or one permute if other devices want the slice."""
        if not start.is_partial or goal.is_replicated:
            return False
        sliced = refine(start, goal)
        if sliced is None:
            return False
        self._exchange_edges(start, sliced, start)
        return self.permute(sliced, goal)

    def gather_to_shared(self, start: Tiling, goal: Tiling) -> bool:
        """All-gathers to larger tiles, after a permute if other devices share them."""
        if not goal.is_partial:
            return False
        held = refine(goal, start)
        if held is None:
            return False
        self.permute(start, held)
        self._exchange_edges(held, goal, held)
        self._gather(held, goal)
        return True

    def rotate(self, start: Tiling, goal: Tiling) -> bool:
        """[1, a, b] shared by c, to [a, b, c] and back: one dimension is shared on the way."""
        if goal.is_replicated or start.is_partial == goal.is_partial:
            return False
        shared, whole = (start, goal) if start.is_partial else (goal, start)
        if shared.tiles[0] != 1 or shared.sizes[1:] != whole.tiles or shared.order != whole.order:
            return False
        between = reshape_tiling(whole, (*whole.tiles[:-1], 1))
        if start.is_partial:
            return self.all_to_all(start, between) and self.run(between, goal)
        return self.run(start, between) and self.all_to_all(between, goal)

    def in_two_steps(self, start: Tiling, goal: Tiling) -> bool:
        """Methods that take two reshards."""
        if goal.is_replicated:
            return False
        if (split := split_dimension(self.shape, start, goal)) is not None:
            return self._through_split(*split, goal)
        between = with_dimension_shared(start, goal) or without_sharing(start, goal)
        return between is not None and self.run(start, between) and self.run(between, goal, may_gather_all=False)

    def in_groups(self, start: Tiling, goal: Tiling) -> bool:
        """Dimensions with equal tile counts before and after stay; the rest is resharded between them."""
        same = [dim for dim, (a, b) in enumerate(zip(start.tiles, goal.tiles, strict=True)) if a == b > 1]
        if not same or goal.is_replicated:
            return False
        inner_have, inner_want = without_dimensions(start, same), without_dimensions(goal, same)
        same_parts = [start.parts[dim] for dim in same]
        if same_parts != [goal.parts[dim] for dim in same]:
            inner_want = reshape_tiling(inner_have, inner_want.tiles)
        local = tuple(-(-n // start.tiles[dim]) if dim in same else n for dim, n in enumerate(self.shape))
        before = len(self.steps)
        Resharding(local, self.steps, self.alike).run(inner_have, inner_want)
        cuts = [start.tiles[dim] if dim in same else 1 for dim in range(len(self.shape))]
        self._recut(before, lambda cut: tuple(a * b for a, b in zip(cut, cuts, strict=False)))
        parts = list(inner_want.parts)
        for dim, part in zip(same, same_parts, strict=True):
            parts[dim] = part
        return self.run(make_tiling(parts[:-1], parts[-1]), goal)

    # ---- what the ways are made of -----------------------------------------------
    def _swap(self, start: Tiling, goal: Tiling, swaps: Sequence[tuple[int, int]]) -> bool:
        """All-to-alls that move shards from the first dimension of each pair to the second; then a permute.

        Disjoint pairs of even dimensions share one all-to-all, ahead of the others. This departs from the order in
        which each pair's first dimension is split enough.
        """
        together = self._choose_joint_swaps(start, goal, swaps)
        if len(together) < 2:
            together = []
        rest = [pair for pair in swaps if pair not in together]
        for pairs in [together, *([pair] for pair in rest)]:
            if pairs:
                moved: AtomOrder = ()
                before, elements = (
                    start,
                    self._local(start) if len(pairs) > 1 else self._elements_with_padding(start, pairs[0]),
                )
                for source, target in pairs:
                    start, atoms = move_shards(start, source, target)
                    moved += atoms
                for _, target in pairs:
                    self._fit_edges(
                        before,
                        target,
                        self._shard_length(before, target),
                        self._length_with_padding(before, start, target),
                    )
                reads, writes = (max(pair[which] for pair in pairs) for which in (1, 0))
                self._add(
                    "all-to-all", moved, elements, reads=_outermost(before, reads), writes=_outermost(start, writes)
                )
                for source, _ in pairs:
                    self._fit_edges(
                        start,
                        source,
                        self._length_with_padding(start, before, source),
                        self._shard_length(start, source),
                    )
        return self.permute(start, goal)

    def _choose_joint_swaps(
        self, start: Tiling, goal: Tiling, swaps: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        chosen: list[tuple[int, int]] = []
        seen: set[int] = set()
        for source, target in sorted(swaps, key=lambda pair: pair[1]):
            even = self.shape[source] % start.tiles[source] == 0 == self.shape[target] % goal.tiles[target]
            if even and not {source, target} & seen:
                chosen.append((source, target))
                seen |= {source, target}
        return chosen

    def _gather(self, start: Tiling, goal: Tiling) -> None:
        """Collectives that join the dimensions with fewer tiles in `goal` (`PartitionedHlo::ReplicatePartial`).

        First, dimensions with all elements in one shard: a sum with zeros of the others. Then all-gathers, last
        dimension first, padding included. Then dimensions of fewer elements than half their shards: a sum from zeros.
        """
        local = [-(-n // tiles) for n, tiles in zip(self.shape, start.tiles, strict=True)]
        whole = [-(-n // tiles) for n, tiles in zip(self.shape, goal.tiles, strict=True)]
        factors = [a // b for a, b in zip(start.tiles, goal.tiles, strict=True)]
        joined = [dim for dim, factor in enumerate(factors) if factor > 1]
        copied = [dim for dim in joined if whole[dim] == local[dim]]
        summed = [dim for dim in joined if dim not in copied and whole[dim] <= factors[dim] // 2]
        self._sum(start, goal, copied, local)
        gathered = [dim for dim in joined if dim not in copied and dim not in summed]
        for dim in reversed(gathered):
            local[dim] *= factors[dim]
            outermost = _outermost(start, dim, is_last=dim == len(local) - 1)
            self._add("all-gather", atoms_to_gather(start, goal, dim), prod(local), reads=outermost, writes=outermost)
        for dim in (*gathered, *summed):
            local[dim] = whole[dim]
        self._sum(start, goal, summed, local)

    def _sum(self, start: Tiling, goal: Tiling, dims: Sequence[int], local: Sequence[int]) -> None:
        """One sum of arrays of `local` dimensions over the devices that differ along `dims`."""
        if dims:
            self._add(
                "all-reduce", tuple(a for d in reversed(dims) for a in atoms_to_gather(start, goal, d)), prod(local)
            )

    def _exchange_edges(self, start: Tiling, goal: Tiling, tiling: Tiling) -> None:
        """Halo exchange between padded shards of different sizes, along dimensions split by both tilings: one tiling
        splits them more, devices share shards of the other.

        tiling: the one with more splits in a gather, fewer in a slice; devices sharing one of its shards do the same.
        """
        local = [self._shard_length(tiling, dim) for dim in range(len(self.shape))]
        for dim, size in enumerate(local):
            coarse, fine = (start, goal) if start.tiles[dim] < goal.tiles[dim] else (goal, start)
            few, parts = coarse.tiles[dim], fine.tiles[dim] // coarse.tiles[dim]
            whole, padded = self._shard_length(coarse, dim), self._length_with_padding(coarse, fine, dim)
            if few == 1 or whole == padded:
                continue
            row = prod(local) // size
            # Slices of a coarse shard reach past its end, by one gap more than the last slice's offset.
            if coarse is start:
                sent, edge = halo_permutes(self.shape[dim], whole, even_bounds(padded, few)), (padded - whole) * few
                local[dim] = padded
            else:
                sent = halo_permutes(self.shape[dim], size, part_bounds(whole, size, few, parts))
                edge = (padded - whole) * (few - 1)
            self._permute_edges(tiling, dim, [rows * row for rows in sent], (size + edge) * row)

    def _fit_edges(self, tiling: Tiling, dim: int, rows: int, target_rows: int) -> None:
        """Halo exchange around an all-to-all, from shards of `rows` rows to shards of `target_rows`."""
        few = tiling.tiles[dim]
        if few == 1 or rows == target_rows:
            return
        row = self._local(tiling) // self._shard_length(tiling, dim)
        sent = resize_permutes(self.shape[dim], rows, target_rows, few)
        if sent is None:
            self._gather(tiling, with_shared(tiling, dim))
            return
        size = self._shard_length(tiling, dim) + abs(target_rows - rows) * few
        self._permute_edges(tiling, dim, [rows * row for rows in sent], size * row)

    def _permute_edges(self, tiling: Tiling, dim: int, sizes: Sequence[int], joined: int) -> None:
        """One permute per entry of `sizes`, in elements; the shard joined with all of them has `joined`."""
        for remaining, elements in zip(reversed(range(len(sizes))), sizes, strict=True):
            concatenation = None if remaining else JoinedShards(joined, dim == len(self.shape) - 1)
            self._add("collective-permute", tiling.parts[dim], elements, concatenation)

    def _shard_length(self, tiling: Tiling, dim: int) -> int:
        """Elements of a shard along one dimension."""
        return -(-self.shape[dim] // tiling.tiles[dim])

    def _length_with_padding(self, coarse: Tiling, fine: Tiling, dim: int) -> int:
        """Elements along one dimension of a shard of `coarse` joined from padded shards of `fine`."""
        return self._shard_length(fine, dim) * (fine.tiles[dim] // coarse.tiles[dim])

    def _through_split(self, split_start: Tiling, split_goal: Tiling, dim: int, goal: Tiling) -> bool:
        """Reshard with dimension `dim` split in two, and join them again."""
        inner = -(-self.shape[dim] // prod(split_start.tiles[dim : dim + 2])) * split_start.tiles[dim + 1]
        shape = (*self.shape[:dim], self.shape[dim] // inner, inner, *self.shape[dim + 1 :])
        first = len(self.steps)
        if not Resharding(shape, self.steps).run(split_start, split_goal, may_gather_all=False):
            return False
        self._recut(first, lambda cut: (*cut[:dim], prod(cut[dim : dim + 2]), *cut[dim + 2 :])[: len(cut)])
        tiles = (
            *split_goal.tiles[:dim],
            split_goal.tiles[dim] * split_goal.tiles[dim + 1],
            *split_goal.tiles[dim + 2 :],
        )
        return self.run(reshape_tiling(split_goal, tiles), goal, may_gather_all=False)

    def _holds_target(self, start: Tiling, goal: Tiling) -> bool:
        """Whether every device already holds its target: tiles differ along dimensions of equal elements only. XLA
        knows this of a value, not of a collective's result.
        """
        pairs = enumerate(zip(start.parts[:-1], goal.parts[:-1], strict=True))
        return not self.steps and all(dim in self.alike or before == after for dim, (before, after) in pairs)

    def _local(self, tiling: Tiling) -> int:
        return prod(-(-n // tiles) for n, tiles in zip(self.shape, tiling.tiles, strict=True))

    def _elements_with_padding(self, start: Tiling, pair: tuple[int, int]) -> int:
        """Elements of one shard before an all-to-all, its target dimension padded to a divisible length."""
        source, target = pair
        local = [-(-n // tiles) for n, tiles in zip(self.shape, start.tiles, strict=True)]
        local[target] = -(-self.shape[target] // start.tiles[source]) * start.tiles[source] // start.tiles[target]
        return prod(local)

    def _add(
        self,
        kind: str,
        atoms: AtomOrder,
        elements: int,
        joined: JoinedShards | None = None,
        reads: OutermostDim | None = None,
        writes: OutermostDim | None = None,
    ) -> None:
        self.steps.append(PartitionerStep(kind, atoms, elements, joined, reads, writes))

    def _recut(self, first: int, cut: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
        """Update the cuts of dimensions in all steps from one on."""

        def anew(outermost: OutermostDim | None) -> OutermostDim | None:
            return outermost and outermost._replace(cut=cut(outermost.cut))

        self.steps[first:] = [
            step._replace(reads=anew(step.reads), writes=anew(step.writes)) for step in self.steps[first:]
        ]


def _outermost(tiling: Tiling, dim: int, *, is_last: bool = False) -> OutermostDim | None:
    """A dimension of an array, made outermost."""
    return OutermostDim(tiling.tiles[:dim], is_last) if dim else None


_Method = Callable[[Resharding, Tiling, Tiling], bool]

_METHODS: tuple[_Method, ...] = (
    Resharding.permute,
    Resharding.all_to_all,
    Resharding.slice_of_shared,
    Resharding.gather_to_shared,
    Resharding.rotate,
    Resharding.in_two_steps,
    Resharding.in_groups,
)
