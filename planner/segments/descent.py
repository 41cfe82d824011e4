"""Block coordinate descent: refine the best plan of a mesh on a finer mesh, a few axes at a time.

On three axes a value has hundreds of layouts: too many for an outright search of large programs. But a plan on two axes
is also one on three: a split axis does the same with both parts. From there one axis at a time is set free, for every
instruction at once; along the others each keeps its choice. Such a neighbourhood is the whole problem with a fraction
of the states; the same reductions solve it to its best plan, and no round makes a plan worse. It ends when no round
improves the plan. Its result is bounded by all strategies on the mesh (`MeshSearch.build_bounding_chain`);
`effort="best"` also searches three axes outright.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, cycle, islice

from shardwright.planner.memory.constraint import Multipliers
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.dominator_cut import Run, SegmentInstance
from shardwright.planner.segments.segment_chain import Chain, ChainSolution, Key
from shardwright.planner.segments.tuning import MIN_ROUND_GAIN, ROUND_GAP
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver.warm_start import WarmStart
from shardwright.planner.strategies.expansion import Restriction, Strategy
from shardwright.plans.shardings import Mesh, TensorSharding


def lift_plan(coarse: Chain, states: Mapping[Variable, int], mesh: Mesh) -> tuple[dict[Variable, Strategy], list[str]]:
    """A plan lifted to a finer mesh, and that mesh's axes in the order of freeing: parts of a split axis first."""
    parts = axis_parts(coarse.graph.prices.mesh, mesh)
    lift = _Lift(parts)
    at = {variable: lift(strategy) for variable, strategy in coarse.strategies(states).items()}
    return at, [part for names in sorted(parts.values(), key=len, reverse=True) for part in names]


def descend(
    chain: Chain,
    at: Mapping[Variable, Strategy],
    fine: CostGraph,
    axes: Sequence[str],
    *,
    time_limit_s: float,
    most_rounds: int | None = None,
    price: Multipliers | None = None,
    together: int = 1,
    close: float = ROUND_GAP,
) -> tuple[Chain, ChainSolution]:
    """The best plan found on the mesh of `fine` from the plan `at`, and its neighbourhood.

    chain: segments of the same program on any mesh.
    fine: the same program on its mesh.
    axes: set free in turn.
    time_limit_s: for the integer programs of one round.
    most_rounds: None goes on until no axis gains.
    price: on memory, included in the plan's cost.
    together: number of axes free at a time.
    close: relative gap of a solved round.

    Raises PlanError when the plan itself is impossible there.
    """
    instances, runs = chain.instances, chain.runs
    best: tuple[Chain, ChainSolution] | None = None
    idle = 0  # rounds since one that gained
    frees = [frozenset(names) for names in combinations(axes, together)]
    for free in islice(cycle(frees), most_rounds):
        near = _build_neighborhood(instances, runs, fine, at, free)
        priced = near.with_multipliers(price)
        priced.warm_start = _find_warm_start(priced, free)
        solved = priced.solve(time_limit_s, close=close, plan=at)
        fine.neighborhood_cache.saved_messages[free] = priced.graph.restrictions, priced.warm_start
        gains = best is None or solved.value < best[1].value * (1 - MIN_ROUND_GAIN)
        idle = 0 if gains else idle + 1
        if gains:
            best = near, solved
            at = near.strategies(solved.states)
        # All others were tried since the last gain, and the axes that gained are at their best already.
        if idle >= len(frees) - 1 or fine.clock.is_expired:
            break
    assert best is not None, "a mesh that refines another one has axes"
    return best


def reprice_plan(
    chain: Chain, at: Mapping[Variable, Strategy], fine: CostGraph, *, time_limit_s: float
) -> tuple[Chain, ChainSolution]:
    """A plan of another search, with the prices of the mesh of `fine`: `descend` with no free axis."""
    near = _build_neighborhood(chain.instances, chain.runs, fine, at, frozenset())
    return near, near.solve(time_limit_s, close=ROUND_GAP, plan=at)


def _find_warm_start(chain: Chain, free: frozenset[str]) -> WarmStart[Key]:
    """The warm start of a neighbourhood: the last messages with the same free axes, between variables with unchanged
    restrictions."""
    graph = chain.graph
    if free not in graph.neighborhood_cache.saved_messages:
        return WarmStart()
    restrictions, end = graph.neighborhood_cache.saved_messages[free]
    is_same = {
        key: restrictions.get(v) is graph.restrictions[v]  # equal restrictions are one object (`NeighborhoodCache`)
        for pair in end.moved
        for key in pair
        for v in [chain.variable(key)]
    }
    return WarmStart(moved={pair: moved for pair, moved in end.moved.items() if all(is_same[key] for key in pair)})


def axis_parts(coarse: Mesh, fine: Mesh) -> dict[str, tuple[str, ...]]:
    """Axis of `coarse` → the neighbouring axes of `fine` it is split into."""
    parts_by_axis: dict[str, tuple[str, ...]] = {}
    names = iter(fine.axes)
    for axis in coarse.axes:
        size, parts = 1, []
        while size < axis.size:
            part = next(names)
            size *= part.size
            parts.append(part.name)
        parts_by_axis[axis.name] = tuple(parts)
    return parts_by_axis


class _Lift:
    """Translates strategies from the coarse mesh to the finer one; equal objects once."""

    def __init__(self, parts: Mapping[str, tuple[str, ...]]) -> None:
        self._parts = parts
        self._strategies: dict[int, Strategy] = {}
        self._shardings: dict[TensorSharding, TensorSharding] = {}

    def __call__(self, strategy: Strategy) -> Strategy:
        lifted = self._strategies.get(id(strategy))
        if lifted is None:
            lifted = self._strategies[id(strategy)] = self._lift_strategy(strategy)
        return lifted

    def _lift_strategy(self, strategy: Strategy) -> Strategy:
        pairs = zip(strategy.choices, self._parts.values(), strict=False)  # no rule, no choices
        return Strategy(
            operands=tuple(map(self._sharding, strategy.operands)),
            results=tuple(map(self._sharding, strategy.results)),
            partial=self._axes(strategy.partial),
            summed_first=self._axes(strategy.summed_first),
            gathered=self._axes(strategy.gathered),
            choices=tuple(choice for choice, names in pairs for _ in names),
        )

    def _sharding(self, sharding: TensorSharding) -> TensorSharding:
        lifted = self._shardings.get(sharding)
        if lifted is None:
            lifted = TensorSharding(tuple(map(self._axes, sharding.dims)), self._axes(sharding.unreduced))
            self._shardings[sharding] = lifted
        return lifted

    def _axes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(part for axis in names for part in self._parts[axis])


def _build_neighborhood(
    instances: Sequence[SegmentInstance],
    runs: Sequence[Run],
    fine: CostGraph,
    at: Mapping[Variable, Strategy],
    free: frozenset[str],
) -> Chain:
    """The chain of the plans near `at`. Segments with equal restrictions are of one kind."""
    mesh_cache = fine.neighborhood_cache
    narrowed: dict[int, Restriction] = {}  # by the strategy's identity: one set has few
    for strategy in at.values():
        if id(strategy) not in narrowed:
            narrowed[id(strategy)] = mesh_cache.restriction(strategy, free)
    near = {variable: narrowed[id(strategy)] for variable, strategy in at.items()}

    def kind(instance: SegmentInstance) -> int:
        return mesh_cache.kind(instances, instance, [near[variable] for variable in instance.variables])

    alike = tuple(replace(instance, kind=kind(instance)) for instance in instances)
    graph = replace(fine, restrictions=near, _sets={}, _min_seconds={})
    return Chain(graph=graph, instances=alike, runs=runs, _problems=mesh_cache.problems)
