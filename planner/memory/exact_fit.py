"""The fastest plan that fits the memory, exactly, for programs small enough to solve as one integer program.

The price of a byte (`budget`) leaves a gap where no price makes the best plan that fits the cheapest one. The
integer program has none: bytes at a peak are a row of it, those of temporaries with the margin that a device must have
beyond them. What the rows miss (buffers that depend on the schedule, copies) the memory model judges on the finished
plan: where it says no, the plan is forbidden, its own peak becomes a row, and the next best is sought.

What one plan takes beyond its rows, others mostly do, too. So beside that the program is solved with as much less room:
what comes of that mostly fits and is hardly slower, and no plan that fits is faster than the next one to be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.errors import PlanError
from shardwright.planner.memory.budget import Peak
from shardwright.planner.memory.rows import terms
from shardwright.planner.segments.chain import Chain, SolvedChain
from shardwright.planner.segments.choices import Graph
from shardwright.planner.segments.layout import Variable, variables_of
from shardwright.planner.solver import ilp
from shardwright.planner.solver.pbqp import FloatArray, IntArray, Problem

#: Largest program, in states of all variables together, that is solved whole.
MOST_STATES = 3000

#: Plans that are found and judged, at most: each row makes the next search longer.
MOST_PLANS = 40

#: Plans × states squared, at most: an integer program takes about the square of its states (0.4 s of CPU for 350 of
#: them, 5 s for 1,400), and a plan forbidden is mostly followed by one much like it, as large.
MOST_WORK = 1_000_000

#: Refused plans after which one that is known to fit will do, if it is within `CLOSE` of what is left.
PATIENCE = 4
CLOSE = 1e-3

#: The bytes that a plan needs, and where it takes the most.
Judge = Callable[[Mapping[Variable, int]], tuple[int, Peak]]


def fit_exactly(
    chain: Chain, limit_bytes: int, peaks: Sequence[Peak], judge: Judge, time_limit_s: float
) -> SolvedChain | None:
    """The fastest plan that fits as `judge` says, or one that may be slower by what its bound says; None where the
    program is too large, or no plan was found to fit."""
    graph = chain.graph
    nodes = [node for instance in chain.instances for node in instance.nodes]
    variables, _ = variables_of(graph.layout, nodes)
    states_of_all = sum(len(graph.set_of(variable)) for variable in variables)
    if states_of_all > MOST_STATES:
        return None
    room = _Room(graph=graph, variables=variables, limit_bytes=limit_bytes)
    for peak in peaks:
        room.add(peak)
    problem = graph.problem(nodes, variables)
    best: SolvedChain | None = None
    forbidden: list[IntArray] = []

    def fits(solution: ilp.Solution) -> bool:
        """Whether a plan does; what it takes becomes a row, and if that is too much it is forbidden."""
        needed, peak = judge(dict(zip(variables, solution.states.tolist(), strict=True)))
        room.add(peak)
        if needed > limit_bytes:
            room.miss(solution.states, needed)
            forbidden.append(solution.states)
        return needed <= limit_bytes

    def made(solution: ilp.Solution, bound_s: float) -> SolvedChain:
        states = dict(zip(variables, solution.states.tolist(), strict=True))
        return SolvedChain(states=states, value=solution.value, rolled_bound=min(bound_s, solution.value))

    for refused in range(min(MOST_PLANS, 1 + MOST_WORK // max(states_of_all, 1) ** 2)):
        fastest = _solved(problem, room.rows(), forbidden, time_limit_s)
        if fastest is None:
            break
        if fits(fastest):
            return made(fastest, fastest.lower_bound)
        if best is not None:
            best = replace(best, rolled_bound=min(max(best.rolled_bound, fastest.lower_bound), best.value))
            if refused >= PATIENCE and best.value - best.rolled_bound <= CLOSE * abs(best.value):
                break
        if (refused + 1).bit_count() == 1:  # after the first, second, fourth, eighth, …
            thrifty = _solved(problem, room.rows(spared=True), forbidden, time_limit_s)
            if thrifty is not None and fits(thrifty) and (best is None or thrifty.value < best.value):
                best = made(thrifty, fastest.lower_bound)
    return best


@dataclass(slots=True, kw_only=True, eq=False)
class _Room:
    """The rows of a program, and the most bytes that a refused plan took beyond them."""

    graph: Graph
    variables: Sequence[Variable]
    limit_bytes: int
    _rows: list[ilp.Row] = field(default_factory=list)
    _missed: float = 0.0

    def add(self, peak: Peak) -> None:
        self._rows.append(_row(self.graph, peak, self.variables, self.limit_bytes))

    def miss(self, states: IntArray, needed: int) -> None:
        """Note what a refused plan needs."""
        self._missed = max(self._missed, needed - max(row.evaluate(states) for row in self._rows))

    def rows(self, *, spared: bool = False) -> list[ilp.Row]:
        """spared: without the room for what they miss."""
        return [replace(row, limit=row.limit - self._missed) for row in self._rows] if spared else list(self._rows)


def _solved(
    problem: Problem, rows: Sequence[ilp.Row], forbidden: Sequence[IntArray], time_limit_s: float
) -> ilp.Solution | None:
    """None where no plan is left."""
    if any(row.minimum > row.limit for row in rows):
        return None
    try:
        return ilp.solve(problem, time_limit_s=time_limit_s, rows=rows, forbidden=forbidden)
    except PlanError:
        return None


def _row(graph: Graph, peak: Peak, variables: Sequence[Variable], limit_bytes: int) -> ilp.Row:
    """What a plan takes at a peak, but for copies that hubs make: the memory model judges these."""
    coefficients: dict[int, FloatArray] = {}
    pairs: dict[tuple[int, int], FloatArray] = {}
    position = {variable: i for i, variable in enumerate(variables)}
    for decided, array in terms(graph, replace(peak, copies=frozenset()), position):
        i, j = position[decided[0]], position[decided[-1]]
        if i == j:
            coefficients[i] = array
        else:
            key = min(i, j), max(i, j)
            pairs[key] = pairs.get(key, 0.0) + (array if i < j else array.T)
    return ilp.Row(coefficients=coefficients, limit=float(limit_bytes), pairs=pairs)
