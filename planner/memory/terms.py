"""What values and copies of them take by the states of the variables that decide it: bytes on one device, as arrays."""

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
    """Bytes that an array leaf takes as it is made, by the states of its node.

    reduced: the least it can take for its readers. A partial sum may be scattered as it is reduced
    (`partial_sum_bytes`).
    """
    made = graph.set_of((leaf[0], -1)).result_ids[:, leaf[1]]
    found = _bytes_by_state(graph, leaf, made)
    return found / graph.prices.summands(made) if reduced and not _is_stored_as_made(graph, leaf) else found


def partial_sum_bytes(graph: CostGraph, leaf: Leaf) -> tuple[Variable, FloatArray] | None:
    """Bytes that a partial sum takes besides the least because it is not scattered over all its axes.

    They hang on whom it is reduced for: that variable, and states of the node × of it. None where there are none.
    """
    layout = graph.variables
    made = graph.set_of((leaf[0], -1)).result_ids[:, leaf[1]]
    reader = layout.single_use.get(leaf)
    if (
        _is_stored_as_made(graph, leaf)
        or not (leaf in layout.shared_layouts or reader)
        or graph.prices.summands(made).max() == 1
    ):
        return None
    if leaf in layout.shared_layouts:
        decider, wanted = leaf, graph.set_of(leaf).result_ids[:, 0]
    else:
        assert reader is not None
        decider, wanted = (reader[0], -1), graph.set_of((reader[0], -1)).operand_ids[:, reader[1]]
    kept = graph.prices.summands_unscattered(made, wanted) - 1
    return decider, value_bytes(graph, leaf, reduced=True)[:, None] * kept


def _is_stored_as_made(graph: CostGraph, leaf: Leaf) -> bool:
    """Whether no sum is reduced before it is read."""
    return leaf in graph.variables.after_loops or leaf in graph.variables.forwarded_values


def layout_bytes(graph: CostGraph, hub: Leaf) -> FloatArray:
    """Bytes that an array leaf takes as it lies for its readers, by the states of its hub."""
    return _bytes_by_state(graph, hub, graph.set_of(hub).result_ids[:, 0])


def operand_bytes(graph: CostGraph, node: int, use: Use) -> FloatArray:
    """Bytes of what is made anew for a node that reads it, by the node's states."""
    return _bytes_by_state(graph, use.source, graph.set_of((node, -1)).operand_ids[:, use.position])


def _bytes_by_state(graph: CostGraph, leaf: Leaf, lies: IntArray) -> FloatArray:
    """Bytes of an array leaf where it lies as each of some states has it."""
    return graph.prices.bytes_per_device(graph.flow.nodes[leaf[0]].shapes[leaf[1]], lies)


def reader_copy_bytes(graph: CostGraph, node: Node, use: Use) -> FloatArray:
    """Bytes of the copy that a node makes of what it reads: states of where it takes that from × of the node; 0 where
    it needs no more than is there."""
    is_hub = graph.variables.source(node, use)[1] >= 0
    found = layout_bytes(graph, use.source) if is_hub else value_bytes(graph, use.source)
    used = operand_bytes(graph, node.index, use)
    return np.where(used[None, :] > found[:, None], np.broadcast_to(used[None, :], (len(found), len(used))), 0.0)


def layout_copy_bytes(graph: CostGraph, leaf: Leaf) -> FloatArray:
    """Bytes of the copy that a hub makes: states of the node × of the hub; 0 where it needs no more than is there."""
    made, lies = value_bytes(graph, leaf), layout_bytes(graph, leaf)
    return np.where(lies[None, :] > made[:, None], np.broadcast_to(lies[None, :], (len(made), len(lies))), 0.0)


def transpose_bytes(graph: CostGraph, operand: Operand) -> FloatArray:
    """Bytes of an operand's copy in the order that its product's kernel takes, by the product's states."""
    product, ids = graph.flow.nodes[operand[0]].instruction, graph.set_of((operand[0], -1)).operand_ids.tolist()
    lies, mesh = graph.prices.shardings, graph.prices.mesh
    by_ids = {
        used: operand_copy_bytes(product, operand[1], [lies[i] for i in used], mesh) for used in set(map(tuple, ids))
    }
    return np.array([by_ids[tuple(used)] for used in ids], np.float64)


def reshard_bytes(graph: CostGraph, operand: Operand) -> FloatArray:
    """Bytes of what an instruction alone has brought to another layout: states of what decides how the value lies × of
    the instruction; 0 where it lies so, or takes more (`reader_copy_bytes`)."""
    node, position = operand
    use = graph.flow.nodes[node].uses[position]
    source, leaf = graph.variables.source(graph.flow.nodes[node], use)
    lies = graph.set_of((source, leaf)).result_ids[:, 0 if leaf >= 0 else use.source[1]]
    used = graph.set_of((node, -1)).operand_ids[:, position]
    found, taken = _bytes_by_state(graph, use.source, lies), operand_bytes(graph, node, use)
    is_brought = (lies[:, None] != used[None, :]) & (taken[None, :] <= found[:, None])
    return np.where(is_brought, taken[None, :], 0.0)


def loop_gather_bytes(graph: CostGraph, reading: LoopUse) -> FloatArray:
    """Bytes of an argument as it is gathered for a use in a loop: states of the argument × of the node that uses it; 0
    where that needs no more than is there."""
    node, number = reading
    argument = argument_of_use(graph.flow, reading), 0
    found, taken = value_bytes(graph, argument), operand_bytes(graph, node, graph.flow.nodes[node].uses[number])
    return np.where(taken[None, :] > found[:, None], taken[None, :], 0.0)


def node_bytes(graph: CostGraph, peak: MemoryConstraint, node: int) -> FloatArray | None:
    """Bytes at a peak of what a node makes and of what is made anew or turned for it, by its states, each as often as
    it counts; None where none of that is live there."""
    found: FloatArray | None = None
    reader = graph.flow.nodes[node]
    for leaf in range(len(reader.shapes)):
        if times := peak.value_weight((node, leaf)):
            made = times * value_bytes(graph, (node, leaf), reduced=(node, leaf) in peak.reduced_values)
            found = made if found is None else found + made
    for use in reader.uses:
        if graph.variables.pays_for(reader, use) and (times := peak.value_weight(use.source)):
            anew = times * operand_bytes(graph, node, use)
            found = anew if found is None else found + anew
        if times := peak.transpose_weight((node, use.position)):
            turned = times * transpose_bytes(graph, (node, use.position))
            found = turned if found is None else found + turned
    return found
