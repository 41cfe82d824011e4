"""Lookups and writes of one row in an array split by rows, as devices compute them (`manual_computation`).

XLA:GPU makes a gather or scatter of one index a dynamic slice ahead of its partitioner, the TPU compiler does so with
scatters, and no partitioner has a case for dynamic slices along a split dimension: the whole array is gathered. Here
each device looks into the rows that it has. The row of a lookup is zeros on all devices but one, and their sum; a write
lands on the device that has the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

from shardwright.plans.plan import InstructionPlan
from shardwright.xla import private, tensors
from shardwright.xla.zeros import zero_constant

_GATHER, _SCATTER = "stablehlo.gather", "stablehlo.scatter"
_SLICE, _UPDATE = "stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice"
_OPERATIONS = (_GATHER, _SCATTER, _SLICE, _UPDATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRows:
    """The rows of one dimension of an array, split over devices.

    position: number of the index's component, or of the start, that says which row. count: rows of all devices, without
    padding.
    """

    dim: int
    position: int
    count: int
    axes: tuple[str, ...]


def split_rows(operation: Any, entry: InstructionPlan) -> tuple[SplitRows, ...]:
    """The split dimensions of which an operation looks up, or writes, one row; none for any other operation."""
    if operation.operation.name not in _OPERATIONS:
        return ()
    shape, dims = tuple(operation.operands[0].type.shape), entry.operands[0][0].dims
    positions = _row_positions(operation)
    if not _lies_alike(operation.operation.name, entry, positions):
        return ()  # XLA moves what a plan wants elsewhere
    return tuple(
        SplitRows(dim=dim, position=positions[dim], count=shape[dim], axes=dims[dim])
        for dim in sorted(positions)
        if dims[dim]
    )


def _lies_alike(name: str, entry: InstructionPlan, rows: Mapping[int, int]) -> bool:
    """Whether result and written slice lie as the array does, the rows aside, and what is looked up is summed over the
    devices that have the rows: then each device has what it needs."""
    table, result = entry.operands[0][0].dims, entry.result[0]
    without_rows = tuple(() if dim in rows else axes for dim, axes in enumerate(table))
    if name in (_UPDATE, _SCATTER):
        return result.dims == table and (name == _SCATTER or entry.operands[1][0].dims == without_rows)
    of_rows = {axis for dim in rows for axis in table[dim]}
    return of_rows.issubset((*entry.partial, *result.unreduced)) and (name == _GATHER or result.dims == without_rows)


def _row_positions(operation: Any) -> Mapping[int, int]:
    """By dimension of which one row is taken, where its number is; a dimension of one element is one of them."""
    name = operation.operation.name
    if name in (_SLICE, _UPDATE):
        row = operation.result.type if name == _SLICE else operation.operands[1].type
        return {dim: dim for dim, size in enumerate(row.shape) if size == 1}
    stablehlo = private.dialect("stablehlo")
    if name == _GATHER:
        numbers = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
        mapped, indices = numbers.start_index_map, operation.operands[1]
        picked = [dim for dim, size in enumerate(operation.attributes["slice_sizes"]) if size == 1]
    else:
        numbers = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
        mapped, indices = numbers.scattered_dims_to_operand_dims, operation.operands[len(operation.results)]
        picked = _picked_by_scatter(operation, numbers)
    if prod(indices.type.shape) != len(mapped):
        return {}
    return {dim: position for position, dim in enumerate(mapped) if dim in picked}


def _picked_by_scatter(operation: Any, numbers: Any) -> list[int]:
    """The dimensions of which updates cover one row each."""
    update = operation.operands[len(operation.results) + 1].type.shape
    outside = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
    window = [dim for dim in range(operation.operands[0].type.rank) if dim not in outside]
    single = [dim for dim, own in zip(window, numbers.update_window_dims, strict=True) if update[own] == 1]
    return [*numbers.inserted_window_dims, *single]


def reach_row(
    operation: Any, arguments: Sequence[Any], firsts: Sequence[Any], rows: Sequence[SplitRows], results: Sequence[Any]
) -> list[Any]:
    """One device's part of an operation, at the current insertion point.

    arguments: the device's parts of its operands. firsts: the number of its first row (`first_numbers`), for each of
    `rows`. results: the types of the device's results. The operation's regions are taken away from it.
    """
    name = operation.operation.name
    if name in (_SLICE, _UPDATE):
        after = 1 if name == _SLICE else 2
        starts, inside = _local_positions(arguments[after:], firsts, rows, arguments[0])
        if name == _SLICE:
            return [_or_zeros(inside, _slice(arguments[0], starts, results[0].shape))]
        before = _slice(arguments[0], starts, arguments[1].type.shape)
        stablehlo = private.dialect("stablehlo")
        row = stablehlo.SelectOp(inside, arguments[1], before).result
        return [stablehlo.DynamicUpdateSliceOp(arguments[0], row, starts).result]
    count = 1 if name == _GATHER else len(operation.results)
    clamps = name == _GATHER
    places, inside = _local_positions(_components(arguments[count]), firsts, rows, arguments[0], clamps=clamps)
    operands = [*arguments[:count], _index(places, arguments[count].type.shape), *arguments[count + 1 :]]
    part = _same_operation(operation, operands, results)
    return [_or_zeros(inside, part.results[0])] if name == _GATHER else list(part.results)


def _same_operation(operation: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    ir = private.ir()
    attributes = {name: operation.attributes[name] for name in operation.attributes}
    if operation.operation.name == _GATHER:
        whole = operation.operands[0].type.shape
        sizes = zip(attributes["slice_sizes"], whole, operands[0].type.shape, strict=True)
        attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get([own if size == all else size for size, all, own in sizes])
    part = ir.Operation.create(
        operation.operation.name,
        results=list(results),
        operands=list(operands),
        attributes=attributes,
        regions=len(operation.regions),
    )
    for source, target in zip(operation.regions, part.regions, strict=True):
        source.blocks[0].append_to(target)
    return part


def _local_positions(
    positions: Sequence[Any], firsts: Sequence[Any], rows: Sequence[SplitRows], array: Any, *, clamps: bool = True
) -> tuple[list[Any], Any]:
    """Scalar positions counted from the device's own first rows, and whether all of the rows are its own.

    clamps: positions before the first row or behind the last mean these; else nothing is there.
    """
    stablehlo = private.dialect("stablehlo")
    kind = max((_signed(position.type) for position in positions), key=lambda kind: kind.element_type.width)
    local = [tensors.convert(position, kind.element_type) for position in positions]
    inside = []
    for first, split in zip(firsts, rows, strict=True):
        position = local[split.position]
        if clamps:
            last = tensors.number(split.count - 1, kind)
            position = stablehlo.ClampOp(tensors.number(0, kind), position, last).result
        begin = tensors.convert(stablehlo.ReshapeOp(_scalar(first.type.element_type), first).result, kind.element_type)
        position = local[split.position] = stablehlo.SubtractOp(position, begin).result
        size = tensors.number(array.type.shape[split.dim], kind)
        inside += [tensors.compare(position, tensors.number(0, kind), "GE"), tensors.compare(position, size, "LT")]
    return local, reduce(lambda one, other: stablehlo.AndOp(one, other).result, inside)


def _components(index: Any) -> list[Any]:
    """The components of one index, as scalars."""
    stablehlo = private.dialect("stablehlo")
    count, element = prod(index.type.shape), index.type.element_type
    flat = stablehlo.ReshapeOp(private.ir().RankedTensorType.get([count], element), index).result
    parts = [stablehlo.SliceOp(flat, [number], [number + 1], [1]).result for number in range(count)]
    return [stablehlo.ReshapeOp(_scalar(element), part).result for part in parts]


def _index(components: Sequence[Any], shape: Sequence[int]) -> Any:
    """An index in its array's shape."""
    ir, stablehlo = private.ir(), private.dialect("stablehlo")
    element = components[0].type.element_type
    one = ir.RankedTensorType.get([1], element)
    parts = [stablehlo.ReshapeOp(one, component).result for component in components]
    flat = stablehlo.ConcatenateOp(parts, 0).result if len(parts) > 1 else parts[0]
    return stablehlo.ReshapeOp(ir.RankedTensorType.get(list(shape), element), flat).result


def _slice(array: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
    return private.dialect("stablehlo").DynamicSliceOp(array, starts, list(sizes)).result


def _or_zeros(inside: Any, row: Any) -> Any:
    stablehlo = private.dialect("stablehlo")
    zeros = stablehlo.BroadcastInDimOp(row.type, zero_constant(row.type.element_type), []).result
    return stablehlo.SelectOp(inside, row, zeros).result


def _scalar(element: Any) -> Any:
    return private.ir().RankedTensorType.get([], element)


def _signed(kind: Any) -> Any:
    """The scalar type that holds an index of a type, and the number of a row, below or above 0."""
    ir, element = private.ir(), kind.element_type
    is_wide = element.width > 32 or (element.width == 32 and element.is_unsigned)
    return _scalar(ir.IntegerType.get_signless(64 if is_wide else 32))
