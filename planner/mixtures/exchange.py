"""Writes the way of a mixture's rows: to the blocks of their experts, into the layout they are multiplied in, and back.

Sizes, with R replicas, E blocks of experts in each, G groups, g = G / E of them a block's own:

    m = pairs / (R E)       pairs of a block, each of one row and one group; a token's pairs lie in one block
    C                       rows that a block sends another at most

    pairs     [R, E, m]           the program's order
    sent      [R, E, E, C]        by source, by destination, within both by group
    lead      [R, E, …]           by destination, by group, within it by source: tiles, or in order (`layouts`)

Between `sent` by source and by destination the split dimension changes: that is the all-to-all.
"""

from __future__ import annotations

from shardwright.hlo import Instruction
from shardwright.planner.mixtures.block_writer import BlockWriter, dims_of
from shardwright.planner.mixtures.layouts import Layout, Received
from shardwright.planner.mixtures.sizes import Sizes


class Exchange:
    """The places of one mixture's pairs, sent rows and tiles; writes their moves. keys: groups of pairs."""

    def __init__(self, writer: BlockWriter, sizes: Sizes, layout: type[Layout], keys: Instruction) -> None:
        self.sizes = s = sizes
        self._w = w = writer
        self._blocks = (s.R, s.E)
        keys = w.reshape(w.convert(keys, "s32"), (*self._blocks, s.m))
        self._keys = keys
        self._order = w.sort_with_places(keys)
        self._place_of_pair: Instruction | None = None
        self._write_counts()
        self.layout = layout(w, s, self._write_received())
        self._sent_pairs = self._write_sent()

    # ---- counts --------------------------------------------------------------------
    def _write_counts(self) -> None:
        """By source: rows for each destination, where they begin; what was too much."""
        w, s = self._w, self.sizes
        dims = (*self._blocks, s.m, s.groups)
        is_own = w.compare(w.spread(self._keys, dims, [0, 1, 2]), w.iota(dims, 3), "EQ")
        counts = w.reshape(w.total(w.convert(is_own, "s32"), [2]), (*self._blocks, s.E, s.g))
        begins = w.sum_before(counts, 3)
        rows = w.total(counts)
        self._begin_of_destination = w.sum_before(rows, 2)  # [R, E, E]
        over = w.with_number("maximum", w.with_number("subtract", rows, s.C), 0)
        self.over = w.total(over, [0, 1, 2])
        ends = w.with_number("minimum", w.elementwise("add", begins, counts), s.C)
        begins = w.with_number("minimum", begins, s.C)
        self._begins = w.transpose(begins, (0, 2, 1, 3))  # [R, E, source, g]: slots of a group from a source
        self._ends = w.transpose(ends, (0, 2, 1, 3))

    def _write_received(self) -> Received:
        """By destination: where the rows of each source begin among a group's."""
        w = self._w
        counts = w.elementwise("subtract", self._ends, self._begins)
        begin = w.sum_before(counts, 2)  # [R, E, source, g]
        return Received(
            begins=self._begins,
            ends=self._ends,
            begin_in_group=begin,
            end_in_group=w.elementwise("add", begin, counts),
            rows_of_group=w.total(counts, [2]),
        )

    # ---- places --------------------------------------------------------------------
    def _write_sent(self) -> Instruction:
        """[R, E, E, C]: the pair, in its block, of each row that is sent."""
        w, s = self._w, self.sizes
        dims = (*self._blocks, s.E, s.C)
        places = w.elementwise("add", w.spread(self._begin_of_destination, dims, [0, 1, 2]), w.iota(dims, 3))
        return w.take(self._order, w.clamp(places, s.m - 1), 2)

    def _write_place_of_pair(self) -> tuple[Instruction, Instruction]:
        """[R, E, m]: where each pair lies in what its block has sent (destination · C + slot); whether it fitted."""
        w, s = self._w, self.sizes
        place = w.sort_with_places(self._order)
        destination = w.with_number("divide", self._keys, s.g)
        dims = (*self._blocks, s.m, s.E)
        is_own = w.compare(w.spread(destination, dims, [0, 1, 2]), w.iota(dims, 3), "EQ")
        begin = w.total(w.select(is_own, w.spread(self._begin_of_destination, dims, [0, 1, 3])))
        slot = w.elementwise("subtract", place, begin)
        fits = w.compare(slot, w.filled(s.C, dims_of(slot)), "LT")
        has_group = w.compare(self._keys, w.filled(s.groups, dims_of(slot)), "LT")
        fits = w.elementwise("and", fits, has_group)
        sent = w.elementwise("add", w.with_number("multiply", destination, s.C), slot)
        return w.clamp(sent, s.E * s.C - 1), fits

    # ---- moves ---------------------------------------------------------------------
    def into_layout(self, value: Instruction, pairs_per_row: int) -> Instruction:
        """Rows [tokens, *rest], each of so many pairs, as they are multiplied: [*lead, *rest]; 0 where no row is."""
        w, s = self._w, self.sizes
        rest = dims_of(value)[1:]
        rows = w.reshape(value, (*self._blocks, s.m // pairs_per_row, *rest))
        places = self._sent_pairs
        if pairs_per_row > 1:
            places = w.with_number("divide", places, pairs_per_row)
        return self.layout.enter(w.take(rows, places, 2))

    def into_pairs(self, rows: Instruction) -> Instruction:
        """Rows [*lead, *rest] into pairs [pairs, *rest]; 0 for those without a group, and those over."""
        w, s = self._w, self.sizes
        if self._place_of_pair is None:
            self._place_of_pair, self._fits = self._write_place_of_pair()
        pairs = w.select(self._fits, self.layout.leave(rows, self._place_of_pair))
        return w.reshape(pairs, (s.R * s.E * s.m, *dims_of(pairs)[3:]))
