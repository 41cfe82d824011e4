"""No plan is slower than the program computed whole on every device, whatever there is no batch of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardwright as sw
from benchmarks.planner.suite import cluster_json
from shardwright.clusters.cluster import Cluster
from shardwright.cost import bytes_with_margin, hardware_profile
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.graph.source import Source
from shardwright.planner.search.replicated import compute_replicated_step_s
from shardwright.planner.search.search import Search
from tests.planner.clocks import FrozenClock, just_late
from tests.planner.programs import gpt2, lower

_NODE = {"ip": "127.0.0.1", "gpu_ids": [0, 1]}
_SLOW = {
    "master": {**_NODE, "port": 1}, "workers": [{**_NODE, "port": 2}],
    "links": {"inter_node": {"bandwidth_gb_per_s": 0.1, "latency_us": 100}},
}  # fmt: skip
CLUSTERS = {
    "8 CPUs": Cluster.local(8),
    "8 A100": Cluster.from_json(cluster_json(8, "a100")),
    "2 slow nodes": Cluster.from_json(json.dumps(_SLOW)),
}


def array(*shape: int, kind: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, kind)


Made = tuple[Callable[..., Any], tuple[Any, ...]]


def recurrence() -> Made:
    """One sequence: its steps follow each other."""

    def run(w: jax.Array, xs: jax.Array) -> jax.Array:
        return lax.scan(lambda h, x: (jnp.tanh(w @ h + x), h), jnp.zeros(64), xs)[1].mean()

    return run, (array(64, 64), array(512, 64))


def message_passing() -> Made:
    """One graph: any node may read any other one."""

    def run(w: list[jax.Array], x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        for each in w:
            x = jax.nn.relu(jax.ops.segment_sum(x[senders] @ each, receivers, num_segments=x.shape[0]))
        return x.var()

    return run, ([array(32, 32)] * 3, array(512, 32), array(2048, kind="int32"), array(2048, kind="int32"))


def graph_of_a_matrix() -> Made:
    """Nodes, features and weights of one size, and an adjacency that contracts what seems to be the batch."""

    def run(w: jax.Array, x: jax.Array, adjacency: jax.Array) -> jax.Array:
        return (lax.fori_loop(0, 8, lambda _, x: jnp.tanh(adjacency @ x @ w), x) ** 2).mean()

    return run, (array(64, 64), array(64, 64), array(64, 64))


def one_image() -> Made:
    """A batch of one."""

    def run(w: list[jax.Array], x: jax.Array) -> jax.Array:
        for each in w:
            dims = ("NHWC", "HWIO", "NHWC")
            x = jax.nn.relu(lax.conv_general_dilated(x, each, (1, 1), "SAME", dimension_numbers=dims))
        return x.mean()

    return run, ([array(3, 3, 8, 8)] * 4, array(1, 32, 32, 8))


def halo() -> Made:
    """A grid whose cells read their neighbours'."""

    def run(k: jax.Array, u: jax.Array) -> jax.Array:
        def step(_: int, u: jax.Array) -> jax.Array:
            around = jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1)
            return u + k * (around - 4 * u)

        return lax.fori_loop(0, 50, step, u).mean()

    return run, (array(), array(128, 128))


def pairs() -> Made:
    """Residues attend to one another, and a table of pairs is multiplied along the third of a triangle."""

    def run(w: list[dict[str, jax.Array]], x: jax.Array, z: jax.Array) -> jax.Array:
        for p in w:
            z = z + jnp.einsum("ikc,jkc->ijc", z @ p["a"], z @ p["b"])
            x = x + jax.nn.softmax((x @ p["q"]) @ (x @ p["q"]).T + z.mean(-1)) @ (x @ p["v"])
            z = (z - z.mean((0, 1))) * lax.rsqrt(z.var((0, 1)) + 1e-5) + (x @ p["o"])[:, None, :]
        return x.mean() + z.mean()

    layer = {"a": array(8, 8), "b": array(8, 8), "q": array(32, 32), "v": array(32, 32), "o": array(32, 8)}
    return run, ([layer] * 3, array(48, 32), array(48, 48, 8))


def training(case: Made) -> Made:
    run, (w, *rest) = case

    def step(w: Any, *rest: Any) -> Any:
        loss, gradients = jax.value_and_grad(run)(w, *rest)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), loss

    return step, (w, *rest)


STRUCTURES = {made.__name__: made for made in (recurrence, message_passing, graph_of_a_matrix, one_image, halo, pairs)}


def text_of(case: Made) -> str:
    run, arguments = case
    return jax.jit(run).lower(*arguments).as_text("hlo", debug_info=True)


@pytest.mark.dear
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_no_plan_is_slower_than_the_program_on_every_device(structure: str, trains: bool) -> None:
    s_t_r_u_c_t_u_r_e_s = STRUCTURES[structure]()
    text = text_of(training(s_t_r_u_c_t_u_r_e_s) if trains else s_t_r_u_c_t_u_r_e_s)
    for name, cluster in CLUSTERS.items():
        whole = plan(text, cluster, PlanOptions(force="replicated")).cost.step_s
        for options in (PlanOptions(deadline_s=1e-9), PlanOptions(effort="fast")):
            planned = plan(text, cluster, options, clock=FrozenClock(options.deadline_s))
            assert planned.cost.step_s <= whole * (1 + 1e-3), (name, options)


def test_it_says_what_it_is() -> None:
    step_plan = plan(text_of(recurrence()), CLUSTERS["8 A100"], PlanOptions(deadline_s=1e-9), clock=just_late())
    assert not step_plan.collectives
    assert "'replicated'" in step_plan.cost.bound_scope


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_its_price_is_a_sum_over_instructions(cluster: Cluster) -> None:
    text = lower(gpt2(layers=1, batch=16, length=16))
    search = Search(Source(text), cluster, PlanOptions())
    tried = search.solve_mesh(next(iter(search._select_meshes())))
    whole = plan(text, cluster, PlanOptions(force="replicated")).cost
    assert compute_replicated_step_s(tried.chain.graph) == pytest.approx(whole.step_s, rel=1e-9)


def test_where_it_does_not_fit_the_memory_it_is_not_taken() -> None:
    text, cluster = text_of(training(recurrence())), CLUSTERS["8 A100"]
    profile = hardware_profile(cluster.hardware)
    whole, split = (plan(text, cluster, PlanOptions(force=force)) for force in ("replicated", "fsdp"))
    needed = [bytes_with_margin(each.memory, profile) for each in (split, whole)]
    assert needed[0] < needed[1]
    step_plan = plan(text, cluster, PlanOptions(deadline_s=1e-9, memory_budget=needed[0]), clock=just_late())
    assert bytes_with_margin(step_plan.memory, profile) <= needed[0]


def test_what_is_pinned_stays_so_where_the_whole_program_would_be_faster() -> None:
    def pinned(w: jax.Array, xs: jax.Array) -> jax.Array:
        return recurrence()[0](sw.annotate(w, {0: True}), xs)

    text, cluster = sw.lower(pinned, *recurrence()[1]).as_text(), CLUSTERS["8 A100"]
    for options in (PlanOptions(deadline_s=1e-9), PlanOptions()):
        planned = plan(text, cluster, options, clock=FrozenClock(options.deadline_s))
        lies = [lies for entry in planned.instructions for lies in entry.result]
        assert any(each.axes for each in lies)


@pytest.mark.dear
def test_where_all_is_computed_again_the_same_holds() -> None:
    text = text_of(training(pairs()))
    result, whole = (
        plan(text, CLUSTERS["8 A100"], PlanOptions(remat="full", force=force)) for force in (None, "replicated")
    )
    assert result.cost.step_s <= whole.cost.step_s * (1 + 1e-3)
