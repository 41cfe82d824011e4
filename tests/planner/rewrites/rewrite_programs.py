"""Training steps whose weights hold several things side by side, and a way to run HLO text on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwright.xla import private
from tests.planner.programs import Program, gpt2

BATCH, LENGTH, WIDTH, HEADS = 8, 6, 16, 4


def _normal(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * 0.3).astype(np.float32)


def _training(loss: Callable[..., Any], params: Any, *batch: Any) -> Program:
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), *batch), (0, 1)


def lstm() -> Program:
    """Four gates in one weight of `[d, 4h]`, inside a loop over time."""
    params = {"wx": _normal(1, WIDTH, 4 * WIDTH), "wh": _normal(2, WIDTH, 4 * WIDTH), "b": _normal(3, 4 * WIDTH)}

    def loss(p: Any, xs: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((BATCH, WIDTH))
        _, hs = jax.lax.scan(cell, (zeros, zeros), xs)
        return jnp.mean(hs**2)

    return _training(loss, params, _normal(4, LENGTH, BATCH, WIDTH))


def glu() -> Program:
    """Gate and value in one weight of `[d, 2f]`."""
    params = {"w": _normal(1, WIDTH, 48), "v": _normal(2, 24, WIDTH)}

    def loss(p: Any, x: Any) -> Any:
        y = x @ p["w"]
        return jnp.mean(((jax.nn.silu(y[..., :24]) * y[..., 24:]) @ p["v"]) ** 2)

    return _training(loss, params, _normal(3, BATCH, LENGTH, WIDTH))


def gqa() -> Program:
    """Four query heads and two heads each of keys and values in one weight: pieces of unequal size."""
    size = WIDTH // HEADS
    params = {"w": _normal(1, WIDTH, 8 * size), "proj": _normal(2, WIDTH, WIDTH)}

    def loss(p: Any, x: Any) -> Any:
        q, k, v = jnp.split(x @ p["w"], [4 * size, 6 * size], axis=-1)
        q = q.reshape(BATCH, LENGTH, 2, 2, size)
        k, v = (a.reshape(BATCH, LENGTH, 2, size) for a in (k, v))
        scores = jax.nn.softmax(jnp.einsum("bqgrd,bkgd->bgrqk", q, k))
        mixed = jnp.einsum("bgrqk,bkgd->bqgrd", scores, v).reshape(BATCH, LENGTH, WIDTH)
        return jnp.mean((mixed @ p["proj"]) ** 2)

    return _training(loss, params, _normal(3, BATCH, LENGTH, WIDTH))


def stacked() -> Program:
    """Fused QKV reshaped to `[…, 3, heads, size]`, in layers run by a rematerialised scan."""
    layers, size = 3, WIDTH // HEADS
    params = {"qkv": _normal(1, layers, WIDTH, 3 * WIDTH), "b": _normal(2, layers, 3 * WIDTH)}

    def loss(p: Any, x: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, p: Any) -> Any:
            y = (x @ p["qkv"] + p["b"]).reshape(BATCH, LENGTH, 3, HEADS, size)
            q, k, v = y[:, :, 0], y[:, :, 1], y[:, :, 2]
            scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
            return x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape), None

        x, _ = jax.lax.scan(layer, x, p)
        return jnp.mean(x**2)

    return _training(loss, params, _normal(3, BATCH, LENGTH, WIDTH))


def nested() -> Program:
    """A fused weight whose halves are cut again: `[d, 2, 2, d/4]` in the end."""
    params = {"w": _normal(1, WIDTH, 32)}

    def loss(p: Any, x: Any) -> Any:
        a, b = jnp.split(x @ p["w"], 2, axis=-1)
        turned = jnp.concatenate([-a[..., 8:], a[..., :8]], axis=-1)
        return jnp.mean((turned * b) ** 2)

    return _training(loss, params, _normal(2, BATCH, WIDTH))


def joined() -> Program:
    """Features joined before a weight, as in a recommender: a concatenate, its gradient slices."""
    params = {"w": _normal(1, 3 * WIDTH, 8), "table": _normal(2, 10, WIDTH)}

    def loss(p: Any, x: Any, ids: Any) -> Any:
        features = jnp.concatenate([x, p["table"][ids], jnp.tanh(x)], axis=-1)
        return jnp.mean((features @ p["w"]) ** 2)

    ids = np.arange(BATCH, dtype=np.int32) * 2 % 10
    return _training(loss, params, _normal(3, BATCH, WIDTH), ids)


REWRITTEN: dict[str, Callable[[], Program]] = {
    "gpt2": gpt2, "lstm": lstm, "glu": glu, "gqa": gqa, "stacked": stacked, "nested": nested, "joined": joined,
}  # fmt: skip


def deep(layers: int = 8, batch: int = 128, width: int = 32) -> Program:
    """Residual layers with a wide inside: they make far more for the backward pass than they hand on."""
    params = {
        f"l{i}": {"w": _normal(2 * i, width, 4 * width), "v": _normal(2 * i + 1, 4 * width, width)}
        for i in range(layers)
    }

    def loss(p: Any, x: Any) -> Any:
        for layer in p.values():
            x = x + jax.nn.gelu(x @ layer["w"]) @ layer["v"]
        return jnp.mean(x**2)

    return _training(loss, params, _normal(99, batch, width))


def deep_scan(layers: int = 6, batch: int = 64, width: int = 16, *, hands_out: bool = False) -> Program:
    """Such layers in a loop. hands_out: what each layer ends with is a result, too."""
    params = {"w": _normal(1, layers, width, 4 * width), "v": _normal(2, layers, 4 * width, width)}

    def step(params: Any, scale: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            def layer(x: Any, p: Any) -> Any:
                x = x + scale * (jax.nn.gelu(x @ p["w"]) @ p["v"])
                return x, x if hands_out else None

            last, every = jax.lax.scan(layer, x, params)
            return jnp.mean(last**2), every

        (value, every), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, every

    return step, (params, np.float32(0.5), _normal(3, batch, width)), (0,)


def compiled(hlo_text: str, *, every_pass: bool = False) -> Any:
    """XLA's executable of HLO text on one device. every_pass: XLA leaves none out, as `jax.jit` has it."""
    device = private.local_devices()[0]
    options = private.compile_options([device.id])
    if every_pass:
        options.env_option_overrides = []
    return private.compile_and_load(private.stablehlo_of(hlo_text), [device], options)


def run(hlo: str | Any, arguments: Sequence[Any]) -> list[np.ndarray]:
    """Outputs of HLO text, or of what `compiled` made of one, on one device."""
    executable = compiled(hlo) if isinstance(hlo, str) else hlo
    device = private.local_devices()[0]
    placed = [jax.device_put(np.asarray(argument), device) for argument in arguments]
    results = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
    return [np.asarray(shards[0]) for shards in results]
