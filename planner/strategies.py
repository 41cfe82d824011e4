"""The ways to compute one instruction on a mesh: its rule's factors, one or none per axis.

A strategy gives each mesh axis a factor of the rule or leaves it idle (the axis
replicates). A contracted factor leaves partial results, which are reduced at once:
to every device (all-reduce), or, for sums, split over a dimension of the result
(reduce-scatter). Both are strategies of their own, which is how ZeRO-like plans
come out of the same search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.prices import FloatArray, IntArray, Prices
from shardwright.planner.rules import Factor, OpRule, denied, rule_of
from shardwright.plans import Mesh, TensorSharding

#: Attributes that say nothing about what an instruction computes.
_IRRELEVANT = frozenset({"metadata", "frontend_attributes", "sharding", "backend_config", "to_apply", "origin"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one mesh axis does: nothing, split a factor, or split it and scatter the sum over `scatter_dim`."""

    factor: Factor | None = None
    scatter_dim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to compute an instruction: shardings per array leaf of the operands as used, and of the result."""

    operands: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]
    partial: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrategySet:
    """All strategies of an instruction on a mesh, as arrays for the search.

    operand_ids: [strategies, operand leaves], result_ids: [strategies, result leaves]: interned shardings.
    time_s: [strategies], seconds of computing and of reducing partial results, once.
    reason: why there is no more to choose from; else empty.
    """

    strategies: tuple[Strategy, ...]
    operand_ids: IntArray
    result_ids: IntArray
    time_s: FloatArray
    reason: str = ""

    def __len__(self) -> int:
        return len(self.strategies)


class StrategyBuilder:
    """Strategy sets of instructions on one mesh; equal instructions share one set."""

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._sets: dict[object, StrategySet] = {}
        self._rules: dict[object, OpRule] = {}

    def rule(self, instruction: Instruction) -> OpRule:
        """The instruction's rule."""
        key = _signature(instruction)
        found = self._rules.get(key)
        if found is None:
            found = self._rules[key] = rule_of(instruction)
        return found

    def of_instruction(self, instruction: Instruction) -> StrategySet:
        """Strategies by the instruction's rule; the first one is replicated."""
        key = _signature(instruction)
        found = self._sets.get(key)
        if found is None:
            found = self._sets[key] = self._build(instruction)
        return found

    def of_value(self, shape: ArrayShape) -> StrategySet:
        """Every even sharding of an array that is only handed on: it is used as it is."""
        key = ("value", shape.dimensions)
        found = self._sets.get(key)
        if found is None:
            found = self._sets[key] = self.of_shardings(even_shardings(shape, self._prices.mesh))
        return found

    def of_shardings(self, shardings: Iterator[TensorSharding] | tuple[TensorSharding, ...]) -> StrategySet:
        """The given shardings of an array that is only handed on."""
        strategies = tuple(Strategy(operands=(sharding,), results=(sharding,)) for sharding in shardings)
        return self._set(strategies, np.zeros(len(strategies)), "")

    def _build(self, instruction: Instruction) -> StrategySet:
        rule = self.rule(instruction)
        strategies = tuple(enumerate_strategies(instruction, rule, self._prices.mesh))
        time_s = np.array([self._time_s(instruction, strategy) for strategy in strategies])
        return self._set(strategies, time_s, rule.reason if len(strategies) == 1 else "")

    def _set(self, strategies: tuple[Strategy, ...], time_s: FloatArray, reason: str) -> StrategySet:
        identify = self._prices.identify
        count = len(strategies)
        return StrategySet(
            strategies=strategies,
            operand_ids=np.array([[identify(s) for s in each.operands] for each in strategies], np.int64).reshape(
                count, -1
            ),
            result_ids=np.array([[identify(s) for s in each.results] for each in strategies], np.int64).reshape(
                count, -1
            ),
            time_s=time_s,
            reason=reason,
        )

    def _time_s(self, instruction: Instruction, strategy: Strategy) -> float:
        before = local_results(strategy)
        compute_s = self._prices.compute_s(instruction, strategy.operands, before)
        leaves = instruction.shape.leaves
        return compute_s + sum(
            self._prices.reshard_s(leaf, source, target)
            for leaf, source, target in zip(leaves, before, strategy.results, strict=True)
        )


def local_results(strategy: Strategy) -> tuple[TensorSharding, ...]:
    """Result shardings before partial results are reduced."""
    if not strategy.partial:
        return strategy.results
    partial = set(strategy.partial)
    return tuple(
        TensorSharding(tuple(tuple(a for a in dim if a not in partial) for dim in s.dims), strategy.partial)
        for s in strategy.results
    )


def even_shardings(shape: ArrayShape, mesh: Mesh) -> Iterator[TensorSharding]:
    """Every way to split the dimensions of `shape` evenly over the mesh axes; replicated first."""
    options = [None, *range(shape.rank)]
    for dims in product(options, repeat=len(mesh.axes)):
        split: list[tuple[str, ...]] = [()] * shape.rank
        for axis, dim in zip(mesh.axes, dims, strict=True):
            if dim is not None:
                split[dim] = (*split[dim], axis.name)
        if all(size % mesh.size(axes) == 0 for size, axes in zip(shape.dimensions, split, strict=True)):
            yield TensorSharding(tuple(split))


def enumerate_strategies(instruction: Instruction, rule: OpRule, mesh: Mesh) -> Iterator[Strategy]:
    """Strategies of `instruction` on `mesh`: each axis takes one factor or none; replicated first.

    Left out: a factor that its axes do not divide, two factors on one dimension of one tensor,
    a scatter over a dimension already split by a minor axis, and what XLA is known to compute wrongly.
    """
    inputs = tuple(leaf for operand in instruction.operands for leaf in operand.shape.leaves)
    results = instruction.shape.leaves
    choices = list(_choices(rule, results))
    seen = set()
    for combination in product(choices, repeat=len(mesh.axes)):
        strategy = _strategy(combination, inputs, results, mesh)
        if strategy is None or strategy in seen:
            continue
        assignment = {axis.name: choice.factor for axis, choice in zip(mesh.axes, combination, strict=True)}
        if any(assignment.values()) and denied(instruction, assignment, mesh):
            continue
        seen.add(strategy)
        yield strategy


def _choices(rule: OpRule, results: tuple[ArrayShape, ...]) -> Iterator[Choice]:
    yield Choice()
    if rule.leafwise:
        return  # tuples and loops: their leaves are values of their own in the graph
    for factor in rule.factors:
        yield Choice(factor=factor)
        if factor.reduction == "add" and len(results) == 1:
            yield from (Choice(factor=factor, scatter_dim=dim) for dim in range(results[0].rank))


def _strategy(
    combination: tuple[Choice, ...], inputs: tuple[ArrayShape, ...], results: tuple[ArrayShape, ...], mesh: Mesh
) -> Strategy | None:
    """The strategy that the axes' choices make together; None where they do not go together."""
    axes_of: dict[str, int] = {}
    for axis, choice in zip(mesh.axes, combination, strict=True):
        if choice.factor is not None:
            axes_of[choice.factor.name] = axes_of.get(choice.factor.name, 1) * axis.size
            if choice.factor.size % axes_of[choice.factor.name]:
                return None
    taken = [(axis.name, choice.factor) for axis, choice in zip(mesh.axes, combination, strict=True) if choice.factor]
    operands = [_split(leaf, i, [(a, f, f.operands) for a, f in taken]) for i, leaf in enumerate(inputs)]
    outputs = [_split(leaf, i, [(a, f, f.results) for a, f in taken]) for i, leaf in enumerate(results)]
    if any(dims is None for dims in (*operands, *outputs)):
        return None
    partial = tuple(axis for axis, factor in taken if factor.contracted)
    for axis, choice in zip(mesh.axes, combination, strict=True):
        if choice.scatter_dim is not None and not _scatter(outputs[0], choice.scatter_dim, axis.name, results[0], mesh):
            return None
    return Strategy(
        operands=tuple(TensorSharding(tuple(dims)) for dims in operands if dims is not None),
        results=tuple(TensorSharding(tuple(dims)) for dims in outputs if dims is not None),
        partial=partial,
    )


def _split(
    leaf: ArrayShape, position: int, taken: list[tuple[str, Factor, tuple[int | None, ...]]]
) -> list[tuple[str, ...]] | None:
    """Axes per dimension of one array leaf; None where two factors meet on one dimension."""
    dims: list[tuple[str, ...]] = [()] * leaf.rank
    owner: dict[int, str] = {}
    for axis, factor, splits in taken:
        dim = splits[position]
        if dim is None:
            continue
        if owner.setdefault(dim, factor.name) != factor.name:
            return None
        dims[dim] = (*dims[dim], axis)
    return dims


def _scatter(dims: list[tuple[str, ...]] | None, dim: int, axis: str, shape: ArrayShape, mesh: Mesh) -> bool:
    """Split `dim` further over `axis`, in place; False where that is uneven or against mesh order."""
    assert dims is not None
    order = [each.name for each in mesh.axes]
    if any(order.index(other) > order.index(axis) for other in dims[dim]):
        return False
    dims[dim] = (*dims[dim], axis)
    return shape.dimensions[dim] % mesh.size(dims[dim]) == 0


def _signature(instruction: Instruction) -> object:
    """What strategies depend on: opcode, shapes, attributes, and what the applied region computes."""
    return (
        instruction.opcode,
        tuple(leaf for operand in instruction.operands for leaf in operand.shape.leaves),
        tuple(o.payload for o in instruction.operands if o.opcode == "constant"),  # a sum from 5 is split otherwise
        instruction.shape.leaves,
        tuple((a.name, a.text) for a in instruction.attributes.values() if a.name not in _IRRELEVANT),
        tuple(
            tuple((inner.opcode, inner.index) for inner in computation)
            for called in instruction.called.values()
            for computation in called
        ),
    )
