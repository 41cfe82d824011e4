"""Groups of tensors that are laid out alike, and of collectives that have one cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwright.cost.memory import shard_bytes
from shardwright.plans import Mesh, PlannedCollective, TensorSharding, VariablePlan

_NUMBER = re.compile(r"\d+")
_SUFFIX = re.compile(r"(?<=[A-Za-z_\-])(\.\d+)+\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableGroup:
    """Variables that differ only in a number of their name (a layer's index) and share everything else.

    bytes_per_device: of one of them, as stored.
    """

    name: str
    count: int
    element_type: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    sharding: TensorSharding
    bytes_per_device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGroup:
    """Collectives of one kind over the same axes with one cause; bytes and seconds of a whole step."""

    kind: str
    axes: tuple[str, ...]
    cause: str
    count: int
    payload_bytes: int
    wire_bytes: int
    time_s: float


def group_variables(variables: Iterable[VariablePlan], mesh: Mesh) -> list[VariableGroup]:
    """Groups in order of their first member; index runs are written `blocks[0..11]`."""
    groups: dict[tuple[object, ...], list[VariablePlan]] = {}
    for variable in variables:
        key = (
            _NUMBER.sub("#", variable.name),
            variable.element_type,
            variable.shape,
            variable.stored_shape,
            variable.sharding,
        )
        groups.setdefault(key, []).append(variable)
    return [
        VariableGroup(
            name=joined_name([member.name for member in members]),
            count=len(members),
            element_type=members[0].element_type,
            shape=members[0].shape,
            stored_shape=members[0].stored_shape,
            sharding=members[0].sharding,
            bytes_per_device=shard_bytes(members[0].element_type, members[0].stored_shape, members[0].sharding, mesh),
        )
        for members in groups.values()
    ]


def joined_name(names: Sequence[str]) -> str:
    """One name for names that differ only in numbers: `b[0].w`, `b[1].w` → `b[0..1].w`."""
    pieces = _NUMBER.split(names[0])
    columns = list(zip(*(_NUMBER.findall(name) for name in names), strict=True))
    joined = pieces[0]
    for column, piece in zip(columns, pieces[1:], strict=True):
        joined += _runs(sorted({int(number) for number in column})) if len(set(column)) > 1 else column[0]
        joined += piece
    return joined


def _runs(numbers: Sequence[int]) -> str:
    """Runs of consecutive numbers: 0..3,5,7..8."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)


def group_collectives(collectives: Iterable[PlannedCollective]) -> list[CollectiveGroup]:
    """Groups by kind, axes and cause, whose numbers may differ, the longest time first.

    The suffixes that make instruction names unique are left out of the cause.
    """
    groups: dict[tuple[str, tuple[str, ...], str], list[PlannedCollective]] = {}
    for collective in collectives:
        key = (collective.kind, collective.axes, _NUMBER.sub("#", _SUFFIX.sub("", collective.cause)))
        groups.setdefault(key, []).append(collective)
    found = [
        CollectiveGroup(
            kind=kind,
            axes=axes,
            cause=joined_name([_SUFFIX.sub("", each.cause) for each in members]),
            count=sum(each.count for each in members),
            payload_bytes=sum(each.payload_bytes * each.count for each in members),
            wire_bytes=sum(each.wire_bytes * each.count for each in members),
            time_s=sum(each.time_s for each in members),
        )
        for (kind, axes, _), members in groups.items()
    ]
    return sorted(found, key=lambda group: -group.time_s)
