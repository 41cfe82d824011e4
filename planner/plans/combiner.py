"""Predicts which collectives of a plan a compiler combines, after XLA's combiners.

XLA goes through a computation in order. It combines collectives of one kind over the same groups (sums also of one
element type) while none needs the result of another and the total size of their results stays within a limit; then it
starts a new group (`CombineInstructionsByKey` in `xla/service/collective_combiner_utils.h`).
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
    """A collective as seen by a combiner.

    leaf: the moved value. move: the collective. weight: its executions a step, scaled by the fraction moved.
    """

    leaf: Leaf
    move: Move
    weight: float


@dataclass(slots=True)
class _Open:
    """The group being combined: its number, the bytes of its payload, and its members, as bits."""

    number: int
    payload_bytes: int
    members: int


def combine(collectives: Sequence[Combinable], flow: Dataflow, topology: Topology) -> tuple[int, ...]:
    """Per collective the number of its combined group, from 0, in the order of their first members."""
    waits_for = _dependencies(collectives, flow)
    open_ones: dict[Hashable, _Open] = {}
    numbers: list[int] = []
    count = 0
    for place, collective in enumerate(collectives):
        most_bytes = topology.max_combined_bytes(collective.move.kind, collective.move.group_size)
        payload_bytes = collective.move.payload_bytes
        if payload_bytes > most_bytes:  # XLA leaves out what is too large
            numbers.append(count)
            count += 1
            continue
        key = _key(collective, flow)
        current = open_ones.get(key)
        if current is None or current.payload_bytes + payload_bytes > most_bytes or waits_for[place] & current.members:
            current = open_ones[key] = _Open(count, 0, 0)
            count += 1
        current.payload_bytes += payload_bytes
        current.members |= 1 << place
        numbers.append(current.number)
    return tuple(numbers)


def _key(collective: Combinable, flow: Dataflow) -> Hashable:
    node = flow.nodes[collective.leaf[0]]
    element_type = node.shapes[collective.leaf[1]].element_type if collective.move.kind in _SUMS else ""
    return node.computation, collective.move.kind, element_type, collective.move.atoms


def _dependencies(collectives: Sequence[Combinable], flow: Dataflow) -> list[int]:
    """Per collective its dependencies, as bits. All readers of a value are assumed to read the moved one."""
    moving: defaultdict[Leaf, int] = defaultdict(int)
    for place, collective in enumerate(collectives):
        moving[collective.leaf] |= 1 << place
    before = _before(flow, moving)
    own: defaultdict[Leaf, int] = defaultdict(int)
    waits_for = []
    for place, collective in enumerate(collectives):
        waits_for.append(before[collective.leaf[0]] | own[collective.leaf])
        own[collective.leaf] |= 1 << place
    return waits_for


def _before(flow: Dataflow, moving: Mapping[Leaf, int]) -> list[int]:
    """Per node the moves that its operands depend on. Values fed back to a loop's start existed before the pass."""
    arguments = frozenset(flow.parameters)
    before = [0] * len(flow.nodes)
    for node in flow.nodes:
        if node.index in arguments:
            continue
        moves = 0
        for use in node.uses:
            if use.source[0] < node.index:
                moves |= before[use.source[0]] | moving.get(use.source, 0)
        before[node.index] = moves
    return before
