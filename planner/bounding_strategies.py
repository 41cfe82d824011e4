"""Strategy sets for bounds: instructions of one structure share them, whatever their sizes.

On three axes an instruction has hundreds of strategies, and a training step hundreds of kinds of instructions that
differ in nothing but sizes that the axes divide alike. What is shared are the layouts; the seconds are each one's own.
`Strategy.choices` are those of the first one: a bound needs none.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import combinations
from math import prod

import numpy as np

from shardwright.hlo import Instruction
from shardwright.planner.prices import Prices
from shardwright.planner.rules import Factor, rule_of
from shardwright.planner.strategies import Near, StrategyBuilder, StrategySet, splits


class BoundingBuilder(StrategyBuilder):
    """Strategy sets on one mesh, for bounds: dimensions are padded over any axes, as in plans descended to."""

    def __init__(self, prices: Prices, *, pads: bool) -> None:
        super().__init__(prices, pads=pads, pads_along_several=True)
        sizes = [axis.size for axis in prices.mesh.axes]
        self._subsets = [axes for count in range(1, len(sizes) + 1) for axes in combinations(sizes, count)]
        self._alike: dict[Hashable, StrategySet] = {}

    def _build(
        self, instruction: Instruction, linear: tuple[frozenset[int], ...], near: Near | None = None
    ) -> StrategySet:
        rule = rule_of(instruction)
        if rule.bordered or near is not None or instruction.opcode == "convolution":  # sizes say more there
            return super()._build(instruction, linear, near)
        leaves = [
            *(leaf for operand in instruction.operands for leaf in operand.shape.leaves),
            *instruction.shape.leaves,
        ]
        key = (
            instruction.opcode,
            rule.leafwise,
            rule.reason,
            linear,
            len(leaves) - len(instruction.shape.leaves),
            tuple(map(self._of_factor, rule.factors)),
            tuple(self._divided(leaf.dimensions) for leaf in leaves),
        )
        known = self._alike.get(key)
        if known is None:
            known = super()._build(instruction, linear, near)
            if not any(strategy.exchanges for strategy in known.strategies):  # their payloads are sizes
                self._alike[key] = known
            return known
        return replace(known, time_s=np.array([self._time_s(instruction, each) for each in known.strategies]))

    def _of_factor(self, factor: Factor) -> Hashable:
        allowed = tuple(splits(factor, axes, self._may_split()) for axes in self._subsets)
        return factor.operands, factor.results, factor.reduction, allowed

    def _divided(self, dims: Sequence[int]) -> Hashable:
        return tuple(tuple(size % prod(axes) == 0 for axes in self._subsets) for size in dims)
