"""Training steps that the planner is tried on: small, but with the structure of the real ones.

Each builder returns (step, arguments, donated argument numbers); `step(state, batch) -> (state, loss)`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwright.planner.limits import SearchLimits

#: How far a search goes whose plan no gap is asked of.
LOOSE = SearchLimits(target_gap=0.2, fine_target_gap=0.2)

#: A profile whose prices stay as they are: what tests of the search hold its mechanisms against.
PLAIN_A100 = str(Path(__file__).with_name("plain_a100.toml"))

Program = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


def _normal(seed: int, *shape: int, scale: float = 0.1) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def _training(loss: Callable[..., Any], params: Any, *batch: Any, optimizer: Any = None) -> Program:
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), *batch), (0, 1)


def mlp(batch: int = 32, width: int = 16, hidden: int = 64) -> Program:
    params = {
        "w1": _normal(1, width, hidden), "b1": _normal(2, hidden),
        "w2": _normal(3, hidden, width), "b2": _normal(4, width),
    }  # fmt: skip

    def loss(p: Any, x: Any, y: Any) -> Any:
        h = jax.nn.relu(x @ p["w1"] + p["b1"])
        return jnp.mean((h @ p["w2"] + p["b2"] - y) ** 2)

    return _training(loss, params, _normal(5, batch, width, scale=1.0), _normal(6, batch, width, scale=1.0))


def gpt2(
    layers: int = 1, width: int = 32, heads: int = 4, vocabulary: int = 64, length: int = 16, batch: int = 8
) -> Program:
    def linear(seed: int, n: int, m: int) -> dict[str, np.ndarray]:
        return {"w": _normal(seed, n, m), "b": _normal(seed + 1, m)}

    def norm() -> dict[str, np.ndarray]:
        return {"g": np.ones(width, np.float32), "b": np.zeros(width, np.float32)}

    params: dict[str, Any] = {"wte": _normal(1, vocabulary, width), "wpe": _normal(2, length, width), "ln": norm()}
    for i in range(layers):
        params[f"h{i}"] = {
            "ln1": norm(), "qkv": linear(10 * i, width, 3 * width), "proj": linear(10 * i + 2, width, width),
            "ln2": norm(), "fc": linear(10 * i + 4, width, 4 * width), "out": linear(10 * i + 6, 4 * width, width),
        }  # fmt: skip

    def normed(p: Any, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["g"] + p["b"]

    def block(p: Any, x: Any, mask: Any) -> Any:
        y = normed(p["ln1"], x) @ p["qkv"]["w"] + p["qkv"]["b"]
        q, k, v = (
            a.reshape(*x.shape[:2], heads, width // heads).transpose(0, 2, 1, 3) for a in jnp.split(y, 3, axis=-1)
        )
        scores = jnp.where(mask, q @ k.transpose(0, 1, 3, 2) / (width // heads) ** 0.5, -1e9)
        x = x + (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ p["proj"]["w"] + p["proj"]["b"]
        return x + jax.nn.gelu(normed(p["ln2"], x) @ p["fc"]["w"] + p["fc"]["b"]) @ p["out"]["w"] + p["out"]["b"]

    def loss(p: Any, tokens: Any) -> Any:
        x = p["wte"][tokens[:, :-1]] + p["wpe"]
        mask = jnp.tril(jnp.ones((length, length), bool))
        for i in range(layers):
            x = block(p[f"h{i}"], x, mask)
        logits = normed(p["ln"], x) @ p["wte"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1)).astype(np.int32)
    return _training(loss, params, tokens)


def cnn(batch: int = 16, size: int = 16, channels: int = 8) -> Program:
    """Two convolutions with batch normalisation (its running statistics are state), pooling, a classifier."""
    params = {
        "k1": _normal(1, 3, 3, 3, channels), "g1": np.ones(channels, np.float32), "b1": _normal(2, channels),
        "k2": _normal(3, 3, 3, channels, 2 * channels), "w": _normal(4, 2 * channels, 8),
    }  # fmt: skip
    statistics = {"mean": np.zeros(channels, np.float32), "var": np.ones(channels, np.float32)}
    layout = ("NHWC", "HWIO", "NHWC")

    def loss(p: Any, statistics: Any, x: Any, y: Any) -> Any:
        h = jax.lax.conv_general_dilated(x, p["k1"], (1, 1), "SAME", dimension_numbers=layout)
        mean, var = h.mean((0, 1, 2)), h.var((0, 1, 2))
        statistics = {"mean": 0.9 * statistics["mean"] + 0.1 * mean, "var": 0.9 * statistics["var"] + 0.1 * var}
        h = jax.nn.relu((h - mean) * jax.lax.rsqrt(var + 1e-5) * p["g1"] + p["b1"])
        h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        h = jax.nn.relu(jax.lax.conv_general_dilated(h, p["k2"], (2, 2), "SAME", dimension_numbers=layout))
        logits = h.mean((1, 2)) @ p["w"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), statistics

    def step(p: Any, statistics: Any, x: Any, y: Any) -> Any:
        (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(p, statistics, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradients), statistics, value

    labels = np.random.default_rng(1).integers(0, 8, batch).astype(np.int32)
    return step, (params, statistics, _normal(5, batch, size, size, 3, scale=1.0), labels), (0, 1)


def scan(layers: int = 6, batch: int = 16, width: int = 32, optimizer: Any = None) -> Program:
    """Equal layers run by `lax.scan`: forward and backward are loops."""
    params = {"w": _normal(1, layers, width, width), "b": _normal(2, layers, width)}

    def loss(p: Any, x: Any) -> Any:
        def layer(h: Any, p: Any) -> Any:
            return h + jnp.tanh(h @ p["w"] + p["b"]), None

        h, _ = jax.lax.scan(layer, x, p)
        return jnp.mean(h**2)

    return _training(loss, params, _normal(3, batch, width, scale=1.0), optimizer=optimizer or optax.adam(1e-2))


def volumes(layers: int = 2, batch: int = 16, width: int = 8) -> Program:
    """Layers of a loop that add up how they stretch space: by a determinant, which branches for its sign, and by
    what they scale with."""
    params = {"w": _normal(1, layers, width, width), "scale": _normal(2, layers, width, width)}

    def loss(p: Any, x: Any) -> Any:
        def layer(carry: Any, p: Any) -> Any:
            x, volume = carry
            x = x @ p["w"]
            scale = jax.nn.sigmoid(x @ p["scale"])
            return (x * scale, volume + jnp.linalg.slogdet(p["w"])[1] + jnp.log(scale).sum(1)), None

        (x, volume), _ = jax.lax.scan(layer, (x, jnp.zeros(batch)), p)
        return jnp.mean((x**2).sum(1) - volume)

    return _training(loss, params, _normal(3, batch, width, scale=1.0))


def recurrent(steps: int = 5, batch: int = 16, width: int = 32, optimizer: Any = None) -> Program:
    """One cell for every time step: the backward loop adds its gradient up."""
    params = {"u": _normal(1, width, width), "w": _normal(2, width, width)}

    def loss(p: Any, x: Any) -> Any:
        def cell(h: Any, row: Any) -> Any:
            return jnp.tanh(h @ p["u"] + row @ p["w"]), None

        h, _ = jax.lax.scan(cell, jnp.zeros((batch, width)), jnp.swapaxes(x, 0, 1))
        return jnp.mean(h**2)

    return _training(loss, params, _normal(3, batch, steps, width, scale=1.0), optimizer=optimizer)


def time_major(steps: int = 6, batch: int = 16, width: int = 16, hidden: int = 32) -> Program:
    """A recurrent network over sequences whose first dimension is time."""
    params = {"wx": _normal(1, width, hidden), "wh": _normal(2, hidden, hidden), "wo": _normal(3, hidden, width)}

    def loss(p: Any, x: Any, y: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ p["wx"] + h @ p["wh"])
            return h, h @ p["wo"]

        return jnp.mean((jax.lax.scan(cell, jnp.zeros((x.shape[1], hidden)), x)[1] - y) ** 2)

    shape = (steps, batch, width)
    return _training(loss, params, _normal(4, *shape, scale=1.0), _normal(5, *shape, scale=1.0))


def control(batch: int = 16, width: int = 32) -> Program:
    """Dropout from a key that is state, a branch on a counter, rematerialised layers, sorting."""
    params = {"w": _normal(1, width, 2 * width), "v": _normal(2, 2 * width, width)}

    def layer(p: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ p["w"]) @ p["v"]

    def step(p: Any, key: Any, count: Any, x: Any) -> Any:
        key, drop = jax.random.split(key)

        def loss(p: Any) -> Any:
            h = jax.checkpoint(layer)(p, jax.checkpoint(layer)(p, x))
            h = h * jax.random.bernoulli(drop, 0.9, h.shape)
            h = jax.lax.cond(count % 2 == 0, lambda h: jnp.tanh(h @ p["w"]), lambda h: jax.nn.relu(h) @ p["w"], h)
            return jnp.mean(jnp.sort(h)[:, ::2] ** 2)

        value, gradients = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradients), key, count + 1, value

    return step, (params, np.array([0, 7], np.uint32), np.int32(0), _normal(3, batch, width, scale=1.0)), (0, 1, 2)


PROGRAMS: dict[str, Callable[[], Program]] = {"mlp": mlp, "gpt2": gpt2, "cnn": cnn, "scan": scan, "control": control}


def lower(program: Program) -> str:
    """HLO text of a program's step, as a client sends it."""
    step, arguments, donated = program
    lowered = jax.jit(step, donate_argnums=donated, keep_unused=True).lower(*arguments)
    return str(lowered.as_text("hlo", debug_info=True))
