"""Which arguments are variables, which are their slots, and which variables are sparse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import shardwright as sw
from shardwright.builders.variables import Variable, read_variables
from shardwright.hlo import parse
from tests.builders.models import model


def shape(*dimensions: int, kind: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, kind)


def variables(step: Callable[..., Any], *arguments: Any, donate: Any = (0, 1)) -> dict[str, Variable]:
    lowered = sw.lower(step, *arguments, donate_argnums=donate)
    found = read_variables(parse(lowered.hlo_text), lowered.argument_names, lowered.aliases)
    return {variable.name: variable for variable in found}


def train(loss: Any, optimizer: Any) -> Any:
    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def trained(loss: Any, params: Any, *batch: Any, optimizer: Any = None) -> dict[str, Variable]:
    optimizer = optimizer or optax.adam(1e-3)
    return variables(train(loss, optimizer), params, jax.eval_shape(optimizer.init, params), *batch)


X, Y, IDS = shape(16, 4), shape(16, 4), shape(16, 3, kind="int32")


def linear(p: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ p["w"] + p["b"] - y) ** 2)


LINEAR = {"w": shape(4, 4), "b": shape(4)}


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (optax.sgd(0.1), ()),
        (optax.sgd(0.1, momentum=0.9), ("state[0].trace",)),
        (optax.adam(1e-3), ("state[0].mu", "state[0].nu")),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), ("state[1][0].mu", "state[1][0].nu")),
        (optax.ema(0.9), ("state.ema",)),
        (
            optax.multi_transform({"a": optax.adam(1e-3)}, {"w": "a", "b": "a"}),
            ("state.inner_states['a'].inner_state[0].mu", "state.inner_states['a'].inner_state[0].nu"),
        ),
    ],
)
def test_slots_of_optimizers(optimizer: Any, slots: tuple[str, ...]) -> None:
    found = trained(linear, LINEAR, X, Y, optimizer=optimizer)
    assert list(found) == ["params['b']", "params['w']"]
    for path in ("['b']", "['w']"):
        assert found[f"params{path}"].slots == tuple(f"{slot}{path}" for slot in slots)


def test_slots_of_another_type_are_slots() -> None:
    found = trained(linear, LINEAR, X, Y, optimizer=optax.adam(1e-3, mu_dtype="bfloat16"))
    assert found["params['w']"].slots == ("state[0].mu['w']", "state[0].nu['w']")


def test_state_in_one_argument() -> None:
    optimizer = optax.adam(1e-3)

    def step(state: Any, x: Any, y: Any) -> Any:
        params, opt = state
        params, opt, value = train(linear, optimizer)(params, opt, x, y)
        return (params, opt), value

    found = variables(step, (LINEAR, jax.eval_shape(optimizer.init, LINEAR)), X, Y, donate=0)
    assert found["state[0]['w']"].slots == ("state[1][0].mu['w']", "state[1][0].nu['w']")


def test_parameters_that_are_one_array() -> None:
    found = trained(lambda p, x, y: jnp.mean((x @ p - y) ** 2), shape(4, 4), X, Y)
    assert found["params"].slots == ("state[0].mu", "state[0].nu")


def test_layers_of_one_shape_keep_their_own_slots() -> None:
    found = trained(lambda p, x, y: jnp.mean((x @ p[0]["w"] @ p[1]["w"] - y) ** 2), [{"w": shape(4, 4)}] * 2, X, Y)
    assert [found[f"params[{n}]['w']"].slots[0] for n in (0, 1)] == ["state[0].mu[0]['w']", "state[0].mu[1]['w']"]


def test_running_statistics_are_no_variables() -> None:
    def step(params: Any, statistics: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(linear)(params, x, y)
        updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return updated, {"mean": 0.9 * statistics["mean"] + 0.1 * x.mean(0)}, value

    found = variables(step, LINEAR, {"mean": shape(4)}, X, Y)
    assert list(found) == ["params['b']", "params['w']"]
    assert found["params['b']"].slots == ()


def test_several_updates_in_one_loop() -> None:
    """A loop carries parameters and slots together: what its loss depends on depends on both."""
    optimizer = optax.adam(1e-3)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def once(carry: Any, _: Any) -> Any:
            *carry, value = train(linear, optimizer)(*carry, x, y)
            return tuple(carry), value

        (params, state), losses = jax.lax.scan(once, (params, state), length=3)
        return params, state, losses[-1]

    found = variables(step, LINEAR, jax.eval_shape(optimizer.init, LINEAR), X, Y)
    assert found["params['w']"].slots == ("state[0].mu['w']", "state[0].nu['w']")
    assert not any(name.startswith("state[0].mu") for name in found)


def test_without_donation_state_is_what_comes_back() -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)
    found = variables(train(linear, optimizer), LINEAR, jax.eval_shape(optimizer.init, LINEAR), X, Y, donate=())
    assert set(found) == {"params['b']", "params['w']"}


# ---- sparse -----------------------------------------------------------------------------


def rows(p: Any, ids: Any) -> Any:
    return p["table"][ids].mean(1) @ p["w"]


def read(p: Any, ids: Any, how: Callable[[Any, Any], Any]) -> Any:
    return jnp.mean(how(p, ids) ** 2)


TABLE = {"table": shape(100, 4), "w": shape(4, 2)}


@pytest.mark.parametrize(
    ("how", "is_sparse"),
    [
        (rows, True),
        (lambda p, ids: jnp.take(p["table"], ids, axis=0).sum(1) @ p["w"], True),
        (lambda p, ids: jnp.take(p["table"], ids, axis=0, mode="clip").sum(1) @ p["w"], True),
        (lambda p, ids: p["table"].astype("bfloat16")[ids].sum(1) @ p["w"], True),
        (jax.checkpoint(rows), True),
        (lambda p, ids: jax.jit(rows)(p, ids) + jax.jit(rows)(p, ids + 1), True),
        (lambda p, ids: jax.lax.cond(ids[0, 0] > 0, rows, rows, p, ids), True),
        (lambda p, ids: jax.lax.scan(lambda c, i: (c + rows(p, i[None]).sum(), None), 0.0, ids)[0], True),
        (lambda p, ids: rows(p, ids) @ p["w"].T @ p["table"].T, False),
        (lambda p, ids: rows(p, ids) * jnp.abs(p["table"]).sum(), False),
        (lambda p, ids: rows(p, jnp.arange(48).reshape(16, 3)), False),
        (lambda p, ids: p["table"][:3].sum() * rows({**p, "table": p["table"] * 0}, ids), False),
        (lambda p, ids: jax.nn.one_hot(ids, 100).sum(1) @ p["table"] @ p["w"], False),
    ],
)
def test_sparse_is_what_lookups_alone_read(how: Any, is_sparse: bool) -> None:
    found = trained(lambda p, ids: read(p, ids, how), TABLE, IDS)
    assert found["params['table']"].is_sparse is is_sparse
    assert not found["params['w']"].is_sparse


def test_layers_that_a_loop_takes_one_by_one_are_dense() -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0] - y) ** 2)

    assert not trained(loss, {"layers": shape(3, 4, 4)}, X, Y)["params['layers']"].is_sparse


@pytest.mark.dear
def test_a_tied_embedding_is_dense() -> None:
    trains = model("gpt2")
    found = variables(trains.step, *jax.eval_shape(lambda: (*trains.state, *trains.batches[0])))
    assert set(found) == {f"params{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(trains.params)}
    assert not any(variable.is_sparse for variable in found.values())
    assert all(len(variable.slots) == 1 for variable in found.values())
