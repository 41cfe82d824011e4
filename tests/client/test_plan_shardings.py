"""`plan.shardings()` and `partition_specs()` fit `jax.jit`, and handles are drawn as they lie."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardwright as sw

PARAMS = {"layers": [np.full((64, 64), 0.01, np.float32), (np.full((64, 16), 0.02, np.float32), None)]}
SCALE = np.linspace(0, 1, 64 * 64, dtype=np.float32).reshape(64, 64)  # hoisted: the function closes over it


class Batch(NamedTuple):
    x: Any
    y: Any
    unused: Any


BATCH = Batch(
    np.linspace(0, 1, 32 * 64, dtype=np.float32).reshape(32, 64), np.zeros((32, 16), np.float32), np.ones(3, np.int32)
)


def step(params: Any, times: int, batch: Batch, key: Any = None) -> Any:
    def loss_of(params: Any) -> Any:
        first, (second, _) = params["layers"]
        hidden = jnp.tanh(batch.x @ (first * SCALE))
        return jnp.square(hidden @ second - batch.y).mean() * times

    loss, gradients = jax.value_and_grad(loss_of)(params)
    noise = 0.0 if key is None else jax.random.normal(key, ())
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"loss": loss, "noise": noise + loss}


@pytest.mark.parametrize("force", ["mixed", pytest.param("fsdp", marks=pytest.mark.dear)])
def test_shardings_of_a_step_go_into_jax_jit_as_they_are(session: sw.Session, force: str) -> None:
    ours = session.parallelize(step, donate_argnums=0, static_argnums=1, force=force, mesh="4x2")
    state, said = ours(PARAMS, 3, BATCH, key=jax.random.key(0))
    shardings = ours.plan.shardings()
    assert all(isinstance(leaf, NamedSharding) for leaf in jax.tree.leaves(shardings))

    jitted = jax.jit(step, static_argnums=1, in_shardings=shardings.arguments, out_shardings=shardings.results)
    call = PARAMS, 3, BATCH, jax.random.key(0)
    compiled = jitted.lower(*call).compile()
    placed = jax.device_put((PARAMS, BATCH, call[-1]), shardings.arguments)
    theirs_state, theirs = compiled(*placed)
    assert float(said["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), state, theirs_state)
    for leaf, wanted in zip(jax.tree.leaves((theirs_state, theirs)), jax.tree.leaves(shardings.results), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
    read, _ = compiled.input_shardings
    there, here = (jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None) for tree in (read, placed))
    for sharding, leaf in zip(there, here, strict=True):  # None: of what the program does not read
        assert sharding is None or sharding.is_equivalent_to(leaf.sharding, leaf.ndim)

    specs = ours.plan.partition_specs()
    assert jax.tree.leaves(specs) == [each.spec for each in jax.tree.leaves(shardings)]
    assert any(axis for spec in jax.tree.leaves(specs.arguments[0]) for axis in spec), "some of the state is split"


def test_specs_need_no_devices_and_plans_of_files_take_structures() -> None:
    def plain(params: Any, x: Any) -> Any:
        return {"y": x @ params["w"] + params["b"]}

    types = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32), "b": jax.ShapeDtypeStruct((64,), jnp.float32)}
    x = jax.ShapeDtypeStruct((128, 64), jnp.float32)
    text = jax.jit(plain).lower(types, x).as_text("hlo")
    plan = sw.plan(text, 16, force={"x*": {0: "data"}}, rest="replicated", mesh="16", cache=False)
    assert isinstance(plan, sw.Plan)
    whole, rows = PartitionSpec(None, None), PartitionSpec("data", None)
    assert plan.partition_specs().arguments == (PartitionSpec(None), whole, rows)
    specs = plan.partition_specs(arguments=(types, x), results=jax.eval_shape(plain, types, x))
    assert specs.arguments == ({"w": whole, "b": PartitionSpec(None)}, rows)
    assert specs.results == {"y": rows}
    with pytest.raises(sw.PlanError, match=r"needs 16 devices, 8 are here\n.*partition_specs\(\) needs no devices"):
        plan.shardings()
    with pytest.raises(sw.PlanError, match=r"arguments: the plan has 3 argument arrays, .*; 1 were given"):
        plan.partition_specs(arguments=(x,))


def test_what_jax_jit_cannot_take_is_said(session: sw.Session) -> None:
    def by_keyword(x: Any, *, scale: Any) -> Any:
        return x * scale

    named = session.parallelize(by_keyword)
    named(np.ones((8, 4), np.float32), scale=np.ones(4, np.float32))
    with pytest.raises(sw.PlanError, match="scale: an argument by keyword alone"):
        named.plan.partition_specs()

    text = jax.jit(jnp.tanh).lower(jax.ShapeDtypeStruct((30, 512), jnp.float32)).as_text("hlo")
    uneven = sw.plan(text, 8, force={"*": {0: "data"}}, mesh="8", cache=False)
    assert isinstance(uneven, sw.Plan)
    with pytest.raises(sw.PlanError, match=r"\[30, 512\] is stored as \[32, 512\]"):
        uneven.partition_specs()


def test_a_split_handle_is_drawn_in_as_many_boxes_as_it_has_parts(
    session: sw.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    split = session.parallelize(lambda x: x + 1, force={"x": {0: "data", 1: "model"}}, mesh="4x2")
    handle = split(np.ones((16, 8), np.float32))
    boxes = handle.sharding.devices_indices_map(handle.shape)
    assert len(boxes) == 8
    assert {device.id: (rows.start, columns.start) for device, (rows, columns) in boxes.items()} == {
        number: (number // 2 * 4, number % 2 * 4) for number in range(8)
    }
    jax.debug.visualize_array_sharding(handle, use_color=False)
    drawn = capsys.readouterr().out
    assert re.findall(r"CPU (\d)", drawn) == [str(number) for number in range(8)]
    whole = session.parallelize(lambda x: x * 2, force="replicated")(np.ones((16, 8), np.float32))
    jax.debug.visualize_array_sharding(whole, use_color=False)
    assert "0,1,2,3,4,5,6,7" in capsys.readouterr().out
    np.testing.assert_array_equal(jnp.sum(handle, axis=1), np.full(16, 16.0))  # to JAX it is a local array still
