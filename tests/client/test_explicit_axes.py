"""Steps under a mesh with Explicit axes: the text is the one under Auto axes, with what was written as pins."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.client.frontends.jax import explicit_axes
from shardwright.client.frontends.jax.function import JaxFunction
from shardwright.errors import PlatformError
from shardwright.reserved_names import TYPES_NEED

SIZES, AXES = (4, 2), ("data", "model")
EXPLICIT = jax.make_mesh(SIZES, AXES)
AUTO = jax.make_mesh(SIZES, AXES, axis_types=(AxisType.Auto,) * 2)
MIXED = jax.make_mesh(SIZES, AXES, axis_types=(AxisType.Explicit, AxisType.Auto))

X, W, INDEX = (jax.ShapeDtypeStruct(shape, kind) for shape, kind in (((16, 8), "f4"), ((8, 32), "f4"), ((16,), "i4")))
KEY = jax.eval_shape(lambda: jax.random.key(0))

#: Closed over by steps: split, and whole as arrays are by default.
SPLIT = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(EXPLICIT, P("data", "model")))
with jax.set_mesh(EXPLICIT):
    WHOLE = jnp.arange(8.0)


def like(array: jax.ShapeDtypeStruct, *spec: Any, mesh: Any = EXPLICIT) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, P(*spec)))


def lower(step: Callable[..., Any], *arguments: Any, mesh: Any = EXPLICIT) -> str:
    with jax.set_mesh(mesh):
        return sw.lower(step, *arguments).hlo_text


def program(text: str) -> list[str]:
    """Its instructions, without numbers of lines and names."""
    instructions = text[re.search(r"^(%|ENTRY|\w+\.\d+ [{(])", text, re.MULTILINE).start() :]
    return [re.sub(r", metadata={[^}]*}|stack_frame_id=\d+", "", line) for line in instructions.splitlines()]


def count_pins(text: str) -> int:
    return text.count('custom_call_target="Sharding"')


# ---- the same program as under Auto axes ------------------------------------------------


def einsum(*arguments: Any, pin: Any, is_auto: bool) -> Any:
    if is_auto:
        return jax.lax.with_sharding_constraint(jnp.einsum(*arguments), pin)
    return jnp.einsum(*arguments, out_sharding=pin)


def gather(table: Any, index: Any, *, pin: Any, is_auto: bool) -> Any:
    if is_auto:
        return jax.lax.with_sharding_constraint(table.at[index].get(), pin)
    return table.at[index].get(out_sharding=pin)


def train_mlp(is_auto: bool, w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        hidden = jax.nn.relu(einsum("bd,df->bf", x, w["a"], pin=P("data", "model"), is_auto=is_auto))
        return (einsum("bf,fd->bd", hidden, w["b"], pin=P("data", None), is_auto=is_auto) ** 2).mean()

    value, gradients = jax.value_and_grad(jax.checkpoint(loss))(w)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients)


def train_layers(is_auto: bool, w: Any, tokens: Any) -> Any:
    def loss(w: Any) -> Any:
        hidden = gather(w["table"], tokens, pin=P("data", None), is_auto=is_auto)
        body = lambda h, u: (jnp.tanh(einsum("bd,de->be", h, u, pin=P("data", None), is_auto=is_auto)), None)  # noqa: E731
        return (jax.lax.scan(body, hidden, w["layers"])[0] ** 2).sum()

    return jax.grad(loss)(w)


def decode(is_auto: bool, w: Any, cache: Any, token: Any) -> Any:
    def one(carry: Any, i: Any) -> Any:
        cache, token = carry
        hidden = gather(w, token, pin=P("data", None), is_auto=is_auto)
        cache = jax.lax.dynamic_update_slice_in_dim(cache, hidden[:, None], i, 1)
        token = einsum("bsd,vd->bv", cache, w, pin=P("data", None), is_auto=is_auto).argmax(-1).astype(jnp.int32)
        return (cache, token), token

    return jax.lax.scan(one, (cache, token), jnp.arange(5))


STEPS = {
    "mlp": (train_mlp, {"a": (W, None, "model"), "b": (jax.ShapeDtypeStruct((32, 8), "f4"), "model")}, (X, "data")),
    "scan": (
        train_layers,
        {"table": (X, None, "model"), "layers": (jax.ShapeDtypeStruct((3, 8, 8), "f4"), None)},
        (INDEX, "data"),
    ),
    "decode": (decode, (X, None, "model"), (jax.ShapeDtypeStruct((16, 5, 8), "f4"), "data"), (INDEX, "data")),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_one_with_constraints_under_auto_axes(name: str) -> None:
    step, *arguments = STEPS[name]

    def typed(mesh: Any) -> list[Any]:
        return jax.tree.map(
            lambda each: like(*each, mesh=mesh), arguments, is_leaf=lambda leaf: isinstance(leaf, tuple)
        )

    explicit = lower(functools.partial(step, False), *typed(EXPLICIT))
    auto = lower(functools.partial(step, True), *typed(AUTO), mesh=AUTO)
    assert count_pins(auto)
    assert program(explicit) == program(auto)
    assert "{devices=[4," in explicit.partition("ENTRY")[2]  # arguments keep theirs


# ---- all ways to write one ----------------------------------------------------------------

_in_auto_axes = jax.sharding.auto_axes(lambda x: jnp.sin(x) * 2, out_sharding=P("data", None))
_in_explicit_axes = jax.sharding.explicit_axes(lambda x: jnp.sin(x) * 2, in_sharding=P("data", None))


@jax.custom_vjp
def _own_gradient(x: Any) -> Any:
    return reshard(jnp.sin(x), P("data"))


_own_gradient.defvjp(lambda x: (_own_gradient(x), x), lambda x, g: (reshard(g * jnp.cos(x), P("data", "model")),))

ROWS, NAMED = P("data", None), NamedSharding(EXPLICIT, P("data", None))

#: name → (step, arguments, number of pins).
WAYS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "three operands": (lambda x, w: jnp.einsum("ab,bc,dc->ad", x, w, w, out_sharding=ROWS), (X, W), 1),
    "dot, named": (lambda x, w: jnp.dot(x, w, out_sharding=NAMED), (X, W), 1),
    "dot, whole": (lambda x, w: jnp.dot(x, w, out_sharding=P()), (X, W), 1),
    "reshape": (lambda x: x.reshape(4, 4, 8, out_sharding=P("data")) * 2, (X,), 1),
    "broadcast": (lambda x: jnp.broadcast_to(x, (4, 16, 8), out_sharding=P("data")) * 2, (X,), 1),
    "new arrays": (
        lambda: jnp.arange(16, out_sharding=P("data"))[:, None] + jnp.zeros((16, 8), out_sharding=NAMED), (), 2,
    ),
    "set": (lambda x, i: x.at[i].set(1.0, out_sharding=ROWS), (X, INDEX), 1),
    "get a slice": (lambda x: x.at[3].get(out_sharding=P("model")) * 2, (X,), 1),
    "repeat": (lambda x: jnp.repeat(x, 2, axis=0, out_sharding=ROWS), (X,), 1),
    "random": (lambda key: jax.random.normal(key, (16, 8), out_sharding=ROWS), (KEY,), 1),
    "sum": (lambda x: jax.lax.reduce_sum(x, (0,), out_sharding=P("model")), (X,), 1),
    "reshard": (lambda x: reshard((jnp.sin(x), x), (NAMED, P(None, "model"))), (X,), 2),
    "auto_axes": (lambda x: _in_auto_axes(x) + 1, (X,), 1),
    "explicit_axes": (lambda x: _in_explicit_axes(x) + 1, (X,), 1),
    "a gradient of one's own": (lambda x: jax.value_and_grad(lambda x: _own_gradient(x).sum())(x * 2), (X,), 2),
    "nested jit": (lambda x: jax.jit(jnp.sin, out_shardings=P("data"))(x) * 2, (X,), 1),
    "device_put": (lambda x: jax.device_put(jnp.sin(x), NAMED) * 2, (X,), 1),
    "constraint": (lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), NAMED) * 2, (X,), 1),
    "vmap": (lambda x, w: jax.vmap(lambda r: jnp.dot(r, w, out_sharding=P("model")))(x), (X, W), 1),
    "sums that are not done": (lambda x, w: jnp.dot(x, w, out_sharding=P(unreduced={"model"})), (X, W), 0),
    "laid out like": (lambda x: jnp.zeros(x.shape, out_sharding=jax.typeof(x).sharding) + x, (X,), 0),
    "over the context's mesh": (
        lambda x: reshard(x * 2, NamedSharding(jax.sharding.get_abstract_mesh(), P("data"))), (X,), 1,
    ),
    "closed over": (lambda x: jax.jit(lambda x, y: x * y + WHOLE)(x, SPLIT) + (SPLIT * 2).sum(), (X,), 0),
    "nothing": (lambda x: jnp.concatenate([x * 2, jnp.zeros_like(x)]), (X,), 0),
    "products that Explicit mode refuses": (lambda x, w: x @ w, (like(X, None, "model"), like(W, "model")), 0),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_what_was_written_is_a_pin_and_nothing_else(way: str) -> None:
    step, arguments, pins = WAYS[way]
    text = lower(step, *arguments)
    assert count_pins(text) == pins
    assert TYPES_NEED not in text
    assert "/frontends/" not in text


def test_pins_have_the_users_lines() -> None:
    text = lower(lambda x: reshard(jnp.sin(x), P("data")) * 2, X)
    assert "test_explicit_axes.py" in text
    assert text.count('#sdy.sharding_per_value<[<@mesh, [{\\"data\\"}, {}]>]>') == 1


def test_other_axes_of_a_mixed_mesh_may_split_what_is_not_named() -> None:
    text = lower(lambda x: reshard(jnp.sin(x), P("data")) * 2, X, mesh=MIXED)
    assert '[{\\"data\\"}, {?}]' in text


def test_a_mesh_of_arguments_alone_and_one_without_devices() -> None:
    step = lambda x: reshard(jnp.sin(x), NAMED) * 2  # noqa: E731
    assert count_pins(sw.lower(step, like(X, "data")).hlo_text) == 1
    with jax.sharding.use_abstract_mesh(EXPLICIT.abstract_mesh):
        assert count_pins(sw.lower(jax.jit(lambda x: reshard(jnp.sin(x), ROWS) * 2), X).hlo_text) == 1


# ---- arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "dims"),
    [
        (like(X, None, "model"), '[{}, {\\"model\\"}]'),
        (like(X, mesh=AUTO), "[{}, {}]"),
        (SPLIT, '[{\\"data\\"}, {\\"model\\"}]'),
        (WHOLE, None),  # as every array is by default
        (jax.device_put(np.ones((16, 8)), NamedSharding(AUTO, P("data"))), None),
        (X, None),
    ],
)
def test_arguments_keep_the_shardings_that_they_were_given(argument: Any, dims: str | None) -> None:
    text = sw.lower(lambda x: x * 2, argument).hlo_text
    (parameter,) = (line for line in text.splitlines() if "parameter(0)" in line)
    assert ("sdy.sharding" in parameter) == (dims is not None)
    assert dims is None or dims in parameter


def test_where_arguments_lie_makes_no_other_program() -> None:
    function = JaxFunction(lambda x: x * 2)
    signatures = [function.describe((x,), {}, takes_types=True)[0] for x in (X, like(X, "data"), like(X, "model"))]
    assert len(set(signatures)) == 1


# ---- types that are read ----------------------------------------------------------------------


def test_a_step_that_reads_its_types_is_traced_with_them() -> None:
    def step(x: Any) -> Any:
        return jnp.ones((16, 8), out_sharding=P(*jax.typeof(x * 2).sharding.spec)) + x

    line = step.__code__.co_firstlineno + 1
    text = lower(step, like(X, "data"))
    assert f"{TYPES_NEED}=" in text.splitlines()[0]
    assert f"test_explicit_axes.py:{line} reads the sharding in a value's type" in text
    assert count_pins(text) > 1
    plan = sw.plan(text, 8)
    assert any(f"test_explicit_axes.py:{line}" in note for note in plan.notes)


def test_types_that_were_written_are_known_when_they_are_read() -> None:
    def step(x: Any) -> Any:
        hidden = reshard(jnp.sin(x), P(None, "model"))
        specs.extend([jax.typeof(x).sharding.spec, jax.typeof(hidden).sharding.spec])
        return hidden

    specs: list[Any] = []
    text = lower(step, like(X, "data"))
    assert specs == [P("data", None), P(None, "model")]
    assert (count_pins(text), TYPES_NEED in text) == (1, False)


def test_a_step_that_runs_under_explicit_axes_only_is_traced_there() -> None:
    def step(x: Any) -> Any:
        assert jax.sharding.get_abstract_mesh().are_all_axes_explicit, "only there"
        return jnp.sin(x)

    assert "under Auto axes tracing raises AssertionError: only there" in lower(step, like(X, "data"))
    with pytest.raises(ZeroDivisionError):
        lower(lambda x: x / (1 // 0), like(X, "data"))


# ---- JAX itself -----------------------------------------------------------------------------


def test_other_threads_and_later_calls_have_jax_itself() -> None:
    def types_elsewhere() -> None:
        with jax.set_mesh(EXPLICIT):
            seen.append(jax.typeof(SPLIT * 2).sharding.spec)

    seen: list[Any] = []

    def step(x: Any) -> Any:
        thread = threading.Thread(target=types_elsewhere)
        thread.start()
        thread.join()
        return x * 2

    lower(step, X)
    types_elsewhere()
    assert seen == [P("data", "model")] * 2
    assert jax.typeof is jax._src.core.typeof
    with jax.set_mesh(AUTO), pytest.raises(ValueError, match="Auto or Manual"):
        jax.jit(lambda x: x.reshape(4, 4, 8, out_sharding=P("data"))).trace(X)


def test_a_jax_that_moved_a_name_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(explicit_axes.PRIVATE_NAMES, "jax._src.pjit", ("get_ctx_mesh", "gone"))
    with pytest.raises(PlatformError, match=r"lacks jax\._src\.pjit\.gone"):
        lower(lambda x: x * 2, X)


@pytest.mark.parametrize("mesh", [EXPLICIT, None])
def test_regions_lie_over_the_mesh_of_the_rest_and_have_their_own_again(mesh: Any) -> None:
    rotate = lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])  # noqa: E731
    region = jax.shard_map(rotate, mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    split = jax.shard_map(
        lambda x: reshard(rotate(x), P(None, "model")), mesh=mesh, in_specs=P("data"), out_specs=P("data"),
        axis_names={"data"},
    )  # fmt: skip
    with explicit_axes.trace_under_auto_axes(EXPLICIT.abstract_mesh):
        jaxpr = str(jax.jit(lambda x: region(x) + region(x * 2) + split(x)).trace(X).jaxpr)
    assert jaxpr.count("shard_map") == 3
    assert jaxpr.count("sharding_constraint") == 1
    assert "Explicit" not in jaxpr
    with jax.set_mesh(EXPLICIT):
        jax.jit(region).trace(reshard(SPLIT, ROWS))


# ---- on servers -----------------------------------------------------------------------------


@pytest.mark.cluster
def test_training_in_a_session_is_that_of_jax_jit(session: sw.Session) -> None:
    numbers = np.random.default_rng(0)

    def placed(shape: tuple[int, ...], *spec: Any) -> Any:
        values = numbers.standard_normal(shape).astype(np.float32)
        return jax.device_put(values * 0.1, NamedSharding(EXPLICIT, P(*spec)))

    w = {"a": placed((8, 32), None, "model"), "b": placed((32, 8), "model")}
    batches = [placed((16, 8), "data") for _ in range(3)]
    train = functools.partial(train_mlp, False)
    with jax.set_mesh(EXPLICIT):
        expected, ours = w, w
        ours_step, step = session.parallelize(train, donate_argnums=0), jax.jit(train)
        for batch in batches:
            loss, ours = ours_step(ours, batch)
            expected_loss, expected = step(expected, batch)
            np.testing.assert_allclose(float(loss), float(expected_loss), rtol=1e-6)
        for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-5, atol=1e-7)
    assert len(ours_step._programs.plans.programs) == 1
    splits = {variable.name: variable.sharding.dims for variable in ours_step.plan.parameters}
    assert splits == {"w['a']": ((), ("model",)), "w['b']": (("model",), ()), "x": (("data",), ())}
