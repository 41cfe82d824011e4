"""XLA's actual collectives: those of a partitioned HLO module, with bytes and counts.

Read by our own HLO parser. Bytes on the wire follow the ring algorithms, like the cost model's, but are computed
independently here: the two can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from shardwright import hlo
from shardwright.hlo import Computation, Instruction, Module
from shardwright.plans.plan import COLLECTIVE_KINDS
from shardwright.xla.compiled import ObservedCollective
from shardwright.xla.offsets import slice_offsets
from shardwright.xla.reduce_scatter import Users, find_inner_all_reduce, find_kept_slices

_OPCODES = {
    **{kind: kind for kind in COLLECTIVE_KINDS},
    **{f"{kind}-start": kind for kind in COLLECTIVE_KINDS},
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "collective-permute",
}
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')


class _Times(NamedTuple):
    """How often a computation runs in a step, and whether every loop around it was counted."""

    runs: int
    known: bool


def find_collectives(hlo_text: str, device_count: int) -> tuple[ObservedCollective, ...]:
    """Every collective of a partitioned HLO module, in program order.

    device_count: devices of the program; groups without devices mean all of them. Raises HloSyntaxError if the text is
    not HLO.
    """
    module = hlo.parse(hlo_text)
    users = Users(module)
    return tuple(
        _observe(instruction, times, device_count, users)
        for instruction, times in _iterate_executed(module)
        if instruction.opcode in _OPCODES
    )


def _iterate_executed(module: Module) -> Iterator[tuple[Instruction, _Times]]:
    """Executed instructions with their execution counts; reducers of collectives and the like are left out."""
    pending: list[tuple[Computation, _Times]] = [(module.entry, _Times(1, True))]
    while pending:
        computation, times = pending.pop()
        for instruction in computation:
            yield instruction, times
            if instruction.opcode == "while":
                trips = trip_count(instruction)
                inner = _Times(times.runs * (1 if trips is None else trips), times.known and trips is not None)
                pending += [(body, inner) for key in ("body", "condition") for body in instruction.called.get(key, ())]
                continue
            for key in ("calls", "called_computations", "branch_computations", "true_computation", "false_computation"):
                pending += [(called, times) for called in instruction.called.get(key, ())]
            if instruction.opcode in ("call", "async-start"):
                pending += [(called, times) for called in instruction.called.get("to_apply", ())]


def _observe(instruction: Instruction, times: _Times, device_count: int, users: Users) -> ObservedCollective:
    kind = _OPCODES[instruction.opcode]
    size, count, groups = _groups(instruction, device_count)
    operand_bytes = sum(operand.shape.size_bytes for operand in instruction.operands)
    payload = operand_bytes * size if kind == "all-gather" else operand_bytes
    if kind == "all-reduce" and _is_scattered(instruction, device_count, users):
        kind = "reduce-scatter"
        payload //= _split_before(instruction, device_count, users)
    return ObservedCollective(
        kind=kind,
        payload_bytes=payload,
        wire_bytes=ring_bytes(kind, payload, size),
        group_size=size,
        group_count=count,
        count=times.runs,
        trip_counts_known=times.known,
        groups=groups,
        instruction=instruction.name,
        op_name=instruction.op_name.rpartition("/")[2],  # inlining prefixes the names of callers
    )


def _is_scattered(all_reduce: Instruction, device_count: int, users: Users) -> bool:
    """Whether each device keeps a slice of its own of the group's sum."""
    slices = find_kept_slices(all_reduce, users)
    return bool(slices) and all(
        _differ_in_groups(all_reduce, slice_instruction, device_count, users) for slice_instruction in slices
    )


def _differ_in_groups(all_reduce: Instruction, dynamic_slice: Instruction, device_count: int, users: Users) -> bool:
    """Whether no two devices of a group take the same slice."""
    attribute = all_reduce.attributes.get("replica_groups")
    groups = attribute.value if attribute is not None and attribute.value else [range(device_count)]
    offsets = slice_offsets(dynamic_slice, device_count, users)
    if offsets is not None:
        return all(len({offsets[device] for device in group}) == len(group) for group in groups)
    parts = dynamic_slice.operands[0].shape.size_bytes // max(1, dynamic_slice.shape.size_bytes)
    return parts % max(map(len, groups)) == 0


def _split_before(scattered: Instruction, device_count: int, users: Users) -> int:
    """Into how many parts the reduce-scatters before this one in a chain have split the array."""
    parts = 1
    before = find_inner_all_reduce(scattered)
    while before is not None:
        if _is_scattered(before, device_count, users):
            parts *= _groups(before, device_count)[0]
        before = find_inner_all_reduce(before)
    return parts


def _groups(instruction: Instruction, device_count: int) -> tuple[int, int, str]:
    """(devices of a group, groups, their text)."""
    pairs = instruction.attributes.get("source_target_pairs")
    if pairs is not None:
        moving = {device for source, target in pairs.value if source != target for device in (source, target)}
        return len(moving), 1, pairs.text
    attribute = instruction.attributes.get("replica_groups")
    if attribute is None or not attribute.value:
        return device_count, 1, "all"
    return max(map(len, attribute.value)), len(attribute.value), attribute.text


def ring_bytes(kind: str, payload_bytes: int, group_size: int) -> int:
    """Bytes one device sends in one collective: 2(n−1)/n of an all-reduce's array, all of a permute's shard, (n−1)/n of
    the others' payload.
    """
    if group_size <= 1:
        return 0
    if kind == "collective-permute":
        return payload_bytes
    rounds = 2 if kind == "all-reduce" else 1
    return round(rounds * payload_bytes * (group_size - 1) / group_size)


# ---- loops -----------------------------------------------------------------
def trip_count(loop: Instruction) -> int | None:
    """How often a while's body runs: XLA's annotation, else a counter compared with a constant."""
    annotation = loop.attributes.get("backend_config")
    if annotation is not None and (match := _KNOWN_TRIPS.search(annotation.text)):
        return int(match[1])
    return _count_trips(loop)


def _count_trips(loop: Instruction) -> int | None:
    """Trip count of `for i in range(start, limit)`: condition `i < limit`, body `i + 1`, start a constant."""
    root = _through(loop.called["condition"][0].root)
    if root.opcode != "compare" or root.get("direction") != "LT" or len(root.operands) != 2:
        return None
    counter, limit = (_through(operand) for operand in root.operands)
    if counter.opcode != "get-tuple-element" or limit.opcode != "constant":
        return None
    start = _element(loop.operands[0], counter.index)
    step = _element(loop.called["body"][0].root, counter.index)
    if start is None or start.opcode != "constant" or not _adds_one(step, counter.index):
        return None
    try:
        return max(0, int(limit.payload) - int(start.payload))
    except ValueError:
        return None


def _through(value: Instruction) -> Instruction:
    while value.opcode in ("copy", "bitcast", "convert") and value.operands:
        value = value.operands[0]
    return value


def _element(value: Instruction, index: int) -> Instruction | None:
    """Element `index` of a tuple with a visible construction."""
    value = _through(value)
    return _through(value.operands[index]) if value.opcode == "tuple" and index < len(value.operands) else None


def _adds_one(step: Instruction | None, index: int) -> bool:
    if step is None or step.opcode != "add":
        return False
    sides = [_through(operand) for operand in step.operands]
    ones = any(side.opcode == "constant" and side.payload == "1" for side in sides)
    return ones and any(side.opcode == "get-tuple-element" and side.index == index for side in sides)
