"""Layouts of a sum over devices, from the summands on the devices to the value's final layout.

The intermediate constraints decide XLA's result: a reduce-scatter, an all-reduce, or a wrong number (see `emit` on the
meaning of marks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.cost.moves.reshard import reduce_scatter_steps
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import private


def steps_of_reduction(
    operation: Any, entry: InstructionPlan, sharding: TensorSharding, shape: tuple[int, ...], mesh: Mesh
) -> tuple[TensorSharding, ...]:
    """Intermediate layouts of a result summed at its definition.

    - Summands: if its operands are partial already, XLA would reduce over one axis after the other, or only some of the
      axes scatter it.
    - The whole sum: if it ends scattered.

    Summands have even shards: Shardy aborts at others.
    """
    if not entry.partial:
        return ()
    whole = TensorSharding(_without(sharding.dims, entry.partial), sharding.unreduced)
    handed_on = {axis for used in _uses(entry) for axis in used.unreduced} & set(entry.partial)
    is_even = whole.is_even(shape, mesh) and sharding.is_even(shape, mesh)
    if is_even and not _reduces_at_once(operation, entry):
        summands = _with_unreduced(whole, {*entry.partial, *sharding.unreduced}, mesh)
        between = _scatter_steps(summands, sharding, set(summands.unreduced), shape, mesh)
        if between:  # else XLA would reduce whole arrays over all axes
            return (summands, *between)
    held = set(entry.partial) if is_even and _reduces_apart(operation, entry) else handed_on
    steps = [_with_unreduced(whole, {*held, *sharding.unreduced}, mesh)] if held else []
    if whole != sharding:
        steps.append(whole)
    return tuple(steps)


def _reduces_apart(operation: Any, entry: InstructionPlan) -> bool:
    """Whether XLA reduces over one of several summed dimensions after the other (`AllReduceAlongShardingDims`), where
    one all-reduce over all of their axes moves less.
    """
    kind = operation.operation.name
    if kind == "stablehlo.reduce":
        first = next(iter(operation.regions[0].blocks[0].operations))
        if len(operation.results) > 1 or first.operation.name != "stablehlo.add":
            return False
    elif kind not in ("stablehlo.dot", "stablehlo.dot_general"):
        return False
    return sum(not set(entry.partial).isdisjoint(dim) for dim in _uses(entry)[0].dims) > 1


def _reduces_at_once(operation: Any, entry: InstructionPlan) -> bool:
    """Whether XLA itself reduces the operation's sum over devices, and would take a mark for a further sum.

    The planner's `linear.why_not_partial` is the same table, for its instructions.
    """
    kind = operation.operation.name
    if kind == "stablehlo.convolution":
        return splits_image(operation, entry)
    return bool(kind == "stablehlo.gather")


def splits_image(convolution: Any, entry: InstructionPlan) -> bool:
    """Whether devices hold blocks of an image without their borders (`Span.BORDERS` of the planner's rules)."""
    numbers = private.dialect("stablehlo").ConvDimensionNumbers(convolution.attributes["dimension_numbers"])
    image, kernel = (tuple(operand.type.shape) for operand in convolution.operands)
    sharding = _uses(entry)[0]
    spatial = zip(numbers.input_spatial_dimensions, numbers.kernel_spatial_dimensions, strict=True)
    return any(
        sharding.dims[dim] and _has_borders(convolution, number, image[dim], kernel[tap])
        for number, (dim, tap) in enumerate(spatial)
    )


def _has_borders(convolution: Any, number: int, size: int, wide: int) -> bool:
    """Whether windows `wide` over image dimension `number` reach beyond blocks of it: not through a kernel one wide,
    side by side, or over all of the image at once."""

    def of_window(name: str, default: int) -> Any:
        return tuple(convolution.attributes[name])[number] if name in convolution.attributes else default

    stride = of_window("window_strides", 1)
    is_plain = of_window("lhs_dilation", 1) == of_window("rhs_dilation", 1) == 1 and not of_window("window_reversal", 0)
    padding = list(convolution.attributes["padding"]) if "padding" in convolution.attributes else ()
    if not is_plain or any(padding[2 * number : 2 * number + 2]):
        return True
    return wide != size and not (wide == stride and size % wide == 0)


def _uses(entry: InstructionPlan) -> tuple[TensorSharding, ...]:
    return tuple(leaf for operand in entry.operands for leaf in operand)


def _with_unreduced(sharding: TensorSharding, unreduced: set[str], mesh: Mesh) -> TensorSharding:
    return TensorSharding(sharding.dims, tuple(axis for axis in mesh.sizes if axis in unreduced))


def steps_to(
    source: TensorSharding | None, target: TensorSharding, shape: tuple[int, ...], mesh: Mesh
) -> tuple[TensorSharding, ...]:
    """Intermediate layouts of a partial value on its way to a use that scatters it over some axes and reduces it over
    others: scattered first, like in `steps_of_reduction`; whole first, if it ends in uneven shards. XLA makes all other
    moves in the intended order: it reduces before it moves, and moves before it keeps a whole value on one device for a
    sum.
    """
    if source is None or not source.unreduced:
        return ()
    if not target.is_even(shape, mesh):
        return (TensorSharding(source.dims),)
    summed = set(source.unreduced) - set(target.unreduced)
    if summed and not set(target.unreduced) <= set(source.unreduced):  # Shardy aborts at both in one
        return (_with_unreduced(source, set(source.unreduced) - summed, mesh),)
    return _scatter_steps(source, target, {*summed, *target.unreduced}, shape, mesh)


def _scatter_steps(
    source: TensorSharding, target: TensorSharding, unreduced: set[str], shape: tuple[int, ...], mesh: Mesh
) -> tuple[TensorSharding, ...]:
    """The sum's layout behind each of its reduce-scatters that leaves a sum of summands over other axes."""
    steps = [
        _with_unreduced(TensorSharding(dims), unreduced.difference(*dims), mesh)
        for dims in reduce_scatter_steps(shape, source, target, mesh)
    ]
    return tuple(step for step in steps if set(step.unreduced) > set(target.unreduced))


def _without(dims: tuple[tuple[str, ...], ...], axes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis for axis in dim if axis not in axes) for dim in dims)
