"""Rewrites of each opcode for dimensions that become two.

A function per opcode takes the instruction and returns its attributes that name or count dimensions, in the new
numbering. Instructions that join or cut a split dimension (slice, pad, concatenate) are written on the pieces, with
reshapes around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from shardwright.hlo import ArrayShape, Attribute, Instruction, Shape, Window, format_shape
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.dim_links import Dim, read_annotation
from shardwright.reserved_names import PLACEMENT_TARGET

#: New positions of each old dimension.
Positions = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """The dimensions that become two: (pieces, elements of each)."""

    factors: dict[Dim, tuple[int, int]]

    def sizes(self, value: Instruction, leaf: int = 0) -> tuple[tuple[int, ...], ...]:
        """New sizes of each dimension of a leaf: one or two."""
        dimensions = value.shape.leaves[leaf].dimensions
        return tuple(self.factors.get((value, leaf, dim), (size,)) for dim, size in enumerate(dimensions))

    def dimensions(self, value: Instruction, leaf: int = 0) -> tuple[int, ...]:
        return tuple(size for sizes in self.sizes(value, leaf) for size in sizes)

    def positions(self, value: Instruction, leaf: int = 0) -> Positions:
        positions: Positions = []
        position = 0
        for sizes in self.sizes(value, leaf):
            positions.append(tuple(range(position, position + len(sizes))))
            position += len(sizes)
        return positions

    def shape(self, value: Instruction) -> Shape:
        """The whole new shape, tuples included."""
        return edit.with_leaves(value.shape, iter([self._leaf(value, leaf) for leaf in range(len(value.shape.leaves))]))

    def _leaf(self, value: Instruction, leaf: int) -> ArrayShape:
        old = value.shape.leaves[leaf]
        dimensions = self.dimensions(value, leaf)
        if len(dimensions) == old.rank:
            return old
        return ArrayShape(old.element_type, dimensions, (), _layout(old.layout, self.positions(value, leaf)))


def _layout(layout: str | None, positions: Positions) -> str | None:
    """Minor-to-major order of the new dimensions; none for layouts with tiles or other details beyond an order."""
    if not layout or ":" in layout:
        return None
    order = [new for old in layout.split(",") for new in reversed(positions[int(old)])]
    return ",".join(map(str, order))


def _at(positions: Positions, dims: Iterable[int]) -> list[int]:
    return [new for dim in dims for new in positions[dim]]


# ---- opcodes of which only attributes change ---------------------------------

AttributeRule = Callable[[Splits, Instruction], list[Attribute]]


def _dot(splits: Splits, dot: Instruction) -> list[Attribute]:
    attributes = []
    for number, side in enumerate(("lhs", "rhs")):
        positions = splits.positions(dot.operands[number])
        for name in (f"{side}_batch_dims", f"{side}_contracting_dims"):
            if name in dot.attributes:
                attributes.append(edit.int_list(name, _at(positions, dot.get(name))))
    return attributes


def _of_operand(splits: Splits, instruction: Instruction) -> list[Attribute]:
    """`dimensions=` counts over the operand's dimensions."""
    return [edit.int_list("dimensions", _at(splits.positions(instruction.operands[0]), instruction.get("dimensions")))]


def _broadcast(splits: Splits, instruction: Instruction) -> list[Attribute]:
    return [edit.int_list("dimensions", _at(splits.positions(instruction), instruction.get("dimensions", ())))]


def _iota(splits: Splits, instruction: Instruction) -> list[Attribute]:
    (position,) = splits.positions(instruction)[instruction.get("iota_dimension")]
    return [edit.attribute("iota_dimension", str(position))]


def _reduce_window(splits: Splits, instruction: Instruction) -> list[Attribute]:
    """A dimension that became two is idle: its window parameters hold for both."""
    sizes = splits.sizes(instruction.operands[0])
    value: Window = instruction.get("window")
    old = [dim for dim, parts in enumerate(sizes) for _ in parts]
    window = Window(
        sizes=tuple(value.sizes[dim] for dim in old),
        strides=tuple(value.strides[dim] for dim in old),
        padding_low=tuple(value.padding_low[dim] for dim in old),
        padding_high=tuple(value.padding_high[dim] for dim in old),
        lhs_dilation=tuple(value.lhs_dilation[dim] for dim in old),
        rhs_dilation=tuple(value.rhs_dilation[dim] for dim in old),
        reversal=tuple(value.reversal[dim] for dim in old),
    )
    return [edit.window(window)]


def _dynamic_slice(splits: Splits, instruction: Instruction) -> list[Attribute]:
    sizes = splits.sizes(instruction.operands[0])
    slice_sizes = [
        part
        for size, parts in zip(instruction.get("dynamic_slice_sizes"), sizes, strict=True)
        for part in (parts if len(parts) > 1 else (size,))
    ]
    return [edit.int_list("dynamic_slice_sizes", slice_sizes)]


def _gather(splits: Splits, instruction: Instruction) -> list[Attribute]:
    operand, indices = instruction.operands
    of_operand, of_indices = splits.positions(operand), splits.positions(indices)
    sizes = [
        part
        for size, parts in zip(instruction.get("slice_sizes"), splits.sizes(operand), strict=True)
        for part in (parts if len(parts) > 1 else (size,))
    ]
    return [
        edit.int_list("offset_dims", _at(splits.positions(instruction), instruction.get("offset_dims"))),
        edit.int_list("slice_sizes", sizes),
        *_renumber(
            instruction,
            (of_operand, "collapsed_slice_dims operand_batching_dims start_index_map"),
            (of_indices, "start_indices_batching_dims"),
        ),
        _index_vector_dim(instruction, of_indices),
    ]


def _scatter(splits: Splits, instruction: Instruction) -> list[Attribute]:
    operand, indices, updates = instruction.operands
    of_indices = splits.positions(indices)
    return [
        *_renumber(
            instruction,
            (splits.positions(operand), "inserted_window_dims input_batching_dims scatter_dims_to_operand_dims"),
            (of_indices, "scatter_indices_batching_dims"),
            (splits.positions(updates), "update_window_dims"),
        ),
        _index_vector_dim(instruction, of_indices),
    ]


def _renumber(instruction: Instruction, *lists: tuple[Positions, str]) -> list[Attribute]:
    return [
        edit.int_list(name, _at(positions, instruction.get(name)))
        for positions, names in lists
        for name in names.split()
        if name in instruction.attributes
    ]


def _index_vector_dim(instruction: Instruction, positions: Positions) -> Attribute:
    """May be the rank of the indices: each index is then one number."""
    dim = instruction.get("index_vector_dim")
    position = positions[dim][0] if dim < len(positions) else sum(map(len, positions))
    return edit.attribute("index_vector_dim", str(position))


def _annotation(splits: Splits, instruction: Instruction) -> list[Attribute]:
    """The pins in the new numbering; both parts of an unsplit dimension stay unsplit."""
    if instruction.get("custom_call_target") == PLACEMENT_TARGET:
        return []
    positions = splits.positions(instruction)
    pins = [f"{at}:{pin}" for dim, pin in read_annotation(instruction).items() for at in positions[dim]]
    attributes = [edit.attribute("backend_config", '"' + ",".join(pins) + '"')]
    if "operand_layout_constraints" in instruction.attributes:
        shape = format_shape(splits.shape(instruction.operands[0]))
        attributes.append(edit.attribute("operand_layout_constraints", f"{{{shape}}}"))
    return attributes


ATTRIBUTES: dict[str, AttributeRule] = {
    "broadcast": _broadcast,
    "custom-call": _annotation,
    "dot": _dot,
    "dynamic-slice": _dynamic_slice,
    "gather": _gather,
    "iota": _iota,
    "reduce": _of_operand,
    "reduce-window": _reduce_window,
    "reverse": _of_operand,
    "scatter": _scatter,
    "sort": _of_operand,
    "transpose": _of_operand,
}


def start_indices(splits: Splits, instruction: Instruction, operands: Sequence[Instruction]) -> list[Instruction]:
    """Operands of a dynamic slice or update: one start index for each new dimension.

    A dimension that became two is sliced in full: any start is clamped to 0.
    """
    first = 1 if instruction.opcode == "dynamic-slice" else 2
    sizes = splits.sizes(instruction.operands[0])
    starts = [start for start, parts in zip(operands[first:], sizes, strict=True) for _ in parts]
    return [*operands[:first], *starts]


# ---- what cuts and joins -----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A slice, pad or concatenate on pieces: dimensions of each operand, and of the result."""

    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    attribute: Attribute


def on_pieces(splits: Splits, instruction: Instruction) -> Pieces:
    """A slice, pad or concatenate on pieces of the larger side's split dimensions."""
    return {"slice": _slice, "pad": _pad, "concatenate": _concatenate}[instruction.opcode](splits, instruction)


def _slice(splits: Splits, instruction: Instruction) -> Pieces:
    source = instruction.operands[0]
    ranges: list[tuple[int, int, int]] = []
    for (start, limit, stride), parts in zip(instruction.get("slice"), splits.sizes(source), strict=True):
        if len(parts) == 1:
            ranges.append((start, limit, stride))
        else:
            block = parts[1]
            ranges += [(start // block, limit // block, 1), (0, block, 1)]
    return Pieces(
        operands=(splits.dimensions(source),),
        result=tuple(-(-(limit - start) // stride) for start, limit, stride in ranges),
        attribute=edit.slice_ranges(ranges),
    )


def _pad(splits: Splits, instruction: Instruction) -> Pieces:
    source = instruction.operands[0]
    inner: list[int] = []
    amounts: list[tuple[int, int, int]] = []
    sizes = source.shape.leaves[0].dimensions
    for size, (low, high, interior), parts in zip(
        sizes, instruction.get("padding"), splits.sizes(instruction), strict=True
    ):
        if len(parts) == 1:
            inner.append(size)
            amounts.append((low, high, interior))
        else:
            block = parts[1]
            inner += [size // block, block]
            amounts += [(low // block, high // block, 0), (0, 0, 0)]
    return Pieces(
        operands=(tuple(inner), ()),
        result=splits.dimensions(instruction),
        attribute=edit.padding(amounts),
    )


def _concatenate(splits: Splits, instruction: Instruction) -> Pieces:
    (joined,) = instruction.get("dimensions")
    parts = splits.sizes(instruction)
    result = splits.dimensions(instruction)
    (position, *_) = splits.positions(instruction)[joined]
    block = prod(parts[joined][1:])
    operands = []
    for operand in instruction.operands:
        count = operand.shape.leaves[0].dimensions[joined] // block
        operands.append((*result[:position], count, *result[position + 1 :]))
    return Pieces(operands=tuple(operands), result=result, attribute=edit.int_list("dimensions", [position]))
