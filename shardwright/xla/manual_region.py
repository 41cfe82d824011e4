"""A manual computation (Shardy's `sdy.manual_computation`) under construction: what devices' parts are computed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import private, tensors
from shardwright.xla.zeros import pad_with_zeros, zero_constant


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """A result that devices compute parts of.

    whole: its type. lies: the layout of devices' parts, before their sum. summed: the axes over which it is added up.
    takes_largest: the largest is taken instead, of numbers that are not negative.
    """

    whole: Any
    lies: TensorSharding
    summed: tuple[str, ...] = ()
    takes_largest: bool = False

    def even_type(self, mesh: Mesh) -> Any:
        """The type with all parts as large as the first."""
        return tensors.tensor_type(_even_shape(self.whole, self.lies, mesh), self.whole.element_type)

    def part_type(self, mesh: Mesh) -> Any:
        return _part_type(self.whole, self.lies, mesh)


class ManualRegion:
    """A manual computation at the current insertion point; inside `with`, operations are its own. It is manual over all
    axes of the mesh, but for those that are manual around it already.

    operands: padded to even parts (`pad_to_parts`), `used`: how they lie. attribute: a sharding in Shardy's form.
    arguments, parts: a device's parts of the operands, and the types of its parts of results.
    """

    def __init__(
        self,
        operands: Sequence[Any],
        used: Sequence[TensorSharding],
        results: Sequence[PartResult],
        mesh: Mesh,
        attribute: Callable[[TensorSharding], Any],
    ) -> None:
        ir, sdy = private.ir(), private.dialect("sdy")
        stacked = [TensorSharding((each.summed, *each.lies.dims)) if each.summed else each.lies for each in results]
        evens = [each.even_type(mesh) for each in results]
        terms = [
            tensors.tensor_type((mesh.size(each.summed), *even.shape), even.element_type) if each.summed else even
            for each, even in zip(results, evens, strict=True)
        ]
        around = manual_axes_around(ir.InsertionPoint.current.block)
        axes = sdy.ManualAxesAttr.get([ir.StringAttr.get(axis.name) for axis in mesh.axes if axis.name not in around])
        per_value = sdy.TensorShardingPerValueAttr.get
        self._operation = sdy.ManualComputationOp(
            terms, list(operands), per_value([*map(attribute, used)]), per_value([*map(attribute, stacked)]), axes
        )
        inputs = [_part_type(operand.type, lies, mesh) for operand, lies in zip(operands, used, strict=True)]
        location = ir.Location.current
        block = self._operation.regions[0].blocks.append(*inputs, arg_locs=[location] * len(inputs))
        self._point = ir.InsertionPoint(block)
        self._results = results
        self.arguments = [*block.arguments]
        self.parts = [each.part_type(mesh) for each in results]

    def __enter__(self) -> Self:
        self._point.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._point.__exit__(kind, error, trace)

    def hand_out(self, values: Sequence[Any]) -> None:
        """End the region with a device's parts of the results."""
        private.dialect("sdy").ReturnOp(
            [
                tensors.reshape(value, (1, *value.type.shape)) if each.summed else value
                for value, each in zip(values, self._results, strict=True)
            ]
        )

    def join(self) -> list[Any]:
        """The whole results, added up and without padding."""
        return [
            _slice_to(_reduce_terms(value, each) if each.summed else value, each.whole)
            for value, each in zip(self._operation.results, self._results, strict=True)
        ]


def manual_axes_around(block: Any) -> set[str]:
    """The axes that are manual where a block stands."""
    axes, owner = set[str](), block.owner
    while owner is not None:
        if owner.operation.name == "sdy.manual_computation":
            axes.update(private.dialect("sdy").ManualAxesAttr(owner.attributes["manual_axes"]))
        owner = owner.operation.parent
    return axes


def pad_to_parts(values: Sequence[Any], used: Sequence[TensorSharding], mesh: Mesh) -> list[Any]:
    """Arrays, filled with zeros until their axes divide them."""
    return [
        pad_with_zeros(value, _even_shape(value.type, lies, mesh)) for value, lies in zip(values, used, strict=True)
    ]


def first_numbers(axes: tuple[str, ...], step: int, mesh: Mesh) -> tuple[Any, TensorSharding]:
    """The number of each device's first row, with `step` rows on each along the axes, and how that lies."""
    stablehlo = private.dialect("stablehlo")
    numbers = tensors.iota((mesh.size(axes),), 0, tensors.element_type("s32"))
    return stablehlo.MulOp(numbers, tensors.like(step, numbers)).result, TensorSharding((axes,))


def replace_elements(operation: Any, results: Sequence[Any]) -> None:
    """Have the readers of a tuple's elements read these arrays."""
    for use in list(operation.results[0].uses):
        element = use.owner
        element.operation.results[0].replace_all_uses_with(results[element.attributes["index"].value])
        element.operation.erase()


def _even_shape(kind: Any, sharding: TensorSharding, mesh: Mesh) -> tuple[int, ...]:
    """The dimensions of an array with all parts as large as the first."""
    parts = sharding.shard_shape(tuple(kind.shape), mesh)
    return tuple(size * mesh.size(axes) for size, axes in zip(parts, sharding.dims, strict=True))


def _part_type(whole: Any, sharding: TensorSharding, mesh: Mesh) -> Any:
    """The type of one device's part of an array."""
    return tensors.tensor_type(sharding.shard_shape(tuple(whole.shape), mesh), whole.element_type)


def _reduce_terms(terms: Any, result: PartResult) -> Any:
    """The sum along the first dimension, or the largest: the partitioner makes an all-reduce of it, or what the plan
    does with it."""
    ir, stablehlo = private.ir(), private.dialect("stablehlo")
    scalar = tensors.tensor_type((), terms.type.element_type)
    whole = tensors.tensor_type(tuple(terms.type.shape)[1:], terms.type.element_type)
    total = stablehlo.ReduceOp([whole], [terms], [zero_constant(terms.type.element_type)], [0])
    body = total.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(body):
        operation = stablehlo.MaxOp if result.takes_largest else stablehlo.AddOp
        stablehlo.ReturnOp([operation(*body.arguments).result])
    return total.results[0]


def _slice_to(value: Any, kind: Any) -> Any:
    """The value without its padding."""
    if value.type == kind:
        return value
    rank = len(kind.shape)
    return private.dialect("stablehlo").SliceOp(value, [0] * rank, list(kind.shape), [1] * rank).result
