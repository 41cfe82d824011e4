"""Bytes on one device of values and copies, as arrays over the states of the deciding variables."""

from __future__ import annotations

import numpy as np

from shardwright.cost.peak.copy_readers import operand_copy_bytes
from shardwright.planner.costs.prices import FloatArray, IntArray
from shardwright.planner.graph.dataflow import Leaf, Node, Use
from shardwright.planner.memory.constraint import MemoryConstraint, Operand
from shardwright.planner.memory.loop_gathers import LoopUse, argument_of_use
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.variables import Variable


def value_bytes(graph: CostGraph, leaf: Leaf, *, reduced: bool = False) -> FloatArray:
    """Bytes of an array leaf in its producer's sharding, by the states of its node.

    reduced: the minimum over its readers; a partial sum may be reduce-scattered (`partial_sum_bytes`).
    """
    shardings = graph.set_of((leaf[0], -1)).result_ids[:, leaf[1]]
    sizes = _bytes_by_state(graph, leaf, shardings)
    return sizes / graph.prices.summands(shardings) if reduced and not _is_stored_as_made(graph, leaf) else sizes


def partial_sum_bytes(graph: CostGraph, leaf: Leaf) -> tuple[Variable, FloatArray] | None:
    """Extra bytes of a partial sum not scattered over all its axes: the variable of its reader, and an array of states
    of the node × of that variable. None without any."""
    layout = graph.variables
    shardings = graph.set_of((leaf[0], -1)).result_ids[:, leaf[1]]
    reader = layout.single_use.get(leaf)
    if (
        _is_stored_as_made(graph, leaf)
        or not (leaf in layout.shared_layouts or reader)
        or graph.prices.summands(shardings).max() == 1
    ):
        return None
    if leaf in layout.shared_layouts:
        decider, wanted = leaf, graph.set_of(leaf).result_ids[:, 0]
    else:
        assert reader is not None
        decider, wanted = (reader[0], -1), graph.set_of((reader[0], -1)).operand_ids[:, reader[1]]
    unscattered = graph.prices.summands_unscattered(shardings, wanted) - 1
    return decider, value_bytes(graph, leaf, reduced=True)[:, None] * unscattered


def _is_stored_as_made(graph: CostGraph, leaf: Leaf) -> bool:
    """Whether the value is read without a reduction."""
    return leaf in graph.variables.after_loops or leaf in graph.variables.forwarded_values


def layout_bytes(graph: CostGraph, hub: Leaf) -> FloatArray:
    """Bytes of an array leaf in its shared layout, by the states of that layout."""
    return _bytes_by_state(graph, hub, graph.set_of(hub).result_ids[:, 0])


def operand_bytes(graph: CostGraph, node: int, use: Use) -> FloatArray:
    """Bytes of an operand in a node's sharding of it, by the node's states."""
    return _bytes_by_state(graph, use.source, graph.set_of((node, -1)).operand_ids[:, use.position])


def _bytes_by_state(graph: CostGraph, leaf: Leaf, sharding_ids: IntArray) -> FloatArray:
    """Bytes of an array leaf in each of some shardings."""
    return graph.prices.bytes_per_device(graph.flow.nodes[leaf[0]].shapes[leaf[1]], sharding_ids)


def reader_copy_bytes(graph: CostGraph, node: Node, use: Use) -> FloatArray:
    """Bytes of a node's copy of an operand: states of the source variable × of the node; 0 unless larger than the
    source."""
    is_hub = graph.variables.source(node, use)[1] >= 0
    stored = layout_bytes(graph, use.source) if is_hub else value_bytes(graph, use.source)
    used = operand_bytes(graph, node.index, use)
    return np.where(used[None, :] > stored[:, None], np.broadcast_to(used[None, :], (len(stored), len(used))), 0.0)


def layout_copy_bytes(graph: CostGraph, leaf: Leaf) -> FloatArray:
    """Bytes of the copy in a shared layout: states of the node × of the layout; 0 unless larger than the original."""
    stored, shared = value_bytes(graph, leaf), layout_bytes(graph, leaf)
    return np.where(
        shared[None, :] > stored[:, None], np.broadcast_to(shared[None, :], (len(stored), len(shared))), 0.0
    )


def transpose_bytes(graph: CostGraph, operand: Operand) -> FloatArray:
    """Bytes of an operand's copy in the dimension order of its product's kernel, by the product's states."""
    product, ids = graph.flow.nodes[operand[0]].instruction, graph.set_of((operand[0], -1)).operand_ids.tolist()
    layouts, mesh = graph.prices.shardings, graph.prices.mesh
    by_ids = {
        used: operand_copy_bytes(product, operand[1], [layouts[i] for i in used], mesh) for used in set(map(tuple, ids))
    }
    return np.array([by_ids[tuple(used)] for used in ids], np.float64)


def reshard_bytes(graph: CostGraph, operand: Operand) -> FloatArray:
    """Bytes of an operand resharded for one instruction: states of the source variable × of the instruction; 0 with
    equal shardings, or when larger (`reader_copy_bytes`)."""
    node, position = operand
    use = graph.flow.nodes[node].uses[position]
    source, leaf = graph.variables.source(graph.flow.nodes[node], use)
    stored = graph.set_of((source, leaf)).result_ids[:, 0 if leaf >= 0 else use.source[1]]
    used = graph.set_of((node, -1)).operand_ids[:, position]
    stored_bytes, used_bytes = _bytes_by_state(graph, use.source, stored), operand_bytes(graph, node, use)
    is_brought = (stored[:, None] != used[None, :]) & (used_bytes[None, :] <= stored_bytes[:, None])
    return np.where(is_brought, used_bytes[None, :], 0.0)


def loop_gather_bytes(graph: CostGraph, reading: LoopUse) -> FloatArray:
    """Bytes of an argument gathered for a use in a loop: states of the argument × of the using node; 0 unless larger
    than the argument."""
    node, number = reading
    argument = argument_of_use(graph.flow, reading), 0
    stored, used = value_bytes(graph, argument), operand_bytes(graph, node, graph.flow.nodes[node].uses[number])
    return np.where(used[None, :] > stored[:, None], used[None, :], 0.0)


def node_bytes(graph: CostGraph, peak: MemoryConstraint, node: int) -> FloatArray | None:
    """Weighted bytes at a peak of a node's results and of its recomputed or transposed operands, by its states; None
    when none is live there."""
    total: FloatArray | None = None
    reader = graph.flow.nodes[node]
    for leaf in range(len(reader.shapes)):
        if times := peak.value_weight((node, leaf)):
            results = times * value_bytes(graph, (node, leaf), reduced=(node, leaf) in peak.reduced_values)
            total = results if total is None else total + results
    for use in reader.uses:
        if graph.variables.pays_for(reader, use) and (times := peak.value_weight(use.source)):
            operands = times * operand_bytes(graph, node, use)
            total = operands if total is None else total + operands
        if times := peak.transpose_weight((node, use.position)):
            turned = times * transpose_bytes(graph, (node, use.position))
            total = turned if total is None else total + turned
    return total
