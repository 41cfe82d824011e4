"""Mixtures of experts, detected by their products.

A product of dispatched activations with experts' weights has a dimension of the weights in its batch dimensions (`e b c
d, e d h -> e b c h`; Lepikhin et al., 2020). When one operand of a product depends on the batch and the other does not,
its batch dimensions run over experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.planner.graph.dataflow import Dataflow, Leaf
from shardwright.planner.rules import rule_of

_BATCH_DIMS = ("lhs_batch_dims", "rhs_batch_dims")


def find_expert_weights(flow: Dataflow, batch: Iterable[int]) -> dict[int, int]:
    """Nodes of the arguments with experts' weights, each with its expert dimension.

    batch: nodes of the arguments with the batch.
    """
    depends = _batch_dependents(flow, batch)
    expert_dims: dict[int, int] = {}
    for node in flow.nodes:
        if node.is_value or node.instruction.opcode != "dot":
            continue
        whole = [use for use in node.uses if use.source[0] not in depends]
        if len(whole) != 1:
            continue
        (use,) = whole
        for dim in node.instruction.get(_BATCH_DIMS[use.position], ()):
            for argument, at in _origins(flow, use.source, dim):
                expert_dims.setdefault(argument, at)
    return dict(sorted(expert_dims.items()))


def _batch_dependents(flow: Dataflow, batch: Iterable[int]) -> set[int]:
    """Nodes computed from the batch, without arguments updated in place."""
    readers: dict[int, list[int]] = {}
    for node in flow.nodes:
        for use in node.uses:
            readers.setdefault(use.source[0], []).append(node.index)
    arguments = set(flow.parameters)
    dependents, todo = set(batch), list(batch)
    while todo:
        for reader in readers.get(todo.pop(), ()):
            if reader not in dependents and reader not in arguments:
                dependents.add(reader)
                todo.append(reader)
    return dependents


def _origins(flow: Dataflow, leaf: Leaf, dim: int) -> Iterator[tuple[int, int]]:
    """The arguments' dimensions, (node, dimension), tied to a dimension of a value through its operands."""
    arguments = set(flow.parameters)
    todo, seen = [(leaf, dim)], {(leaf, dim)}
    while todo:
        (index, result), at = todo.pop()
        node = flow.nodes[index]
        if index in arguments:
            yield index, at
            continue
        if node.is_value:
            before = [(use.source, at) for use in node.uses]
        else:
            before = [
                (use.source, source_dim)
                for factor in rule_of(node.instruction).factors
                if factor.results[result] == at
                for use in node.uses
                if (source_dim := factor.operands[use.position]) is not None
            ]
        todo += [origin for origin in before if origin not in seen]
        seen.update(before)
