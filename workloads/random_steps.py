"""Training steps that nobody wrote: random blocks in a random order, of random sizes.

Shapes only, no arrays. Every block takes and returns activations (batch, length, width); dimensions are multiples of 8
or, seldom, not. The same generator state draws the same step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from workloads.collective_steps import array, step_text, tokens

Tree = Any
Block = Callable[[Tree, jax.Array], jax.Array]

BATCHES = (8, 16, 32, 48)
LENGTHS = (16, 32, 64, 96)
WIDTHS = (32, 64, 96, 128)
VOCABULARIES = (128, 256, 257, 500)
MOST_BLOCKS = 5
MOST_LAYERS = 4

#: Chances: that blocks are layers of a scan, that those are computed again, and that a dimension divides nothing.
SCANNED, AGAIN, ODD = 0.4, 0.5, 0.15


def random_step(rng: random.Random) -> tuple[str, str]:
    """What was drawn, in words, and its HLO text."""
    batch, length, width = rng.choice(BATCHES), rng.choice(LENGTHS), rng.choice(WIDTHS)
    if rng.random() < ODD:
        length += rng.choice((1, 3))
    kinds = [rng.choice(list(BLOCKS)) for _ in range(rng.randint(1, MOST_BLOCKS))]
    results = [BLOCKS[kind](rng, width) for kind in kinds]
    params, blocks = [each for each, _ in results], [block for _, block in results]
    layers = rng.randint(2, MOST_LAYERS) if rng.random() < SCANNED else 1
    again = rng.random() < AGAIN
    vocabulary = rng.choice((0, *VOCABULARIES))
    optimizer = rng.choice(("sgd", "adamw", "momentum"))
    text = _step(params, blocks, layers if layers > 1 else 0, again, vocabulary, optimizer, (batch, length, width))
    said = f"{batch}x{length}x{width} {'+'.join(kinds)}"
    said += f" scanned {layers}{' again' if again else ''}" if layers > 1 else ""
    return f"{said} vocabulary {vocabulary} {optimizer}", text


def _step(
    params: list[Tree], blocks: list[Block], layers: int, again: bool, vocabulary: int, optimizer: str,
    sizes: tuple[int, int, int],
) -> str:  # fmt: skip
    batch, length, width = sizes

    def layer(x: jax.Array, weights: list[Tree]) -> jax.Array:
        for block, p in zip(blocks, weights, strict=True):
            x = x + block(p, x)
        return x

    def trunk(p: Tree, x: jax.Array) -> jax.Array:
        if not layers:
            return layer(x, p)
        body = jax.checkpoint(layer) if again else layer
        return jax.lax.scan(lambda h, weights: (body(h, weights), None), x, p)[0]

    def of_words(p: Tree, words: jax.Array) -> jax.Array:
        x = trunk(p["layers"], p["embedding"][words[:, :-1]])
        return optax.softmax_cross_entropy_with_integer_labels(x @ p["embedding"].T, words[:, 1:]).mean()

    def of_numbers(p: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((trunk(p["layers"], x) @ p["head"] - y) ** 2)

    stacked = jax.tree.map(lambda leaf: array(layers, *leaf.shape), params) if layers else params
    chosen = {"sgd": optax.sgd(0.1), "adamw": optax.adamw(1e-3), "momentum": optax.sgd(0.1, momentum=0.9)}[optimizer]
    if vocabulary:
        tree = {"layers": stacked, "embedding": array(vocabulary, width)}
        return step_text(of_words, tree, tokens(batch, length + 1), optimizer=chosen)
    x = array(batch, length, width)
    return step_text(of_numbers, {"layers": stacked, "head": array(width, width)}, x, x, optimizer=chosen)


# ---- blocks: their parameters and what they compute ---------------------------


def _normed(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)


def _perceptron(rng: random.Random, width: int) -> tuple[Tree, Block]:
    act = rng.choice((jax.nn.gelu, jax.nn.relu, jax.nn.silu, jnp.tanh))
    hidden = rng.choice((2, 3, 4)) * width

    def block(p: Tree, x: jax.Array) -> jax.Array:
        h = _normed(x) * p["scale"] @ p["up"] + p["bias"]
        return (act(h) * (x @ p["gate"]) if "gate" in p else act(h)) @ p["down"]

    params = {
        "scale": array(width), "up": array(width, hidden), "bias": array(hidden), "down": array(hidden, width),
    }  # fmt: skip
    return (params | {"gate": array(width, hidden)} if rng.random() < 0.5 else params), block


def _attention(rng: random.Random, width: int) -> tuple[Tree, Block]:
    heads, causal, fused = rng.choice((2, 4, 8)), rng.random() < 0.5, rng.random() < 0.5

    def block(p: Tree, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        y = _normed(x)
        parts = jnp.split(y @ p["qkv"], 3, -1) if fused else [y @ p[name] for name in "qkv"]
        q, k, v = (each.reshape(batch, length, heads, width // heads) for each in parts)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["out"]

    projections = {"qkv": array(width, 3 * width)} if fused else {name: array(width, width) for name in "qkv"}
    return {**projections, "out": array(width, width)}, block


def _convolution(rng: random.Random, width: int) -> tuple[Tree, Block]:
    groups = rng.choice((1, width))

    def block(p: Tree, x: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
        )
        return jax.nn.silu(y + p["bias"])

    return {"kernel": array(rng.choice((3, 5)), width // groups, width), "bias": array(width)}, block


def _recurrence(rng: random.Random, width: int) -> tuple[Tree, Block]:
    """A gated unit, scanned over time."""

    def block(p: Tree, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
            gate, new = jnp.split(now @ p["in"] + h @ p["again"], 2, -1)
            h = h + jax.nn.sigmoid(gate) * (jnp.tanh(new) - h)
            return h, h

        return jax.lax.scan(cell, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)

    return {"in": array(width, 2 * width), "again": array(width, 2 * width)}, block


def _mixture(rng: random.Random, width: int) -> tuple[Tree, Block]:
    """Experts weighed by a softmax, all computed; or the best one alone, dispatched by a product."""
    experts, best = rng.choice((4, 8)), rng.random() < 0.5

    def block(p: Tree, x: jax.Array) -> jax.Array:
        chances = jax.nn.softmax(x @ p["route"])
        if best:
            chances = chances * jax.nn.one_hot(jnp.argmax(chances, -1), experts)
        h = jax.nn.relu(jnp.einsum("btw,ewh->beth", x, p["up"]))
        return jnp.einsum("beth,ehw,bte->btw", h, p["down"], chances)

    params = {"route": array(width, experts), "up": array(experts, width, width), "down": array(experts, width, width)}
    return params, block


def _mixing(rng: random.Random, width: int) -> tuple[Tree, Block]:
    """What has no parameters but a scale: cumulative means, neighbours, maxima, sorted order, halves swapped."""
    what = rng.choice(("cumulative", "shifted", "largest", "sorted", "swapped"))

    def block(p: Tree, x: jax.Array) -> jax.Array:
        if what == "cumulative":
            y = jnp.cumsum(x, 1) / (1 + jnp.arange(x.shape[1]))[:, None]
        elif what == "shifted":
            y = jnp.concatenate([x[:, :1], x[:, :-1]], 1) - x
        elif what == "largest":
            y = x / (1 + jnp.abs(x).max(1, keepdims=True))
        elif what == "sorted":
            y = jnp.take_along_axis(x, jnp.argsort(x.mean(-1), 1)[..., None], 1)
        else:
            y = jnp.concatenate(jnp.split(x, 2, -1)[::-1], -1) * x
        return y * p

    return array(width), block


BLOCKS: dict[str, Callable[[random.Random, int], tuple[Tree, Block]]] = {
    "perceptron": _perceptron,
    "attention": _attention,
    "convolution": _convolution,
    "recurrence": _recurrence,
    "mixture": _mixture,
    "mixing": _mixing,
}
