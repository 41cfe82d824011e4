"""A weight that a loop reads in every trip and lies split is gathered once: by the plan, and by XLA itself.

That is why no rewrite hoists gathers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardwright
from shardwright.xla import private
from shardwright.xla.inspect import find_collectives
from tests.planner.programs import lower

TRIPS = 10


def recurrent(w: Any, xs: Any) -> Any:
    return jax.lax.scan(lambda h, x: (jnp.tanh(x + h @ w), None), jnp.zeros_like(xs[0]), xs)[0]


ARGUMENTS = (np.ones((64, 64), np.float32), np.ones((TRIPS, 512, 64), np.float32))


def gathers(executable: Any) -> list[int]:
    """Executions of each all-gather a device runs."""
    return [c.count for c in find_collectives(private.hlo_of_executable(executable), 8) if c.kind == "all-gather"]


def test_plan_gathers_a_loop_invariant_weight_once() -> None:
    text = lower((recurrent, ARGUMENTS, ()))
    pins = {"w": {0: "data", 1: None}, "xs": {0: None, 1: "data", 2: None}}
    plan = shardwright.plan(text, 8, mesh={"data": 8}, force=pins)
    planned = [c for c in plan.collectives if c.kind == "all-gather" and c.payload_bytes == ARGUMENTS[0].nbytes]
    assert [c.count for c in planned] == [1]
    devices = private.local_devices()
    options = private.compile_options([device.id for device in devices])
    assert gathers(private.compile_and_load(plan.emit(), devices, options)) == [1]


def test_xla_hoists_a_gather_that_is_written_inside_the_loop() -> None:
    """Fails where XLA stops moving loop-invariant gathers out: then the plan alone has to."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    split, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("x",), ()))

    def inside(w: Any, xs: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            return jnp.tanh(x + h @ jax.lax.with_sharding_constraint(w, whole)), None

        return jax.lax.scan(body, jnp.zeros_like(xs[0]), xs)[0]

    batch = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    compiled = jax.jit(inside, in_shardings=(split, batch), out_shardings=split).lower(*ARGUMENTS).compile()
    counts = [c.count for c in find_collectives(compiled.as_text(), 8) if c.kind == "all-gather"]
    assert counts == [1]
