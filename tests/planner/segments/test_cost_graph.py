"""Variables, hubs, segments and runs; the rolled program against the program written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.search.search import Search
from shardwright.planner.segments.bound import lower_bound
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.dominator_cut import SegmentInstance
from shardwright.planner.segments.segment_chain import Chain
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver.solve import solve
from shardwright.planner.strategies.expansion import shardings_of
from shardwright.plans.shardings import Mesh
from tests.planner.programs import PLAIN_A100, PROGRAMS, gpt2, lower, volumes

ONE_AXIS = Mesh.of({"data": 8})
TWO_AXES = Mesh.of({"data": 4, "model": 2})


def chain_of(text: str, mesh: Mesh, hardware: str = "a100") -> Chain:
    cluster = replace(Cluster.local(mesh.device_count), hardware=hardware)
    return Search(text, cluster, PlanOptions(mesh=mesh.sizes)).build_chain(mesh, ForcedStrategy(), frozenset())


def value_written_out(chain: Chain, states: dict[Variable, int]) -> float:
    """Seconds of all segments under the given states, priced anew from the graph: no reduction, no rolling up."""
    total = 0.0
    for instance in chain.instances:
        problem = chain.graph.problem(instance.nodes, instance.variables)
        total += problem.value(np.array([states[v] for v in instance.variables], np.int64))
    return total


CHAIN = """HloModule chain, entry_computation_layout={(f32[64,32], f32[32,16])->f32[64,16]}

ENTRY main {
  x = f32[64,32] parameter(0)
  w = f32[32,16] parameter(1)
  y = f32[64,16] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT z = f32[64,16] tanh(y)
}
"""


# ---- segments -------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep() -> str:
    return lower(gpt2(layers=6, width=64, batch=16, length=32))


def test_layers_are_segments_and_equal_ones_a_run(deep: str) -> None:
    """Two segments a layer, between the residual additions; the first and the last layer may differ."""
    chain = chain_of(deep, ONE_AXIS)
    assert len(chain.instances) == 2 * 6 + 2
    (run,) = chain.runs
    assert run.period == 2
    assert run.repeats >= 4
    assert chain.kind_count <= 6


def test_backward_and_optimizer_belong_to_the_forward_they_differentiate(deep: str) -> None:
    """Only the residual stream and its gradient cross a boundary between layers."""
    chain = chain_of(deep, ONE_AXIS)
    (run,) = chain.runs
    flow = chain.graph.flow
    for segment in range(run.first + 1, run.stop - 1):
        imports = [flow.nodes[node].shapes[leaf] for node, leaf in chain.instances[segment].imports]
        assert [shape.dimensions for shape in imports] == [(16, 32, 64), (16, 32, 64)]


@pytest.mark.parametrize("mesh", [ONE_AXIS, TWO_AXES], ids=str)
def test_rolling_up_a_run_loses_nothing_here(deep: str, mesh: Mesh) -> None:
    """The rolled program's plan costs what it says, written out; and the bound on the unrolled one meets it."""
    chain = chain_of(deep, mesh)
    solved = chain.solve(20.0)
    assert value_written_out(chain, solved.states) == pytest.approx(solved.value, rel=1e-9)
    assert lower_bound(chain, 20.0) <= solved.value * (1 + 1e-9)
    assert lower_bound(chain, 20.0) >= solved.value * 0.995


def test_what_segments_share_is_decided_once() -> None:
    """Another segment's value can be taken as it is made, with no hub between: a conditional hands on what its branch
    computes."""
    chain = chain_of(lower(volumes()), TWO_AXES)
    shared = {variable for instance in chain.instances for variable in instance.imports}
    assert any(leaf < 0 for _, leaf in shared)
    assert shared == set(chain.graph.variables.cross_segment)


def test_whole_program_in_one_piece_agrees_with_its_segments(deep: str) -> None:
    """One problem over all nodes, no run rolled up: what segments and runs must not change."""
    chain = chain_of(deep, ONE_AXIS)
    apart = Chain(graph=chain.graph, instances=chain.instances, runs=())
    assert apart.solve(60.0).value == pytest.approx(chain.solve(20.0).value, rel=1e-6)


def test_small_program_against_the_problem_written_out() -> None:
    chain = chain_of(CHAIN, ONE_AXIS)
    (instance,) = chain.instances
    problem = chain.graph.problem(instance.nodes, instance.variables)
    best = min(problem.value(np.array(states)) for states in np.ndindex(*(len(cost) for cost in problem.costs)))
    assert chain.solve(10.0).value == pytest.approx(best)
    assert solve(problem, time_limit_s=10).value == pytest.approx(best)


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


def set_of(graph: CostGraph, name: str):  # type: ignore[no-untyped-def]
    node = next(node.index for node in graph.flow.nodes if node.instruction.name == name)
    return graph.set_of((node, -1))


def test_strategies_of_a_product_on_one_axis() -> None:
    """m, n and k; a contracted k leaves a partial sum for the reader to reduce."""
    strategies = set_of(chain_of(CHAIN, ONE_AXIS).graph, "y").strategies
    values = {(str(s.operands[0]), str(s.operands[1]), str(s.results[0]), s.partial) for s in strategies}
    assert values == {
        ("[-, -]", "[-, -]", "[-, -]", ()),
        ("[data, -]", "[-, -]", "[data, -]", ()),
        ("[-, -]", "[-, data]", "[-, data]", ()),
        ("[-, data]", "[data, -]", "[-, -] partial over data", ("data",)),
    }


def test_strategies_divide_and_keep_mesh_order() -> None:
    graph = chain_of(CHAIN, TWO_AXES).graph
    for node in graph.flow.nodes:
        for strategy in graph.set_of((node.index, -1)).strategies:
            for sharding in (*strategy.operands, *strategy.results):
                assert all(list(axes) == sorted(axes) for axes in sharding.dims)
    shape = graph.flow.nodes[0].shapes[0]
    assert len(list(shardings_of(shape, TWO_AXES))) == 9
    assert len(list(shardings_of(shape, TWO_AXES, partial=True))) == 16


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_every_value_with_a_hub_has_readers(name: str) -> None:
    layout = chain_of(lower(PROGRAMS[name]()), TWO_AXES).graph.variables
    read = {use.source for node in layout.flow.nodes for use in node.uses}
    assert set(layout.shared_layouts) <= read
    assert set(layout.cross_segment) <= set(layout.shared_layouts)


@pytest.mark.parametrize("force", [None, "zero1"])
def test_equal_segments_share_strategies_that_are_those_of_each(deep: str, force: str | None) -> None:
    search = Search(deep, replace(Cluster.local(8), hardware=PLAIN_A100), PlanOptions(mesh=ONE_AXIS.sizes, force=force))
    graph = search.build_chain(ONE_AXIS, search.program.resolve_force(search.options, ONE_AXIS), frozenset()).graph
    apart = replace(graph, isomorphic_variables={}, _sets={})
    assert len(graph.isomorphic_variables) > len(graph.flow.nodes) / 2
    for variable, model in graph.isomorphic_variables.items():
        assert graph.set_of(variable) is graph.set_of(model)
        assert graph.set_of(variable).strategies == apart.set_of(variable).strategies


def test_equal_edges_of_a_program_share_a_matrix(deep: str) -> None:
    chain = chain_of(deep, TWO_AXES)
    run = chain.runs[0]
    first, second = (chain.graph.problem(each.nodes, each.variables).edges for each in _repeats(chain, run.first))
    shared = [first[edge] is second[edge] for edge in first]
    assert np.mean(shared) > 0.8  # the others are sums of several uses


def _repeats(chain: Chain, first: int) -> tuple[SegmentInstance, SegmentInstance]:
    """A segment of a run and the equal one of the next repeat."""
    one = chain.instances[first]
    return one, next(each for each in chain.instances[first + 1 :] if each.kind == one.kind)
