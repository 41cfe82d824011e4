"""Ties fall to the simpler layout, in every layer alike, and for no price that means anything."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.cost import hardware_profile
from shardwright.hlo import parse
from shardwright.planner import plan
from shardwright.planner.dataflow import build_dataflow
from shardwright.planner.graph import Graph, build_graph
from shardwright.planner.preference import prefer_simple
from shardwright.planner.prices import Prices
from shardwright.planner.solve import solve
from shardwright.planner.strategies import StrategyBuilder
from shardwright.plans import Mesh
from tests.planner.programs import PROGRAMS, gpt2, lower

LAYERS = 5


@pytest.fixture(scope="module")
def deep() -> str:
    return lower(gpt2(layers=LAYERS, width=64, batch=16, length=32))


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}], ids=str)
@pytest.mark.parametrize("hardware", ["cpu", "a100"])
def test_equal_layers_are_laid_out_alike(deep: str, hardware: str, mesh: dict[str, int]) -> None:
    """The first layer meets the embedding, the last one the head: they may differ."""
    planned = plan(deep, replace(Cluster.local(8), hardware=hardware), PlanOptions(mesh=mesh))
    layouts: dict[str, set[str]] = {}
    for variable in planned.parameters:
        layer = re.search(r"'h(\d)'", variable.name)
        if layer and 0 < int(layer[1]) < LAYERS - 1:
            layouts.setdefault(variable.name.replace(layer[0], "h"), set()).add(str(variable.sharding))
    assert len(layouts) > 20
    assert {name: found for name, found in layouts.items() if len(found) > 1} == {}


def graph_of(name: str) -> Graph:
    prices = Prices(Mesh.of({"data": 4, "model": 2}), Cluster.local(8), hardware_profile("a100"))
    return build_graph(build_dataflow(parse(lower(PROGRAMS[name]()))), StrategyBuilder(prices), prices, {})


@pytest.mark.parametrize("name", ["mlp", "cnn", "scan"])
def test_preferences_cost_nothing_and_keep_the_bound(name: str) -> None:
    graph = graph_of(name)
    problem = graph.problem()
    preferred = prefer_simple(graph, problem)
    best, chosen = solve(problem, time_limit_s=10), solve(preferred.problem, time_limit_s=10)
    assert 0 < preferred.most < 1e-3 * best.value
    assert best.value <= problem.value(chosen.states) * (1 + 1e-9)
    assert problem.value(chosen.states) <= best.value + preferred.most
    assert chosen.lower_bound - preferred.most <= best.value


def test_replicated_is_free_and_every_split_is_not() -> None:
    graph = graph_of("mlp")
    problem = graph.problem()
    added = [new - old for new, old in zip(prefer_simple(graph, problem).problem.costs, problem.costs, strict=True)]
    for leader, points in zip(graph.leaders, added, strict=True):
        strategies = graph.sets[leader].strategies
        whole = np.array([all(s.is_replicated for s in (*each.operands, *each.results)) for each in strategies])
        assert np.allclose(points[whole], 0, atol=1e-15)
        assert (points[~whole] > 0).all()
