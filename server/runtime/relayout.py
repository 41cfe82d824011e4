"""Arrays of a snapshot under other layouts than they were stored in: which stored parts a shard is made of, and how.

Where both layouts cut the same dimensions, a shard takes its overlap with each part (`plan_resharding`). Where they
view the array in other dimensions, it is put together first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from shardwright.plans.layouts import Layout, Slices, distinct_shards, logical_part, slice_stored
from shardwright.server.runtime.resharding import RowSection, TargetShard, plan_resharding

#: (array id, number of the distinct shard).
PartKey = tuple[int, int]
#: Contents of a part, as bytes.
Contents = Mapping[PartKey, np.ndarray]


@dataclass(frozen=True, slots=True)
class StoredSection:
    """Rows of an array as a snapshot has them. array_id: that they were stored under."""

    array_id: int
    rows: RowSection

    @property
    def layout(self) -> Layout:
        return self.rows.layout

    def part(self, contents: Contents, number: int) -> np.ndarray:
        """A distinct shard."""
        return contents[self.array_id, number].view(self.layout.dtype).reshape(self.layout.shard_shape)

    def whole(self, contents: Contents) -> np.ndarray:
        """All rows, in the user's dimensions."""
        stored = np.empty(self.layout.stored_shape, self.layout.dtype)
        for number, shard in enumerate(distinct_shards(self.layout, self.layout.devices)):
            index: tuple[Any, ...] = (..., *shard.slices)  # an array, also of a scalar
            stored[index] = self.part(contents, number)
        return logical_part(stored, self.layout)


class Relayout:
    """An array, or rows of one, in a new layout. sections: as stored, in the order of their rows."""

    def __init__(self, sections: Sequence[StoredSection], target: RowSection) -> None:
        self._sections = tuple(sections)
        self._target = target
        self._is_cut_alike = _are_cut_alike([section.rows for section in sections], target)

    def part_sizes(self, positions: Iterable[int]) -> dict[PartKey, int]:
        """The stored parts that the shards of these devices need, with their bytes."""
        here = set(positions)
        if not here.intersection(self._target.layout.devices):
            return {}
        if not self._is_cut_alike:
            return {
                (section.array_id, number): section.layout.shard_bytes
                for section in self._sections
                for number in range(len(distinct_shards(section.layout, section.layout.devices)))
            }
        return {
            (section.array_id, self._numbers(section)[piece.source]): section.layout.shard_bytes
            for shard in self._shards(here)
            for piece in shard.pieces
            for section in [self._sections[piece.section]]
        }

    def make(self, positions: Iterable[int], contents: Contents) -> list[np.ndarray]:
        """The distinct shards of these devices, in their order."""
        here, layout = tuple(positions), self._target.layout
        wanted = distinct_shards(layout, here)
        if not wanted:
            return []
        if not self._is_cut_alike:
            value = self._rows(contents)
            return [slice_stored(value, layout, shard.slices) for shard in wanted]
        parts = {shard.positions[0]: shard for shard in self._shards(set(here))}
        return [self._assemble(parts[shard.holders[0]], contents) for shard in wanted]

    def _rows(self, contents: Contents) -> np.ndarray:
        """The rows of the target, in the user's dimensions."""
        parts = [section.whole(contents) for section in self._sections]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        wanted = self._target.layout.user_shape
        if whole.shape == wanted:
            return whole
        first = self._target.first_row - self._sections[0].rows.first_row
        return whole[first : first + wanted[0]]

    def _shards(self, here: set[int]) -> list[TargetShard]:
        """Those of the target on these devices."""

        def node_of(position: int) -> int:
            return 0 if position in here else 1

        shards = plan_resharding([section.rows for section in self._sections], self._target, node_of)
        return [shard for shard in shards if shard.positions[0] in here]

    @staticmethod
    def _numbers(section: StoredSection) -> dict[int, int]:
        """Number of the distinct shard that each device held."""
        shards = distinct_shards(section.layout, section.layout.devices)
        return {position: number for number, shard in enumerate(shards) for position in shard.holders}

    def _assemble(self, shard: TargetShard, contents: Contents) -> np.ndarray:
        layout = self._target.layout
        if not shard.pieces:
            return np.zeros(layout.shard_shape, layout.dtype)
        pieces = [
            _cut(section.part(contents, self._numbers(section)[piece.source]), piece.cut)
            for piece in shard.pieces
            for section in [self._sections[piece.section]]
        ]
        blocks, at = [], 0
        for grid in shard.grids:
            blocks.append(_block(pieces[at : at + prod(grid)], grid))
            at += prod(grid)
        whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return np.pad(whole, [(0, extra) for extra in shard.padding]) if any(shard.padding) else whole


def _are_cut_alike(sources: Sequence[RowSection], target: RowSection) -> bool:
    """Whether all cut the same dimensions of the array."""
    every = [*sources, target]
    if any(source.type_of_row != target.type_of_row for source in sources):
        return False
    is_viewed = any(section.layout.view_of is not None for section in every)
    return not is_viewed or (len(sources) == 1 and sources[0].layout.shape == target.layout.shape)


def _cut(part: np.ndarray, cut: Slices | None) -> np.ndarray:
    return part if cut is None else part[cut]


def _block(pieces: Sequence[np.ndarray], grid: Sequence[int]) -> np.ndarray:
    blocks = list(pieces)
    for dimension in reversed(range(len(grid))):  # row-major: the last dimension's neighbours stand together
        count = grid[dimension]
        if count > 1:
            blocks = [np.concatenate(blocks[at : at + count], axis=dimension) for at in range(0, len(blocks), count)]
    return blocks[0]
