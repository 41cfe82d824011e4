"""Groups of tensors with equal shardings, and of collectives with one cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwright.cost.peak.memory import shard_bytes
from shardwright.plans.plan import PlannedCollective, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding

_NUMBER = re.compile(r"\d+")
_SUFFIX = re.compile(r"(?<=[A-Za-z_\-])(\.\d+)+\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableGroup:
    """Variables that differ only in a number of their name (a layer's index), or in the tree around the leaf, and share
    everything else.

    bytes_per_device: of one of them, in storage. is_on_host: whether that is in the memory of the device's host.
    """

    name: str
    count: int
    element_type: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    sharding: TensorSharding
    bytes_per_device: int
    is_on_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGroup:
    """Collectives of one kind over the same axes with one cause; bytes and seconds of a whole step.

    over: the axes in words, and how many of their devices take part where not all do.
    """

    kind: str
    axes: tuple[str, ...]
    over: str
    cause: str
    count: int
    payload_bytes: int
    wire_bytes: int
    time_s: float


def group_variables(variables: Iterable[VariablePlan], mesh: Mesh) -> list[VariableGroup]:
    """Groups in order of their first member; index runs are written `blocks[0..11]`.

    A parameter and its optimizer state stand together if their shardings are equal: `params, opt_state[0].mu ['w']`.
    """
    variables = list(variables)
    tails = _find_shared_tails(variables)
    runs: dict[tuple[str, str, tuple[object, ...]], list[VariablePlan]] = {}
    for variable in variables:
        tail = tails.get(variable.name, variable.name)
        head = variable.name.removesuffix(tail)
        key = (head, _NUMBER.sub("#", tail), _layout(variable))
        runs.setdefault(key, []).append(variable)
    groups: dict[tuple[object, ...], tuple[list[str], list[VariablePlan]]] = {}
    for (head, _, layout), members in runs.items():
        own_tails = tuple(member.name.removeprefix(head) for member in members)
        heads, together = groups.setdefault((own_tails, layout), ([], []))
        heads.append(head)
        together += members
    return [_group(heads, members, mesh) for heads, members in groups.values()]


def _layout(variable: VariablePlan) -> tuple[object, ...]:
    return (variable.element_type, variable.user_shape, variable.stored_shape, variable.sharding, variable.is_on_host)


def _group(heads: list[str], members: list[VariablePlan], mesh: Mesh) -> VariableGroup:
    first = members[0]
    tails = [member.name.removeprefix(heads[0]) for member in members[: len(members) // len(heads)]]
    return VariableGroup(
        name=", ".join(heads) + (" " if len(heads) > 1 else "") + join_names(tails),
        count=len(members),
        element_type=first.element_type,
        shape=first.user_shape,
        stored_shape=first.stored_shape,
        sharding=first.sharding,
        bytes_per_device=shard_bytes(first.element_type, first.stored_shape, first.stored_sharding, mesh),
        is_on_host=first.is_on_host,
    )


def is_copy(variables: Sequence[VariablePlan]) -> dict[str, bool]:
    """Per name that `group_variables` may merge: whether it is an optimizer's copy, not the tree's own leaf."""
    copies = {}
    for name, tail in _find_shared_tails(variables).items():
        own = _HEAD.match(name)
        copies[name] = own is None or own.end() != len(name) - len(tail)
    return copies


_HEAD = re.compile(r"[A-Za-z_]\w*(?=[\[.])")


def _find_shared_tails(variables: Sequence[VariablePlan]) -> dict[str, str]:
    """Per name, the path into a tree shared with others of its shape: `['w']` of `params['w']`, and of
    `opt_state[0].mu['w']`, which ends with the whole path of the former. Names without one are left out.
    """
    paths = {
        (variable.name[head.end() :], variable.user_shape): 0
        for variable in variables
        if (head := _HEAD.match(variable.name)) is not None
    }
    tails: dict[str, str] = {}
    for variable in variables:
        starts = (i for i, letter in enumerate(variable.name) if letter in "[." and i)
        ends = [variable.name[i:] for i in starts]
        own = _HEAD.match(variable.name)
        for tail in ends:
            is_own = own is not None and own.end() == len(variable.name) - len(tail)
            if (tail, variable.user_shape) in paths and not is_own:
                tails[variable.name] = tail
                paths[tail, variable.user_shape] += 1
                break
    for variable in variables:
        own = _HEAD.match(variable.name)
        if own is not None and variable.name not in tails and paths[variable.name[own.end() :], variable.user_shape]:
            tails[variable.name] = variable.name[own.end() :]
    return tails


def join_names(names: Sequence[str]) -> str:
    """One name for names differing only in numbers: `b[0].w`, `b[1].w` → `b[0..1].w`."""
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
    """Groups by kind, axes and cause (up to numbers), the longest time first.

    The unique suffixes of instruction names are left out of the cause.
    """
    groups: dict[tuple[str, tuple[str, ...], str, str], list[PlannedCollective]] = {}
    for collective in collectives:
        key = (collective.kind, collective.axes, collective.over, _NUMBER.sub("#", _SUFFIX.sub("", collective.cause)))
        groups.setdefault(key, []).append(collective)
    collective_groups = [
        CollectiveGroup(
            kind=kind,
            axes=axes,
            over=over,
            cause=join_names([_SUFFIX.sub("", member.cause) for member in members]),
            count=sum(member.count for member in members),
            payload_bytes=sum(member.payload_bytes * member.count for member in members),
            wire_bytes=sum(member.wire_bytes * member.count for member in members),
            time_s=sum(member.time_s for member in members),
        )
        for (kind, axes, over, _), members in groups.items()
    ]
    return sorted(collective_groups, key=lambda group: -group.time_s)
