"""Between a fast plan that needs too much memory and a slower one that fits: parts of the one, parts of the other.

Where two plans of one chain differ, the variables that differ fall into groups that no move connects: what stands
between two groups is the same in both plans. So each group can be taken from either plan, whatever the others
do, and what that changes adds up: seconds, and bytes at every peak. Which groups come from which plan is then a
knapsack problem with few rows, an integer program of a group each. A price of memory cannot tell such plans apart: it
finds those that are cheapest at some price, and between two of them there may be many that are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.errors import PlanError
from shardwright.planner import ilp
from shardwright.planner.budget import Peak
from shardwright.planner.carried import argument_of
from shardwright.planner.chain import Chain
from shardwright.planner.graph import Graph
from shardwright.planner.layout import Variable
from shardwright.planner.pbqp import Problem
from shardwright.planner.state_bytes import (
    brought_bytes,
    carried_bytes,
    copy_bytes,
    decided_bytes,
    kept_bytes,
    read_bytes,
)
from shardwright.planner.strategy_sets import StrategySet

States = Mapping[Variable, int]

#: Relative gap to which the knapsack is solved, and the groups of the largest one: what saves least is left as it is
#: in the plan that fits.
CLOSE = 1e-3
MOST_GROUPS = 400

#: Seconds the knapsack may take; it takes milliseconds.
_TIME_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Variables that two plans decide otherwise, and what taking them from the second plan instead of the first adds.

    bytes_at: at each of some peaks.
    """

    variables: tuple[Variable, ...]
    seconds: float
    bytes_at: tuple[float, ...]


def of_one_chain(
    first: tuple[Chain, States], second: tuple[Chain, States]
) -> tuple[Chain, dict[Variable, int], dict[Variable, int]]:
    """Two plans on one mesh as plans of one chain: of theirs, or where each was descended to by itself, of one that has
    nothing but what the two decide."""
    (chain, states), (other, other_states) = first, second
    if chain.graph is other.graph:
        return chain, dict(states), dict(other_states)
    assert chain.graph.prices is other.graph.prices, "both chains number layouts alike"
    made: dict[tuple[int, int, int, int], StrategySet] = {}  # equal pairs share one set
    sets: dict[Variable, StrategySet] = {}
    for variable, state in states.items():
        mine, others, number = chain.graph.set_of(variable), other.graph.set_of(variable), other_states[variable]
        key = id(mine), state, id(others), number
        if key not in made:
            made[key] = mine.only([state])
            if mine.strategies[state] != others.strategies[number]:
                made[key] = made[key].joined(others.only([number]))
        sets[variable] = made[key]
    kinds: dict[tuple[int, tuple[int, ...]], int] = {}
    instances = []
    for instance in chain.instances:
        what = instance.kind, tuple(id(sets[variable]) for variable in instance.variables)
        instances.append(replace(instance, kind=kinds.setdefault(what, len(kinds))))
    graph = replace(chain.graph, near={}, alike={}, _sets=sets, _least_s={})
    both = Chain(graph=graph, instances=instances, runs=chain.runs)
    return both, dict.fromkeys(sets, 0), {variable: len(found) - 1 for variable, found in sets.items()}


def groups_between(chain: Chain, first: States, second: States, peaks: Sequence[Peak]) -> list[Group]:
    """The groups in which two plans of a chain differ, in the program's order."""
    different = [variable for variable in first if first[variable] != second[variable]]
    number = {variable: i for i, variable in enumerate(different)}
    parent = list(range(len(different)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    seconds = [0.0] * len(different)
    for segment, instance in enumerate(chain.instances):
        mine = [number.get(variable) for variable in instance.variables]
        if all(i is None for i in mine):
            continue
        problem = chain.problem(segment)
        was = [first[variable] for variable in instance.variables]
        will = [second[variable] for variable in instance.variables]
        for v, i in enumerate(mine):
            if i is not None:
                seconds[i] += float(problem.costs[v][will[v]] - problem.costs[v][was[v]])
        for (v, w), matrix in problem.edges.items():
            i, j = mine[v], mine[w]
            if i is not None and j is not None:
                parent[max(root(i), root(j))] = min(root(i), root(j))
            touched = i if i is not None else j
            if touched is not None:
                seconds[touched] += float(matrix[will[v], will[w]] - matrix[was[v], was[w]])
    members: dict[int, list[int]] = {}
    for i in range(len(different)):
        members.setdefault(root(i), []).append(i)
    taken = [_bytes_at(chain.graph, peak, different, first, second) for peak in peaks]
    return [
        Group(
            variables=tuple(different[i] for i in group),
            seconds=sum(seconds[i] for i in group),
            bytes_at=tuple(sum(at[i] for i in group) for at in taken),
        )
        for group in members.values()
    ]


def _bytes_at(graph: Graph, peak: Peak, variables: Sequence[Variable], first: States, second: States) -> list[float]:
    """What each of some variables adds to a peak, its copies with whoever decides them."""
    number = {variable: i for i, variable in enumerate(variables)}
    taken = [0.0] * len(variables)
    for i, (node, leaf) in enumerate(variables):
        decided = decided_bytes(graph, peak, node) if leaf < 0 else None
        if decided is not None:
            taken[i] += float(decided[second[node, -1]] - decided[first[node, -1]])
        for each in range(len(graph.flow.nodes[node].shapes)) if leaf < 0 else (leaf,):
            times = peak.times_copy((node, each))
            if times and (node, each) in first and (leaf >= 0 or (node, each) not in number):
                copied = copy_bytes(graph, (node, each))
                was, will = first[node, -1], second[node, -1]
                taken[i] += times * float(copied[will, second[node, each]] - copied[was, first[node, each]])
    for made in sorted(peak.reduced):
        kept = kept_bytes(graph, made) if (made[0], -1) in first else None
        decider = None if kept is None else number.get((made[0], -1), number.get(kept[0]))
        if kept is not None and decider is not None:
            before, after = (float(kept[1][states[made[0], -1], states[kept[0]]]) for states in (first, second))
            taken[decider] += peak.times_value(made) * (after - before)
    for reader in graph.flow.nodes:
        for use in reader.uses:
            times = peak.times_read(use.source)
            if not times or graph.is_free[use.source[0]] or (reader.index, -1) not in first:
                continue
            source = graph.layout.source(reader, use)
            decider = number.get((reader.index, -1), number.get(source))
            if decider is not None:
                read = read_bytes(graph, reader, use)
                was, will = (each[source] for each in (first, second))
                mine, other = first[reader.index, -1], second[reader.index, -1]
                taken[decider] += times * float(read[will, other] - read[was, mine])
    for node, position in sorted(peak.brought):
        reader = graph.flow.nodes[node]
        source = graph.layout.source(reader, reader.uses[position])
        decider = number.get((node, -1), number.get(source))
        if decider is not None:
            brought = brought_bytes(graph, (node, position))
            before, after = (float(brought[states[source], states[node, -1]]) for states in (first, second))
            taken[decider] += peak.times_brought((node, position)) * (after - before)
    for reading in sorted(peak.carried):
        user, argument = (reading[0], -1), (argument_of(graph.flow, reading), -1)
        decider = number.get(user, number.get(argument))
        if decider is not None:
            carried = carried_bytes(graph, reading)
            before, after = (float(carried[states[argument], states[user]]) for states in (first, second))
            taken[decider] += peak.times_carried(reading) * (after - before)
    return taken


def mixed(first: States, second: States, groups: Sequence[Group], room: Sequence[float]) -> dict[Variable, int] | None:
    """The fastest of the plans that take each group from the first plan or from the second and need no more than
    `room` besides the first at each peak; None where none does."""
    ranked = sorted(range(len(groups)), key=lambda i: (-abs(groups[i].seconds), i))[:MOST_GROUPS]
    chosen = [groups[i] for i in sorted(ranked)]
    kept = set(ranked)
    states = dict(first)
    left = list(room)
    for i, group in enumerate(groups):
        if i not in kept:
            states.update((variable, second[variable]) for variable in group.variables)
            left = [a - b for a, b in zip(left, group.bytes_at, strict=True)]
    spared = [-sum(min(group.bytes_at[k], 0.0) for group in chosen) for k in range(len(left))]
    if any(limit + most < 0 for limit, most in zip(left, spared, strict=True)):
        return None
    costs = np.array([group.seconds for group in chosen])
    problem = Problem(costs=[np.array([max(-cost, 0.0), max(cost, 0.0)]) for cost in costs])
    rows = [
        _row([group.bytes_at[k] for group in chosen], limit + most)
        for k, (limit, most) in enumerate(zip(left, spared, strict=True))
    ]
    try:
        solution = ilp.solve(problem, time_limit_s=_TIME_LIMIT_S, gap=CLOSE, rows=rows)
    except PlanError:
        return None
    for group, take_second in zip(chosen, solution.states.tolist(), strict=True):
        if take_second:
            states.update((variable, second[variable]) for variable in group.variables)
    return states


def _row(bytes_of: Sequence[float], limit: float) -> ilp.Row:
    """Bytes that groups take beyond the plan of which each is where it takes least."""
    coefficients = {i: np.array([max(-each, 0.0), max(each, 0.0)]) for i, each in enumerate(bytes_of) if each}
    return ilp.Row(coefficients=coefficients, limit=max(limit, 1.0))
