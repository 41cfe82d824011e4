"""A canonical order of nodes: it depends on their computation alone, not on the text's order or on other results."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.graph.value_numbering import operation_key


def canonical_order(flow: Dataflow, nodes: Collection[int]) -> list[int]:
    """`nodes`, each after its operands: depth first, operand by operand, from those without consumers among them,
    deepest first."""
    arguments = set(flow.parameters)
    depth, digests = _depths_and_digests(flow)
    inner = [
        [] if node.index in arguments else [s for use in node.uses if (s := use.source[0]) < node.index]
        for node in flow.nodes
    ]
    needed = [False] * len(flow.nodes)
    for node in reversed(flow.nodes):
        if needed[node.index] or node.index in nodes:
            for source in inner[node.index]:
                needed[source] = True
    ends = sorted((i for i in nodes if not needed[i]), key=lambda i: (-depth[i], digests[i], i))
    order, seen = [], set[int]()
    for end in ends:
        todo = [(end, False)]
        while todo:
            i, is_behind = todo.pop()
            if is_behind:
                order.append(i)
            elif i not in seen:
                seen.add(i)
                todo.append((i, True))
                todo += [(source, False) for source in reversed(inner[i])]
    return [i for i in order if i in nodes]


def _depths_and_digests(flow: Dataflow) -> tuple[list[int], list[bytes]]:
    """Per node, its depth and a digest of its computation."""
    arguments = {node: number for number, node in enumerate(flow.parameters)}
    depths: list[int] = []
    digests: list[bytes] = []
    for node in flow.nodes:
        number = arguments.get(node.index)
        if number is not None:
            depths.append(0)
            digests.append(number.to_bytes(8, "big"))
            continue
        sources = [use.source for use in node.uses if use.source[0] < node.index]
        depths.append(1 + max((depths[source] for source, _ in sources), default=0))
        operands = [(digests[source].hex(), leaf) for source, leaf in sources]
        digests.append(hashlib.blake2b(repr((*operation_key(node), operands)).encode(), digest_size=8).digest())
    return depths, digests
