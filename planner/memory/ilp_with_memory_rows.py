"""The fastest feasible plan, exactly: one integer program, for small programs.

A multiplier (`constraint`) leaves a gap when no multiplier makes the best feasible plan the cheapest. The integer
program leaves none: bytes at a peak are a row, those of temporaries with their margin. The memory model judges the
finished plan, with the buffers missed by the rows (buffers due to the schedule, copies). A refused plan is forbidden,
its own peak becomes a row, and the next best is sought.

Bytes beyond the rows are similar in most plans. So the program is also solved with that much less room: the result
mostly fits and is hardly slower, and the next plan to be judged bounds all feasible plans from below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.errors import PlanError
from shardwright.planner.limits import SearchLimits
from shardwright.planner.memory.constraint import MemoryConstraint
from shardwright.planner.memory.constraint_rows import constraint_terms
from shardwright.planner.memory.tuning import ROWS_GAP, ROWS_PATIENCE
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.segments.variables import Variable, variables_of
from shardwright.planner.solver import ilp
from shardwright.planner.solver.pbqp import FloatArray, IntArray, Problem

#: The bytes of a plan, and its peak.
Judge = Callable[[Mapping[Variable, int]], tuple[int, MemoryConstraint]]


def solve_with_memory_rows(
    chain: Chain,
    limit_bytes: int,
    peaks: Sequence[MemoryConstraint],
    judge: Judge,
    time_limit_s: float,
    limits: SearchLimits = SearchLimits(),
) -> ChainSolution | None:
    """The fastest feasible plan by `judge`, or one slower by at most its gap to its bound; None when the program is too
    large, or no feasible plan was found.

    limits: `max_exact_states`, `max_exact_plans`, `max_exact_work`.
    """
    graph = chain.graph
    nodes = [node for instance in chain.instances for node in instance.nodes]
    variables, _ = variables_of(graph.variables, nodes)
    states_of_all = sum(len(graph.set_of(variable)) for variable in variables)
    if states_of_all > limits.max_exact_states:
        return None
    room = _MemoryRows(graph=graph, variables=variables, limit_bytes=limit_bytes)
    for peak in peaks:
        room.add(peak)
    problem = graph.problem(nodes, variables)
    best: ChainSolution | None = None
    forbidden: list[IntArray] = []
    bounds: list[float] = []

    def fits(solution: ilp.Solution) -> bool:
        """Whether a plan fits. Its peak becomes a row; an infeasible plan is forbidden."""
        needed, peak = judge(dict(zip(variables, solution.states.tolist(), strict=True)))
        room.add(peak)
        if needed > limit_bytes:
            room.record_misfit(solution.states, needed)
            forbidden.append(solution.states)
        return needed <= limit_bytes

    def to_chain_solution(solution: ilp.Solution, bound_s: float) -> ChainSolution:
        states = dict(zip(variables, solution.states.tolist(), strict=True))
        return ChainSolution(states=states, value=solution.value, tied_bound=min(bound_s, solution.value))

    max_judged = min(limits.max_exact_plans, 1 + limits.max_exact_work // max(states_of_all, 1) ** 2)
    for refused in range(max_judged):
        fastest = _solve_ilp(problem, room.rows(), forbidden, time_limit_s)
        if fastest is None:
            break
        if fits(fastest):
            return to_chain_solution(fastest, fastest.lower_bound)
        if best is not None:
            best = replace(best, tied_bound=min(max(best.tied_bound, fastest.lower_bound), best.value))
            if refused >= ROWS_PATIENCE and best.value - best.tied_bound <= ROWS_GAP * abs(best.value):
                break
        bounds.append(fastest.lower_bound)
        if best is None and _is_stalled(bounds):
            break
        if (refused + 1).bit_count() == 1:  # after the first, second, fourth, eighth, …
            thrifty = _solve_ilp(problem, room.rows(spared=True), forbidden, time_limit_s)
            if thrifty is not None and fits(thrifty) and (best is None or thrifty.value < best.value):
                best = to_chain_solution(thrifty, fastest.lower_bound)
    return best


def _is_stalled(bounds: Sequence[float]) -> bool:
    """Whether the last `ROWS_PATIENCE` refused plans raised the bound by less than `ROWS_GAP`."""
    return len(bounds) > ROWS_PATIENCE and bounds[-1] - bounds[-1 - ROWS_PATIENCE] < ROWS_GAP * abs(bounds[-1])


@dataclass(slots=True, kw_only=True, eq=False)
class _MemoryRows:
    """The rows of a program, and the largest excess of a refused plan over them."""

    graph: CostGraph
    variables: Sequence[Variable]
    limit_bytes: int
    _rows: list[ilp.Row] = field(default_factory=list)
    _unmodeled_bytes: float = 0.0

    def add(self, peak: MemoryConstraint) -> None:
        self._rows.append(_build_row(self.graph, peak, self.variables, self.limit_bytes))

    def record_misfit(self, states: IntArray, needed: int) -> None:
        """Note the bytes of a refused plan."""
        self._unmodeled_bytes = max(self._unmodeled_bytes, needed - max(row.evaluate(states) for row in self._rows))

    def rows(self, *, spared: bool = False) -> list[ilp.Row]:
        """spared: without the room for unmodeled bytes."""
        return (
            [replace(row, limit=row.limit - self._unmodeled_bytes) for row in self._rows]
            if spared
            else list(self._rows)
        )


def _solve_ilp(
    problem: Problem, rows: Sequence[ilp.Row], forbidden: Sequence[IntArray], time_limit_s: float
) -> ilp.Solution | None:
    """The fastest plan left; None without any."""
    if any(row.minimum > row.limit for row in rows):
        return None
    try:
        return ilp.solve(problem, time_limit_s=time_limit_s, rows=rows, forbidden=forbidden)
    except PlanError:
        return None


def _build_row(graph: CostGraph, peak: MemoryConstraint, variables: Sequence[Variable], limit_bytes: int) -> ilp.Row:
    """The bytes of a plan at a peak, without copies in shared layouts: the memory model judges these."""
    coefficients: dict[int, FloatArray] = {}
    pairs: dict[tuple[int, int], FloatArray] = {}
    position = {variable: i for i, variable in enumerate(variables)}
    for decided, array in constraint_terms(graph, replace(peak, layout_copies=frozenset()), position):
        i, j = position[decided[0]], position[decided[-1]]
        if i == j:
            coefficients[i] = array
        else:
            key = min(i, j), max(i, j)
            pairs[key] = pairs.get(key, 0.0) + (array if i < j else array.T)
    return ilp.Row(coefficients=coefficients, limit=float(limit_bytes), pairs=pairs)
