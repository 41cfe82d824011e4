"""Strategies and coarsening: against brute force over all strategies of small programs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from shardwright.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.hlo import parse
from shardwright.planner import plan
from shardwright.planner.dataflow import Dataflow, build_dataflow
from shardwright.planner.graph import FINE_NODES, Graph, build_graph
from shardwright.planner.prices import Prices
from shardwright.planner.solve import solve
from shardwright.planner.strategies import StrategyBuilder, even_shardings
from shardwright.plans import Mesh
from tests.planner.programs import PROGRAMS, lower

ONE_AXIS = Mesh.of({"data": 8})
TWO_AXES = Mesh.of({"data": 4, "model": 2})


def graph_of(text: str, mesh: Mesh, *, coarsen: bool | None) -> Graph:
    flow = build_dataflow(parse(text))
    prices = Prices(mesh, Cluster.local(mesh.device_count), hardware_profile("cpu"))
    return build_graph(flow, StrategyBuilder(prices), prices, {}, coarsen=coarsen)


CHAIN = """HloModule chain, entry_computation_layout={(f32[64,32], f32[32,16])->f32[64,16]}

ENTRY main {
  x = f32[64,32] parameter(0)
  w = f32[32,16] parameter(1)
  y = f32[64,16] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT z = f32[64,16] tanh(y)
}
"""


def brute_force(graph: Graph) -> float:
    """The least cost over every combination of every node's strategies, priced edge by edge."""
    flow, prices = graph.flow, graph.prices
    best = np.inf
    for chosen in product(*(range(len(s)) for s in graph.sets)):
        strategies = [s.strategies[i] for s, i in zip(graph.sets, chosen, strict=True)]
        cost = sum(float(graph.sets[n.index].time_s[chosen[n.index]]) * n.weight for n in flow.nodes)
        for node in flow.nodes:
            for use in node.uses:
                source, leaf = use.source
                made = strategies[source].results[leaf]
                wanted = strategies[node.index].operands[use.position]
                if use.hard and made != wanted:
                    cost = np.inf
                else:
                    cost += use.weight * prices.reshard_s(flow.nodes[source].shapes[leaf], made, wanted)
        best = min(best, cost)
    return best


@pytest.mark.parametrize("coarsen", [True, False])
def test_small_program_against_brute_force(coarsen: bool) -> None:
    graph = graph_of(CHAIN, ONE_AXIS, coarsen=coarsen)
    assert solve(graph.problem(), time_limit_s=10).value == pytest.approx(brute_force(graph))


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_small_programs_are_not_coarsened(name: str) -> None:
    text = lower(PROGRAMS[name]())
    as_planned = graph_of(text, TWO_AXES, coarsen=None)
    assert len(as_planned.flow.nodes) <= FINE_NODES
    assert as_planned.leaders == graph_of(text, TWO_AXES, coarsen=False).leaders


@pytest.mark.parametrize("mesh", [ONE_AXIS, TWO_AXES], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt2", "scan"])
def test_coarsening_loses_at_most_three_percent(name: str, mesh: Mesh) -> None:
    text = lower(PROGRAMS[name]())
    coarse = graph_of(text, mesh, coarsen=True)
    fine = graph_of(text, mesh, coarsen=False)
    assert len(coarse.leaders) < 0.6 * len(fine.leaders)
    best = solve(fine.problem(), time_limit_s=20)
    found = solve(coarse.problem(), time_limit_s=20)
    assert best.value - 1e-12 <= found.value <= 1.03 * best.value


def node_named(flow: Dataflow, name: str) -> int:
    return next(node.index for node in flow.nodes if node.instruction.name == name)


def test_conditionals_and_nested_tuples_plan_end_to_end() -> None:
    text = """HloModule branches, entry_computation_layout={(s32[], (f32[16,8], f32[8]))->f32[16,8]}

left {
  p = (f32[16,8], f32[8]) parameter(0)
  m = f32[16,8] get-tuple-element(p), index=0
  ROOT t = f32[16,8] tanh(m)
}

right {
  q = (f32[16,8], f32[8]) parameter(0)
  v = f32[8] get-tuple-element(q), index=1
  ROOT s = f32[16,8] broadcast(v), dimensions={1}
}

ENTRY main {
  which = s32[] parameter(0)
  both = (f32[16,8], f32[8]) parameter(1)
  ROOT r = f32[16,8] conditional(which, both, both), branch_computations={left, right}
}
"""
    planned = plan(text, Cluster.local(8))
    assert [variable.number for variable in planned.parameters] == [0, 1, 2]
    assert {entry.computation for entry in planned.instructions} == {"main", "left", "right"}


# ---- strategies --------------------------------------------------------------------


def test_strategies_of_a_product_on_one_axis() -> None:
    """m, n and k; k summed everywhere, or scattered over either dimension of the result."""
    graph = graph_of(CHAIN, ONE_AXIS, coarsen=False)
    strategies = graph.sets[node_named(graph.flow, "y")].strategies
    found = {(str(s.operands[0]), str(s.operands[1]), str(s.results[0]), s.partial) for s in strategies}
    assert found == {
        ("[-, -]", "[-, -]", "[-, -]", ()),
        ("[data, -]", "[-, -]", "[data, -]", ()),
        ("[-, -]", "[-, data]", "[-, data]", ()),
        ("[-, data]", "[data, -]", "[-, -]", ("data",)),
        ("[-, data]", "[data, -]", "[data, -]", ("data",)),
        ("[-, data]", "[data, -]", "[-, data]", ("data",)),
    }


def test_strategies_divide_and_keep_mesh_order() -> None:
    graph = graph_of(CHAIN, TWO_AXES, coarsen=False)
    for found in graph.sets:
        for strategy in found.strategies:
            for sharding in (*strategy.operands, *strategy.results):
                assert all(list(axes) == sorted(axes) for axes in sharding.dims)
    shape = graph.flow.nodes[0].shapes[0]
    assert len(list(even_shardings(shape, TWO_AXES))) == 9
