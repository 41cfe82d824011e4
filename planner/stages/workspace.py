"""Workspace of a part of a step: temporary values during its run, beside stored ones."""

from __future__ import annotations

from collections.abc import Collection

from shardwright.planner.graph.dataflow import Leaf
from shardwright.planner.segments.forward_pass import CHOICE_OPCODES
from shardwright.planner.stages.clustering import Clustering
from shardwright.planner.stages.node_costs import StepCosts


def workspaces(coarse: Clustering, measured: StepCosts, stored: Collection[Leaf]) -> list[float]:
    """Bytes of one device, per part: the peak of simultaneously live values of its own, in program order.

    Only operands and results of products, loops and the like count: the compiler fuses all others into their kernels.
    stored: values counted elsewhere. A loop adds the bytes live inside it.
    """
    flow = coarse.flow
    written = {i for i in range(len(flow.nodes)) if flow.nodes[i].instruction.opcode in CHOICE_OPCODES}
    last: dict[Leaf, int] = {}
    for node in flow.nodes:
        for use in node.uses:
            if node.index > use.source[0]:
                last[use.source] = node.index
                if node.index in written:
                    written.add(use.source[0])
    ends: dict[int, list[tuple[int, float]]] = {}
    live, most = [0.0] * len(coarse.parts), [0.0] * len(coarse.parts)
    arguments = set(flow.parameters)
    for node in flow.nodes:
        i = node.index
        part = coarse.first[i]
        if part >= 0 and i not in coarse.once and i not in arguments:
            rows = len(coarse.members(i))
            inside = measured.inside_bytes.get(i, 0.0)
            for leaf in range(len(node.shapes)):
                if i in written and i not in coarse.stacks and (i, leaf) not in stored and (i, leaf) in last:
                    size = measured.shard_bytes((i, leaf)) / rows
                    live[part] += size
                    ends.setdefault(last[i, leaf], []).append((part, size))
            most[part] = max(most[part], live[part] + inside)
        for ended, size in ends.pop(i, ()):
            live[ended] -= size
    return [most[number - part.row] for number, part in enumerate(coarse.parts)]
