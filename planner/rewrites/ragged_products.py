"""Products of rows in groups (`ragged-dot`) become products of tiles of rows, each of one group.

XLA:GPU multiplies all rows with every group's matrix and masks; XLA:CPU has no such product at all. With tiles of t
rows, no more than M / t + G of which hold rows of G groups,

    rows:     y[m]    = x[m] · w[group of m]            tiles of x · matrices of their groups, back to the rows
    weights:  dw[g]   = Σ x[m]ᵀ · y[m], m in group g    products of tiles, summed by group

are ordinary gathers and products of a batch of tiles, which are split, priced and stored as any. Work is (M + G t) / M
of what rows need, matrices are copied M / (G t) + 1 times. The form follows Gale et al., "MegaBlocks" (2022).
Rows behind the last group are 0, as in `jax.lax.ragged_dot`.
"""

from __future__ import annotations

from math import sqrt

from shardwright.cost import HardwareProfile
from shardwright.hlo import Computation, Instruction, Module
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.group_integers import GroupIntegers
from shardwright.planner.rewrites.instruction_writer import InstructionWriter, rewrite_instructions
from shardwright.planner.tuning import TILE_FLOPS_PER_BYTE

_NARROW = frozenset({"bf16", "f16"})


def tile_ragged_products(module: Module, profile: HardwareProfile | None) -> Module:
    """`module` with its ragged products written as products of tiles; `module` itself without any.

    profile: of the devices, which the size of a tile depends on. Unchanged: what `can_tile` is false of.
    """
    return rewrite_instructions(
        module, can_tile, lambda product, names, regions: write_tiles(product, names, regions, profile)
    )


def can_tile(product: Instruction) -> bool:
    """Whether an instruction is a ragged product of matrices, without a batch."""
    if product.opcode != "ragged-dot" or product.get("lhs_batch_dims"):
        return False
    rows, other, sizes = (operand.shape.leaves[0] for operand in product.operands)
    (ragged,) = product.get("lhs_ragged_dims")
    contracted = tuple(product.get("lhs_contracting_dims"))
    if rows.rank != 2 or sizes.rank != 1 or len(contracted) != 1 or not rows.size_bytes or not other.size_bytes:
        return False
    if ragged in contracted:
        return other.rank == 2
    return other.rank == 3 and tuple(product.get("rhs_group_dims")) == (0,)


def write_tiles(
    product: Instruction, names: edit.Names, regions: dict[str, Computation], profile: HardwareProfile | None
) -> list[Instruction]:
    """The instructions ahead of a product, which becomes the last of them. regions: see `GroupIntegers`."""
    return _Tiles(product, names, regions, profile).write()


def tile_rows(rows: int, groups: int, flops_per_byte: float) -> int:
    """The power of two at which rows multiplied in vain and matrices copied take as long.

    G t rows too many take 2 G t K N / flops per second, M / t copies 6 M K N / t bytes of bandwidth.
    """
    best = sqrt(3 * flops_per_byte * rows / max(groups, 1))
    tile = 1
    while tile < min(best, rows):
        tile *= 2
    return tile


def count_tiles(rows: int, groups: int, tile: int) -> int:
    """Tiles that hold rows in groups, at most."""
    return min(rows, rows // tile + groups)


def flops_per_byte(profile: HardwareProfile | None, element_type: str) -> float:
    """Operations of a product in the time of a byte of memory."""
    if profile is None:
        return TILE_FLOPS_PER_BYTE
    return profile.matmul_flops_per_s(element_type) / profile.memory_bandwidth_bytes_per_s


class _Tiles(GroupIntegers):
    """Writes one ragged product. regions: of reductions, shared by a module's products, by element type."""

    def __init__(
        self,
        product: Instruction,
        names: edit.Names,
        regions: dict[str, Computation],
        profile: HardwareProfile | None,
    ) -> None:
        super().__init__(InstructionWriter(product, names), regions)
        self._product = product
        (self._ragged,) = product.get("lhs_ragged_dims")
        lhs, _, sizes = (operand.shape.leaves[0] for operand in product.operands)
        self._rows, self._groups = lhs.dimensions[self._ragged], sizes.dimensions[0]
        self._tile = tile_rows(self._rows, self._groups, flops_per_byte(profile, lhs.element_type))
        self._tiles = count_tiles(self._rows, self._groups, self._tile)

    def write(self) -> list[Instruction]:
        """The new instructions ahead of the product, which becomes the last of them."""
        sizes = self.to_integers(self._product.operands[2])
        self._sizes = sizes
        row_ends = self.sum_up_to(sizes)
        self._row_starts = self.binary("subtract", row_ends, sizes)
        tiles = self.binary("divide", self.plus(sizes, self._tile - 1), self.filled(self._tile, sizes))
        tile_ends = self.sum_up_to(tiles)
        self._tile_starts = self.binary("subtract", tile_ends, tiles)
        self._group_of_tile = self.clamped(self._count_passed(tile_ends, self._tiles), self._groups - 1)
        if self._ragged in self._product.get("lhs_contracting_dims"):
            self._write_weights()
        else:
            self._write_rows(row_ends)
        return self.writer.written

    # ---- the two forms -----------------------------------------------------------
    def _write_rows(self, row_ends: Instruction) -> None:
        product, writer = self._product, self.writer
        lhs, weights, _ = product.operands
        (contracted,) = product.get("rhs_contracting_dims")
        places, _ = self._rows_of_tiles()
        tiles = self._take_rows(lhs, self._ragged, places)
        matrices = self._take_matrices(weights)
        result = product.shape.leaves[0]
        columns = result.dimensions[1]
        products = writer.array(
            "dot", result.element_type, (self._tiles, self._tile, columns), tiles, matrices,
            lhs_batch_dims="{0}", lhs_contracting_dims="{2}", rhs_batch_dims="{0}",
            rhs_contracting_dims=f"{{{contracted}}}", **self._precision(),
        )  # fmt: skip
        flat = writer.array("reshape", result.element_type, (self._tiles * self._tile, columns), products)
        group = self._count_passed(row_ends, self._rows)
        starts = self.binary("multiply", self._tile_starts, self.filled(self._tile, self._tile_starts))
        shift = self._of_group(self.binary("subtract", starts, self._row_starts), group)
        place = self.clamped(self.binary("add", shift, self.iota((self._rows,), 0)), self._tiles * self._tile - 1)
        rows = self._take_rows(flat, 0, place)
        inside = self.compare(group, self.filled(self._groups, group), "LT")
        inside = writer.spread(inside, result.dimensions, [0])
        zeros = writer.spread(writer.constant(result.element_type, 0), result.dimensions, [])
        self._become("select", inside, rows, zeros)

    def _write_weights(self) -> None:
        product, writer = self._product, self.writer
        lhs, rhs, _ = product.operands
        (other_ragged,) = product.get("rhs_contracting_dims")
        places, inside = self._rows_of_tiles()
        left = self._take_rows(lhs, self._ragged, places)
        right = self._take_rows(rhs, other_ragged, places)
        left_leaf, result = left.shape.leaves[0], product.shape.leaves[0]
        zeros = writer.spread(writer.constant(left_leaf.element_type, 0), left_leaf.dimensions, [])
        inside = writer.spread(inside, left_leaf.dimensions, [0, 1])
        left = writer.array("select", left_leaf.element_type, left_leaf.dimensions, inside, left, zeros)
        wide = "f32" if result.element_type in _NARROW else result.element_type
        products = writer.array(
            "dot", wide, (self._tiles, *result.dimensions[1:]), left, right,
            lhs_batch_dims="{0}", lhs_contracting_dims="{1}", rhs_batch_dims="{0}", rhs_contracting_dims="{1}",
            **self._precision(),
        )  # fmt: skip
        dims = (self._tiles, self._groups)
        of_group = self.compare(writer.spread(self._group_of_tile, dims, [0]), self.iota(dims, 1), "EQ")
        total = writer.array(
            "dot", wide, result.dimensions, writer.array("convert", wide, dims, of_group), products,
            lhs_contracting_dims="{0}", rhs_contracting_dims="{0}", operand_precision="{highest,highest}",
        )  # fmt: skip
        self._become("convert", total)

    def _become(self, opcode: str, *operands: Instruction) -> None:
        """Have the product be its last step."""
        product = self._product
        product.opcode, product.operands = opcode, operands
        product.attributes = {name: each for name, each in product.attributes.items() if name == "metadata"}

    # ---- tiles -------------------------------------------------------------------
    def _rows_of_tiles(self) -> tuple[Instruction, Instruction]:
        """The row of each place in each tile, and whether it is one of the tile's group."""
        dims, group = (self._tiles, self._tile), self._group_of_tile
        number = self.binary("subtract", self.iota((self._tiles,), 0), self._of_group(self._tile_starts, group))
        before = self.binary("multiply", number, self.filled(self._tile, number))
        first = self.binary("add", self._of_group(self._row_starts, group), before)
        count = self.binary("subtract", self._of_group(self._sizes, group), before)
        places = self.binary("add", self.writer.spread(first, dims, [0]), self.iota(dims, 1))
        inside = self.compare(self.iota(dims, 1), self.writer.spread(count, dims, [0]), "LT")
        return self.clamped(places, self._rows - 1), inside

    def _take_rows(self, array: Instruction, dim: int, places: Instruction) -> Instruction:
        """The rows of a matrix, along `dim`, at some places."""
        leaf, dims = array.shape.leaves[0], places.shape.leaves[0].dimensions
        width = leaf.dimensions[1 - dim]
        indices = self.writer.array("reshape", "s32", (*dims, 1), places)
        slices = [width, width]
        slices[dim] = 1
        return self.writer.array(
            "gather", leaf.element_type, (*dims, width), array, indices,
            offset_dims=f"{{{len(dims)}}}", collapsed_slice_dims=f"{{{dim}}}", start_index_map=f"{{{dim}}}",
            index_vector_dim=str(len(dims)), slice_sizes=f"{{{slices[0]},{slices[1]}}}",
        )  # fmt: skip

    def _take_matrices(self, weights: Instruction) -> Instruction:
        """Each tile's matrix."""
        leaf = weights.shape.leaves[0]
        indices = self.writer.array("reshape", "s32", (self._tiles, 1), self._group_of_tile)
        sizes = ",".join(str(size) for size in leaf.dimensions[1:])
        return self.writer.array(
            "gather", leaf.element_type, (self._tiles, *leaf.dimensions[1:]), weights, indices,
            offset_dims="{1,2}", collapsed_slice_dims="{0}", start_index_map="{0}", index_vector_dim="1",
            slice_sizes=f"{{1,{sizes}}}",
        )  # fmt: skip

    def _count_passed(self, ends: Instruction, count: int) -> Instruction:
        """For each of `count` numbers from 0 on, how many groups end at it or before."""
        dims = (count, self._groups)
        passed = self.compare(self.writer.spread(ends, dims, [1]), self.iota(dims, 0), "LE")
        return self.total(self.writer.array("convert", "s32", dims, passed))

    def _of_group(self, values: Instruction, group: Instruction) -> Instruction:
        """The value of each one's group; 0 behind the last."""
        dims = (group.shape.leaves[0].dimensions[0], self._groups)
        own = self.compare(self.writer.spread(group, dims, [0]), self.iota(dims, 1), "EQ")
        values = self.writer.spread(values, dims, [1])
        zeros = self.writer.spread(self.writer.constant("s32", 0), dims, [])
        return self.total(self.writer.array("select", "s32", dims, own, values, zeros))

    def _precision(self) -> dict[str, str]:
        own = self._product.attributes.get("operand_precision")
        return {} if own is None else {"operand_precision": own.text}
