"""Variables are stored as the user's program has them, unless the plan splits what a view takes apart."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.cost import bytes_with_margin, hardware_profile, predict_memory
from shardwright.hlo import Module, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.plans.verify import check_plan
from shardwright.planner.rewrites import drop_idle_views, rewrite, with_views
from shardwright.plans.plan import Plan
from tests.planner.programs import lower
from tests.planner.rewrites.rewrite_programs import REWRITTEN, run
from tests.planner.test_numbers import run_planned


def viewed(name: str, force: str, mesh: dict[str, int]) -> tuple[Any, Module, Plan]:
    """(program, the module that is planned, a plan of it with every variable in its view)."""
    program = REWRITTEN[name]()
    original = parse(lower(program))
    rewritten_module = rewrite(original)
    # The rewritten text is planned as it stands, so that the planner settles nothing itself.
    planned = plan(
        rewritten_module.module.to_text(), Cluster.local(8), PlanOptions(mesh=mesh, force=force, rewrites="none")
    )
    return program, parse(planned.require_hlo()), with_views(planned, rewritten_module, original, "0" * 64)


@pytest.mark.parametrize("name", ["glu", pytest.param("lstm", marks=pytest.mark.dear), "nested"])
def test_data_parallel_plan_is_portable_and_computes_the_same(name: str) -> None:
    program, module, before = viewed(name, "data", {"data": 8})
    assert not before.portable
    result, after = drop_idle_views(module, before)
    check_plan(result, after)
    assert after.portable
    assert (after.cost, after.memory, after.collectives) == (before.cost, before.memory, before.collectives)
    assert after.hlo_text is not None
    assert after.hlo_sha256 == sha256(after.hlo_text.encode()).hexdigest()
    arguments = [np.asarray(leaf) for leaf in jax.tree.leaves(program[1])]
    expected = run(lower(program), arguments)
    for e, f in zip(expected, run(after.hlo_text, arguments), strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-6)


def test_portable_plan_runs_on_all_devices() -> None:
    program, module, before = viewed("glu", "data", {"data": 4, "model": 2})
    _, after = drop_idle_views(module, before)
    for e, f in zip(run_single_of(program), run_planned(program, after)[0], strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-6)


def run_single_of(program: Any) -> list[np.ndarray]:
    step, arguments, _ = program
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(step)(*arguments))]


def test_view_that_the_plan_splits_is_kept() -> None:
    _, module, before = viewed("glu", "tensor", {"data": 1, "model": 8})
    result, after = drop_idle_views(module, before)
    assert (result, after) == (module, before)
    assert [v.view_of for v in after.parameters].count((16, 48)) == 2


def test_first_of_two_dimensions_may_be_split() -> None:
    """Blocks of the pieces are blocks of the whole: `[2, 24]` split in two is `[48]` split in two."""
    module = parse("""HloModule m, input_output_alias={ {}: (0, {}, may-alias) }

ENTRY main {
  x = f32[2,24]{1,0} parameter(0)
  ROOT y = f32[2,24]{1,0} tanh(x)
}
""")
    options = PlanOptions(mesh={"data": 2}, argument_axes={0: (("data",), ())}, argument_views={0: (2, 24)})
    before = plan(module.to_text(), Cluster.local(2), options)
    parameters, outputs = (
        tuple(replace(v, view_of=(48,)) for v in variables) for variables in (before.parameters, before.outputs)
    )
    before = replace(before, parameters=parameters, outputs=outputs)
    result, after = drop_idle_views(module, before)
    check_plan(result, after)
    assert after.portable
    assert str(after.parameters[0].sharding) == str(after.outputs[0].sharding) == "[data]"
    assert after.parameters[0].stored_shape == (48,)


def test_a_view_in_which_arrays_lie_already_stays() -> None:
    _, module, before = viewed("glu", "data", {"data": 8})
    (viewed_argument, *_) = [v for v in before.parameters if v.view_of is not None]
    outputs = [] if viewed_argument.alias is None else [viewed_argument.alias]
    result, after = drop_idle_views(module, before, arguments=[viewed_argument.number], outputs=outputs)
    check_plan(result, after)
    results = [v.number for v in after.parameters if v.view_of is not None]
    assert results == [viewed_argument.number]
    assert [v.number for v in after.outputs if v.view_of is not None] == outputs


def two_fused(w: jax.Array, u: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Halves of 64 columns, which four devices split, and of 5, which they do not split."""

    def loss(w: jax.Array, u: jax.Array) -> jax.Array:
        (a, b), (c, d) = jnp.split(x[:, :64] @ w, 2, axis=-1), jnp.split(jnp.tanh(x) @ u, 2, axis=-1)
        return jnp.mean(jnp.sin(a) * b) + jnp.mean(jnp.sin(c) * d)

    by_w, by_u = jax.grad(loss, (0, 1))(w, u)
    return w - 0.1 * by_w, u - 0.1 * by_u


def plan_in_parallel(**options: Any) -> Plan:
    w, u, x = (np.zeros(shape, np.float32) for shape in ((64, 128), (4096, 10), (2, 4096)))
    text = lower((two_fused, (w, u, x), (0, 1)))
    cluster, chosen = Cluster.local(4), PlanOptions(mesh={"model": 4}, force="tensor", remat="none", micro_batches=1)
    return plan(text, cluster, replace(chosen, **options))


def views(step_plan: Plan) -> list[bool]:
    return [variable.view_of is not None for variable in step_plan.parameters[:2]]


def test_memory_is_that_of_the_program_without_the_views() -> None:
    """XLA:CPU copies donated arguments whose results are reshaped."""
    result = plan_in_parallel()
    assert views(result) == [True, False]
    parts = result.instructions, result.parameters, result.outputs, result.mesh, hardware_profile("cpu")
    assert result.memory == predict_memory(parse(result.require_hlo()), *parts)


def test_a_view_stays_where_the_program_without_it_does_not_fit() -> None:
    needed = bytes_with_margin(plan_in_parallel().memory, hardware_profile("cpu"))
    result = plan_in_parallel(memory_budget=needed - 1)
    assert views(result) == [True, True]
    assert bytes_with_margin(result.memory, hardware_profile("cpu")) < needed
