"""Gradients that move beside compute: which values those are, and what a step saves by it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.clusters.links import Link
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.limits import SearchLimits
from shardwright.planner.search.program import Program
from shardwright.planner.segments.overlap import optimizer_nodes
from shardwright.plans.plan import Plan
from tests.planner import programs
from tests.planner.programs import PLAIN_A100

EIGHT = replace(Cluster.local(8), hardware=PLAIN_A100)


def make_plan(text: str, overlap: float, *, bandwidth: float | None = None, **options: object) -> Plan:
    link = None if bandwidth is None else Link(bandwidth_bytes_per_s=bandwidth, latency_s=1e-6)
    return plan(text, replace(EIGHT, overlap=overlap, intra_node=link), PlanOptions(**options))  # type: ignore[arg-type]


def of_gradients_s(step_plan: Plan) -> float:
    """Seconds a step of the collectives that the plan itself puts down to gradients."""
    return sum(each.time_s for each in step_plan.collectives if each.cause.startswith("gradient of"))


def last_s(step_plan: Plan) -> float:
    """Seconds a step of the longest of them: when the last gradient is ready nothing is left to compute."""
    return max(each.time_s for each in step_plan.collectives if each.cause.startswith("gradient of"))


@pytest.fixture(scope="module")
def wide_mlp() -> str:
    return programs.lower(programs.mlp(batch=4096, width=1024, hidden=4096))


@pytest.mark.parametrize("program", [programs.mlp(), programs.scan()], ids=["unrolled", "scanned"])
def test_gradients_are_what_the_backward_pass_sums_and_no_product_reads(program: programs.Program) -> None:
    flow = Program(programs.lower(program), PlanOptions()).flow
    result = Program(programs.lower(program), PlanOptions()).gradients
    sizes = {flow.nodes[i].shapes[leaf].dimensions for i, leaf in result}
    state = {flow.nodes[i].shapes[0].dimensions for i in set(flow.aliases.values()) for i in [flow.parameters[i]]}
    assert {size for size in state if size} <= sizes  # each parameter's gradient
    products = {node.index for node in flow.nodes if node.instruction.opcode == "dot" and not node.is_value}
    for node in flow.nodes:
        assert node.index not in products or not any(use.source in result for use in node.uses)
    late = optimizer_nodes(flow)
    assert not any(late[index] for index in products)
    assert any(late)


def test_a_step_waits_for_the_exposed_part_of_its_gradients(wide_mlp: str) -> None:
    whole, half = (make_plan(wide_mlp, overlap, bandwidth=3e12, force="data") for overlap in (0.0, 0.5))
    assert whole.cost.hidden_s == 0 < of_gradients_s(half)
    assert half.cost.hidden_s == pytest.approx(0.5 * (of_gradients_s(half) - last_s(half)))
    assert half.cost.step_s == pytest.approx(whole.cost.step_s - half.cost.hidden_s)
    assert half.cost.step_s - half.cost.lower_bound_s <= 0.5 * last_s(half) + 0.01 * half.cost.step_s
    assert "50% of the time that gradients move is priced" in half.cost.bound_scope


def test_nothing_hides_behind_compute_that_is_not_there(wide_mlp: str) -> None:
    step_plan = make_plan(wide_mlp, 0.9, bandwidth=1e8, force="data")
    assert step_plan.cost.hidden_s < step_plan.cost.compute_s < 0.1 * of_gradients_s(step_plan)
    assert step_plan.cost.lower_bound_s <= step_plan.cost.step_s
    assert step_plan.cost.step_s + step_plan.cost.hidden_s == pytest.approx(
        make_plan(wide_mlp, 0.0, bandwidth=1e8, force="data").cost.step_s
    )


def test_all_of_it_hides_where_links_are_said_to_hide_all(wide_mlp: str) -> None:
    result, nearly = (make_plan(wide_mlp, overlap, bandwidth=3e13, force="data") for overlap in (1.0, 0.99))
    assert result.cost.hidden_s == pytest.approx(of_gradients_s(result) - last_s(result))
    assert nearly.cost.hidden_s == pytest.approx(0.99 * result.cost.hidden_s)
    assert result.cost.lower_bound_s < result.cost.step_s < nearly.cost.step_s
    assert "0% of the time that gradients move is priced" in result.cost.bound_scope


@pytest.mark.dear
@pytest.mark.parametrize("bandwidth", [2e9, 2e10])
@pytest.mark.parametrize("overlap", [0.9, 1.0])
def test_plans_that_promise_too_much_are_searched_again(wide_mlp: str, bandwidth: float, overlap: float) -> None:
    hiding, waiting = (make_plan(wide_mlp, each, bandwidth=bandwidth) for each in (overlap, 0.0))
    forced = make_plan(wide_mlp, overlap, bandwidth=bandwidth, force="data")
    assert hiding.cost.lower_bound_s <= hiding.cost.step_s <= min(waiting.cost.step_s, forced.cost.step_s) * 1.002
    assert hiding.cost.lower_bound_s <= forced.cost.step_s


def test_what_hides_is_compiled_so(wide_mlp: str) -> None:
    hiding, waiting = (make_plan(wide_mlp, overlap, bandwidth=3e12, force="data") for overlap in (0.5, 0.0))
    assert hiding.compile_options == {"xla_gpu_enable_latency_hiding_scheduler": True}
    assert waiting.compile_options == {}
    always = plan(wide_mlp, replace(EIGHT, hardware="h100", overlap=0.5), PlanOptions(force="data"))
    assert always.cost.hidden_s > 0
    assert always.compile_options == {}


@pytest.mark.parametrize("bandwidth", [2e9, 2e10])
def test_plans_that_were_compared_hide_no_more_than_they_can_either(wide_mlp: str, bandwidth: float) -> None:
    step_plan = make_plan(wide_mlp, 0.9, bandwidth=bandwidth)
    forced = make_plan(wide_mlp, 0.9, bandwidth=bandwidth, force="zero1", mesh={"data": 8})
    by_name = {each.name: each.step_s for each in step_plan.candidates if each.mesh.sizes == {"data": 8}}
    assert by_name["optimizer sharded (ZeRO-1)"] == pytest.approx(forced.cost.step_s, rel=0.01)
    fastest_s = min(each.step_s or math.inf for each in step_plan.candidates)
    assert fastest_s * (1 + SearchLimits().simplicity_tolerance) >= step_plan.cost.step_s


@pytest.mark.parametrize("bandwidth", [1e11, 1e12])
def test_the_search_moves_more_where_it_can_hide_it(wide_mlp: str, bandwidth: float) -> None:
    hiding, waiting = (make_plan(wide_mlp, overlap, bandwidth=bandwidth) for overlap in (0.9, 0.0))
    assert of_gradients_s(hiding) > of_gradients_s(waiting)
    assert hiding.cost.step_s < waiting.cost.step_s
