"""The search against exhaustive search on random small programs, with and without a memory limit.

`make bench-exact` tries 300 of them, the test suite fewer. `SHARDWRIGHT_EXACT_FIRST` is the seed of the first.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.cost import bytes_with_margin, hardware_profile
from shardwright.errors import MemoryBudgetError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.graph.dataflow import Leaf
from shardwright.planner.memory.constraint import MemoryConstraint, MemoryModel
from shardwright.planner.memory.ilp_with_memory_rows import solve_with_memory_rows
from shardwright.planner.search.search import Search
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.segments.variables import Variable, variables_of
from shardwright.plans.shardings import Mesh, TensorSharding
from tests.planner.programs import PLAIN_A100, lower, mlp

PROGRAMS = int(os.environ.get("SHARDWRIGHT_EXACT_PROGRAMS", "40"))
FIRST = int(os.environ.get("SHARDWRIGHT_EXACT_FIRST", "0"))
SEEDS = range(FIRST, FIRST + PROGRAMS)

#: Programs with more plans than this are not judged for memory: each plan is written down for it.
MOST_JUDGED = 800

#: Preferences among equal plans may cost as much (`planner.strategies.preference.MAX_SHARE`).
TIES = 2e-5

TWO = replace(Cluster.local(2), hardware=PLAIN_A100)
MESH = {"data": 2}
SIZES = (4, 8, 16)

Shape = tuple[int, int]


def random_program(seed: int) -> str:
    """One to three products, sums and transposes of two matrices, some values read twice, then a unary one."""
    rng = random.Random(seed)
    values: list[tuple[str, Shape]] = []
    lines: list[str] = []
    for number in range(2):
        shape = (rng.choice(SIZES), rng.choice(SIZES))
        lines.append(f"  p{number} = {text_of(shape)} parameter({number})")
        values.append((f"p{number}", shape))
    for number in range(rng.randint(1, 3)):
        line, shape = random_instruction(rng, f"v{number}", values)
        lines.append(line)
        values.append((f"v{number}", shape))
    result, shape = values[-1]
    lines.append(f"  ROOT out = {text_of(shape)} {rng.choice(('tanh', 'negate', 'copy'))}({result})")
    return "HloModule random\n\nENTRY main {\n" + "\n".join(lines) + "\n}\n"


def text_of(shape: Shape) -> str:
    return f"f32[{shape[0]},{shape[1]}]"


def random_instruction(rng: random.Random, name: str, values: list[tuple[str, Shape]]) -> tuple[str, Shape]:
    a, left = rng.choice(values)
    choices = [(f"transpose({a}), dimensions={{1,0}}", left[::-1])]
    for (a, left), (b, right) in product(values, repeat=2):
        if left[1] == right[0]:
            choices.append(
                (f"dot({a}, {b}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}", (left[0], right[1]))
            )
        if left == right:
            choices.append((f"{rng.choice(('add', 'multiply'))}({a}, {b})", left))
    what, shape = rng.choice(choices)
    return f"  {name} = {text_of(shape)} {what}", shape


def make_search(text: str, memory_budget: int | None = None) -> tuple[Search, Mesh]:
    return Search(text, TWO, PlanOptions(mesh=MESH, memory_budget=memory_budget)), Mesh.of(MESH)


def every_plan(search: Search, mesh: Mesh) -> tuple[Chain, list[tuple[float, dict[Variable, int]]]]:
    """(seconds by the search's objective, states) of every plan, priced move by move."""
    chain = search.build_chain(mesh, ForcedStrategy(), frozenset())
    variables, _ = variables_of(chain.graph.variables, [node for each in chain.instances for node in each.nodes])
    moved_s = price_moves(chain.graph)
    plans = []
    for states in product(*(range(len(chain.graph.set_of(variable))) for variable in variables)):
        chosen = dict(zip(variables, states, strict=True))
        seconds = seconds_of(chain.graph, chosen, moved_s)
        if np.isfinite(seconds):
            plans.append((seconds, chosen))
    return chain, plans


MovePrices = Callable[[int, TensorSharding, TensorSharding], float]


def price_moves(graph: CostGraph) -> MovePrices:
    """(an array's maker, how it is laid out, how it shall be) → seconds; each move is priced once."""
    prices = graph.prices

    @cache
    def moved_s(maker: int, source: TensorSharding, target: TensorSharding) -> float:
        seconds = prices.reshard_s(graph.flow.nodes[maker].shapes[0], source, target)
        is_written = seconds > 0 and graph.variables.kernels.is_fused[maker]
        return seconds + prices.profile.launch_s if is_written else seconds

    return moved_s


def seconds_of(graph: CostGraph, chosen: dict[Variable, int], moved_s: MovePrices | None = None) -> float:
    """Computing, arriving, and every move: from maker to hub, and from hub or maker to each reader."""
    flow, prices, hubs = graph.flow, graph.prices, graph.variables.shared_layouts
    moved_s = moved_s or price_moves(graph)
    total = 0.0

    for node in flow.nodes:
        mine = graph.set_of((node.index, -1))
        strategy = mine.strategies[chosen[node.index, -1]]
        total += node.weight * float(mine.time_s[chosen[node.index, -1]])
        if node.index in graph.fed_arguments:
            total += prices.arrival_s(node.shapes[0], strategy.results[0])
        if (node.index, 0) in hubs:
            hub = graph.set_of((node.index, 0)).strategies[chosen[node.index, 0]].results[0]
            total += hubs[node.index, 0] * moved_s(node.index, strategy.results[0], hub)
        for use in node.uses:
            lies = graph.set_of(use.source if use.source in hubs else (use.source[0], -1))
            have = lies.strategies[chosen[use.source if use.source in hubs else (use.source[0], -1)]].results[0]
            total += use.weight * moved_s(use.source[0], have, strategy.operands[use.position])
    return total


@pytest.mark.dear
@pytest.mark.parametrize("first", SEEDS[::20])
def test_search_finds_the_best_plan_and_the_best_that_fits(first: int) -> None:
    limited = 0
    for seed in range(first, min(first + 20, SEEDS.stop)):
        text = random_program(seed)
        search, mesh = make_search(text)
        chain, plans = every_plan(search, mesh)
        result = search.solve_mesh(mesh)
        best = min(seconds for seconds, _ in plans)
        assert result.solution.value == pytest.approx(best, rel=TIES), text
        assert result.solution.tied_bound == pytest.approx(best, rel=TIES)
        if len(plans) <= MOST_JUDGED:
            limited += finds_the_best_that_fits(text, search, chain, plans)
    assert limited


def finds_the_best_that_fits(
    text: str, search: Search, chain: Chain, plans: Sequence[tuple[float, dict[Variable, int]]]
) -> bool:
    """Whether any plan fits, the limit just under the median of what plans take: half of them do not, or all."""
    fastest: dict[int, float] = {}
    for seconds, chosen in plans:
        size = search.bytes_needed(search.evaluate(chain, ChainSolution(states=chosen, value=0.0, tied_bound=0.0), ()))
        fastest[size] = min(seconds, fastest.get(size, np.inf))
    limit = sorted(fastest)[len(fastest) // 2] - 1
    fitting = [seconds for size, seconds in fastest.items() if size <= limit]
    limited, _ = make_search(text, memory_budget=limit)
    if not fitting:
        with pytest.raises(MemoryBudgetError):
            limited.run()
        return False
    outcome = limited.search_meshes()
    assert limited.fit_memory(outcome)
    assert outcome.best_plan is not None
    result = outcome.best_plan
    assert limited.bytes_needed(result) <= limit
    assert result.solution.value == pytest.approx(min(fitting), rel=TIES), text
    return True


class _PeakAlone(Search):
    """Counts the peak of a plan alone, without the margin that a device must have."""

    def memory_model(self, hubs: Iterable[Leaf]) -> MemoryModel:
        return self.program.build_memory_model(self.profile, hubs, 0.0)


def test_the_margin_is_in_the_rows() -> None:
    """A device must have more than the peak. Were the rows of the peak alone, plans between the two would be found and
    refused one by one. What XLA copies is in no row: here it copies nothing."""
    step, arguments, _ = mlp(batch=1024, width=32, hidden=64)
    text, cluster = lower((step, arguments, ())), Cluster.local(4)
    options = PlanOptions(mesh={"data": 4}, remat="none", micro_batches=1)
    fastest = plan(text, cluster, options)
    limited = replace(options, memory_budget=bytes_with_margin(fastest.memory, hardware_profile("cpu")) - 1)
    judged: list[int] = []
    for kind in (Search, _PeakAlone):
        search = kind(text, cluster, limited)
        assert search.run().memory.peak_bytes < fastest.memory.peak_bytes
        judged.append(_plans_judged(search))
    with_margin, without = judged
    assert with_margin == 1 < without


def _plans_judged(search: Search) -> int:
    """How many plans are judged until the exact program gives the fastest one that fits."""
    outcome = search.search_meshes()
    fastest = outcome.evaluate(outcome.fastest)
    model, judged = search.memory_model(fastest.chain.graph.variables.shared_layouts), 0

    def judge(states: Mapping[Variable, int]) -> tuple[int, MemoryConstraint]:
        nonlocal judged
        judged += 1
        candidate = search.evaluate(fastest.chain, ChainSolution(states=dict(states), value=0.0, tied_bound=0.0), ())
        return search.bytes_needed(candidate), model.constraint_at_peak(candidate.decisions)

    peak = model.constraint_at_peak(fastest.decisions)
    best = solve_with_memory_rows(fastest.chain, search.limit_bytes, [peak], judge, 20.0)
    assert best is not None
    return judged
