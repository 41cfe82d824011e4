"""`effort="fast"`: one mesh, what fits first, a weak bound."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest

from benchmarks.planner.suite import cluster_json
from shardwright.clusters.cluster import Cluster
from shardwright.cost import bytes_with_margin, hardware_profile
from shardwright.errors import MemoryBudgetError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.clock import Clock
from shardwright.plans.plan import Plan
from shardwright.progress import PlanProgress
from tests.planner.clocks import FrozenClock, just_late
from tests.planner.programs import gpt2, lower, mlp

CLUSTERS = {
    "8 CPUs": Cluster.local(8),
    "7 CPUs": Cluster.local(7),
    "2 nodes of 8 A100": Cluster.from_json(cluster_json(16, "a100")),
}
PROGRAMS = {
    "transformer": partial(gpt2, layers=1, batch=16, length=16),
    "perceptron": partial(mlp, batch=64, width=64, hidden=256),
}


@cache
def text_of(name: str) -> str:
    return lower(PROGRAMS[name]())


def make_plan(text: str, cluster: Cluster, clock: Clock | None = None, **asked: Any) -> tuple[Plan, list[PlanProgress]]:
    reports: list[PlanProgress] = []
    return plan(text, cluster, PlanOptions(**asked), progress=reports.append, clock=clock), reports


def meshes(reports: list[PlanProgress]) -> set[str]:
    """Those that were searched."""
    return {each.detail for each in reports if each.phase == "rules"}


@pytest.mark.dear
@pytest.mark.parametrize(
    ("program", "devices"), [("transformer", "8 CPUs"), *(("perceptron", devices) for devices in CLUSTERS)]
)
def test_it_searches_one_mesh_and_is_nearly_as_good(program: str, devices: str) -> None:
    text, cluster = text_of(program), CLUSTERS[devices]
    fast, told = make_plan(text, cluster, effort="fast")
    usual, all_told = make_plan(text, cluster)
    assert meshes(told) == {str(fast.mesh)} or "replicated" in fast.cost.bound_scope
    assert len(fast.mesh.axes) <= 2
    assert len(told) < len(all_told), "never the same search"
    assert fast.cost.step_s <= 1.15 * usual.cost.step_s


@pytest.mark.dear
def test_its_bound_holds_on_its_mesh_and_says_that_it_is_weak() -> None:
    text, cluster = text_of("transformer"), CLUSTERS["8 CPUs"]
    fast, _ = make_plan(text, cluster, effort="fast")
    usual, _ = make_plan(text, cluster, mesh=fast.mesh.sizes)
    assert 0 < fast.cost.lower_bound_s <= usual.cost.step_s * (1 + 1e-3)
    assert "a weak bound" in fast.cost.bound_scope


def test_a_mesh_of_several_nodes_lies_along_them() -> None:
    fast, _ = make_plan(text_of("perceptron"), CLUSTERS["2 nodes of 8 A100"], effort="fast", memory_fraction=1.0)
    assert list(fast.mesh.sizes.values()) in ([2, 8], [16])


@pytest.mark.dear
@pytest.mark.parametrize("part", [0.9, 0.6])
def test_where_memory_binds_it_finds_what_fits_on_one_mesh(part: float) -> None:
    text, cluster = text_of("transformer"), CLUSTERS["8 CPUs"]
    profile = hardware_profile(cluster.hardware)
    free, _ = make_plan(text, cluster, effort="fast")
    limit = round(part * bytes_with_margin(free.memory, profile))
    tight, told = make_plan(text, cluster, effort="fast", memory_budget=limit)
    assert bytes_with_margin(tight.memory, profile) <= limit
    assert len(meshes(told)) == 1
    assert tight.cost.lower_bound_s <= tight.cost.step_s


def test_where_nothing_fits_it_says_so_too() -> None:
    with pytest.raises(MemoryBudgetError, match="the least that was found needs"):
        make_plan(text_of("perceptron"), CLUSTERS["8 CPUs"], effort="fast", memory_budget=20_000)


@pytest.mark.parametrize(
    "asked", [{"mesh": {"data": 8}}, {"mesh": {"a": 2, "b": 2, "c": 2}}, {"force": "mixed"}, {"mode": "propagate"}]
)
def test_what_else_is_asked_for_holds(asked: dict[str, Any]) -> None:
    result, _ = make_plan(text_of("perceptron"), CLUSTERS["8 CPUs"], effort="fast", **asked)
    if "mesh" in asked:
        assert result.mesh.sizes == asked["mesh"]
    if "force" in asked:
        assert result.origin == f"forced: {asked['force']}"
        assert len(result.mesh.axes) == 2


def test_with_a_deadline_it_is_no_slower_than_what_is_known_at_once() -> None:
    text, cluster = text_of("transformer"), CLUSTERS["8 CPUs"]
    outcome, _ = make_plan(text, cluster, just_late(), effort="fast", deadline_s=1e-9)
    result, _ = make_plan(text, cluster, FrozenClock(60.0), effort="fast", deadline_s=60.0)
    assert result.cost.step_s <= outcome.cost.step_s * (1 + 1e-3)
