"""Restricted master problem: merge fast infeasible plans with slower feasible ones.

A multiplier finds only plans that are cheapest at some price; many plans between two of them are not. So the plans
found are merged: each variable takes its state in one of them, by an integer program with the bytes at known peaks as
rows (Construct, Merge, Solve & Adapt: Blum, Pinacho, López-Ibáñez and Lozano, 2016; with two parents, the optimized
crossover of Aggarwal, Orlin and Tai, 1997). It is small: most variables have one state in all plans, and most others
without memory at a peak are eliminated exactly (`pbqp.reduce`).

Each repeat of a run decides separately. In too large a program, repeats with equal states in every plan are tied.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.errors import PlanError
from shardwright.planner.memory.constraint import MemoryConstraint
from shardwright.planner.memory.constraint_rows import constraint_terms
from shardwright.planner.memory.tuning import MAX_MERGE_ENTRIES, MAX_SMALL_MERGE_ENTRIES, MERGE_GAP, ROUGH_MERGE_GAP
from shardwright.planner.segments.segment_chain import Chain
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver import ilp
from shardwright.planner.solver.pbqp import FloatArray, IntArray, Problem, reduce, submatrix
from shardwright.planner.solver.tuning import MAX_CPU_S
from shardwright.planner.strategies.strategy_set import StrategySet

States = Mapping[Variable, int]


def to_one_chain(plans: Sequence[tuple[Chain, States]]) -> tuple[Chain, list[dict[Variable, int]]]:
    """Plans on one mesh, expressed in one chain: their own chain or, after separate descents, a chain restricted to
    their strategies."""
    chain = plans[0][0]
    if all(other.graph is chain.graph for other, _ in plans):
        return chain, [dict(states) for _, states in plans]
    assert all(other.graph.prices is chain.graph.prices for other, _ in plans), "all chains number layouts alike"
    joins: dict[Hashable, tuple[StrategySet, list[int]]] = {}  # equal decisions share one set
    sets: dict[Variable, StrategySet] = {}
    joined = [dict[Variable, int]() for _ in plans]
    for variable in plans[0][1]:
        decided = [(other.graph.set_of(variable), states[variable]) for other, states in plans]
        key = tuple((id(strategies), state) for strategies, state in decided)
        if key not in joins:
            joins[key] = _join_strategies(decided)
        sets[variable], numbers = joins[key]
        for states, number in zip(joined, numbers, strict=True):
            states[variable] = number
    kinds: dict[tuple[int, tuple[int, ...]], int] = {}
    instances = []
    for instance in chain.instances:
        what = instance.kind, tuple(id(sets[variable]) for variable in instance.variables)
        instances.append(replace(instance, kind=kinds.setdefault(what, len(kinds))))
    graph = replace(chain.graph, restrictions={}, isomorphic_variables={}, _sets=sets, _min_seconds={})
    return Chain(graph=graph, instances=instances, runs=chain.runs), joined


def _join_strategies(decided: Sequence[tuple[StrategySet, int]]) -> tuple[StrategySet, list[int]]:
    """The set of the chosen strategies, each once, and the index of each choice in it."""
    (first, state), *others = decided
    union, numbers = first.subset([state]), [0]
    for strategies, state in others:
        strategy = strategies.strategies[state]
        if strategy not in union.strategies:
            union = union.concat(strategies.subset([state]))
        numbers.append(union.strategies.index(strategy))
    return union, numbers


def merge_solutions(
    chain: Chain,
    plans: Sequence[States],
    room: Sequence[tuple[MemoryConstraint, float]],
    time_limit_s: float,
    most_entries: int = MAX_MERGE_ENTRIES,
    most_cpu_s: float = MAX_CPU_S,
) -> dict[Variable, int] | None:
    """The fastest plan with each variable's state from one of `plans`; None when no such plan has room, or the program
    is too large.

    room: peaks, and the bytes available at each in addition to those of the first plan.
    most_entries: of edges in the integer program.
    most_cpu_s: CPU seconds of the integer program.
    """
    size = -1
    for is_alike in (False, True):  # repeats by themselves; if that is too large, tied
        merged = _RestrictedMaster.of(chain, plans, is_alike=is_alike)
        if len(merged.state_options) == size:  # no tied repeats: the same program
            break
        size = len(merged.state_options)
        rows = [merged.build_row(peak, beside) for peak, beside in room]
        if any(row.limit < 0 for row in rows):
            return None
        chosen = _solve_master(
            merged.problem, [row for row in rows if _may_bind(row)], time_limit_s, most_entries, most_cpu_s
        )
        if chosen is not None:
            return merged.to_states(chosen)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RestrictedMaster:
    """The choice between the solutions of several plans of a chain.

    base: states of the first plan.
    choices: variable with several states → variable of the problem.
    state_options: per variable of the problem, its states in the plans.
    """

    chain: Chain
    base: States
    choices: dict[Variable, int]
    state_options: list[IntArray]
    problem: Problem

    @classmethod
    def of(cls, chain: Chain, plans: Sequence[States], *, is_alike: bool) -> _RestrictedMaster:
        """is_alike: tie repeats of a run with equal states in every plan."""
        choices: dict[Variable, int] = {}
        options: list[IntArray] = []
        numbers: dict[Hashable, int] = {}
        for variable in plans[0]:
            pattern = tuple(states[variable] for states in plans)
            if min(pattern) == max(pattern):
                continue
            alike = chain.key_of(variable), id(chain.graph.set_of(variable)), pattern
            number = choices[variable] = numbers.setdefault(alike if is_alike else variable, len(numbers))
            if number == len(options):
                options.append(np.unique(pattern))
        master = cls(chain=chain, base=plans[0], choices=choices, state_options=options, problem=_zero_problem(options))
        for segment, instance in enumerate(chain.instances):
            if any(variable in choices for variable in instance.variables):
                problem = chain.problem(segment)
                for variable, cost in zip(instance.variables, problem.costs, strict=True):
                    master._add(master.problem, (variable,), cost)
                for (v, w), matrix in problem.edges.items():
                    master._add(master.problem, (instance.variables[v], instance.variables[w]), matrix)
        return master

    def _add(self, total: Problem, variables: tuple[Variable, ...], array: FloatArray) -> None:
        """Add the cost of one variable or of a pair, restricted to the open choices."""
        states = [self._states_of(variable) for variable in variables]
        numbers = [self.choices.get(variable) for variable in variables]
        chosen = [number for number in numbers if number is not None]
        if len(chosen) == 2:
            total.add_edge(chosen[0], chosen[1], submatrix(array, states[0], states[1]))
        elif chosen:
            total.costs[chosen[0]] = total.costs[chosen[0]] + array[np.ix_(*states)].ravel()

    def _states_of(self, variable: Variable) -> IntArray:
        number = self.choices.get(variable)
        return self.state_options[number] if number is not None else np.array([self.base[variable]])

    def build_row(self, peak: MemoryConstraint, room: float) -> ilp.Row:
        """The bytes of a merged plan at a peak. room: bytes available in addition to the first plan's."""
        total, limit = _zero_problem(self.state_options), room
        for variables, array in constraint_terms(self.chain.graph, peak, self.choices):
            self._add(total, variables, array)
            limit += float(array[tuple(self.base[variable] for variable in variables)])
        # Bytes that no choice changes leave the row and its limit: what remains decides whether the row may bind.
        least = [float(cost.min()) for cost in total.costs]
        return ilp.Row(
            coefficients={v: cost - least[v] for v, cost in enumerate(total.costs) if np.ptp(cost)},
            pairs={edge: matrix for edge, matrix in total.edges.items() if matrix.any()},
            limit=limit - sum(least),
        )

    def to_states(self, choice: IntArray) -> dict[Variable, int]:
        """The plan given by the states of the problem's variables."""
        decided = {
            variable: int(self.state_options[number][choice[number]]) for variable, number in self.choices.items()
        }
        return {**self.base, **decided}


def _zero_problem(state_numbers: Sequence[IntArray]) -> Problem:
    return Problem(costs=[np.zeros(len(states)) for states in state_numbers])


def _may_bind(row: ilp.Row) -> bool:
    """Whether some assignment exceeds a row's limit."""
    return sum(float(a.max()) for a in (*row.coefficients.values(), *row.pairs.values())) > row.limit


def _solve_master(
    problem: Problem, rows: Sequence[ilp.Row], time_limit_s: float, most_entries: int, most_cpu_s: float
) -> IntArray | None:
    """The best states within the rows; None without any, or when the program is too large."""
    counted = {v for row in rows for v in (*row.coefficients, *(end for pair in row.pairs for end in pair))}
    reduction = reduce(problem, sorted(counted))
    core, place = reduction.core, {v: i for i, v in enumerate(reduction.variables)}
    entries = sum(matrix.size for matrix in core.edges.values())
    if entries > most_entries:
        return None
    states = {v: reduction.states[place[v]] for v in counted}
    of_core = [
        ilp.Row(
            coefficients={place[v]: a[states[v]] for v, a in row.coefficients.items()},
            pairs={(place[v], place[w]): submatrix(a, states[v], states[w]) for (v, w), a in row.pairs.items()},
            limit=max(row.limit, 1.0),  # a row is divided by it
        )
        for row in rows
    ]
    try:
        gap = MERGE_GAP if entries <= MAX_SMALL_MERGE_ENTRIES else ROUGH_MERGE_GAP
        solution = ilp.solve(core, time_limit_s=time_limit_s, gap=gap, rows=of_core, most_cpu_s=most_cpu_s)
    except PlanError:
        return None
    return reduction.complete(solution.states)
