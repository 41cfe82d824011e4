"""Joins broadcasts along dimensions of one element, spelled as three instructions in HLO text, into one operation.

`[8, 1] -> [8, 4]` is `broadcast_in_dim` in StableHLO. HLO's `broadcast` cannot do it; XLA's conversion writes

    a = [8, 1] broadcast(x), dimensions={0, 1}    r = [8] reshape(a)    b = [8, 4] broadcast(r), dimensions={0}

(`XlaBuilder::BroadcastInDim`, xla/hlo/builder/xla_builder.cc). Read back as three operations, the first is an identity
and is folded away by the next conversion. XLA's simplifier then misses the pattern: it writes `x / broadcast(s)` as `x
* broadcast(1 / s)` if only that broadcast reads its operand (algebraic_simplifier.cc); by then other readers of the
divisor, such as a softmax's gradient, read the same operand. XLA:CPU then stores the divisor at the size of the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from shardwright.plans.plan import InstructionPlan
from shardwright.xla import private
from shardwright.xla.operations import operations_within

_BROADCAST, _RESHAPE = "stablehlo.broadcast_in_dim", "stablehlo.reshape"


class _BroadcastChain(NamedTuple):
    """The three operations, in order."""

    first: Any
    reshape: Any
    last: Any


def join_broadcasts(module: Any, plans: Mapping[str, InstructionPlan]) -> dict[str, InstructionPlan]:
    """Write each such broadcast of a StableHLO module as one operation, unless a value between its parts is resharded.

    plans: by instruction name, the operations' location. Returns the plans without instructions that lost their
    operation; the last part of a broadcast takes over the first part's operands. Changes the module.
    """
    plan_of_name = dict(plans)
    for operation in list(operations_within(module.operation)):
        spelled = _match_broadcast(operation)
        if spelled is None:
            continue
        # Looked up in `plans`: conversion leaves copies of regions behind, whose operations have the same names.
        first, reshape, last = (plans.get(private.location_name(part.location) or "") for part in spelled)
        if first is None or reshape is None or last is None or not _is_in_place(first, reshape, last):
            continue
        _join(spelled)
        plan_of_name[last.name] = replace(last, operands=first.operands)
        plan_of_name.pop(first.name, None)
        plan_of_name.pop(reshape.name, None)
    return plan_of_name


def _match_broadcast(last: Any) -> _BroadcastChain | None:
    """The broadcast ending with an operation; None without one."""
    reshape = _maker(last, _BROADCAST)
    first = _maker(reshape, _RESHAPE)
    if first is None or first.name != _BROADCAST:
        return None
    between, wide = first.results[0].type.shape, last.results[0].type.shape
    if len(between) != len(wide):
        return None
    same = [dim for dim, (size, other) in enumerate(zip(between, wide, strict=True)) if size == other]
    is_shortened = list(reshape.results[0].type.shape) == [between[dim] for dim in same]
    others_are_one = all(size == 1 for dim, size in enumerate(between) if dim not in same)
    if not (is_shortened and others_are_one and _dimensions(last) == same):
        return None
    return _BroadcastChain(first, reshape, last)


def _maker(reader: Any, name: str) -> Any:
    """The operation called `name` that makes the only operand of another, if nothing else reads the operand."""
    if reader is None or reader.name != name:
        return None
    operand = reader.operands[0]
    is_operation = not isinstance(operand.owner, private.ir().Block)
    return operand.owner if is_operation and len(list(operand.uses)) == 1 else None


def _dimensions(broadcast: Any) -> list[int]:
    return list(broadcast.attributes["broadcast_dimensions"])


def _is_in_place(first: InstructionPlan, reshape: InstructionPlan, last: InstructionPlan) -> bool:
    """Whether the values in between are used whole and in their own layout."""
    between = (*first.result, *reshape.result)
    return (
        (first.result, reshape.result) == (reshape.operands[0], last.operands[0])
        and not any(entry.partial or entry.shared for entry in (first, reshape))
        and not any(sharding.unreduced for sharding in between)
    )


def _join(spelled: _BroadcastChain) -> None:
    ir = private.ir()
    first, reshape, last = spelled
    joined = ir.Operation.create(
        _BROADCAST,
        results=[last.results[0].type],
        operands=[first.operands[0]],
        attributes={"broadcast_dimensions": ir.DenseI64ArrayAttr.get(_dimensions(first))},
        loc=last.location,
        ip=ir.InsertionPoint(last),
    )
    last.results[0].replace_all_uses_with(joined.results[0])
    for operation in (last, reshape, first):
        operation.erase()
