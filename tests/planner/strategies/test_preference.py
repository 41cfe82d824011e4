"""Ties fall to the simpler layout, in every layer alike, and for no price that means anything."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.search.search import Search
from shardwright.planner.segments.segment_chain import Chain
from shardwright.planner.tuning import MAX_TIE_SHARE
from shardwright.plans.shardings import Mesh
from tests.planner.programs import PLAIN_A100, PROGRAMS, gpt2, lower

LAYERS = 4


@pytest.fixture(scope="module")
def deep() -> str:
    return lower(gpt2(layers=LAYERS, width=64, batch=16, length=32))


@pytest.mark.dear
@pytest.mark.parametrize(
    ("hardware", "mesh"),
    [("cpu", {"data": 4, "model": 2}), ("a100", {"data": 8}), ("a100", {"data": 2, "model": 4})],
    ids=str,
)
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


@pytest.mark.parametrize("name", ["mlp", "cnn", "scan"])
def test_preferences_cost_next_to_nothing(name: str) -> None:
    chain = chain_of(name)
    preferred = chain.solve(10.0)
    chain.graph.preference = None
    plain = Chain(graph=chain.graph, instances=chain.instances, runs=chain.runs)
    assert plain.solve(10.0).value <= preferred.value <= plain.solve(10.0).value * (1 + MAX_TIE_SHARE)


def test_replicated_is_free_and_every_split_is_not() -> None:
    graph = chain_of("mlp").graph
    preference = graph.preference
    assert preference is not None
    for node in graph.flow.nodes:
        strategies = graph.set_of((node.index, -1))
        added = preference.penalty_s(strategies)
        whole = np.array(
            [all(s.is_replicated for s in (*each.operands, *each.results)) for each in strategies.strategies]
        )
        assert (added[whole] == 0).all()
        assert (added[~whole] > 0).all()


def chain_of(name: str) -> Chain:
    mesh = Mesh.of({"data": 4, "model": 2})
    cluster = replace(Cluster.local(8), hardware=PLAIN_A100)
    return Search(lower(PROGRAMS[name]()), cluster, PlanOptions(mesh=mesh.sizes)).build_chain(
        mesh, ForcedStrategy(), frozenset()
    )
