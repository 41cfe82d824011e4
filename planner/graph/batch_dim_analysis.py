"""Which dimensions run along the batch.

A factor of a rule ties its dimensions together: splitting one splits the others. Starting at the batch dimension of the
batch arguments, these ties reach each activation and its gradient through every instruction; dropout masks and other
operands of elementwise operations join too. The colour ends where the batch is contracted: in a weight's gradient.
(Colours of named dimensions: TOAST, Alabed et al., 2025.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardwright.hlo import Instruction
from shardwright.planner.graph.dataflow import Dataflow, Leaf, Node
from shardwright.planner.rules import OpRule

#: Per array leaf of one node's result, the dimensions of the colour.
NodeDims = tuple[frozenset[int], ...]


#: Dimensions that a factor ties together: of operand leaves by position, and of result leaves.
_TiedGroup = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]


def _ties_of_factors(rule: OpRule) -> tuple[_TiedGroup, ...]:
    """Per factor of a rule, its tied dimensions, if more than one."""
    groups = []
    for factor in rule.factors:
        operands, results = (
            tuple([(place, dim) for place, dim in enumerate(dims) if dim is not None])
            for dims in (factor.operands, factor.results)
        )
        if len(operands) + len(results) > 1:
            groups.append((operands, results))
    return tuple(groups)


class TiedDims:
    """Tied dimensions of a program's array leaves (union-find).

    is_free: nodes rematerialized per consumer; they tie nothing together.
    """

    def __init__(self, flow: Dataflow, is_free: Sequence[bool], rule_of: Callable[[Instruction], OpRule]) -> None:
        self._nodes = flow.nodes
        self._first: list[list[int]] = []
        count = 0
        for node in flow.nodes:
            self._first.append([])
            for shape in node.shapes:
                self._first[-1].append(count)
                count += len(shape.dimensions)
        self._above = list(range(count))  # a forest: towards the representative of each tied group
        #: By identity of the rule: equal instructions share it, and the entry keeps it alive.
        tied_by: dict[int, tuple[OpRule, tuple[_TiedGroup, ...]]] = {}
        for node in flow.nodes:
            if is_free[node.index]:
                continue
            if node.is_value:
                self._tie_value(node, is_free)
                continue
            rule = rule_of(node.instruction)
            if id(rule) not in tied_by:
                tied_by[id(rule)] = rule, _ties_of_factors(rule)
            self._tie_factors(node, tied_by[id(rule)][1], is_free)

    def _tie_value(self, node: Node, is_free: Sequence[bool]) -> None:
        for use in node.uses:
            if not is_free[use.source[0]]:
                for dim in range(node.shapes[0].rank):
                    self.tie(self.of(use.source, dim), self.of((node.index, 0), dim))

    def _tie_factors(self, node: Node, tied: Sequence[_TiedGroup], is_free: Sequence[bool]) -> None:
        first, uses, mine = self._first, node.uses, self._first[node.index]
        for operands, results in tied:
            last = -1
            for place, dim in operands:
                source, leaf = uses[place].source
                if not is_free[source]:
                    number = first[source][leaf] + dim
                    if last >= 0:
                        self.tie(last, number)
                    last = number
            for leaf, dim in results:
                number = mine[leaf] + dim
                if last >= 0:
                    self.tie(last, number)
                last = number

    def dims(self, seeds: Iterable[tuple[int, int]]) -> list[NodeDims]:
        """Dimensions tied to `seeds`, (node, dimension) pairs of first leaves, per node and leaf of its result."""
        wanted = {self.find(self.of((node, 0), dim)) for node, dim in seeds}
        is_tied: list[bool] = []
        for number, above in enumerate(self._above):  # a representative comes first
            is_tied.append(number in wanted if above == number else is_tied[above])
        sets: dict[tuple[bool, ...], frozenset[int]] = {}  # few, for many leaves

        def dims_from(first: int, rank: int) -> frozenset[int]:
            is_wanted = tuple(is_tied[first : first + rank])
            if is_wanted not in sets:
                sets[is_wanted] = frozenset([dim for dim in range(rank) if is_wanted[dim]])
            return sets[is_wanted]

        return [
            tuple([dims_from(first, len(shape.dimensions)) for first, shape in zip(firsts, node.shapes, strict=True)])
            for firsts, node in zip(self._first, self._nodes, strict=True)
        ]

    def of(self, leaf: Leaf, dim: int) -> int:
        node, i = leaf
        return self._first[node][i] + dim

    def find(self, number: int) -> int:
        """The representative of all dimensions tied to `number`."""
        above = self._above
        while above[number] != number:
            above[number] = number = above[above[number]]
        return number

    def tie(self, a: int, b: int) -> None:
        above = self._above
        while above[a] != a:  # `find`, inlined: calls would cost more than the work
            above[a] = a = above[above[a]]
        while above[b] != b:
            above[b] = b = above[above[b]]
        if a < b:
            above[b] = a
        else:
            above[a] = b
