"""Ten small models with places for their author's shardings: under Explicit axes, under Auto ones, or without any.

A step takes `Pins`, which says how the author's shardings are written; without them a model says nothing of layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

DATA, MODEL = "data", "model"

#: A model's step and its arguments.
Model = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Pins:
    """How the author's shardings are written: "explicit", `out_sharding=`; "auto", constraints; "", not at all."""

    form: str = ""

    def einsum(self, equation: str, *arrays: jax.Array, to: tuple[Any, ...]) -> jax.Array:
        if self.form == "explicit":
            return jnp.einsum(equation, *arrays, out_sharding=PartitionSpec(*to))
        return self._constrain(jnp.einsum(equation, *arrays), to)

    def lookup(self, table: jax.Array, ids: jax.Array, to: tuple[Any, ...]) -> jax.Array:
        if self.form == "explicit":
            return table.at[ids].get(out_sharding=PartitionSpec(*to))
        return self._constrain(table[ids], to)

    def reshape(self, array: jax.Array, shape: tuple[int, ...], to: tuple[Any, ...]) -> jax.Array:
        if self.form == "explicit":
            return jnp.reshape(array, shape, out_sharding=PartitionSpec(*to))
        return self._constrain(jnp.reshape(array, shape), to)

    def reshard(self, array: jax.Array, to: tuple[Any, ...]) -> jax.Array:
        if self.form == "explicit":
            return jax.sharding.reshard(array, PartitionSpec(*to))
        return self._constrain(array, to)

    def _constrain(self, array: jax.Array, to: tuple[Any, ...]) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, PartitionSpec(*to)) if self.form == "auto" else array


# ---- parts ----------------------------------------------------------------------------------------


class _Values:
    """Arrays of a model, the same each time."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def __call__(self, *shape: int) -> np.ndarray:
        return np.asarray(self._random.standard_normal(shape) * 0.1, np.float32)

    def below(self, limit: int, *shape: int) -> np.ndarray:
        return np.asarray(self._random.integers(0, limit, shape), np.int32)


def _sgd(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(weights: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | float) -> jax.Array:
    """Heads of q, k and v, `[batch, time, heads, width]`."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores + bias), v)


def _causal(time: int) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones((time, time), bool)), 0.0, -1e9)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = (logits * jax.nn.one_hot(labels, logits.shape[-1])).sum(-1)
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def _block_weights(new: _Values, width: int, heads: int, hidden: int, *layers: int) -> dict[str, np.ndarray]:
    head = width // heads
    return {
        **{name: new(*layers, width, heads, head) for name in ("q", "k", "v")},
        "o": new(*layers, heads, head, width),
        "up": new(*layers, width, hidden),
        "down": new(*layers, hidden, width),
    }


def _block(pins: Pins, w: Any, h: jax.Array, bias: jax.Array | float = 0.0) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dhk->bthk", _norm(h), w[name]) for name in ("q", "k", "v"))
    h = h + pins.einsum("bthk,hkd->btd", _attend(q, k, v, bias), w["o"], to=(DATA, None, None))
    return h + jnp.einsum("btf,fd->btd", jax.nn.gelu(_norm(h) @ w["up"]), w["down"])


# ---- models ---------------------------------------------------------------------------------------


def llama(pins: Pins) -> Model:
    """Decoder of scanned layers."""
    new = _Values()

    def loss(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def layer(h: jax.Array, u: Any) -> tuple[jax.Array, None]:
            return _block(pins, u, h, _causal(h.shape[1])), None

        h, _ = jax.lax.scan(layer, w["table"][x], w["layers"])
        return _cross_entropy(_norm(h) @ w["head"], y)

    weights = {"table": new(256, 64), "head": new(64, 256), "layers": _block_weights(new, 64, 4, 256, 3)}
    return _sgd(loss), (weights, new.below(256, 16, 32), new.below(256, 16, 32))


def moe(pins: Pins) -> Model:
    """Tokens to their best of eight experts, as products with a mask."""
    new = _Values()

    def loss(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        chosen = jax.nn.softmax(x @ w["router"])
        mask = jax.nn.one_hot(chosen.argmax(-1), 8) * chosen.max(-1, keepdims=True)
        sent = jnp.einsum("td,te->etd", x, mask)
        hidden = jax.nn.relu(pins.einsum("etd,edf->etf", sent, w["up"], to=(MODEL, None, None)))
        return jnp.square(jnp.einsum("etf,efd->td", hidden, w["down"]) - y).mean()

    weights = {"router": new(32, 8), "up": new(8, 32, 128), "down": new(8, 128, 32)}
    return _sgd(loss), (weights, new(256, 32), new(256, 32))


def vit(pins: Pins) -> Model:
    """Patches of images, two blocks, a mean."""
    new = _Values()

    def loss(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        patches = x.reshape(32, 4, 8, 4, 8, 3).transpose(0, 1, 3, 2, 4, 5)
        h = pins.reshape(patches, (32, 16, 192), to=(DATA, None, None)) @ w["patch"] + w["place"]
        for u in w["layers"]:
            h = _block(pins, u, h)
        return _cross_entropy(_norm(h).mean(1) @ w["head"], y)

    layers = [_block_weights(new, 64, 4, 128) for _ in range(2)]
    weights = {"patch": new(192, 64), "place": new(16, 64), "head": new(64, 16), "layers": layers}
    return _sgd(loss), (weights, new(32, 32, 32, 3), new.below(16, 32))


def unet(pins: Pins) -> Model:
    """Convolutions down and up again."""
    new = _Values()

    def convolve(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        first = jax.nn.relu(convolve(x, w["in"]))
        low = pins.reshard(jax.nn.relu(convolve(first, w["down"], 2)), to=(DATA, None, None, None))
        back = jnp.repeat(jnp.repeat(jax.nn.relu(convolve(low, w["middle"])), 2, 1), 2, 2)
        return jnp.square(convolve(jnp.concatenate([first, back], -1), w["out"]) - y).mean()

    weights = {"in": new(3, 3, 3, 16), "down": new(3, 3, 16, 32), "middle": new(3, 3, 32, 32), "out": new(3, 3, 48, 3)}
    return _sgd(loss), (weights, new(16, 16, 16, 3), new(16, 16, 16, 3))


def lstm(pins: Pins) -> Model:
    """A cell scanned over time."""
    new = _Values()

    def loss(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def cell(state: Any, x: jax.Array) -> Any:
            c, s = state
            i, f, g, o = (x @ w["x"][n] + s @ w["h"][n] for n in range(4))
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (c, jax.nn.sigmoid(o) * jnp.tanh(c)), None

        start = pins.reshard(jnp.zeros((32, 64)), to=(DATA, None))
        (_, s), _ = jax.lax.scan(cell, (start, start), x)
        return jnp.square(s @ w["out"] - y).mean()

    weights = {"x": new(4, 32, 64), "h": new(4, 64, 64), "out": new(64, 32)}
    return _sgd(loss), (weights, new(12, 32, 32), new(32, 32))


def dlrm(pins: Pins) -> Model:
    """Looked-up features and dense ones, their products, a perceptron."""
    new = _Values()

    def loss(w: Any, dense: jax.Array, ids: jax.Array, y: jax.Array) -> jax.Array:
        looked_up = [pins.lookup(table, ids[:, n], to=(DATA, None)) for n, table in enumerate(w["tables"])]
        features = jnp.stack([jax.nn.relu(dense @ w["bottom"]), *looked_up], 1)
        products = jnp.einsum("bnd,bmd->bnm", features, features).reshape(128, 25)
        return jnp.square((jax.nn.relu(products @ w["top"]) @ w["out"])[:, 0] - y).mean()

    weights = {"tables": [new(512, 32) for _ in range(4)], "bottom": new(16, 32), "top": new(25, 64), "out": new(64, 1)}
    return _sgd(loss), (weights, new(128, 16), new.below(512, 128, 4), new(128))


def t5(pins: Pins) -> Model:
    """Encoder, and a decoder that attends to it, with biases by distance."""
    new = _Values()

    def loss(w: Any, x: jax.Array, z: jax.Array, y: jax.Array) -> jax.Array:
        distance = jnp.clip(jnp.arange(16)[:, None] - jnp.arange(16)[None] + 16, 0, 31)
        bias = w["bias"][distance].transpose(2, 0, 1)
        seen = _block(pins, w["encoder"], w["table"][x], bias)
        h = _block(pins, w["decoder"], w["table"][z], bias + _causal(16))
        u = w["across"]
        q, k, v = (jnp.einsum("btd,dhk->bthk", _norm(a), u[n]) for n, a in (("q", h), ("k", seen), ("v", seen)))
        h = h + pins.einsum("bthk,hkd->btd", _attend(q, k, v, 0.0), u["o"], to=(DATA, None, None))
        return _cross_entropy(_norm(h) @ w["head"], y)

    names = ("encoder", "decoder", "across")
    weights = {"table": new(128, 64), "head": new(64, 128), "bias": new(32, 4)}
    weights |= {name: _block_weights(new, 64, 4, 128) for name in names}
    return _sgd(loss), (weights, *(new.below(128, 16, 16) for _ in range(3)))


def gnn(pins: Pins) -> Model:
    """Messages along edges, summed by node, twice."""
    new = _Values()

    def loss(w: Any, nodes: jax.Array, sources: jax.Array, targets: jax.Array, y: jax.Array) -> jax.Array:
        for u in w["layers"]:
            messages = jax.nn.relu(pins.lookup(nodes, sources, to=(DATA, None)) @ u["edge"])
            nodes = jnp.tanh(nodes @ u["self"] + jax.ops.segment_sum(messages, targets, num_segments=128))
        return jnp.square(nodes @ w["out"] - y).mean()

    weights = {"layers": [{"edge": new(32, 32), "self": new(32, 32)} for _ in range(2)], "out": new(32, 8)}
    return _sgd(loss), (weights, new(128, 32), new.below(128, 512), new.below(128, 512), new(128, 8))


def dpo(pins: Pins) -> Model:
    """Preferences between two answers, against a frozen model."""
    new = _Values()

    def score(w: Any, tokens: jax.Array) -> jax.Array:
        h = _block(pins, w["layer"], w["table"][tokens[:, :-1]], _causal(tokens.shape[1] - 1))
        logits = pins.einsum("btd,dv->btv", _norm(h), w["head"], to=(DATA, None, None))
        return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).sum((1, 2))

    def loss(w: Any, frozen: Any, better: jax.Array, worse: jax.Array) -> jax.Array:
        margin = [score(w, a) - jax.lax.stop_gradient(score(frozen, a)) for a in (better, worse)]
        return -jax.nn.log_sigmoid(0.1 * (margin[0] - margin[1])).mean()

    def weights() -> Any:
        return {"table": new(128, 64), "head": new(64, 128), "layer": _block_weights(new, 64, 4, 128)}

    return _sgd(loss), (weights(), weights(), new.below(128, 16, 17), new.below(128, 16, 17))


def decode(pins: Pins) -> Model:
    """Greedy tokens from a cache that is written in place; no gradient."""
    new = _Values()

    def step(w: Any, keys: jax.Array, values: jax.Array, tokens: jax.Array) -> Any:
        def one(state: Any, n: jax.Array) -> Any:
            keys, values, tokens = state
            h = pins.lookup(w["table"], tokens, to=(DATA, None))
            q, k, v = (jnp.einsum("bd,dhk->bhk", h, w[name]) for name in ("q", "k", "v"))
            keys = jax.lax.dynamic_update_slice_in_dim(keys, k[:, None], 16 + n, 1)
            values = jax.lax.dynamic_update_slice_in_dim(values, v[:, None], 16 + n, 1)
            scores = jnp.where(jnp.arange(20) <= 16 + n, jnp.einsum("bhk,bshk->bhs", q, keys), -1e9)
            h = h + jnp.einsum("bhs,bshk,hkd->bd", jax.nn.softmax(scores), values, w["o"])
            logits = h @ w["head"]
            tokens = logits.argmax(-1).astype(jnp.int32)
            return (keys, values, tokens), logits.max(-1)

        state, best = jax.lax.scan(one, (keys, values, tokens), jnp.arange(4))
        return best.mean(), state

    weights = {"table": new(128, 64), "head": new(64, 128), **_block_weights(new, 64, 4, 1)}
    del weights["up"], weights["down"]
    return step, (weights, new(16, 20, 4, 16), new(16, 20, 4, 16), new.below(128, 16))


MODELS = {model.__name__: model for model in (llama, moe, vit, unet, lstm, dlrm, t5, gnn, dpo, decode)}
