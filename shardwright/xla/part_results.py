"""What devices' parts of an operation give, by the plan of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import private
from shardwright.xla.manual_region import PartResult


def result_types(operation: Any) -> tuple[list[Any], bool]:
    """The types of the arrays of an operation's result, and whether they come in a tuple."""
    types = [value.type for value in operation.results]
    if len(types) == 1 and isinstance(types[0], private.ir().TupleType):
        return [types[0].get_type(number) for number in range(types[0].num_types)], True
    return types, False


def part_results(types: Sequence[Any], entry: InstructionPlan | None, mesh: Mesh) -> list[PartResult]:
    """What parts give of results of these types; entry: the plan of the operation, or None: whole on every device."""
    if entry is None:
        return [PartResult(whole=kind, lies=TensorSharding.replicated(kind.rank)) for kind in types]
    summands = {*entry.partial, *(axis for lies in entry.result for axis in lies.unreduced)}
    summed = tuple(axis for axis in mesh.sizes if axis in summands)
    return [
        PartResult(whole=kind, lies=_before_sum(lies, summed), summed=summed)
        for kind, lies in zip(types, entry.result, strict=True)
    ]


def _before_sum(sharding: TensorSharding, summed: Sequence[str]) -> TensorSharding:
    """The layout of a device's part of a result, before it is added up, and scattered, over the axes `summed`."""
    return TensorSharding(tuple(tuple(axis for axis in dim if axis not in summed) for dim in sharding.dims))
