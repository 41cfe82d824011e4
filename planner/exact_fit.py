"""The fastest plan that fits the memory, exactly, for programs small enough to solve as one integer program.

The price of a byte (`budget`) leaves a gap where no price makes the best plan that fits the cheapest one. The
integer program has none: bytes at a peak are a row of it, those of temporaries with the margin that a device must have
beyond them. What the rows miss (buffers that depend on the schedule) the memory model judges on the finished plan:
where it says no, the plan is forbidden, its own peak becomes a row, and the next best is sought.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardwright.errors import PlanError
from shardwright.planner import ilp
from shardwright.planner.budget import Peak, decided_bytes
from shardwright.planner.chain import Chain, SolvedChain
from shardwright.planner.graph import Graph
from shardwright.planner.layout import Variable, variables_of
from shardwright.planner.pbqp import IntArray

#: Largest program, in states of all variables together, that is solved whole.
MOST_STATES = 3000

#: Plans that are found and judged, at most: each row makes the next search longer.
MOST_PLANS = 40

#: Plans × states squared, at most: an integer program takes about the square of its states (0.4 s of CPU for 350 of
#: them, 5 s for 1,400), and a plan forbidden is mostly followed by one much like it, as large.
MOST_WORK = 1_000_000

#: Whether a plan fits, and where it takes the most.
Judge = Callable[[Mapping[Variable, int]], tuple[bool, Peak]]


def fit_exactly(
    chain: Chain, limit_bytes: int, peaks: Sequence[Peak], judge: Judge, time_limit_s: float
) -> SolvedChain | None:
    """The fastest plan that `judge` accepts; None where the program is too large, or no plan was accepted."""
    graph = chain.graph
    nodes = [node for instance in chain.instances for node in instance.nodes]
    variables, _ = variables_of(graph.layout, nodes)
    states_of_all = sum(len(graph.set_of(variable)) for variable in variables)
    if states_of_all > MOST_STATES:
        return None
    problem = graph.problem(nodes, variables)
    rows = [_row(graph, peak, variables, limit_bytes) for peak in peaks]
    forbidden: list[IntArray] = []
    for _ in range(min(MOST_PLANS, 1 + MOST_WORK // max(states_of_all, 1) ** 2)):
        try:
            solution = ilp.solve(problem, time_limit_s=time_limit_s, rows=rows, forbidden=forbidden)
        except PlanError:
            return None
        states = dict(zip(variables, solution.states.tolist(), strict=True))
        fits, peak = judge(states)
        if fits:
            return SolvedChain(states=states, value=solution.value, rolled_bound=solution.lower_bound)
        forbidden.append(solution.states)
        rows.append(_row(graph, peak, variables, limit_bytes))
    return None


def _row(graph: Graph, peak: Peak, variables: Sequence[Variable], limit_bytes: int) -> ilp.Row:
    coefficients = {}
    for position, (node, leaf) in enumerate(variables):
        decided = decided_bytes(graph, peak, node) if leaf < 0 else None
        if decided is not None:
            coefficients[position] = decided
    return ilp.Row(coefficients=coefficients, limit=float(limit_bytes))
