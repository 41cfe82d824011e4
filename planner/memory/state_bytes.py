"""What values and copies of them take by the states of the variables that decide it: bytes on one device, as arrays."""

from __future__ import annotations

import numpy as np

from shardwright.cost.peak.readers import bytes_turned
from shardwright.planner.costs.prices import FloatArray, IntArray
from shardwright.planner.graph.dataflow import Leaf, Node, Use
from shardwright.planner.memory.budget import Operand, Peak
from shardwright.planner.memory.carried import Reading, argument_of
from shardwright.planner.segments.choices import Graph
from shardwright.planner.segments.layout import Variable


def value_bytes(graph: Graph, leaf: Leaf, *, reduced: bool = False) -> FloatArray:
    """Bytes that an array leaf takes as it is made, by the states of its node.

    reduced: the least it can take for its readers. A partial sum may be scattered as it is reduced (`kept_bytes`).
    """
    made = graph.set_of((leaf[0], -1)).result_ids[:, leaf[1]]
    found = _bytes_by_state(graph, leaf, made)
    return found / graph.prices.summands(made) if reduced and not _lies_as_made(graph, leaf) else found


def kept_bytes(graph: Graph, leaf: Leaf) -> tuple[Variable, FloatArray] | None:
    """Bytes that a partial sum takes besides the least because it is not scattered over all its axes.

    They hang on whom it is reduced for: that variable, and states of the node × of it. None where there are none.
    """
    layout = graph.layout
    made = graph.set_of((leaf[0], -1)).result_ids[:, leaf[1]]
    reader = layout.only_use.get(leaf)
    if _lies_as_made(graph, leaf) or not (leaf in layout.hubs or reader) or graph.prices.summands(made).max() == 1:
        return None
    if leaf in layout.hubs:
        decider, wanted = leaf, graph.set_of(leaf).result_ids[:, 0]
    else:
        assert reader is not None
        decider, wanted = (reader[0], -1), graph.set_of((reader[0], -1)).operand_ids[:, reader[1]]
    kept = graph.prices.summands_unscattered(made, wanted) - 1
    return decider, value_bytes(graph, leaf, reduced=True)[:, None] * kept


def _lies_as_made(graph: Graph, leaf: Leaf) -> bool:
    """Whether no sum is reduced before it is read."""
    return leaf in graph.layout.apart or leaf in graph.layout.handed_on


def hub_bytes(graph: Graph, hub: Leaf) -> FloatArray:
    """Bytes that an array leaf takes as it lies for its readers, by the states of its hub."""
    return _bytes_by_state(graph, hub, graph.set_of(hub).result_ids[:, 0])


def anew_bytes(graph: Graph, node: int, use: Use) -> FloatArray:
    """Bytes of what is made anew for a node that reads it, by the node's states."""
    return _bytes_by_state(graph, use.source, graph.set_of((node, -1)).operand_ids[:, use.position])


def _bytes_by_state(graph: Graph, leaf: Leaf, lies: IntArray) -> FloatArray:
    """Bytes of an array leaf where it lies as each of some states has it."""
    return graph.prices.bytes_per_device(graph.flow.nodes[leaf[0]].shapes[leaf[1]], lies)


def read_bytes(graph: Graph, node: Node, use: Use) -> FloatArray:
    """Bytes of the copy that a node makes of what it reads: states of where it takes that from × of the node; 0 where
    it needs no more than is there."""
    is_hub = graph.layout.source(node, use)[1] >= 0
    found = hub_bytes(graph, use.source) if is_hub else value_bytes(graph, use.source)
    used = anew_bytes(graph, node.index, use)
    return np.where(used[None, :] > found[:, None], np.broadcast_to(used[None, :], (len(found), len(used))), 0.0)


def copy_bytes(graph: Graph, leaf: Leaf) -> FloatArray:
    """Bytes of the copy that a hub makes: states of the node × of the hub; 0 where it needs no more than is there."""
    made, lies = value_bytes(graph, leaf), hub_bytes(graph, leaf)
    return np.where(lies[None, :] > made[:, None], np.broadcast_to(lies[None, :], (len(made), len(lies))), 0.0)


def turned_bytes(graph: Graph, operand: Operand) -> FloatArray:
    """Bytes of an operand's copy in the order that its product's kernel takes, by the product's states."""
    product, ids = graph.flow.nodes[operand[0]].instruction, graph.set_of((operand[0], -1)).operand_ids.tolist()
    lies, mesh = graph.prices.shardings, graph.prices.mesh
    by_ids = {used: bytes_turned(product, operand[1], [lies[i] for i in used], mesh) for used in set(map(tuple, ids))}
    return np.array([by_ids[tuple(used)] for used in ids], np.float64)


def brought_bytes(graph: Graph, operand: Operand) -> FloatArray:
    """Bytes of what an instruction alone has brought to another layout: states of what decides how the value lies × of
    the instruction; 0 where it lies so, or takes more (`read_bytes`)."""
    node, position = operand
    use = graph.flow.nodes[node].uses[position]
    source, leaf = graph.layout.source(graph.flow.nodes[node], use)
    lies = graph.set_of((source, leaf)).result_ids[:, 0 if leaf >= 0 else use.source[1]]
    used = graph.set_of((node, -1)).operand_ids[:, position]
    found, taken = _bytes_by_state(graph, use.source, lies), anew_bytes(graph, node, use)
    is_brought = (lies[:, None] != used[None, :]) & (taken[None, :] <= found[:, None])
    return np.where(is_brought, taken[None, :], 0.0)


def carried_bytes(graph: Graph, reading: Reading) -> FloatArray:
    """Bytes of an argument as it is gathered for a use in a loop: states of the argument × of the node that uses it; 0
    where that needs no more than is there."""
    node, number = reading
    argument = argument_of(graph.flow, reading), 0
    found, taken = value_bytes(graph, argument), anew_bytes(graph, node, graph.flow.nodes[node].uses[number])
    return np.where(taken[None, :] > found[:, None], taken[None, :], 0.0)


def decided_bytes(graph: Graph, peak: Peak, node: int) -> FloatArray | None:
    """Bytes at a peak of what a node makes and of what is made anew or turned for it, by its states, each as often as
    it counts; None where none of that is live there."""
    found: FloatArray | None = None
    reader = graph.flow.nodes[node]
    for leaf in range(len(reader.shapes)):
        if times := peak.times_value((node, leaf)):
            made = times * value_bytes(graph, (node, leaf), reduced=(node, leaf) in peak.reduced)
            found = made if found is None else found + made
    for use in reader.uses:
        if graph.layout.pays_for(reader, use) and (times := peak.times_value(use.source)):
            anew = times * anew_bytes(graph, node, use)
            found = anew if found is None else found + anew
        if times := peak.times_turned((node, use.position)):
            turned = times * turned_bytes(graph, (node, use.position))
            found = turned if found is None else found + turned
    return found
