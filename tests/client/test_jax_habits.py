"""What users of `jax.jit` write, run on the servers: the numbers, types and structures are `jax.jit`'s.

Habits of one row are one program, so that each costs one plan and one compilation.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, nnx, struct
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardwright as sw
from shardwright.errors import SettingWarning

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
PARAMS = {"w": np.ones((4, 2), np.float32), "b": np.zeros(2, np.float32)}


def assert_same(ours: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(as_numpy(mine), as_numpy(theirs), rtol=tolerance, atol=tolerance)


def as_numpy(array: Any) -> np.ndarray:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).astype(np.complex128)


# ---- one call each ------------------------------------------------------------------


@struct.dataclass
class State:
    params: Any
    config: Any = struct.field(pytree_node=False, default=None)


class Node:
    """A registered node whose auxiliary data cannot be hashed."""

    def __init__(self, child: Any, aux: Any) -> None:
        self.child, self.aux = child, aux


jax.tree_util.register_pytree_node(Node, lambda node: ((node.child,), node.aux), lambda aux, c: Node(c[0], aux))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -0.5, 0.5),))


class Scale:
    factor = 2.0

    def method(self, x: Any) -> Any:
        return x * self.factor

    def __call__(self, x: Any, *, shift: Any = 1.0) -> Any:
        return x + shift


def numbers(*args: Any, **named: Any) -> Any:
    return [arg * 2 for arg in args], {key: value + 1 for key, value in named.items()}, (1, 2.5, None, True, np.ones(2))


def narrow(arrays: Any) -> Any:
    return arrays, [array.astype(jnp.float32) * 2 for array in arrays]


def transformed(x: Any) -> Any:
    return {
        "vmap": jax.vmap(lambda row: row / jax.lax.psum(row, "i"), axis_name="i")(x),
        "checkpoint": jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum()))(x),
        "custom": jax.grad(lambda x: (3 * clipped(x)).sum())(x),
        "jacobian": jax.jacfwd(lambda x: x**2)(x[0]),
        "jit": jax.jit(lambda x, mode: -x, static_argnames="mode")(x, mode="a"),
    }


def nodes(state: Any, node: Any, partial: Any, nothing: Any) -> Any:
    return state.replace(params=jax.tree.map(lambda p: p * state.config["k"], state.params)), node, partial(X), nothing


def from_keys(keys: Any) -> Any:
    split = jax.random.split(keys["rbg"], 3)
    wrapped = jax.random.wrap_key_data(jax.random.key_data(keys["threefry"]))
    return split, wrapped, jax.random.normal(wrapped, (4,)), jax.random.fold_in(keys["many"][1], 3)


NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "int8", "uint16", "bool")
SCALARS = (True, 3, 2.5, 1 + 2j, np.float32(1), np.int8(3), np.bool_(True), np.float64(2), np.array(5), np.arange(4))
EMPTY = (np.zeros((0, 4), np.float32), np.zeros((3, 0), np.int32))
KEYS = {
    "rbg": jax.random.key(1, impl="rbg"),
    "threefry": jax.random.key(2),
    "many": jax.random.split(jax.random.key(3), 4),
}
NODES = (
    State({"a": X, "f": core.freeze({"b": X})}, {"k": 2.0}),
    Node(X, {"layers": [1]}),
    jax.tree_util.Partial(jnp.add, X),
    {"none": None, "empty": [], "tuple": ()},
)

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "scalars, *args and **kwargs": (numbers, (*SCALARS, *EMPTY), {"z": 1.0, "y": np.float32(2)}),
    "narrow types": (narrow, ([np.abs(X).astype(jnp.dtype(name)) for name in NARROW],), {}),
    "transformations": (transformed, (X,), {}),
    "nodes": (nodes, NODES, {}),
    "keys": (from_keys, (KEYS,), {}),
    "bound method": (Scale().method, (X,), {}),
    "callable object": (Scale(), (X,), {"shift": 3.0}),
    "partial of a partial": (functools.partial(functools.partial(jnp.matmul, X.T), precision="highest"), (X,), {}),
    "jit with a pin": (jax.jit(lambda x: x @ x.T, donate_argnums=0), (X,), {}),
    "strides of numpy": (numbers, (X.T[::2], np.asfortranarray(X), np.broadcast_to(X[0], (3, 4))), {}),
}  # fmt: skip


@pytest.mark.dear
@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("habit", CALLS)
def test_a_call_gives_what_jax_jit_gives(session: sw.Session, habit: str) -> None:
    fn, args, kwargs = CALLS[habit]
    ours = session.parallelize(fn)(*args, **kwargs)
    assert_same(ours, jax.jit(fn)(*args, **kwargs))


def test_lambdas_of_a_loop_keep_their_values(session: sw.Session) -> None:
    steps = [session.parallelize(lambda x, k=k: x * k) for k in (2.0, 3.0)]
    assert [float(step(np.float32(1))) for step in steps] == [2, 3]


# ---- arrays that are somewhere, and settings -------------------------------------------


def test_arrays_on_devices_and_meshes_of_this_process(session: sw.Session) -> None:
    device = jax.local_devices()[-1]
    explicit = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    auto = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    step = session.parallelize(lambda a, b: a * 2 + b.sum())
    for array in (
        jax.device_put(X, device),
        jax.device_put(X, NamedSharding(auto, PartitionSpec("d"))),
        jax.device_put(X, NamedSharding(explicit, PartitionSpec("d"))),
    ):
        np.testing.assert_allclose(np.asarray(step(array, X)), 2 * X + X.sum(), rtol=1e-5)
    assert len(step._programs.plans.programs) == 1  # where an array lies is no part of the program
    with jax.set_mesh(auto), jax.disable_jit(), pytest.warns(SettingWarning, match="jax_disable_jit"):
        np.testing.assert_allclose(np.asarray(step(X, X)), 2 * X + X.sum(), rtol=1e-5)


def test_a_step_is_traced_anew_where_x64_is_switched(session: sw.Session) -> None:
    fn = lambda x, n: (x / 3, n + 1, 2.5)  # noqa: E731
    step, x = session.parallelize(fn), np.linspace(0, 1, 4)
    for is_on in (False, True, False):
        with jax.enable_x64(is_on):
            assert_same(step(x, 3), jax.jit(fn)(x, 3))
    with jax.enable_x64(True):
        third, _, _ = step(x, 3)
    with pytest.raises(sw.UnsupportedProgramError, match="x: an array of float64, while jax_enable_x64 is off"):
        step(third, 3)


def test_a_step_in_a_traced_function_is_refused(session: sw.Session) -> None:
    step = session.parallelize(lambda y: (y * 2).sum())
    for outer in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(sw.UnsupportedProgramError, match="y: a value that JAX is tracing"):
            outer(step)(X[0])
    with pytest.raises(sw.UnsupportedProgramError, match=r"y: the type float32\[4\] without an array"):
        step(jax.ShapeDtypeStruct((4,), np.float32))


def test_arrays_as_static_fields_are_refused(session: sw.Session) -> None:
    step = session.parallelize(lambda node: node.child * 2)
    step(Node(X, np.ones(3)))
    with pytest.raises(sw.OptionError, match="static fields"):
        step(Node(X, np.ones(3)))


def test_another_batch_size_is_told_of(session: sw.Session, caplog: pytest.LogCaptureFixture) -> None:
    def total(batch):
        return batch["x"].sum()

    step = session.parallelize(total)
    step({"x": X})
    with caplog.at_level(logging.INFO, "shardwright"):
        assert float(step({"x": X[:5]})) == pytest.approx(float(X[:5].sum()), rel=1e-5)
    assert "total: another program: batch['x'] is f32[5,4], was f32[8,4]" in caplog.text


def test_a_step_of_many_programs_warns(session: sw.Session, caplog: pytest.LogCaptureFixture) -> None:
    step = session.parallelize(lambda x: x.sum())
    for size in (1, 2, 3):
        step(X[:size])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    step(X[:4])
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "4 programs so far" in warning.getMessage()
    assert "x is f32[4,4], was f32[1,4]" in warning.getMessage()


# ---- training loops ---------------------------------------------------------------------

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "masked, ema": optax.chain(optax.masked(optax.adam(0.1), {"w": True, "b": False}), optax.ema(0.9)),
    "partition, apply_if_finite": optax.apply_if_finite(
        optax.partition({"x": optax.adam(0.1), "y": optax.set_to_zero()}, {"w": "x", "b": "y"}), 3
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1.0, 0.0, 5)),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
}


@pytest.mark.dear
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optax_wrappers_train(session: sw.Session, name: str) -> None:
    optimizer = OPTIMIZERS[name]

    def step(params, state, x):
        gradients = jax.grad(lambda p: ((x @ p["w"] + p["b"]) ** 2).mean())(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    remote, local = session.parallelize(step, donate_argnames=("params", "state")), jax.jit(step)
    ours = expected = (PARAMS, optimizer.init(PARAMS))
    for _ in range(3):
        ours, expected = remote(*ours, X), local(*expected, X)
    assert_same(ours, expected, 1e-4)


def test_keys_in_a_donated_state_and_its_initializer(session: sw.Session) -> None:
    def init(key):
        return {"key": key, "rest": jax.random.split(key, 3)}

    def step(state, x):
        key, used = jax.random.split(state["key"])
        return {"key": key, "rest": jax.random.split(used, 3)}, jax.random.normal(used, x.shape)

    remote, local = session.parallelize(step, donate_argnums=0), jax.jit(step)
    ours, expected = remote.init(init, jax.random.key(0)), init(jax.random.key(0))
    for _ in range(2):
        (ours, noise), (expected, expected_noise) = remote(ours, X), local(expected, X)
    assert_same((ours, noise), (expected, expected_noise))


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(4, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(self.dense(x)))


def train(model: Any, optimizer: Any, x: Any) -> Any:
    loss, gradients = nnx.value_and_grad(lambda model: ((model(x) - 1) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return loss


@pytest.mark.dear
@pytest.mark.parametrize("fn", [train, nnx.jit(train), nnx.jit(train, donate_argnums=(0, 1))], ids=["", "jit", "gone"])
def test_nnx_modules_are_changed_in_place_as_by_nnx_jit(session: sw.Session, fn: Any) -> None:
    pairs = [(model, nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)) for model in (Net(), Net())]
    remote, local = session.parallelize(fn), nnx.jit(train)
    for _ in range(3):
        losses = remote(*pairs[0], X), local(*pairs[1], X)
        assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-4)
    assert_same(nnx.state(pairs[0]), nnx.state(pairs[1]), 1e-4)
    assert pairs[0][0](X).shape == (8, 2)  # and runs here


def test_nnx_modules_that_are_returned_stay_as_they_were(session: sw.Session) -> None:
    def step(model, optimizer, x):
        loss = train(model, optimizer, x)
        return model, optimizer, loss

    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    ours = session.parallelize(step)(model, optimizer, X)
    assert_same(nnx.state(model, nnx.Param), before)
    assert_same(ours, jax.jit(step)(model, optimizer, X), 1e-4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Counter:
    count: Any
    name: str = dataclasses.field(metadata={"static": True}, default="n")


def test_graph_definitions_and_static_fields(session: sw.Session) -> None:
    graph, state = nnx.split(Net())

    def step(graph, state, counter, x):
        model = nnx.merge(graph, state)
        return model(x).mean(), nnx.state(model), dataclasses.replace(counter, count=counter.count + len(counter.name))

    arguments = (graph, state, Counter(jnp.int32(1), "abc"), X)
    expected = jax.jit(step, static_argnames="graph")(*arguments)
    ours = session.parallelize(step, static_argnames="graph")(*arguments)
    assert_same(ours, expected, 1e-4)
    assert_same(session.parallelize(step)(*arguments), expected, 1e-4)
