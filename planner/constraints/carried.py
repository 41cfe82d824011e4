"""Decisions of an earlier plan, carried over to a program that may differ from the plan's own.

An instruction with a partner in the earlier program (`graph.matching`) keeps the strategies that the plan's entry
describes: operands as used, result, partial sums. One without a partner, or none of whose strategies is the entry's (a
size that an axis does not divide any more), is free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardwright.hlo import Instruction, Module
from shardwright.planner.graph.dataflow import Dataflow, Node
from shardwright.planner.graph.matching import Matching, match_instructions, match_names
from shardwright.planner.strategies.expansion import Strategy
from shardwright.planner.strategies.legality import flat
from shardwright.planner.strategies.strategy_set import StrategySet
from shardwright.plans.plan import InstructionPlan, Plan
from shardwright.plans.shardings import TensorSharding


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedPlan:
    """A plan with the module it planned, as a source of decisions. module: None where the plan came without it."""

    plan: Plan
    module: Module | None
    _known: list[tuple[Module, CarriedDecisions]] = field(default_factory=list)

    def on(self, flow: Dataflow) -> CarriedDecisions:
        """Its decisions for the instructions of another program."""
        for module, decisions in self._known:
            if module is flow.module:
                return decisions
        entries = {entry.name: entry for entry in self.plan.instructions}
        partners = self.match(flow.module).partners
        decisions = CarriedDecisions(
            entries={new: entries[old] for new, old in partners.items() if old in entries},
        )
        self._known.append((flow.module, decisions))
        return decisions

    def match(self, module: Module) -> Matching:
        """Which instructions of another program are the plan's."""
        if self.module is None:
            return match_names({entry.name: entry.opcode for entry in self.plan.instructions}, module)
        return match_instructions(self.module, module)


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedDecisions:
    """Narrows the strategies of a program's instructions to what the entries of their partners say.

    entries: instruction → entry of its partner.
    """

    entries: dict[Instruction, InstructionPlan]
    _narrowed: dict[tuple[int, object], StrategySet | None] = field(default_factory=dict)
    _kept_alive: list[StrategySet] = field(default_factory=list)

    def key(self, node: Node) -> tuple[object, ...]:
        """All that `narrow` depends on, besides the strategies."""
        entry = self.entries.get(node.instruction)
        if entry is None:
            return ("free",)
        return ("carried", entry.operands, entry.result, entry.partial, node.leaf, node.is_value)

    def narrow(self, node: Node, strategy_set: StrategySet) -> StrategySet:
        """The strategies of `strategy_set` that follow the entry; all of them where there is none."""
        entry = self.entries.get(node.instruction)
        if entry is None:
            return strategy_set
        key = (id(strategy_set), self.key(node))
        if key not in self._narrowed:
            self._kept_alive.append(strategy_set)  # an id is valid only while its object lives
            chosen = [i for i, strategy in enumerate(strategy_set.strategies) if _follows(strategy, entry, node)]
            self._narrowed[key] = strategy_set.subset(np.array(chosen, np.int64)) if chosen else None
        narrowed = self._narrowed[key]
        return strategy_set if narrowed is None else narrowed


def _follows(strategy: Strategy, entry: InstructionPlan, node: Node) -> bool:
    if node.is_value:
        return entry.result[node.leaf : node.leaf + 1] == strategy.results
    return (
        flat(entry.operands) == strategy.operands
        and len(entry.result) == len(strategy.results)
        and all(
            _becomes(local, result, entry.partial) for local, result in zip(strategy.results, entry.result, strict=True)
        )
    )


def _becomes(local: TensorSharding, result: TensorSharding, summed: tuple[str, ...]) -> bool:
    """Whether a result computed as `local` is `result` once it is summed over some axes, and scattered perhaps."""
    return _without(local, summed) == _without(result, summed) and set(result.unreduced) <= set(local.unreduced)


def _without(sharding: TensorSharding, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis for axis in dim if axis not in axes) for dim in sharding.dims)
