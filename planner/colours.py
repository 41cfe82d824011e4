"""Which dimensions run along the batch.

A factor of a rule ties the dimensions that it names: split one and the others are split with it. Followed from the
dimension that the batch arguments are split on, through every instruction, these ties reach each activation and each
gradient of one; dropout masks and whatever else meets them element by element join too. Where the batch is
contracted, in the gradient of a weight, the colour ends. (Colours of named dimensions: TOAST, Alabed et al., 2025.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardwright.hlo import Instruction
from shardwright.planner.dataflow import Dataflow, Leaf, Node
from shardwright.planner.rules import OpRule

#: Per array leaf of one node's result, the dimensions of the colour.
NodeDims = tuple[frozenset[int], ...]


def _tie_value(ties: Ties, node: Node, is_free: Sequence[bool]) -> None:
    for use in node.uses:
        if not is_free[use.source[0]]:
            for dim in range(node.shapes[0].rank):
                ties.tie(ties.of(use.source, dim), ties.of((node.index, 0), dim))


def _tie_factors(ties: Ties, node: Node, rule: OpRule, is_free: Sequence[bool]) -> None:
    sources = [None if is_free[use.source[0]] else use.source for use in node.uses]
    for factor in rule.factors:
        tied = [
            ties.of(source, dim)
            for source, dim in zip(sources, factor.operands, strict=True)
            if source is not None and dim is not None
        ]
        tied += [ties.of((node.index, leaf), dim) for leaf, dim in enumerate(factor.results) if dim is not None]
        for other in tied[1:]:
            ties.tie(tied[0], other)


class Ties:
    """Which dimensions of a program's array leaves are tied together.

    is_free: nodes that are made anew for each reader; they tie nothing together.
    """

    def __init__(self, flow: Dataflow, is_free: Sequence[bool], rule_of: Callable[[Instruction], OpRule]) -> None:
        self._nodes = flow.nodes
        self._first: list[list[int]] = []
        count = 0
        for node in flow.nodes:
            self._first.append([])
            for shape in node.shapes:
                self._first[-1].append(count)
                count += shape.rank
        self._above = list(range(count))  # a forest: towards what stands for all that is tied together
        for node in flow.nodes:
            if is_free[node.index]:
                continue
            if node.is_value:
                _tie_value(self, node, is_free)
            else:
                _tie_factors(self, node, rule_of(node.instruction), is_free)

    def dims(self, seeds: Iterable[tuple[int, int]]) -> list[NodeDims]:
        """Dimensions tied to `seeds`, (node, dimension) pairs of first leaves, per node and leaf of its result."""
        wanted = {self.find(self.of((node, 0), dim)) for node, dim in seeds}
        return [
            tuple(
                frozenset(dim for dim in range(shape.rank) if self.find(self.of((node.index, leaf), dim)) in wanted)
                for leaf, shape in enumerate(node.shapes)
            )
            for node in self._nodes
        ]

    def of(self, leaf: Leaf, dim: int) -> int:
        node, i = leaf
        return self._first[node][i] + dim

    def find(self, number: int) -> int:
        """What stands for all dimensions tied to `number`."""
        above = self._above
        while above[number] != number:
            above[number] = number = above[above[number]]
        return number

    def tie(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self._above[max(a, b)] = min(a, b)
