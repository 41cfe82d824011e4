"""Steps whose parts are known: what a stage graph of them must show."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwright.options.plan_options import PlanOptions
from shardwright.planner.microbatch import StepSplit, split_step
from shardwright.planner.search.program import Program
from shardwright.planner.stages.clustering import Clustering, cluster_step
from tests.planner.programs import lower

BATCH, WIDTH = 8, 16


def normal(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * 0.3).astype(np.float32)


def training(loss: Callable[..., Any], params: Any, *batch: Any) -> Any:
    """AdamW behind a global norm: an update that waits for all gradients."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), *batch), (0, 1)


def dense(layers: int = 4, *, remat: bool = False, tied: bool = False) -> Any:
    """Residual layers of two products with biases, a norm ahead of each; the head may be the embedding."""
    params: dict[str, Any] = {
        f"l{i}": {
            "up": normal(2 * i, WIDTH, 4 * WIDTH),
            "b": normal(90 + i, 4 * WIDTH),
            "down": normal(2 * i + 1, 4 * WIDTH, WIDTH),
        }
        for i in range(layers)
    }
    params["table"] = normal(50, 32, WIDTH)
    if not tied:
        params["head"] = normal(51, 32, WIDTH)

    def layer(x: Any, p: Any) -> Any:
        y = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        return x + jax.nn.gelu(y @ p["up"] + p["b"]) @ p["down"]

    def loss(p: Any, ids: Any, labels: Any) -> Any:
        x = p["table"][ids]
        for i in range(layers):
            x = (jax.checkpoint(layer) if remat else layer)(x, p[f"l{i}"])
        logits = x @ (p["table"] if tied else p["head"]).T
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    ids = np.arange(BATCH, dtype=np.int32)
    return training(loss, params, ids, ids)


def scanned(layers: int = 6) -> Any:
    """Layers in a scan with remat, that all read a mask."""
    params = {
        "layers": {"w": normal(1, layers, WIDTH, WIDTH), "b": normal(2, layers, WIDTH)},
        "head": normal(3, WIDTH, 8),
    }

    def loss(p: Any, x: Any, mask: Any) -> Any:
        def layer(x: Any, q: Any) -> Any:
            return x + mask * jnp.tanh(x @ q["w"] + q["b"]), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, p["layers"])
        return jnp.mean((x @ p["head"]) ** 2)

    return training(loss, params, normal(9, BATCH, WIDTH), np.ones((BATCH, WIDTH), np.float32))


def bare_scan(layers: int = 6, width: int = 45, batch: int = 512) -> Any:
    """Layers in a scan with nothing ahead and only a mean behind; the widths divide over no axis."""
    params = {"w": normal(1, layers, width, width), "b": normal(2, layers, width)}

    def loss(p: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, q: (x + jnp.tanh(x @ q["w"] + q["b"]), None), x, p)
        return jnp.mean(x**2)

    return training(loss, params, normal(9, batch, width))


def typed_scan(layers: int, width: int, batch: int) -> Any:
    """Layers in a scan, of arrays that are only described: large ones."""

    def typed(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"w": typed(layers, width, 4 * width), "v": typed(layers, 4 * width, width)}
    optimizer = optax.adamw(1e-3)

    def loss(p: Any, x: Any) -> Any:
        def layer(x: Any, q: Any) -> Any:
            return x + jnp.tanh(x @ q["w"]) @ q["v"], None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, p)
        return jnp.mean(x**2)

    def step(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, jax.eval_shape(optimizer.init, params), typed(batch, width)), (0, 1)


def branches() -> Any:
    """Two towers that meet, one output of the first layer skipping to the end."""
    params = {name: normal(i, WIDTH, WIDTH) for i, name in enumerate(("stem", "a1", "a2", "b1", "b2", "join"))}

    def loss(p: Any, x: Any) -> Any:
        stem = jnp.tanh(x @ p["stem"])
        a = jnp.tanh(jnp.tanh(stem @ p["a1"]) @ p["a2"])
        b = jnp.tanh(jnp.tanh(stem @ p["b1"]) @ p["b2"])
        return jnp.mean(((a + b) @ p["join"] + stem) ** 2)

    return training(loss, params, normal(9, BATCH, WIDTH))


@cache
def program(name: str) -> Program:
    item = {
        "dense": dense, "remat": lambda: dense(remat=True), "tied": lambda: dense(2, tied=True),
        "scanned": scanned, "branches": branches, "bare scan": bare_scan,
    }[name]  # fmt: skip
    return Program(lower(item()), PlanOptions())


@cache
def split_and_parts(name: str) -> tuple[StepSplit, Clustering]:
    result = program(name)
    split = split_step(result.module)
    once = {name for name, parts in split.parts.items() if parts == {"once"}}
    state = set(range(len(result.flow.parameters))).difference(split.batch)
    return split, cluster_step(split.module, state, once)
