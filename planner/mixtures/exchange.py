"""Writes the way of a mixture's rows: to the blocks of their experts, into tiles of one expert each, and back.

Sizes, with R replicas, E blocks of experts in each, G groups, g = G / E of them a block's own:

    m = pairs / (R E)       pairs of a block, each of one row and one group; a token's pairs lie in one block
    C                       rows that a block sends another at most
    T, t                    tiles of a block, and rows of a tile; T = ceil(E C / t) + g

    pairs     [R, E, m]           the program's order
    sent      [R, E, E, C]        by source, by destination, within both by group
    tiles     [R, E, T, t]        by destination, by group, within it by source

Between `sent` by source and by destination the split dimension changes: that is the all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from shardwright.cost import HardwareProfile
from shardwright.hlo import Instruction
from shardwright.planner.mixtures.block_writer import BlockWriter, dims_of, type_of
from shardwright.planner.mixtures.blocks import Blocks
from shardwright.planner.mixtures.tuning import MAX_TILE_WASTE
from shardwright.planner.tuning import TILE_FLOPS_PER_BYTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the module's docstring."""

    R: int
    E: int
    m: int
    C: int
    groups: int
    t: int

    @property
    def g(self) -> int:
        return self.groups // self.E

    @property
    def T(self) -> int:
        return -(-self.E * self.C // self.t) + self.g


def sizes_of(rows: int, groups: int, blocks: Blocks, profile: HardwareProfile | None, element_type: str) -> Sizes:
    """Sizes of a mixture. element_type: of its rows, as multiplied."""
    capacity = blocks.capacity(rows)
    own = groups // blocks.experts
    received = blocks.experts * capacity
    ratio = TILE_FLOPS_PER_BYTE
    if profile is not None:
        ratio = profile.matmul_flops_per_s(element_type) / profile.memory_bandwidth_bytes_per_s
    best = min(sqrt(3 * ratio * received / own), MAX_TILE_WASTE * received / own)
    tile = 1
    while 2 * tile <= best:
        tile *= 2
    return Sizes(
        R=blocks.replicas, E=blocks.experts, m=rows // blocks.count, C=capacity, groups=groups, t=min(tile, received)
    )


class Exchange:
    """The places of one mixture's pairs, sent rows and tiles; writes their moves. keys: groups of pairs."""

    def __init__(self, writer: BlockWriter, sizes: Sizes, keys: Instruction) -> None:
        self.sizes = s = sizes
        self._w = w = writer
        self._lead = (s.R, s.E)
        keys = w.reshape(w.convert(keys, "s32"), (*self._lead, s.m))
        self._keys = keys
        self._order = w.sort_with_places(keys)
        self._place_of_pair: Instruction | None = None
        self._write_counts()
        self._write_tiles()
        self._sent_pairs = self._write_sent()
        self._row_of_tile = self._write_row_of_tile()
        self._slot_in_tiles: Instruction | None = None

    # ---- counts --------------------------------------------------------------------
    def _write_counts(self) -> None:
        """By source: rows for each destination, where they begin; what was too much."""
        w, s = self._w, self.sizes
        dims = (*self._lead, s.m, s.groups)
        is_own = w.compare(w.spread(self._keys, dims, [0, 1, 2]), w.iota(dims, 3), "EQ")
        counts = w.reshape(w.total(w.convert(is_own, "s32"), [2]), (*self._lead, s.E, s.g))
        begins = w.sum_before(counts, 3)
        rows = w.total(counts)
        self._begin_of_destination = w.sum_before(rows, 2)  # [R, E, E]
        over = w.with_number("maximum", w.with_number("subtract", rows, s.C), 0)
        self.over = w.total(over, [0, 1, 2])
        ends = w.with_number("minimum", w.elementwise("add", begins, counts), s.C)
        begins = w.with_number("minimum", begins, s.C)
        self._begins = w.transpose(begins, (0, 2, 1, 3))  # [R, E, source, g]: slots of a group from a source
        self._ends = w.transpose(ends, (0, 2, 1, 3))

    def _write_tiles(self) -> None:
        """By destination: each group's tiles, and where the rows of each source begin among a group's."""
        w, s = self._w, self.sizes
        counts = w.elementwise("subtract", self._ends, self._begins)
        self._begin_in_group = w.sum_before(counts, 2)  # [R, E, source, g]
        self._end_in_group = w.elementwise("add", self._begin_in_group, counts)
        self._rows_of_group = w.total(counts, [2])  # [R, E, g]
        tiles = w.with_number("divide", w.with_number("add", self._rows_of_group, s.t - 1), s.t)
        self._first_tile = w.sum_before(tiles, 2)
        tile_ends = w.elementwise("add", self._first_tile, tiles)
        dims = (*self._lead, s.T, s.g)
        passed = w.compare(w.spread(tile_ends, dims, [0, 1, 3]), w.iota(dims, 2), "LE")
        group = w.clamp(w.total(w.convert(passed, "s32")), s.g - 1)
        self.group_of_tile = group  # [R, E, T]
        self.is_group_of_tile = w.compare(w.spread(group, dims, [0, 1, 2]), w.iota(dims, 3), "EQ")  # [R, E, T, g]

    def _of_tile(self, values: Instruction) -> Instruction:
        """Of each tile, the value of its group: [R, E, g] -> [R, E, T], [R, E, S, g] -> [R, E, T, S]."""
        w, s = self._w, self.sizes
        between = dims_of(values)[2:-1]
        dims = (*self._lead, s.T, *between, s.g)
        rest = range(3, len(dims))
        own = w.spread(self.is_group_of_tile, dims, [0, 1, 2, len(dims) - 1])
        return w.total(w.select(own, w.spread(values, dims, [0, 1, *rest])))

    # ---- places --------------------------------------------------------------------
    def _write_sent(self) -> Instruction:
        """[R, E, E, C]: the pair, in its block, of each row that is sent."""
        w, s = self._w, self.sizes
        dims = (*self._lead, s.E, s.C)
        places = w.elementwise("add", w.spread(self._begin_of_destination, dims, [0, 1, 2]), w.iota(dims, 3))
        return w.take(self._order, w.clamp(places, s.m - 1), 2)

    def _write_row_of_tile(self) -> Instruction:
        """[R, E, T, t]: the received row (source · C + slot) at each place of each tile; which of them are rows."""
        w, s = self._w, self.sizes
        dims = (*self._lead, s.T, s.t)
        number = w.elementwise("subtract", w.iota((*self._lead, s.T), 2), self._of_tile(self._first_tile))
        first = w.with_number("multiply", number, s.t)
        place = w.elementwise("add", w.spread(first, dims, [0, 1, 2]), w.iota(dims, 3))
        self.is_row = w.compare(place, w.spread(self._of_tile(self._rows_of_group), dims, [0, 1, 2]), "LT")
        slots = w.with_number("multiply", w.iota(dims_of(self._begins), 2), s.C)
        shift = w.elementwise("subtract", w.elementwise("add", slots, self._begins), self._begin_in_group)
        row = self._shifted(
            place, self._of_tile(self._begin_in_group), self._of_tile(self._end_in_group), self._of_tile(shift)
        )
        return w.clamp(row, s.E * s.C - 1)

    def _shifted(self, place: Instruction, begins: Instruction, ends: Instruction, shift: Instruction) -> Instruction:
        """Each place, shifted as the part that it lies in. place: [R, E, a, b], others: [R, E, a, parts]."""
        w = self._w
        dims = (*dims_of(place), dims_of(begins)[-1])
        each = w.spread(place, dims, [0, 1, 2, 3])
        begins, ends, shift = (w.spread(value, dims, [0, 1, 2, 4]) for value in (begins, ends, shift))
        inside = w.elementwise("and", w.compare(begins, each, "LE"), w.compare(each, ends, "LT"))
        return w.elementwise("add", place, w.total(w.select(inside, shift)))

    def _write_slot_in_tiles(self) -> Instruction:
        """[R, E, source, C]: the place (tile · t + row) of each received row in the tiles."""
        w, s = self._w, self.sizes
        dims = dims_of(self._begins)
        first = w.with_number("multiply", w.spread(self._first_tile, dims, [0, 1, 3]), s.t)
        shift = w.elementwise("subtract", w.elementwise("add", first, self._begin_in_group), self._begins)
        slot = w.iota((*self._lead, s.E, s.C), 3)
        return w.clamp(self._shifted(slot, self._begins, self._ends, shift), s.T * s.t - 1)

    def _write_place_of_pair(self) -> tuple[Instruction, Instruction]:
        """[R, E, m]: where each pair lies in what its block has sent (destination · C + slot); whether it fitted."""
        w, s = self._w, self.sizes
        place = w.sort_with_places(self._order)
        destination = w.with_number("divide", self._keys, s.g)
        dims = (*self._lead, s.m, s.E)
        is_own = w.compare(w.spread(destination, dims, [0, 1, 2]), w.iota(dims, 3), "EQ")
        begin = w.total(w.select(is_own, w.spread(self._begin_of_destination, dims, [0, 1, 3])))
        slot = w.elementwise("subtract", place, begin)
        fits = w.compare(slot, w.filled(s.C, dims_of(slot)), "LT")
        has_group = w.compare(self._keys, w.filled(s.groups, dims_of(slot)), "LT")
        fits = w.elementwise("and", fits, has_group)
        sent = w.elementwise("add", w.with_number("multiply", destination, s.C), slot)
        return w.clamp(sent, s.E * s.C - 1), fits

    # ---- moves ---------------------------------------------------------------------
    def into_tiles(self, value: Instruction, pairs_per_row: int) -> Instruction:
        """Rows [tokens, *rest], each of so many pairs, into tiles [R, E, T, t, *rest]; 0 where there is no row."""
        w, s = self._w, self.sizes
        rest = dims_of(value)[1:]
        rows = w.reshape(value, (*self._lead, s.m // pairs_per_row, *rest))
        places = self._sent_pairs
        if pairs_per_row > 1:
            places = w.with_number("divide", places, pairs_per_row)
        sent = w.take(rows, places, 2)
        return self._received_into_tiles(sent)

    def _received_into_tiles(self, sent: Instruction) -> Instruction:
        w, s = self._w, self.sizes
        rest = dims_of(sent)[4:]
        received = w.transpose(sent, (0, 2, 1, 3, *range(4, 4 + len(rest))))
        tiles = w.take(w.reshape(received, (*self._lead, s.E * s.C, *rest)), self._row_of_tile, 2)
        return self.cleared(tiles)

    def cleared(self, tiles: Instruction) -> Instruction:
        """Tiles [R, E, T, t, *rest] with 0 in the place of what is no row."""
        return self._w.select(self.is_row, tiles)

    def into_pairs(self, tiles: Instruction) -> Instruction:
        """Tiles [R, E, T, t, *rest] into pairs [pairs, *rest]; 0 for those without a group, and those over."""
        w, s = self._w, self.sizes
        rest = dims_of(tiles)[4:]
        if self._slot_in_tiles is None:
            self._slot_in_tiles = self._write_slot_in_tiles()
            self._place_of_pair, self._fits = self._write_place_of_pair()
        assert self._place_of_pair is not None
        flat = w.reshape(tiles, (*self._lead, s.T * s.t, *rest))
        returned = w.take(flat, self._slot_in_tiles, 2)  # [R, destination, source, C, *rest]
        back = w.transpose(returned, (0, 2, 1, 3, *range(4, 4 + len(rest))))
        pairs = w.take(w.reshape(back, (*self._lead, s.E * s.C, *rest)), self._place_of_pair, 2)
        pairs = w.select(self._fits, pairs)
        return w.reshape(pairs, (s.R * s.E * s.m, *rest))

    # ---- products ------------------------------------------------------------------
    def multiply(self, product: Instruction, tiles: Instruction, matrices: Instruction) -> Instruction:
        """A product of rows, by tiles: [R, E, T, t, K] x matrices [groups, …] -> [R, E, T, t, N]."""
        w, s = self._w, self.sizes
        (contracted,) = product.get("rhs_contracting_dims")
        own = self._matrices_of_tiles(matrices)
        result = product.shape.leaves[0]
        return w.array(
            "dot", result.element_type, (*self._lead, s.T, s.t, result.dimensions[1]), tiles, own,
            lhs_batch_dims="{0,1,2}", lhs_contracting_dims="{4}", rhs_batch_dims="{0,1,2}",
            rhs_contracting_dims=f"{{{contracted + 2}}}", **_precision(product),
        )  # fmt: skip

    def _matrices_of_tiles(self, matrices: Instruction) -> Instruction:
        """[groups, K, N] -> [R, E, T, K, N], each from its own block of experts."""
        w, s = self._w, self.sizes
        dims = dims_of(matrices)[1:]
        own = w.reshape(matrices, (s.E, s.g, *dims))
        indices = w.reshape(self.group_of_tile, (*self._lead, s.T, 1))
        return w.array(
            "gather", type_of(own), (*self._lead, s.T, *dims), own, indices,
            offset_dims="{3,4}", collapsed_slice_dims="{1}", start_index_map="{1}", operand_batching_dims="{0}",
            start_indices_batching_dims="{1}", index_vector_dim="3", slice_sizes=f"{{1,1,{dims[0]},{dims[1]}}}",
        )  # fmt: skip

    def multiply_weights(self, product: Instruction, left: Instruction, right: Instruction) -> Instruction:
        """A gradient of matrices, by tiles: [R, E, T, t, K], [R, E, T, t, N] -> [groups, K, N].

        What is no row adds nothing: one of the tiles has 0 there, and the other a number.
        """
        w, s = self._w, self.sizes
        result = product.shape.leaves[0]
        dims = result.dimensions[1:]
        wide = "f32" if result.element_type in ("bf16", "f16") else result.element_type
        products = w.array(
            "dot", wide, (*self._lead, s.T, *dims), left, right,
            lhs_batch_dims="{0,1,2}", lhs_contracting_dims="{3}", rhs_batch_dims="{0,1,2}", rhs_contracting_dims="{3}",
            **_precision(product),
        )  # fmt: skip
        total = w.array(
            "dot", wide, (s.E, s.g, *dims), w.convert(self.is_group_of_tile, wide), products,
            lhs_batch_dims="{1}", lhs_contracting_dims="{0,2}", rhs_batch_dims="{1}", rhs_contracting_dims="{0,2}",
            operand_precision="{highest,highest}",
        )  # fmt: skip
        return w.convert(w.reshape(total, result.dimensions), result.element_type)


def _precision(product: Instruction) -> dict[str, str]:
    own = product.attributes.get("operand_precision")
    return {} if own is None else {"operand_precision": own.text}
