"""How received rows lie in a block, and how they are multiplied there.

    AsReceived  [R S, E, C]     as they came from each source S, products by JAX's kernel (`kernels.ragged`), of blocks
    InOrder     [R, E, M]       one group behind the other, products by the kernel
    Tiles       [R, E, T, t]    tiles of one expert each, products of a batch: anywhere

Within a group rows lie by source; what works row by row between products keeps them where they are. Rows as received
are moved no more, and each source has its own copy of the matrices. What that takes is compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import prod

from shardwright.cost import HardwareProfile
from shardwright.hlo import ArrayShape, Instruction
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.kernels.ragged import SIDE
from shardwright.planner.mixtures.block_writer import BlockWriter, Dims, dims_of, type_of
from shardwright.planner.mixtures.recognise import is_weights
from shardwright.planner.mixtures.sizes import Sizes
from shardwright.planner.rewrites.kernel_ragged_products import call_attributes, kernel_call
from shardwright.planner.rewrites.ragged_forms import form_times_s
from shardwright.planner.tuning import MOST_KERNEL_GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Of each source and group, [R, E, S, g]: slots that its rows are received in, and places among the group's rows.

    rows_of_group: [R, E, g].
    """

    begins: Instruction
    ends: Instruction
    begin_in_group: Instruction
    end_in_group: Instruction
    rows_of_group: Instruction


class Layout(ABC):
    """Of one mixture. lead: dimensions of rows. is_row: [lead], which of them are rows."""

    lead: Dims
    is_row: Instruction

    def __init__(self, writer: BlockWriter, sizes: Sizes, received: Received) -> None:
        self._w, self._s, self._received = writer, sizes, received

    @classmethod
    def fit(cls, sizes: Sizes) -> Sizes:
        """The sizes that it takes."""
        return sizes

    @abstractmethod
    def enter(self, sent: Instruction) -> Instruction:
        """Rows [R, source, destination, C, *rest] in this layout, [*lead, *rest]; 0 where there is no row."""

    @abstractmethod
    def leave(self, rows: Instruction, places: Instruction) -> Instruction:
        """Rows [*lead, *rest] as pairs [R, E, m, *rest], each from its place (destination · C + slot): [R, E, m]."""

    def cleared(self, rows: Instruction) -> Instruction:
        """Rows with 0 in the place of what is no row."""
        return self._w.select(self.is_row, rows)

    @abstractmethod
    def multiply(self, product: Instruction, rows: Instruction, matrices: Instruction) -> Instruction:
        """A product of rows: [*lead, K] x matrices [groups, …] -> [*lead, N]."""

    @abstractmethod
    def multiply_weights(self, product: Instruction, left: Instruction, right: Instruction) -> Instruction:
        """A gradient of matrices: [*lead, K], [*lead, N] -> [groups, K, N].

        What is no row adds nothing: one of the operands has 0 there, and the other a number.
        """

    def _by_block(self, matrices: Instruction) -> Instruction:
        """[groups, K, N] -> [E, g, K, N]."""
        return self._w.reshape(matrices, (self._s.E, self._s.g, *dims_of(matrices)[1:]))


class _ByGroup(Layout):
    """Rows by group, then by source.

    first_row: [R, E, g], where a group's rows begin, counted along all of `lead` behind R and E. received_row: [lead],
    the received row (source · C + slot) of each place.
    """

    first_row: Instruction
    received_row: Instruction
    _place_of_slot: Instruction | None = None

    def enter(self, sent: Instruction) -> Instruction:
        return self.cleared(self._w.take_across(sent, self.received_row))

    def leave(self, rows: Instruction, places: Instruction) -> Instruction:
        w, s = self._w, self._s
        rest = dims_of(rows)[len(self.lead) :]
        if self._place_of_slot is None:
            self._place_of_slot = self._write_place_of_slot()
        flat = w.reshape(rows, (s.R, s.E, prod(self.lead[2:]), *rest))
        returned = w.take(flat, self._place_of_slot, 2)  # [R, destination, source, C, *rest]
        return w.take_across(returned, places)

    def _write_place_of_slot(self) -> Instruction:
        """[R, E, source, C]: the place of each received row in the layout."""
        w, s, received = self._w, self._s, self._received
        first = w.spread(self.first_row, dims_of(received.begins), [0, 1, 3])
        shift = w.elementwise("subtract", w.elementwise("add", first, received.begin_in_group), received.begins)
        slot = w.iota((s.R, s.E, s.E, s.C), 3)
        return w.clamp(w.shifted(slot, received.begins, received.ends, shift), prod(self.lead[2:]) - 1)


class Tiles(_ByGroup):
    """Tiles of rows of one group each."""

    def __init__(self, writer: BlockWriter, sizes: Sizes, received: Received) -> None:
        super().__init__(writer, sizes, received)
        w, s = writer, sizes
        self._blocks = (s.R, s.E)
        self.lead = (s.R, s.E, s.T, s.t)
        tiles = w.with_number("divide", w.with_number("add", received.rows_of_group, s.t - 1), s.t)
        first_tile = w.sum_before(tiles, 2)
        tile_ends = w.elementwise("add", first_tile, tiles)
        dims = (*self._blocks, s.T, s.g)
        passed = w.compare(w.spread(tile_ends, dims, [0, 1, 3]), w.iota(dims, 2), "LE")
        group = w.clamp(w.total(w.convert(passed, "s32")), s.g - 1)
        self._group_of_tile = group  # [R, E, T]
        self._is_group_of_tile = w.compare(w.spread(group, dims, [0, 1, 2]), w.iota(dims, 3), "EQ")  # [R, E, T, g]
        self.first_row = w.with_number("multiply", first_tile, s.t)
        self._write_places(first_tile)

    def _write_places(self, first_tile: Instruction) -> None:
        w, s, received = self._w, self._s, self._received
        number = w.elementwise("subtract", w.iota((*self._blocks, s.T), 2), self._of_tile(first_tile))
        first = w.with_number("multiply", number, s.t)
        place = w.elementwise("add", w.spread(first, self.lead, [0, 1, 2]), w.iota(self.lead, 3))
        self.is_row = w.compare(place, w.spread(self._of_tile(received.rows_of_group), self.lead, [0, 1, 2]), "LT")
        slots = w.with_number("multiply", w.iota(dims_of(received.begins), 2), s.C)
        shift = w.elementwise("subtract", w.elementwise("add", slots, received.begins), received.begin_in_group)
        parts = (received.begin_in_group, received.end_in_group, shift)
        row = w.shifted(place, *(self._of_tile(each) for each in parts))
        self.received_row = w.clamp(row, s.E * s.C - 1)

    def _of_tile(self, values: Instruction) -> Instruction:
        """Of each tile, the value of its group: [R, E, g] -> [R, E, T], [R, E, S, g] -> [R, E, T, S]."""
        w, s = self._w, self._s
        between = dims_of(values)[2:-1]
        dims = (*self._blocks, s.T, *between, s.g)
        rest = range(3, len(dims))
        own = w.spread(self._is_group_of_tile, dims, [0, 1, 2, len(dims) - 1])
        return w.total(w.select(own, w.spread(values, dims, [0, 1, *rest])))

    def multiply(self, product: Instruction, rows: Instruction, matrices: Instruction) -> Instruction:
        w = self._w
        (contracted,) = product.get("rhs_contracting_dims")
        result = product.shape.leaves[0]
        return w.array(
            "dot", result.element_type, (*self.lead, result.dimensions[1]), rows, self._matrices_of_tiles(matrices),
            lhs_batch_dims="{0,1,2}", lhs_contracting_dims="{4}", rhs_batch_dims="{0,1,2}",
            rhs_contracting_dims=f"{{{contracted + 2}}}", **_precision(product),
        )  # fmt: skip

    def _matrices_of_tiles(self, matrices: Instruction) -> Instruction:
        """[groups, K, N] -> [R, E, T, K, N], each from its own block of experts."""
        w, s = self._w, self._s
        dims = dims_of(matrices)[1:]
        own = self._by_block(matrices)
        indices = w.reshape(self._group_of_tile, (*self._blocks, s.T, 1))
        return w.array(
            "gather", type_of(own), (*self._blocks, s.T, *dims), own, indices,
            offset_dims="{3,4}", collapsed_slice_dims="{1}", start_index_map="{1}", operand_batching_dims="{0}",
            start_indices_batching_dims="{1}", index_vector_dim="3", slice_sizes=f"{{1,1,{dims[0]},{dims[1]}}}",
        )  # fmt: skip

    def multiply_weights(self, product: Instruction, left: Instruction, right: Instruction) -> Instruction:
        w, s = self._w, self._s
        result = product.shape.leaves[0]
        dims = result.dimensions[1:]
        wide = "f32" if result.element_type in ("bf16", "f16") else result.element_type
        products = w.array(
            "dot", wide, (*self._blocks, s.T, *dims), left, right,
            lhs_batch_dims="{0,1,2}", lhs_contracting_dims="{3}", rhs_batch_dims="{0,1,2}", rhs_contracting_dims="{3}",
            **_precision(product),
        )  # fmt: skip
        total = w.array(
            "dot", wide, (s.E, s.g, *dims), w.convert(self._is_group_of_tile, wide), products,
            lhs_batch_dims="{1}", lhs_contracting_dims="{0,2}", rhs_batch_dims="{1}", rhs_contracting_dims="{0,2}",
            operand_precision="{highest,highest}",
        )  # fmt: skip
        return w.convert(w.reshape(total, result.dimensions), result.element_type)


class _ByKernel(Layout):
    """Products by JAX's kernel. sizes: rows of each group, by all of `lead` but its last dimension."""

    sizes: Instruction

    def multiply(self, product: Instruction, rows: Instruction, matrices: Instruction) -> Instruction:
        operands = rows, self._by_block(matrices), self.sizes
        return self._call(product, operands, (*self.lead, product.shape.leaves[0].dimensions[1]))

    def multiply_weights(self, product: Instruction, left: Instruction, right: Instruction) -> Instruction:
        dims = product.shape.leaves[0].dimensions
        sums = self._call(product, (left, right, self.sizes), (self._s.E, self._s.g, *dims[1:]))
        return self._w.reshape(sums, dims)

    def _call(self, product: Instruction, operands: tuple[Instruction, ...], dims: Dims) -> Instruction:
        call = kernel_call(_of_block(product, self._s.M, self._s.g))
        assert call is not None
        of_blocks = replace(call, of_blocks=True)
        attributes = call_attributes(of_blocks, operands, dims[-1])
        return self._w.array("custom-call", product.shape.leaves[0].element_type, dims, *operands, **attributes)


class InOrder(_ByGroup, _ByKernel):
    """Rows of one group behind those of another."""

    def __init__(self, writer: BlockWriter, sizes: Sizes, received: Received) -> None:
        super().__init__(writer, sizes, received)
        w, s = writer, sizes
        self.lead = (s.R, s.E, s.M)
        self.sizes = received.rows_of_group
        self.first_row = w.sum_before(received.rows_of_group, 2)
        rows = w.total(received.rows_of_group)
        self.is_row = w.compare(w.iota(self.lead, 2), w.spread(rows, self.lead, [0, 1]), "LT")
        dims = dims_of(received.begins)
        first = w.spread(self.first_row, dims, [0, 1, 3])
        begins, ends = (w.elementwise("add", first, each) for each in (received.begin_in_group, received.end_in_group))
        slots = w.with_number("multiply", w.iota(dims, 2), s.C)
        shift = w.elementwise("subtract", w.elementwise("add", slots, received.begins), begins)
        parts = [w.reshape(each, (s.R, s.E, 1, s.E * s.g)) for each in (begins, ends, shift)]
        row = w.shifted(w.iota((s.R, s.E, 1, s.M), 3), *parts)
        self.received_row = w.clamp(w.reshape(row, self.lead), s.E * s.C - 1)


class AsReceived(_ByKernel):
    """Rows of one source behind those of another, each source's in order of its groups."""

    def __init__(self, writer: BlockWriter, sizes: Sizes, received: Received) -> None:
        super().__init__(writer, sizes, received)
        w, s = writer, sizes
        self.lead = (s.R * s.E, s.E, s.C)
        counts = w.elementwise("subtract", received.ends, received.begins)
        counts = w.transpose(counts, (0, 2, 1, 3))  # [R, source, destination, g]
        self._sent = (s.R, s.E, s.E, s.C)
        self._is_sent = w.compare(w.iota(self._sent, 3), w.spread(w.total(counts), self._sent, [0, 1, 2]), "LT")
        self.sizes = w.reshape(counts, (s.R * s.E, s.E, s.g))
        self.is_row = w.reshape(self._is_sent, self.lead)

    @classmethod
    def fit(cls, sizes: Sizes) -> Sizes:
        return sizes.in_whole_blocks

    def enter(self, sent: Instruction) -> Instruction:
        w = self._w
        return w.reshape(w.select(self._is_sent, sent), (*self.lead, *dims_of(sent)[4:]))

    def leave(self, rows: Instruction, places: Instruction) -> Instruction:
        w, s = self._w, self._s
        rest = dims_of(rows)[3:]
        returned = w.reshape(rows, (*self._sent, *rest))
        return w.take(w.reshape(returned, (s.R, s.E, s.E * s.C, *rest)), places, 2)


def choose_layout(products: tuple[Instruction, ...], sizes: Sizes, profile: HardwareProfile | None) -> type[Layout]:
    """The layout in which a mixture takes least time: tiles where JAX's kernel does not take all of its products."""
    if profile is None:
        return Tiles
    times = [form_times_s(_of_block(product, sizes.M, sizes.g), profile) for product in products]
    if not all("kernel" in each for each in times) or sum(each["kernel"] - each["tiles"] for each in times) >= 0:
        return Tiles
    if sizes.groups > MOST_KERNEL_GROUPS:
        return InOrder
    more_s = sum(_more_time_s(product, sizes, profile) for product in products)
    return AsReceived if more_s <= _moves_time_s(products, sizes, profile) else InOrder


def _more_time_s(product: Instruction, sizes: Sizes, profile: HardwareProfile) -> float:
    """Seconds of a product of rows as received, on one device, beyond those in order: blocks of the kernel that two
    sources share, and copies of the matrices."""
    kind = product.operands[0].shape.leaves[0].element_type
    shapes = [operand.shape.leaves[0].dimensions for operand in product.operands]
    width, columns = shapes[0][-1], product.shape.leaves[0].dimensions[-1]
    bytes_per_s = profile.memory_bandwidth_bytes_per_s
    copied = 2 * (sizes.groups - sizes.g) * width * columns * ELEMENT_BITS[kind] / 8
    shared = 2.0 * (sizes.groups - sizes.g) * SIDE * width * columns
    return copied / bytes_per_s + shared / profile.matmul_flops_per_s(kind)


def _moves_time_s(products: tuple[Instruction, ...], sizes: Sizes, profile: HardwareProfile) -> float:
    """Seconds to read and write received rows once more on the way into order, and on the way out of it: forward, and
    backward if there are gradients."""
    rows = products[0].operands[0].shape.leaves[0]
    moved = 2 * sizes.M * rows.dimensions[1] * ELEMENT_BITS[rows.element_type] / 8
    ways = 4 if any(is_weights(product) for product in products) else 2
    return ways * moved / profile.memory_bandwidth_bytes_per_s


def _of_block(product: Instruction, rows: int, groups: int) -> Instruction:
    """A product of one block's rows with its own matrices."""
    left, right, sizes = (operand.shape.leaves[0] for operand in product.operands)
    result = product.shape.leaves[0]
    is_sum = is_weights(product)
    first = ArrayShape(left.element_type, (rows, *left.dimensions[1:]))
    second = ArrayShape(right.element_type, (rows if is_sum else groups, *right.dimensions[1:]))
    shapes = (first, second, ArrayShape(sizes.element_type, (groups,)))
    operands = tuple(Instruction(f"{product.name}.{place}", "parameter", shape) for place, shape in enumerate(shapes))
    whole = ArrayShape(result.element_type, (groups if is_sum else rows, *result.dimensions[1:]))
    own = Instruction(product.name, product.opcode, whole, operands)
    own.attributes = dict(product.attributes)
    return own


def _precision(product: Instruction) -> dict[str, str]:
    own = product.attributes.get("operand_precision")
    return {} if own is None else {"operand_precision": own.text}
