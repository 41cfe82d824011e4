"""What the parts of a plan's mixtures of experts take."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.cost import flops
from shardwright.planner.graph.dataflow import Node
from shardwright.planner.mixtures.parts import Parts
from shardwright.planner.plans.assemble import Decisions
from shardwright.planner.plans.collectives import node_times_s
from shardwright.planner.strategies.expansion import local_results
from shardwright.plans.mixture_note import MIXTURE_PARTS, MixtureNote
from shardwright.plans.plan import PlannedCollective


def note_mixtures(
    parts: Parts, decisions: Decisions, collectives: Iterable[PlannedCollective], micro_batches: int
) -> tuple[MixtureNote, ...]:
    """A note for each part; none without a mixture."""
    if not parts.mixtures:
        return ()
    time_s, wire_bytes, operations = (dict.fromkeys((*MIXTURE_PARTS, ""), 0.0) for _ in range(3))
    runs: dict[str, float] = {}
    for node, seconds in node_times_s(decisions):
        part = parts.part_of(node.instruction.name)
        time_s[part] += seconds
    for node in decisions.graph.flow.nodes:
        if node.is_value or not node.weight:
            continue
        origin = parts.origin(node.instruction.name)
        operations[parts.part_of(origin)] += node.weight * _flops(node, decisions)
        if origin in parts.mixtures:
            runs[origin] = max(runs.get(origin, 0.0), node.weight)
    for collective in collectives:
        part = parts.part_of(collective.instruction)
        time_s[part] += collective.time_s
        wire_bytes[part] += collective.wire_bytes * collective.count
    rows = sum(parts.mixtures[name] * weight / micro_batches for name, weight in runs.items())
    return tuple(
        MixtureNote(
            part=part,
            mixtures=round(sum(runs.values())),
            rows=round(rows),
            time_s=time_s[part],
            wire_bytes=round(wire_bytes[part]),
            flops=operations[part],
        )
        for part in MIXTURE_PARTS
    )


def _flops(node: Node, decisions: Decisions) -> float:
    """Operations of one run on one device."""
    mesh, strategy = decisions.graph.prices.mesh, decisions.strategies[node.index]
    operands = [leaf for operand in node.instruction.operands for leaf in operand.shape.leaves]
    operand_shapes, result_shapes = (
        [lies.shard_shape(leaf.dimensions, mesh) for leaf, lies in zip(leaves, shardings, strict=True)]
        for leaves, shardings in ((operands, strategy.operands), (node.shapes, local_results(strategy)))
    )
    return flops(node.instruction, operand_shapes, result_shapes)
