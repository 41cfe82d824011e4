"""Gaps that are closed by following more moves, and by putting the repeats of a run apart."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.memory.constraint import Multipliers
from shardwright.planner.search.gap_closing import close_gap
from shardwright.planner.search.search import Search
from shardwright.planner.segments.bound import lower_bound
from shardwright.planner.segments.descent import descend, lift_plan
from shardwright.planner.tuning import EXACT_RANK
from shardwright.plans.shardings import Mesh
from shardwright.progress import PlanProgress
from tests.planner.programs import PLAIN_A100, gpt2, lower

EIGHT = replace(Cluster.local(8), hardware=PLAIN_A100)
COARSE = Mesh.of({"data": 2, "model": 4})
FINE = Mesh.of({"data": 2, "model": 2, "sequence": 2})

#: Heads that no axis divides; more of them than of anything else that attention could be split by.
HEADS, SIZE, LENGTH = 27, 64, 1024


def attention(weights: jax.Array, out: jax.Array, x: jax.Array) -> jax.Array:
    """Attention of one sequence without a softmax."""
    q, k, v = ((x @ each).reshape(1, LENGTH, HEADS, SIZE) for each in weights)
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    mixed = jnp.einsum("bhst,bthd->bshd", scores, v).reshape(1, LENGTH, HEADS * SIZE)
    return mixed @ out


@pytest.fixture(scope="module")
def text() -> str:
    width = HEADS * SIZE
    shapes = ((3, width, width), (width, width), (1, LENGTH, width))
    return jax.jit(attention).lower(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)).as_text("hlo")


def test_a_bound_follows_heads_that_no_axis_divides(text: str) -> None:
    search = Search(text, EIGHT, PlanOptions())
    best = search.build_chain(FINE, ForcedStrategy(), frozenset()).solve(20.0)
    rough_s, bound_s = (
        lower_bound(search.build_bounding_chain(FINE, even_rank=4, uneven_rank=rank), 20.0) for rank in (EXACT_RANK, 4)
    )
    assert rough_s < 0.98 * bound_s
    assert 0.99 * best.value <= bound_s <= best.value


def test_closing_a_gap_does_and_tells_of_every_better_bound(text: str) -> None:
    told: list[PlanProgress] = []
    search = Search(text, EIGHT, PlanOptions(), told.append)
    coarse = search.build_chain(COARSE, ForcedStrategy(), frozenset())
    solved = coarse.solve(20.0)
    at, axes = lift_plan(coarse, solved.states, FINE)
    near, solved = descend(coarse, at, search.refine_graph(coarse, FINE), axes, time_limit_s=20.0)
    candidate = search.evaluate(near, solved, ())
    assert candidate.cost.gap == 1.0
    result = close_gap(search, candidate)
    assert result.cost.gap <= 0.01
    bounds_s = [each.lower_bound_s for each in told if each.incumbent_s]
    assert bounds_s[0] > 0
    assert bounds_s == sorted(bounds_s)
    assert bounds_s[-1] == pytest.approx(result.cost.lower_bound_s)


@pytest.mark.dear
def test_what_a_plan_is_read_off_at_bounds_too() -> None:
    """A bound that was left far from the plan is raised there, without another one before."""
    step = gpt2(layers=2, width=768, heads=12, vocabulary=1024, length=128, batch=16)
    search = Search(lower(step), EIGHT, PlanOptions())
    chain = search.build_chain(COARSE, ForcedStrategy(), frozenset())
    at, axes = lift_plan(chain, chain.solve(20.0).states, FINE)
    candidate = search.evaluate(*descend(chain, at, search.refine_graph(chain, FINE), axes, time_limit_s=20.0), ())
    bounding = search.build_bounding_chain(FINE, even_rank=search.max_rank, uneven_rank=search.max_rank)
    assert not bounding.runs
    rough = replace(candidate, cost=replace(candidate.cost, lower_bound_s=0.9 * candidate.cost.step_s))
    result = close_gap(search, rough, bounding)
    assert result.cost.gap <= 0.01
    assert result.cost.step_s <= candidate.cost.step_s


@pytest.mark.dear
@pytest.mark.parametrize("is_priced", [False, True])
def test_repeats_apart_bound_more(is_priced: bool) -> None:
    """And no more than the best plan whose repeats decide each for itself."""
    step = gpt2(layers=5, width=768, heads=12, vocabulary=1024, length=128, batch=16)
    search = Search(lower(step), EIGHT, PlanOptions())
    chain, bounding = search.build_chain(COARSE, ForcedStrategy(), frozenset()), search.build_bounding_chain(COARSE)
    if is_priced:
        candidate = search.evaluate(chain, chain.solve(20.0), ())
        peak = search.memory_model(chain.graph.variables.shared_layouts).constraint_at_peak(candidate.decisions)
        price = Multipliers(constraints=((peak, candidate.cost.step_s / candidate.memory.peak_bytes),))
        chain, bounding = chain.with_multipliers(price), bounding.with_multipliers(price)
    apart = bounding.untie()
    assert bounding.runs
    assert not apart.runs
    rolled_s, apart_s = lower_bound(bounding, 20.0), lower_bound(apart, 20.0)
    assert rolled_s * (1 + 1e-4) < apart_s <= chain.untie().solve(20.0, close=1e-3).value
