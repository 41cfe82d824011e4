"""Coarsens a stage graph: neighbouring parts far shorter than a stage become one.

Only parts with neighbouring numbers are joined: values still go from lower numbers to higher ones. The border with the
most crossing bytes is removed first, while both parts together stay a small fraction of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.planner.stages.stage_graph import NodeCost, SharedState, StageGraph, StageNode, StageValue, of_kind
from shardwright.planner.stages.tuning import GRAIN


def coarsen_graph(graph: StageGraph, chunks: int, micro_batches: int) -> tuple[StageGraph, tuple[int, ...]]:
    """The coarse graph, and per node its number in it."""
    seconds = [node.costs[0].seconds(micro_batches) for node in graph.nodes]
    limit_s = sum(seconds) / (GRAIN * chunks)
    group = list(range(len(seconds)))  # by node: the first node of its group
    end = list(range(1, len(seconds) + 1))  # by first node: where its group ends
    remaining = len(seconds)
    for border in _by_crossing(graph):
        first, second = group[border - 1], group[border]
        if remaining <= chunks or seconds[first] + seconds[second] > limit_s:
            continue
        seconds[first] += seconds[second]
        group[second : end[second]] = [first] * (end[second] - second)
        end[first] = end[second]
        remaining -= 1
    numbers = {first: number for number, first in enumerate(dict.fromkeys(group))}
    of = tuple(numbers[first] for first in group)
    return _join_nodes(graph, of, len(numbers)), of


def _by_crossing(graph: StageGraph) -> list[int]:
    """Borders (between nodes b-1 and b), by bytes crossing, most first."""
    change = [0.0] * (len(graph.nodes) + 1)
    for value in graph.values:
        ends = (value.producer, *value.readers, *value.saved_by)
        change[min(ends) + 1] += value.bytes
        change[max(ends) + 1] -= value.bytes
    crossing, total = [], 0.0
    for delta in change:
        total += delta
        crossing.append(total)
    return sorted(range(1, len(graph.nodes)), key=lambda border: (-crossing[border], border))


def _join_nodes(graph: StageGraph, of: Sequence[int], count: int) -> StageGraph:
    members: list[list[StageNode]] = [[] for _ in range(count)]
    for node, number in zip(graph.nodes, of, strict=True):
        members[number].append(node)
    kinds = len(graph.nodes[0].costs)
    saved_bytes = [[0.0] * count for _ in range(kinds)]
    values = []
    for value in graph.values:
        producer = of[value.producer]
        readers = tuple(sorted({of[reader] for reader in value.readers} - {producer}))
        saved_by = tuple(sorted({of[reader] for reader in value.saved_by}))
        if readers or set(saved_by) - {producer}:
            values.append(
                StageValue(
                    bytes=value.bytes,
                    producer=producer,
                    readers=readers,
                    saved_by=saved_by,
                    shard_bytes=value.shard_bytes,
                    sent_bytes=value.sent_bytes,
                    direction=value.direction,
                )
            )
        elif saved_by:
            for kind in range(kinds):
                saved_bytes[kind][producer] += of_kind(value.shard_bytes, kind)
    shared = []
    for state in graph.shared:
        reading = tuple(sorted({of[reader] for reader in state.readers}))
        if set(reading) - {of[state.owner]}:
            shared.append(
                SharedState(bytes=state.bytes, owner=of[state.owner], readers=reading, shard_bytes=state.shard_bytes)
            )
    nodes = tuple(
        StageNode(
            name=nodes[0].name,
            costs=tuple(
                _together(works, extra[number])
                for works, extra in zip(zip(*(n.costs for n in nodes), strict=True), saved_bytes, strict=True)
            ),
        )
        for number, nodes in enumerate(members)
    )
    return StageGraph(nodes=nodes, values=tuple(values), shared=tuple(shared))


def _together(works: Sequence[NodeCost], saved_bytes: float) -> NodeCost:
    return NodeCost(
        forward_s=sum(work.forward_s for work in works),
        backward_s=sum(work.backward_s for work in works),
        weight_s=sum(work.weight_s for work in works),
        update_s=sum(work.update_s for work in works),
        arrival_s=sum(work.arrival_s for work in works),
        state_bytes=sum(work.state_bytes for work in works),
        saved_bytes=sum(work.saved_bytes for work in works) + saved_bytes,
        delayed_bytes=sum(work.delayed_bytes for work in works),
        workspace_bytes=max(work.workspace_bytes for work in works),
    )
