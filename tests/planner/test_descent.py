"""Plans on three axes, descended from plans on two."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.planner import plan
from shardwright.planner.chain import Chain
from shardwright.planner.descent import axis_parts, descend
from shardwright.planner.force import Forced
from shardwright.planner.search import Search
from shardwright.plans import Mesh
from tests.planner.test_exact import random_program

EIGHT = replace(Cluster.local(8), hardware="a100")
COARSE = Mesh.of({"data": 4, "model": 2})
FINE = Mesh.of({"data": 2, "model": 2, "sequence": 2})

#: Relative tie-breaks of the search (`planner.preference.MOST`), and the gap at which a round counts as solved.
SLACK = 2e-3


def large_program(seed: int) -> str:
    """A random program with dimensions of 1024 to 4096, worth splitting over 8 devices."""
    size = {"4": "4096", "8": "2048", "16": "1024"}
    return re.sub(r"\[(\d+),(\d+)\]", lambda shape: f"[{size[shape[1]]},{size[shape[2]]}]", random_program(seed))


def chains(seed: int) -> tuple[Chain, Chain]:
    """The same program on both meshes."""
    search = Search(large_program(seed), EIGHT, PlanOptions())
    coarse, fine = (search.chain(mesh, Forced(), frozenset()) for mesh in (COARSE, FINE))
    return coarse, fine


def test_axes_are_split_into_neighbours() -> None:
    assert axis_parts(COARSE, FINE) == {"data": ("data", "model"), "model": ("sequence",)}
    assert axis_parts(Mesh.of({"x": 8}), FINE) == {"x": ("data", "model", "sequence")}


@pytest.mark.parametrize("seed", range(12))
def test_between_the_plan_that_it_starts_from_and_the_best_one(seed: int) -> None:
    """The same plan costs as much on the finer mesh; the best one there is found by searching it outright."""
    coarse, fine = chains(seed)
    start, best = coarse.solve(20.0), fine.solve(20.0)
    near, found = descend(coarse, start.states, fine.graph, time_limit_s=20.0)
    assert best.value <= found.value * (1 + SLACK)
    assert found.value <= start.value * (1 + SLACK)
    chosen = {v: near.graph.set_of(v).strategies[state] for v, state in found.states.items()}
    states = {v: fine.graph.set_of(v).strategies.index(strategy) for v, strategy in chosen.items()}
    nodes = [node.index for node in fine.graph.flow.nodes if not fine.graph.is_free[node.index]]
    problem = fine.graph.problem(nodes, list(states))
    assert problem.value(list(states.values())) == pytest.approx(found.value, rel=1e-5)  # preferences differ


@pytest.mark.parametrize("seed", [14, 39, 72, 73, 97, 98, 100, 103, 115])
def test_it_finds_what_two_axes_cannot(seed: int) -> None:
    """Programs whose best plan on three axes beats every one on two: the descent ends there."""
    coarse, fine = chains(seed)
    start, best = coarse.solve(20.0), fine.solve(20.0)
    _, found = descend(coarse, start.states, fine.graph, time_limit_s=20.0)
    assert best.value < start.value * (1 - SLACK)
    assert found.value <= best.value * (1 + SLACK)


def test_the_plan_says_what_its_bound_covers() -> None:
    made = plan(large_program(97), EIGHT, PlanOptions())
    tried = {len(each.mesh.axes) for each in made.candidates if each.name == "search"}
    assert 3 in tried
    assert made.cost.step_s == min(each.step_s for each in made.candidates if each.name == "search" and each.step_s)
    assert ("divides its axes further" in made.cost.bound_scope) == (len(made.mesh.axes) == 3)
    assert made.cost.is_bounded == (len(made.mesh.axes) < 3)
    if not made.cost.is_bounded:
        assert made.cost.lower_bound_s > made.cost.step_s  # of two axes: this one is faster
