"""The search against exhaustive search, on random small programs, with and without a memory limit."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.errors import MemoryBudgetError
from shardwright.planner.assemble import arrival_time_s, decide
from shardwright.planner.graph import variables_of
from shardwright.planner.search import _Planner

#: Programs tried; each is planned without a limit and with one between what plans take.
PROGRAMS = 300

SIZES = (4, 8, 16)


def random_program(seed: int) -> str:
    """Two to four instructions over matrices, some read twice, with a donated argument now and then."""
    rng = random.Random(seed)
    values: list[tuple[str, tuple[int, ...]]] = []
    lines: list[str] = []
    for number in range(2):
        shape = (rng.choice(SIZES), rng.choice(SIZES))
        lines.append(f"  p{number} = {_text(shape)} parameter({number})")
        values.append((f"p{number}", shape))
    for number in range(rng.randint(1, 3)):
        name, shape, line = _instruction(rng, f"v{number}", values)
        lines.append(line)
        values.append((name, shape))
    result, shape = values[-1]
    lines.append(f"  ROOT out = {_text(shape)} {rng.choice(('tanh', 'negate', 'copy'))}({result})")
    return "HloModule random\n\nadd {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}\n\nENTRY main {\n" + "\n".join(
        lines
    ) + "\n}\n"


def _text(shape: tuple[int, ...]) -> str:
    return f"f32[{','.join(map(str, shape))}]"


def _instruction(
    rng: random.Random, name: str, values: list[tuple[str, tuple[int, ...]]]
) -> tuple[str, tuple[int, ...], str]:
    choices = []
    for (a, left), (b, right) in product(values, repeat=2):
        if left[1] == right[0]:
            choices.append((a, b, (left[0], right[1]), "dot"))
        if left == right:
            choices.append((a, b, left, rng.choice(("add", "multiply"))))
    a, left = rng.choice(values)
    choices.append((a, "", left[::-1], "transpose"))
    first, second, shape, opcode = rng.choice(choices)
    if opcode == "dot":
        line = f"  {name} = {_text(shape)} dot({first}, {second}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    elif opcode == "transpose":
        line = f"  {name} = {_text(shape)} transpose({first}), dimensions={{1,0}}"
    else:
        line = f"  {name} = {_text(shape)} {opcode}({first}, {second})"
    return name, shape, line


@cache
def cluster() -> Cluster:
    return replace(Cluster.local(2), hardware="a100")


def every_plan(planner: _Planner) -> list[tuple[float, int]]:
    """(seconds by the search's objective, bytes) of every assignment, priced value by value."""
    mesh = planner._meshes()[0]
    from shardwright.planner.force import forced

    chain = planner._chain(mesh, forced(planner.flow, planner.program.arguments, planner.options, mesh), frozenset())
    graph = chain.graph
    nodes = [node for instance in chain.instances for node in instance.nodes]
    variables, _ = variables_of(graph.layout, nodes)
    found = []
    for states in product(*(range(len(graph.set_of(v))) for v in variables)):
        chosen = dict(zip(variables, states, strict=True))
        seconds = _seconds(planner, graph, chosen)
        if np.isfinite(seconds):
            found.append((seconds, chosen))
    return [(seconds, chosen, chain) for seconds, chosen in found]


def _seconds(planner: _Planner, graph, chosen) -> float:
    flow, prices = graph.flow, graph.prices
    total = 0.0
    for node in flow.nodes:
        if graph.is_free[node.index]:
            continue
        mine = graph.set_of((node.index, -1))
        state = chosen[node.index, -1]
        total += node.weight * float(mine.time_s[state])
        if node.index in graph.arriving:
            total += prices.arrival_s(node.shapes[0], mine.strategies[state].results[0])
        for leaf, shape in enumerate(node.shapes):
            if (node.index, leaf) in graph.layout.hubs:
                hub = graph.set_of((node.index, leaf)).strategies[chosen[node.index, leaf]].results[0]
                total += graph.layout.hubs[node.index, leaf] * prices.reshard_s(
                    shape, mine.strategies[state].results[leaf], hub
                )
        for use in node.uses:
            if graph.is_free[use.source[0]]:
                continue
            hub = chosen.get(use.source)
            if hub is not None and use.source[1] >= 0:
                have = graph.set_of(use.source).strategies[hub].results[0]
            else:
                source = graph.set_of((use.source[0], -1)).strategies[chosen[use.source[0], -1]]
                have = source.results[use.source[1]]
            shape = flow.nodes[use.source[0]].shapes[use.source[1]]
            total += use.weight * prices.reshard_s(shape, have, mine.strategies[state].operands[use.position])
    return total


@pytest.mark.parametrize("first", range(0, PROGRAMS, 50))
def test_objective_equals_exhaustive_search(first: int) -> None:
    limited = 0
    for seed in range(first, first + 50):
        text = random_program(seed)
        planner = _Planner(text, cluster(), PlanOptions(mesh={"data": 2}), None)
        plans = every_plan(planner)
        best = min(seconds for seconds, *_ in plans)
        found = planner._on_mesh(planner._meshes()[0]).found
        assert found is not None
        assert found.solved.value == pytest.approx(best, rel=2e-5), text
        sizes = {}
        for seconds, chosen, chain in plans:
            tried = planner._found(chain, _solved(chosen), ())
            size = tried.memory.peak_bytes
            sizes[size] = min(seconds, sizes.get(size, np.inf))
        limit = sorted(sizes)[len(sizes) // 2] - 1
        planner = _Planner(text, cluster(), PlanOptions(mesh={"data": 2}, memory_budget=limit), None)
        fitting = [seconds for size, seconds in sizes.items() if size <= limit]
        if not fitting:
            with pytest.raises(MemoryBudgetError):
                planner._on_mesh(planner._meshes()[0])
            continue
        limited += 1
        found = planner._on_mesh(planner._meshes()[0]).found
        assert found is not None
        assert found.memory.peak_bytes <= limit
        assert found.solved.value == pytest.approx(min(fitting), rel=2e-5), text
    assert limited > 10


def _solved(chosen):
    from shardwright.planner.chain import SolvedChain

    return SolvedChain(states=dict(chosen), value=0.0, rolled_bound=0.0)
