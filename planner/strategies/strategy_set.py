"""The strategies of a program's instructions as arrays for the search: equal instructions share one set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardwright.cost import compute_time_s
from shardwright.cost.compute import Traffic
from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.costs.prices import FloatArray, IntArray, Prices
from shardwright.planner.rules import OpRule, axes_on
from shardwright.planner.strategies.expansion import (
    AxisChoice,
    Restriction,
    Strategy,
    enumerate_strategies,
    local_results,
    shardings_of,
    stages_of_sum,
    strategies_of,
)
from shardwright.planner.strategies.padding import MaySplit, divides, divides_or_pays, divides_or_pays_along_one
from shardwright.planner.strategies.rule_cache import RuleCache
from shardwright.plans.shardings import TensorSharding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrategySet:
    """All strategies of an instruction on a mesh, as arrays for the search.

    strategies: the strategies.
    operand_ids: [strategies, operand leaves], interned shardings.
    result_ids: [strategies, result leaves], interned shardings.
    time_s: [strategies], seconds of compute and of the reductions of results that cannot stay partial, once.
    compute_s: [strategies], the part of `time_s` for compute inside another instruction's kernel.
    reason: why there are no more strategies; else empty.
    """

    strategies: tuple[Strategy, ...]
    operand_ids: IntArray
    result_ids: IntArray
    time_s: FloatArray
    compute_s: FloatArray
    reason: str = ""

    def __len__(self) -> int:
        return len(self.strategies)

    def subset(self, indices: Sequence[int] | IntArray) -> StrategySet:
        """The strategies at the given indices."""
        return StrategySet(
            strategies=tuple(self.strategies[i] for i in indices),
            operand_ids=self.operand_ids[indices],
            result_ids=self.result_ids[indices],
            time_s=self.time_s[indices],
            compute_s=self.compute_s[indices],
            reason=self.reason,
        )

    def concat(self, other: StrategySet) -> StrategySet:
        """These strategies and others of the same instruction."""
        return replace(
            self,
            strategies=(*self.strategies, *other.strategies),
            operand_ids=np.concatenate([self.operand_ids, other.operand_ids]),
            result_ids=np.concatenate([self.result_ids, other.result_ids]),
            time_s=np.concatenate([self.time_s, other.time_s]),
            compute_s=np.concatenate([self.compute_s, other.compute_s]),
        )

    def with_compute_s(self, compute_s: FloatArray) -> StrategySet:
        """The same with other compute seconds."""
        return replace(self, time_s=self.time_s - self.compute_s + compute_s, compute_s=compute_s)

    def with_launch_s(self, launch_s: float) -> StrategySet:
        """The same for an instruction that ends a kernel: at least `launch_s`."""
        return replace(self, time_s=self.time_s + np.maximum(launch_s - self.compute_s, 0.0))


class StrategyBuilder:
    """Strategy sets of instructions on one mesh; equal instructions share one set.

    pads: dimensions may also be split over one axis that does not divide them; over several, near a chosen strategy.
    pads_along_several: over several axes, always. rules: rule cache, if there is one.
    """

    def __init__(
        self, prices: Prices, *, pads: bool = False, pads_along_several: bool = False, rules: RuleCache | None = None
    ) -> None:
        self.prices = prices
        self._pads = pads
        self._pads_along_several = pads_along_several
        self._sets: dict[object, StrategySet] = {}
        self.rules = rules or RuleCache()
        self._giving: dict[tuple[int, TensorSharding], Strategy | None] = {}

    def may_split(self, *, is_near: bool = False) -> MaySplit:
        """The test for the number of parts of a dimension; is_near: of strategies near a chosen one."""
        if not self._pads:
            return divides
        return divides_or_pays if self._pads_along_several or is_near else divides_or_pays_along_one

    def of_instruction(
        self,
        instruction: Instruction,
        linear: tuple[frozenset[int], ...] = (),
        number: int | None = None,
        near: Restriction | None = None,
        *,
        ends_kernel: bool = False,
        traffic: Traffic | None = None,
    ) -> StrategySet:
        """Strategies by the instruction's rule; the first one is replicated, unless `near` restricts them.

        linear: sets of operand leaves that may be partial sums together. number: of the instruction's signature, by
        `rules`. ends_kernel, traffic: see `cost.compute_time_s`.
        """
        number = self.rules.number(instruction) if number is None else number
        key = (number, linear, near, ends_kernel, traffic)
        strategy_set = self._sets.get(key)
        if strategy_set is None and ends_kernel:
            strategy_set = self.of_instruction(instruction, linear, number, near, traffic=traffic)
            strategy_set = strategy_set.with_launch_s(self.prices.profile.launch_s)
        elif strategy_set is None and traffic is not None:
            strategy_set = self.of_instruction(instruction, linear, number, near)
            strategy_set = strategy_set.with_compute_s(self._compute_seconds(instruction, strategy_set, traffic))
        elif strategy_set is None:
            strategy_set = self._build(instruction, self.rules.of_number(number), linear, near)
        self._sets[key] = strategy_set
        return strategy_set

    def of_value(
        self,
        shape: ArrayShape,
        *,
        partial: bool = False,
        near: Restriction | None = None,
        inside: frozenset[tuple[str, int]] = frozenset(),
    ) -> StrategySet:
        """Every sharding of a forwarded array; with `partial`, also as a partial sum. inside: the manual axes around
        it, which split nothing."""
        key = ("value", shape.dimensions, partial, near, inside)
        strategy_set = self._sets.get(key)
        if strategy_set is None:
            mesh, may_split = self.prices.mesh, self.may_split(is_near=near is not None)
            barred = axes_on(mesh, inside)
            strategy_set = self.of_shardings(tuple(shardings_of(shape, mesh, partial, near, may_split, barred)))
            self._sets[key] = strategy_set
        return strategy_set

    def strategy_giving(self, instruction: Instruction, number: int, result: TensorSharding) -> Strategy | None:
        """A strategy with `result` as the instruction's layout and no reduction; None if there is none.

        number: of the instruction's signature, by `rules`.
        """
        key = (number, result)
        if key not in self._giving:
            self._giving[key] = self._find_giving(instruction, number, result)
        return self._giving[key]

    def _find_giving(self, instruction: Instruction, number: int, result: TensorSharding) -> Strategy | None:
        manual = self.rules.of_number(number).manual
        if manual is not None and not set(axes_on(self.prices.mesh, manual.axes)).isdisjoint(result.axes):
            return None
        places = {axis: dim for dim, axes in enumerate(result.dims) for axis in axes}
        factors = self.rules.of_number(number).factors
        choices = [
            [AxisChoice(factor=factor) for factor in factors if factor.results == (places[axis.name],)]
            if axis.name in places
            else [AxisChoice()]
            for axis in self.prices.mesh.axes
        ]
        candidates = strategies_of(instruction, self.prices.mesh, choices, self.may_split())
        return next(
            (strategy for strategy in candidates if strategy.results == (result,) and not strategy.partial), None
        )

    def of_shardings(self, shardings: tuple[TensorSharding, ...]) -> StrategySet:
        """The given shardings of a forwarded array."""
        strategies = tuple(Strategy(operands=(sharding,), results=(sharding,)) for sharding in shardings)
        return self._set(strategies, np.zeros(len(strategies)), np.zeros(len(strategies)), "")

    def restrict_values(self, strategy_set: StrategySet, near: Restriction) -> StrategySet:
        """The strategies, from no rule, that `near` admits."""
        return strategy_set.subset([i for i, strategy in enumerate(strategy_set.strategies) if near.admits(strategy)])

    def _build(
        self,
        instruction: Instruction,
        rule: OpRule,
        linear: tuple[frozenset[int], ...],
        near: Restriction | None = None,
    ) -> StrategySet:
        """The strategies of a rule, each with its seconds as a part of a fused kernel, whatever that kernel reads."""
        mesh = self.prices.mesh
        may_split = self.may_split(is_near=near is not None)
        strategies = tuple(enumerate_strategies(instruction, rule, mesh, linear, near, may_split))
        compute_s = np.array(
            [
                self.prices.compute_s(instruction, candidate.operands, local_results(candidate), ends_kernel=False)
                for candidate in strategies
            ]
        )
        combined_s = np.array([self._combine_seconds(instruction, strategy) for strategy in strategies])
        return self._set(strategies, compute_s, combined_s, rule.reason if len(strategies) == 1 else "")

    def _compute_seconds(
        self, instruction: Instruction, strategy_set: StrategySet, traffic: Traffic | None
    ) -> FloatArray:
        """The seconds of the same strategies once the instruction's kernel is known to read and write `traffic`."""
        once: dict[tuple[object, ...], float] = {}  # strategies with equal shards
        inputs = [leaf.dimensions for operand in instruction.operands for leaf in operand.shape.leaves]
        outputs = [leaf.dimensions for leaf in instruction.shape.leaves]
        mesh, profile = self.prices.mesh, self.prices.profile
        seconds = []
        for strategy in strategy_set.strategies:
            input_shards = tuple([s.shard_shape(dims, mesh) for dims, s in zip(inputs, strategy.operands, strict=True)])
            output_shards = tuple(
                [s.shard_shape(dims, mesh) for dims, s in zip(outputs, local_results(strategy), strict=True)]
            )
            if (input_shards, output_shards) not in once:
                once[input_shards, output_shards] = compute_time_s(
                    instruction, input_shards, output_shards, profile, traffic=traffic
                )
            seconds.append(once[input_shards, output_shards])
        return np.array(seconds)

    def _set(
        self, strategies: tuple[Strategy, ...], compute_s: FloatArray, combined_s: FloatArray, reason: str
    ) -> StrategySet:
        identify = self.prices.identify
        count = len(strategies)
        return StrategySet(
            strategies=strategies,
            operand_ids=np.array(
                [[identify(s) for s in strategy.operands] for strategy in strategies], np.int64
            ).reshape(count, -1),
            result_ids=np.array([[identify(s) for s in strategy.results] for strategy in strategies], np.int64).reshape(
                count, -1
            ),
            time_s=compute_s + combined_s,
            compute_s=compute_s,
            reason=reason,
        )

    def _combine_seconds(self, instruction: Instruction, strategy: Strategy) -> float:
        """Seconds to combine the devices' results: sums that cannot stay partial, exchanges within the rule."""
        if not strategy.partial and not strategy.exchanges:
            return 0.0
        reduced_s = sum(
            self.prices.reshard_s(leaf, source, target)
            for leaf, *stages in zip(instruction.shape.leaves, *stages_of_sum(strategy), strategy.results, strict=True)
            for source, target in pairwise(stages)
        )
        exchanged_s = sum(self.prices.collective_s(e.kind, e.axes, e.payload_bytes) for e in strategy.exchanges)
        return reduced_s + exchanged_s
