"""The collectives of a plan that a compiler combines, by following XLA's combiners.

XLA goes through a computation in order and combines collectives of one kind over the same groups (sums also of one
element type) as long as none needs the result of another and their results take no more than a limit together; then it
begins anew (`CombineInstructionsByKey` in `xla/service/collective_combiner_utils.h`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.cost import Move, Topology
from shardwright.planner.graph.dataflow import Dataflow, Leaf

#: Kinds that add up: XLA combines them by element type, too.
_SUMS = frozenset({"all-reduce", "reduce-scatter"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Combinable:
    """A collective as a combiner sees it.

    leaf: the value that it moves. weight: its executions a step, as far as they move all of it.
    """

    leaf: Leaf
    move: Move
    weight: float


@dataclass(slots=True)
class _Open:
    """What is being combined: its number, the bytes of its payload, and its members, as bits."""

    number: int
    payload_bytes: int
    members: int


def combine(collectives: Sequence[Combinable], flow: Dataflow, topology: Topology) -> tuple[int, ...]:
    """Per collective the number of the combined one that it is part of, from 0, in the order of their first members."""
    waits_for = _dependencies(collectives, flow)
    open_ones: dict[Hashable, _Open] = {}
    numbers: list[int] = []
    count = 0
    for place, each in enumerate(collectives):
        most_bytes = topology.max_combined_bytes(each.move.kind, each.move.group_size)
        payload_bytes = each.move.payload_bytes
        if payload_bytes > most_bytes:  # XLA leaves out what is too large
            numbers.append(count)
            count += 1
            continue
        key = _key(each, flow)
        current = open_ones.get(key)
        if current is None or current.payload_bytes + payload_bytes > most_bytes or waits_for[place] & current.members:
            current = open_ones[key] = _Open(count, 0, 0)
            count += 1
        current.payload_bytes += payload_bytes
        current.members |= 1 << place
        numbers.append(current.number)
    return tuple(numbers)


def _key(each: Combinable, flow: Dataflow) -> Hashable:
    node = flow.nodes[each.leaf[0]]
    element_type = node.shapes[each.leaf[1]].element_type if each.move.kind in _SUMS else ""
    return node.computation, each.move.kind, element_type, each.move.atoms


def _dependencies(collectives: Sequence[Combinable], flow: Dataflow) -> list[int]:
    """Per collective those that it waits for, as bits. All readers of a value are taken to read it as moved."""
    moving: defaultdict[Leaf, int] = defaultdict(int)
    for place, each in enumerate(collectives):
        moving[each.leaf] |= 1 << place
    before = _before(flow, moving)
    own: defaultdict[Leaf, int] = defaultdict(int)
    waits_for = []
    for place, each in enumerate(collectives):
        waits_for.append(before[each.leaf[0]] | own[each.leaf])
        own[each.leaf] |= 1 << place
    return waits_for


def _before(flow: Dataflow, moving: Mapping[Leaf, int]) -> list[int]:
    """Per node the moves that its operands come of. What a loop hands back to its start was there before the pass."""
    arguments = frozenset(flow.parameters)
    before = [0] * len(flow.nodes)
    for node in flow.nodes:
        if node.index in arguments:
            continue
        found = 0
        for use in node.uses:
            if use.source[0] < node.index:
                found |= before[use.source[0]] | moving.get(use.source, 0)
        before[node.index] = found
    return before
