"""The integer program over the core that exact reductions leave, in PuLP, solved by HiGHS.

Variables
    x[v,i] ∈ {0,1}   variable v takes its state i
    y[v,w,s,t] ≥ 0   the edge (v,w) is used by a state of v in class s and one of w in class t; states
                     with equal rows (columns) of the edge's matrix E form a class

Objective
    minimize  Σ_v Σ_i cost[v][i] · x[v,i]  +  Σ_(v,w) Σ_s,t E[s,t] · y[v,w,s,t]

Constraints
    (1) Σ_i x[v,i] = 1                            per variable v                            `_one_state`
    (2) Σ_t y[v,w,s,t] = Σ_(i in class s) x[v,i]  per edge and class s of v                 `_edge`
    (3) Σ_s y[v,w,s,t] = Σ_(j in class t) x[w,j]  per edge and class t of w                 `_edge`
    (4) no y when E[s,t] is infinite              (a forbidden pair)                        `_edge`
    (5) Σ_v Σ_i a[v][i] · x[v,i] + Σ_(v,w) Σ_s,t A[s,t] · y[v,w,s,t] ≤ limit
                                                  per given row, such as bytes              `_row`
    (6) Σ_v x[v, s_v] ≤ n - 1                     per forbidden assignment s                `_forbid`

(2) and (3) are the local marginal polytope (Wainwright and Jordan, 2008): with x integral, y is the product of the
ends; near trees the linear relaxation is already integral. Costs are scaled to the incumbent's value: HiGHS' absolute
tolerances then mean parts of a step, not seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pulp

from shardwright.errors import PlanError
from shardwright.planner.solver.highs import highs
from shardwright.planner.solver.local_search import find_incumbent
from shardwright.planner.solver.pbqp import FloatArray, IntArray, Problem
from shardwright.planner.solver.tuning import EXACT, MAX_CPU_S, OBJECTIVE_SCALE


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """States per variable, their value, and a lower bound on every assignment's value."""

    states: IntArray
    value: float
    lower_bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A linear constraint: a sum over the chosen states of at most `limit`.

    coefficients: per variable, by state.
    pairs: per pair of variables, by the states of both.
    """

    coefficients: Mapping[int, FloatArray]
    limit: float
    pairs: Mapping[tuple[int, int], FloatArray] = field(default_factory=dict)

    def evaluate(self, states: IntArray) -> float:
        """The sum over these states."""
        alone = sum(float(a[states[v]]) for v, a in self.coefficients.items())
        return alone + sum(float(a[states[v], states[w]]) for (v, w), a in self.pairs.items())

    def allows(self, states: IntArray) -> bool:
        return self.evaluate(states) <= self.limit

    @property
    def minimum(self) -> float:
        """A lower bound on the sum."""
        return sum(float(a.min()) for a in (*self.coefficients.values(), *self.pairs.values()))


def solve(
    problem: Problem,
    *,
    time_limit_s: float,
    gap: float = EXACT,
    rows: Sequence[Row] = (),
    forbidden: Sequence[IntArray] = (),
    most_cpu_s: float = MAX_CPU_S,
    below: float = np.inf,
    most_work: float = np.inf,
) -> Solution:
    """Best assignment within the limits, with a certified bound. Raises PlanError when none is finite.

    time_limit_s: wall-clock seconds, given a deadline; CPU seconds are always limited (`most_cpu_s`).
    gap: relative gap at which to stop.
    rows: linear constraints.
    forbidden: assignments excluded from the search.
    below: a known value. Without a solution below it, it becomes the bound, and an arbitrary assignment is returned.
    most_work: limit on constraints × linear relaxations solved.
    """
    if not problem.costs:
        return Solution(states=np.zeros(0, np.int64), value=0.0, lower_bound=0.0)
    start = find_incumbent(problem)
    value = problem.value(start)
    scale = OBJECTIVE_SCALE / value if np.isfinite(value) and value > 0 else 1.0
    if not all(row.allows(start) for row in rows) or any(np.array_equal(start, assignment) for assignment in forbidden):
        value = np.inf  # the start breaks a constraint: it is no solution
    program, x, edges = _program(problem, scale, rows)
    for row in rows:
        _row(program, row, x, edges)
    for states in forbidden:
        _forbid(program, states, x)
    most_rounds = most_work / program.numConstraints()
    status = program.solve(
        highs(gap=gap, most_cpu_s=most_cpu_s, time_limit_s=time_limit_s, below=below * scale, most_rounds=most_rounds)
    )
    if status == pulp.LpStatusInfeasible and np.isfinite(below):
        return Solution(states=start, value=problem.value(start), lower_bound=below)
    if status == pulp.LpStatusInfeasible:
        raise PlanError(
            "no combination of strategies satisfies all pins and forced shardings",
            where="annotations, force",
            remedy="leave out pins until a plan is found: the last one left out contradicts others",
        )
    bound = float(program.solverModel.getInfo().mip_dual_bound) / scale
    solved = _states(x)
    if solved is not None and problem.value(solved) <= value:
        start, value = solved, problem.value(solved)
    if not np.isfinite(value):
        raise PlanError("the search found no legal plan within its time limit", remedy="pin or force less")
    return Solution(states=start, value=value, lower_bound=min(bound, value, below) if np.isfinite(bound) else 0.0)


def _program(
    problem: Problem, scale: float, rows: Sequence[Row]
) -> tuple[pulp.LpProblem, list[list[pulp.LpVariable | None]], dict[tuple[int, int], _Edge]]:
    program = pulp.LpProblem("sharding", pulp.LpMinimize)
    x: list[list[pulp.LpVariable | None]] = []
    edges: dict[tuple[int, int], _Edge] = {}
    objective: list[tuple[pulp.LpVariable, float]] = []
    for v, cost in enumerate(problem.costs):
        x.append(_one_state(program, v, cost))
        objective += [(var, float(c) * scale) for var, c in zip(x[-1], cost, strict=True) if var is not None]
    of_rows = {edge: np.zeros(matrix.shape) for row in rows for edge, matrix in row.pairs.items()}
    for (v, w), matrix in sorted({**of_rows, **problem.edges}.items(), key=lambda item: item[0]):
        limited = [row.pairs[v, w] for row in rows if (v, w) in row.pairs]
        edges[v, w] = _edge(program, (v, w), matrix, limited, x[v], x[w])
        objective += [(variable, cost * scale) for variable, cost in edges[v, w].terms(matrix)]
    program.setObjective(pulp.LpAffineExpression(objective))
    return program, x, edges


def _one_state(program: pulp.LpProblem, v: int, cost: FloatArray) -> list[pulp.LpVariable | None]:
    """(1); states of infinite cost get no variable."""
    variables = [
        program.add_variable(f"x_{v}_{i}", cat=pulp.LpBinary) if np.isfinite(c) else None for i, c in enumerate(cost)
    ]
    program.addConstraint(pulp.LpAffineExpression([(var, 1) for var in variables if var is not None]) == 1)
    return variables


class _Edge(NamedTuple):
    """y of one edge, by classes of states; first, second: one state of each class of either end."""

    y: Mapping[tuple[int, int], pulp.LpVariable]
    first: IntArray
    second: IntArray

    def terms(self, matrix: FloatArray) -> list[tuple[pulp.LpVariable, float]]:
        """The edge's matrix in terms of y: variables with coefficients."""
        small = matrix[np.ix_(self.first, self.second)]
        return [(variable, float(small[key])) for key, variable in self.y.items() if small[key]]


def _edge(
    program: pulp.LpProblem,
    name: tuple[int, int],
    matrix: FloatArray,
    limited: Sequence[FloatArray],
    left: list[pulp.LpVariable | None],
    right: list[pulp.LpVariable | None],
) -> _Edge:
    """(2), (3) and (4) of one edge. limited: further matrices; classes must agree on their rows and columns, too."""
    _, first, row_of = np.unique(np.hstack([matrix, *limited]), axis=0, return_index=True, return_inverse=True)
    _, second, column_of = np.unique(np.vstack([matrix, *limited]), axis=1, return_index=True, return_inverse=True)
    small = matrix[np.ix_(first, second)]
    y = {
        (s, t): program.add_variable(f"y_{name[0]}_{name[1]}_{s}_{t}", lowBound=0)
        for s, t in np.ndindex(*small.shape)
        if np.isfinite(small[s, t])
    }
    for s in range(small.shape[0]):
        members = [(x, -1) for x, c in zip(left, row_of.ravel(), strict=True) if c == s and x is not None]
        flow = [(y[s, t], 1) for t in range(small.shape[1]) if (s, t) in y]
        program.addConstraint(pulp.LpAffineExpression(flow + members) == 0)
    for t in range(small.shape[1]):
        members = [(x, -1) for x, c in zip(right, column_of.ravel(), strict=True) if c == t and x is not None]
        flow = [(y[s, t], 1) for s in range(small.shape[0]) if (s, t) in y]
        program.addConstraint(pulp.LpAffineExpression(flow + members) == 0)
    return _Edge(y, first, second)


def _row(
    program: pulp.LpProblem,
    row: Row,
    x: list[list[pulp.LpVariable | None]],
    edges: Mapping[tuple[int, int], _Edge],
) -> None:
    """(5), scaled to a limit of 1."""
    terms = [
        (variable, float(a) / row.limit)
        for v, coefficients in row.coefficients.items()
        for variable, a in zip(x[v], coefficients, strict=True)
        if variable is not None and a
    ]
    for edge, matrix in row.pairs.items():
        terms += [(variable, a / row.limit) for variable, a in edges[edge].terms(matrix)]
    program.addConstraint(pulp.LpAffineExpression(terms) <= 1)


def _forbid(program: pulp.LpProblem, states: IntArray, x: list[list[pulp.LpVariable | None]]) -> None:
    """(6)."""
    chosen = [(variable, 1) for v, i in enumerate(states.tolist()) if (variable := x[v][i]) is not None]
    program.addConstraint(pulp.LpAffineExpression(chosen) <= len(states) - 1)


def _states(x: list[list[pulp.LpVariable | None]]) -> IntArray | None:
    """The chosen state per variable; None without a solution."""
    values = [[-1.0 if var is None or var.value() is None else var.value() for var in row] for row in x]
    if any(max(row) < 0.5 for row in values):
        return None
    return np.array([int(np.argmax(row)) for row in values], np.int64)
