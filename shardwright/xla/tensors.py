"""StableHLO on arrays, at the current insertion point: the few operations of which larger ones are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.xla import private


def tensor_type(shape: Sequence[int], element: Any) -> Any:
    return private.ir().RankedTensorType.get(list(shape), element)


def element_type(name: str) -> Any:
    """An element type by its name in HLO: `bf16`, `f32`, `s32`, `u8`, `f8e5m2`, …"""
    if name.startswith("f8"):
        return private.ir().Type.parse("f" + name[1:].upper())
    return private.ir().Type.parse({"s": "i", "u": "ui"}.get(name[0], name[0]) + name[1:])


def number(value: float, kind: Any) -> Any:
    """An array, or a scalar, full of one number."""
    ir, element = private.ir(), kind.element_type
    is_integer = isinstance(element, ir.IntegerType)
    attribute = ir.IntegerAttr.get(element, int(value)) if is_integer else ir.FloatAttr.get(element, value)
    return private.dialect("stablehlo").ConstantOp(ir.DenseElementsAttr.get_splat(kind, attribute)).result


def like(value: float, array: Any) -> Any:
    """One number in the dimensions and the type of an array."""
    return number(value, array.type)


def convert(array: Any, element: Any) -> Any:
    kind = tensor_type(array.type.shape, element)
    return array if array.type == kind else private.dialect("stablehlo").ConvertOp(kind, array).result


def reshape(array: Any, shape: Sequence[int]) -> Any:
    kind = tensor_type(shape, array.type.element_type)
    return array if array.type == kind else private.dialect("stablehlo").ReshapeOp(kind, array).result


def transpose(array: Any, order: Sequence[int]) -> Any:
    shape = [array.type.shape[dim] for dim in order]
    kind = tensor_type(shape, array.type.element_type)
    return (
        private.ir()
        .Operation.create(
            "stablehlo.transpose",
            results=[kind],
            operands=[array],
            attributes={"permutation": private.ir().DenseI64ArrayAttr.get(list(order))},
        )
        .results[0]
    )


def broadcast(array: Any, shape: Sequence[int], dims: Sequence[int]) -> Any:
    """The array repeated; dims: where each of its dimensions is in `shape`."""
    kind = tensor_type(shape, array.type.element_type)
    return private.dialect("stablehlo").BroadcastInDimOp(kind, array, list(dims)).result


def iota(shape: Sequence[int], dim: int, element: Any) -> Any:
    """Numbers that count along one dimension."""
    return private.dialect("stablehlo").IotaOp(tensor_type(shape, element), dim).result


def compare(one: Any, other: Any, direction: str) -> Any:
    stablehlo = private.dialect("stablehlo")
    return stablehlo.CompareOp(one, other, stablehlo.ComparisonDirectionAttr.get(direction)).result


def select(condition: Any, one: Any, other: Any) -> Any:
    return private.dialect("stablehlo").SelectOp(condition, one, other).result


def multiply_matrices(
    one: Any, other: Any, batch: int, contracted: tuple[Sequence[int], Sequence[int]], element: Any
) -> Any:
    """A batched product, accumulated in `element`. batch: the first dimensions of both. contracted: those of each."""
    stablehlo = private.dialect("stablehlo")
    batched = list(range(batch))
    free = [
        [size for dim, size in enumerate(array.type.shape) if dim >= batch and dim not in summed]
        for array, summed in zip((one, other), contracted, strict=True)
    ]
    shape = [*list(one.type.shape)[:batch], *free[0], *free[1]]
    numbers = stablehlo.DotDimensionNumbers.get(batched, batched, list(contracted[0]), list(contracted[1]))
    return stablehlo.DotGeneralOp(tensor_type(shape, element), one, other, numbers).result


def add_up(array: Any, dims: Sequence[int]) -> Any:
    """The sum along dimensions."""
    return _reduce(array, dims, 0.0, "AddOp")


def greatest(array: Any, dims: Sequence[int]) -> Any:
    """The maximum along dimensions; NaN where there is one."""
    return _reduce(array, dims, float("-inf"), "MaxOp")


def _reduce(array: Any, dims: Sequence[int], start: float, name: str) -> Any:
    ir, stablehlo = private.ir(), private.dialect("stablehlo")
    scalar = tensor_type((), array.type.element_type)
    shape = [size for dim, size in enumerate(array.type.shape) if dim not in dims]
    kind = tensor_type(shape, array.type.element_type)
    total = stablehlo.ReduceOp([kind], [array], [number(start, scalar)], list(dims))
    body = total.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(body):
        stablehlo.ReturnOp([getattr(stablehlo, name)(*body.arguments).result])
    return total.results[0]
