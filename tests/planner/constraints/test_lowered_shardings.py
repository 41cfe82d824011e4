"""Shardings as JAX lowers them: over abstract meshes, with Shardy and without, through micro-batches and pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwright.clusters.cluster import Cluster
from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.planning import plan_step
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from shardwright.xla import emit_stablehlo

EIGHT = Cluster.local(8)
AUTO = AbstractMesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = AbstractMesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
MESH = PlanOptions(mesh={"dp": 2, "tp": 4})

Dims = tuple[tuple[str, ...], ...]


def on(*axes: Any, mesh: AbstractMesh = AUTO) -> NamedSharding:
    return NamedSharding(mesh, P(*axes))


def shape(*dimensions: int, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, jnp.float32, sharding=sharding)


def lower_text(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    traced = jax.jit(function, **options).trace(*arguments)
    return traced.lower(lowering_platforms=("cpu",)).as_text("hlo", debug_info=True)


@pytest.fixture(params=["shardy", "gspmd"])
def partitioner(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


@contextmanager
def using(partitioner: str) -> Iterator[None]:
    jax.config.update("jax_use_shardy_partitioner", partitioner == "shardy")
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def variables(planned: Plan) -> tuple[list[Dims], list[Dims]]:
    return (
        [variable.sharding.dims for variable in planned.parameters],
        [variable.sharding.dims for variable in planned.outputs],
    )


def constraints(planned: Plan) -> list[Dims]:
    return [entry.result[0].dims for entry in planned.instructions if entry.opcode == "custom-call"]


def layer(w: Any, x: Any) -> Any:
    return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), on(P.UNCONSTRAINED, "tp")) * 2


def step(w: Any, x: Any) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: (layer(w, x) ** 2).sum())(w)
    return w - 0.1 * gradient, loss, jnp.tanh(x @ w)


def sharded_step() -> str:
    return lower_text(
        step, shape(16, 32), shape(64, 16), donate_argnums=0,
        in_shardings=(on(None, "tp"), on("dp")), out_shardings=(on(None, "tp"), None, on("dp", "tp")),
    )  # fmt: skip


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_arguments_outputs_and_constraints(partitioner: str, micro_batches: int) -> None:
    planned = plan(sharded_step(), EIGHT, PlanOptions(mesh=MESH.mesh, micro_batches=micro_batches))
    batch = (("dp",), ()) if micro_batches == 1 else ((), ("dp",), ())  # stored micro-batch by micro-batch
    assert variables(planned) == ([((), ("tp",)), batch], [((), ("tp",)), (), (("dp",), ("tp",))])
    result = constraints(planned)
    assert result
    assert all(dims[1] == ("tp",) for dims in result)
    assert "FuncResultSharding" not in planned.require_hlo()


def test_an_unconstrained_dimension_is_free(partitioner: str) -> None:
    text = lower_text(lambda w, x: layer(w, x).sum(), shape(512, 1024), shape(2048, 512), in_shardings=(None, on("dp")))
    assert constraints(plan(text, EIGHT, MESH)) == [(("dp",), ("tp",))]  # unsplit, the batch would have to be gathered


def test_what_variables_are_said_to_be_binds_pipelines_too() -> None:
    """Stages have four devices, the program's mesh eight: its axes are smaller there."""
    planned = plan_step(sharded_step(), EIGHT, PlanOptions(stages=2, micro_batches=2, mesh={"dp": 2, "tp": 2}))
    assert isinstance(planned, PipelinePlan)
    weights = (planned.arguments[0].variable, planned.outputs[0].variable)
    assert [variable.sharding.dims for variable in weights] == [((), ("tp",))] * 2


def test_a_mesh_in_the_context() -> None:
    with jax.sharding.use_abstract_mesh(AUTO):
        text = lower_text(
            lambda w, x: jax.lax.with_sharding_constraint(x @ w, P("dp", "tp")), shape(16, 32), shape(8, 16)
        )
    assert constraints(plan(text, EIGHT, MESH)) == [(("dp",), ("tp",))]


def test_explicit_axes() -> None:
    w, x = shape(16, 32, sharding=on(None, "tp", mesh=EXPLICIT)), shape(8, 16, sharding=on("dp", None, mesh=EXPLICIT))
    with jax.sharding.use_abstract_mesh(EXPLICIT):
        text = lower_text(lambda w, x: jax.sharding.reshard(jnp.tanh(x @ w), P(None, "tp")) + 1, w, x)
    planned = plan(text, EIGHT, MESH)
    assert variables(planned)[0] == [((), ("tp",)), (("dp",), ())]
    both, columns = (("dp",), ("tp",)), ((), ("tp",))
    assert set(constraints(planned)) == {both, columns}


def test_shard_map_of_the_older_partitioner_is_refused_with_its_line(partitioner: str) -> None:
    def mapped(w: Any, x: Any) -> Any:
        return jax.shard_map(
            lambda w, x: jax.lax.psum(x @ w, "tp"), mesh=AUTO, in_specs=(P("tp"), P("dp", "tp")), out_specs=P("dp")
        )(w, x)

    text = lower_text(mapped, shape(16, 32), shape(8, 16))
    if partitioner == "shardy":
        assert plan(text, EIGHT).manual_axes == {"dp": ("dp",), "tp": ("tp",)}
        return
    with pytest.raises(UnsupportedProgramError, match="written for one device") as caught:
        plan(text, EIGHT)
    assert "test_lowered_shardings.py" in caught.value.where


# ---- donation ------------------------------------------------------------------------


def test_donors_share_the_memory_of_an_output_of_their_type() -> None:
    def update(w: Any, x: Any, m: Any) -> Any:
        return x.sum(), m + 1, w * 2  # nothing else reads what is donated: it would be copied for that

    shapes = shape(16, 32), shape(8, 16), shape(4)
    text = lower_text(update, *shapes, donate_argnums=(0, 2), in_shardings=(on(None, "tp"), None, None))
    assert "buffer_donor" in text
    assert "input_output_alias" not in text
    planned = plan(text, EIGHT, MESH)
    assert [variable.alias for variable in planned.parameters] == [2, None, 1]
    assert planned.outputs[2].sharding.dims == ((), ("tp",))
    assert emit_stablehlo(planned.require_hlo(), planned).count("parameter_number = ") == 2
    plain = lower_text(update, *shapes, in_shardings=(on(None, "tp"), None, None))
    assert planned.memory.peak_bytes < plan(plain, EIGHT, MESH).memory.peak_bytes


def test_an_alias_that_is_known_stays_and_a_donor_without_a_match_is_left() -> None:
    text = """HloModule m, input_output_alias={ {0}: (1, {}, may-alias) }, buffer_donor={ (0, {}), (2, {}), (2, {1}) }

ENTRY main {
  a = f32[4] parameter(0)
  b = f32[4] parameter(1)
  t = (f32[3], f32[2]) parameter(2)
  c = f32[3] get-tuple-element(t), index=0
  d = f32[2] get-tuple-element(t), index=1
  s = f32[4] add(a, b)
  n = f32[3] negate(c)
  ROOT out = (f32[4], f32[3]) tuple(s, n)
}
"""
    assert [donor.parameter_index for donor in parse(text).donors] == [(), (), (1,)]
    planned = plan(text, Cluster.local(2))
    assert [variable.alias for variable in planned.parameters] == [None, 0, None, None]
