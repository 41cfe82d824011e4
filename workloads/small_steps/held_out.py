"""Steps that were written when the planner was done, to see what it makes of the unknown."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from workloads.small_steps.made import Step, cross_entropy, integers, make_train_step, normal, weights


def perceiver() -> Step:
    """Few latents that read many inputs, with the same weights each time (Jaegle et al., 2021), and queries."""
    width, heads = 64, 4
    kinds = {"read": 2 * width, "think": 3 * width, "answer": 2 * width}
    params: dict[str, Any] = {
        "latents": weights(24, width),
        "into": weights(48 + 16, width, seed=1),
        "queries": weights(10, width, seed=2),
        "head": weights(width, 12, seed=3),
    }
    for number, kind in enumerate(kinds):
        params[kind] = {
            "q": weights(width, width, seed=10 + number),
            "kv": weights(width, 2 * width, seed=20 + number),
            "out": weights(width, width, seed=30 + number),
            "up": weights(width, 2 * width, seed=40 + number),
            "down": weights(2 * width, width, seed=50 + number),
            "norm": np.ones(width, np.float32),
        }

    def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def attend(p: Any, x: jax.Array, context: jax.Array, hidden: jax.Array | None) -> jax.Array:
        q = (normed(x, p["norm"]) @ p["q"]).reshape(*x.shape[:2], heads, -1)
        k, v = jnp.split((context @ p["kv"]).reshape(*context.shape[:2], heads, -1), 2, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4
        if hidden is not None:
            scores = jnp.where(hidden[:, None, None], -1e9, scores)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(normed(x, p["norm"]) @ p["up"]) @ p["down"]

    def loss(p: Any, x: jax.Array, lengths: jax.Array, labels: jax.Array) -> jax.Array:
        where = jnp.linspace(-1, 1, x.shape[1])[:, None] * 2.0 ** jnp.arange(8) * jnp.pi
        bands = jnp.broadcast_to(jnp.concatenate([jnp.sin(where), jnp.cos(where)], -1), (*x.shape[:2], 16))
        seen = jnp.concatenate([x, bands], -1) @ p["into"]
        hidden = jnp.arange(x.shape[1]) >= lengths[:, None]
        latents = jnp.broadcast_to(p["latents"], (x.shape[0], *p["latents"].shape))

        def again(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            h = attend(p["read"], h, seen, hidden)
            return attend(p["think"], h, h, None), None

        latents, _ = lax.scan(jax.checkpoint(again), latents, None, length=3)
        queries = jnp.broadcast_to(p["queries"], (x.shape[0], *p["queries"].shape))
        return cross_entropy(attend(p["answer"], queries, latents, None) @ p["head"], labels)

    return make_train_step(loss, params, normal(16, 120, 48), integers(60, 120, 16), integers(0, 12, 16, 10))


def flow() -> Step:
    """A normalizing flow of images (Kingma and Dhariwal, 2018): squeezed pixels, mixed channels, coupled halves."""
    channels, hidden, depth = 12, 48, 3
    params = {
        "scale": weights(depth, channels, seed=1),
        "shift": weights(depth, channels, seed=2),
        "mix": np.stack([np.linalg.qr(normal(channels, channels, seed=s))[0] for s in range(depth)]),
        "first": weights(depth, 3, 3, channels // 2, hidden, seed=3),
        "second": weights(depth, 1, 1, hidden, hidden, seed=4),
        "third": weights(depth, 3, 3, hidden, channels, seed=5),
    }

    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def layer(carry: Any, p: Any) -> tuple[Any, None]:
        x, volume = carry
        pixels = x.shape[1] * x.shape[2]
        x = (x + p["shift"]) * jnp.exp(p["scale"])
        x = jnp.einsum("bhwc,cd->bhwd", x, p["mix"])
        volume = volume + pixels * (p["scale"].sum() + jnp.linalg.slogdet(p["mix"])[1])
        result, changed = jnp.split(x, 2, -1)
        h = jax.nn.relu(convolved(jax.nn.relu(convolved(result, p["first"])), p["second"]))
        shift, logits = jnp.split(convolved(h, p["third"]), 2, -1)
        scale = jax.nn.sigmoid(logits + 2)
        x = jnp.concatenate([result, (changed + shift) * scale], -1)
        return (x, volume + jnp.log(scale).sum((1, 2, 3))), None

    def loss(p: Any, images: jax.Array) -> jax.Array:
        batch, rows, columns, _ = images.shape
        x = images.reshape(batch, rows // 2, 2, columns // 2, 2, 3).transpose(0, 1, 3, 5, 2, 4)
        (z, volume), _ = lax.scan(layer, (x.reshape(batch, rows // 2, columns // 2, -1), jnp.zeros(batch)), p)
        return jnp.mean(0.5 * (z**2).sum((1, 2, 3)) - volume) / images[0].size

    return make_train_step(loss, params, normal(16, 16, 16, 3))


def queue() -> Step:
    """Retrieval with negatives of the batch and of a queue, whose keys a slow copy makes (He et al., 2020)."""
    width, result, words = 64, 96, 300
    params = {"table": weights(words, width), "mix": weights(width, width, seed=1), "out": weights(width, 32, seed=2)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3))

    def encoded(p: Any, text: jax.Array, hidden: jax.Array) -> jax.Array:
        h = jax.nn.silu(p["table"][text] @ p["mix"]) * ~hidden[..., None]
        h = (h.sum(1) / jnp.maximum((~hidden).sum(1, keepdims=True), 1)) @ p["out"]
        return h / jnp.linalg.norm(h, axis=-1, keepdims=True)

    def step(
        p: Any, slow: Any, state: Any, rows: jax.Array, place: jax.Array, asked: jax.Array, found: jax.Array
    ) -> Any:
        keys = encoded(slow, found, found == 0)

        def loss(p: Any) -> jax.Array:
            queries = encoded(p, asked, asked == 0)
            logits = jnp.concatenate([queries @ keys.T, queries @ rows.T], 1) / 0.07
            return cross_entropy(logits, jnp.arange(queries.shape[0]))

        value, gradients = jax.value_and_grad(loss)(p)
        updates, state = optimizer.update(gradients, state, p)
        p = optax.apply_updates(p, updates)
        slow = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, slow, p)
        rows = lax.dynamic_update_slice(rows, keys, (place, 0))
        _, best = lax.top_k(encoded(p, asked, asked == 0) @ rows.T, 5)
        return p, slow, state, rows, (place + keys.shape[0]) % result, value, best

    rows = normal(result, 32, seed=4)
    batch = (rows, np.int32(24), integers(0, words, 24, 10), integers(0, words, 24, 14, seed=1))
    return Step(step, (params, params, optimizer.init(params), *batch))


def rays() -> Step:
    """Radiance along rays (Mildenhall et al., 2020): the second samples lie where the first saw something."""
    hidden = 96
    params = {
        f"{name}{number}": weights(*shape, seed=seed)
        for seed, (name, number, shape) in enumerate(
            (name, number, shape)
            for name in ("coarse", "fine")
            for number, shape in enumerate(((36, hidden), (hidden, hidden), (hidden, 4)))
        )
    }

    def seen(p: Any, name: str, origin: jax.Array, way: jax.Array, depth: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = origin[:, None] + way[:, None] * depth[..., None]
        bands = (at[..., None] * 2.0 ** jnp.arange(6)).reshape(*depth.shape, -1)
        h = jnp.concatenate([jnp.sin(bands), jnp.cos(bands)], -1)
        h = jax.nn.relu(jax.nn.relu(h @ p[f"{name}0"]) @ p[f"{name}1"]) @ p[f"{name}2"]
        apart = jnp.concatenate([jnp.diff(depth), jnp.ones_like(depth[:, :1])], -1)
        opaque = 1 - jnp.exp(-jax.nn.softplus(h[..., 3]) * apart)
        left = jnp.cumprod(jnp.concatenate([jnp.ones_like(depth[:, :1]), 1 - opaque[:, :-1] + 1e-10], -1), -1)
        share = opaque * left
        return (share[..., None] * jax.nn.sigmoid(h[..., :3])).sum(1), share

    def drawn(key: jax.Array, depth: jax.Array, share: jax.Array, count: int) -> jax.Array:
        total = jnp.cumsum(share + 1e-5, -1)
        at = jax.random.uniform(key, (depth.shape[0], count)) * total[:, -1:]
        place = jax.vmap(jnp.searchsorted)(total, at)
        return jnp.take_along_axis(depth, jnp.minimum(place, depth.shape[1] - 1), 1)

    def loss(p: Any, key: jax.Array, origin: jax.Array, way: jax.Array, colour: jax.Array) -> jax.Array:
        first, second = jax.random.split(key)
        depth = jnp.linspace(1, 4, 16) + jax.random.uniform(first, (origin.shape[0], 16)) * 3 / 16
        coarse, share = seen(p, "coarse", origin, way, depth)
        more = jnp.sort(jnp.concatenate([depth, drawn(second, depth, lax.stop_gradient(share), 32)], -1), -1)
        fine, _ = seen(p, "fine", origin, way, more)
        return jnp.mean((coarse - colour) ** 2) + jnp.mean((fine - colour) ** 2)

    batch = (jax.random.PRNGKey(1), normal(96, 3), normal(96, 3, seed=1), normal(96, 3, seed=2))
    return make_train_step(loss, params, *batch)


def tasks() -> Step:
    """Weights of each task's own after gradient steps, and the gradient through these (Finn et al., 2017)."""
    params = {"first": weights(20, 48), "second": weights(48, 48, seed=1), "third": weights(48, 6, seed=2)}
    params["rates"] = np.full(3, 0.1, np.float32)

    def plain(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(jnp.tanh(jnp.tanh(x @ w["first"]) @ w["second"]) @ w["third"], y)

    def loss(p: Any, x: jax.Array, y: jax.Array, later_x: jax.Array, later_y: jax.Array) -> jax.Array:
        def of_task(x: jax.Array, y: jax.Array, later_x: jax.Array, later_y: jax.Array) -> jax.Array:
            def taught(w: Any, rate: jax.Array) -> tuple[Any, None]:
                return jax.tree.map(lambda a, g: a - rate * g, w, jax.grad(plain)(w, x, y)), None

            start = {name: value for name, value in p.items() if name != "rates"}
            return plain(lax.scan(taught, start, p["rates"])[0], later_x, later_y)

        return jax.vmap(of_task)(x, y, later_x, later_y).mean()

    batch = (normal(24, 10, 20), integers(0, 6, 24, 10), normal(24, 15, 20, seed=1), integers(0, 6, 24, 15, seed=1))
    return make_train_step(loss, params, *batch)


def chunks() -> Step:
    """States in chunks (Dao and Gu, 2024): products inside a chunk, a scan over chunks; Adafactor."""
    layers, width, heads, size, chunk = 2, 64, 4, 16, 16
    params = {
        "table": weights(200, width),
        "into": weights(layers, width, 2 * width + 2 * size + heads, seed=1),
        "taps": weights(layers, 4, 1, width, seed=2),
        "decay": normal(layers, heads, seed=3, scale=0.3),
        "out": weights(layers, width, width, seed=4),
        "norm": np.ones((layers, width), np.float32),
    }

    def mixed(p: Any, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        h = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p["norm"]
        gate, values, key, query, step = jnp.split(h @ p["into"], np.cumsum([width, width, size, size]), axis=-1)
        values = jax.nn.silu(
            lax.conv_general_dilated(
                values, p["taps"], (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=width
            )
        )
        step = jax.nn.softplus(step)
        parts = length // chunk
        v = (values.reshape(batch, length, heads, -1) * step[..., None]).reshape(batch, parts, chunk, heads, -1)
        k, q = (each.reshape(batch, parts, chunk, size) for each in (key, query))
        a = jnp.cumsum((-jnp.exp(p["decay"]) * step).reshape(batch, parts, chunk, heads), 2)
        apart = a[:, :, :, None] - a[:, :, None]
        seen = jnp.where(jnp.tril(jnp.ones((chunk, chunk), bool))[..., None], jnp.exp(jnp.minimum(apart, 0)), 0)
        inside = jnp.einsum("bpis,bpjs,bpijh,bpjhd->bpihd", q, k, seen, v)
        made = jnp.einsum("bpjs,bpjh,bpjhd->bphsd", k, jnp.exp(a[:, :, -1:] - a), v)

        def carried(state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            result, outcome = now
            return state * outcome[..., None, None] + result, state

        start = jnp.zeros_like(made[:, 0])
        _, before = lax.scan(carried, start, (made.swapaxes(0, 1), jnp.exp(a[:, :, -1]).swapaxes(0, 1)))
        across = jnp.einsum("bpis,bpih,pbhsd->bpihd", q, jnp.exp(a), before)
        return x + ((inside + across).reshape(x.shape) * jax.nn.silu(gate)) @ p["out"]

    def loss(p: Any, words: jax.Array, following: jax.Array) -> jax.Array:
        stacked = {name: each for name, each in p.items() if name != "table"}
        h, _ = lax.scan(lambda h, w: (mixed(w, h), None), p["table"][words], stacked)
        return cross_entropy(h @ p["table"].T, following)

    words, following = integers(0, 200, 16, 64), integers(0, 200, 16, 64, seed=1)
    return make_train_step(loss, params, words, following, optimizer=optax.adafactor(1e-2, min_dim_size_to_factor=16))


def waves() -> Step:
    """Sound from spectra, and a judge of it that learns in the same step (Kong et al., 2020): two optimizers, dilated
    taps, normalized weights, a loss on windowed Fourier transforms."""
    width, up = 32, 4
    made = {
        "into": weights(5, 20, width),
        "wider": weights(2 * up, width, width, seed=1),
        "dilated": weights(3, 3, width, width, seed=2),
        "gain": np.ones((3, width), np.float32),
        "out": weights(5, width, 1, seed=3),
    }
    judge = {"first": weights(9, 1, 24, seed=4), "second": weights(9, 4, 48, seed=5), "last": weights(3, 48, 1, seed=6)}
    optimizer = optax.adam(2e-4, b1=0.8)
    sound = ("NWC", "WIO", "NWC")

    def convolved(x: jax.Array, taps: jax.Array, **how: Any) -> jax.Array:
        named = {"window_strides": (1,), "padding": "SAME", "dimension_numbers": sound, **how}
        return lax.conv_general_dilated(x, taps, **named)

    def spoken(p: Any, spectra: jax.Array) -> jax.Array:
        h = jax.nn.leaky_relu(convolved(spectra, p["into"]))
        h = lax.conv_transpose(h, p["wider"], (up,), "SAME", dimension_numbers=sound)
        for number in range(3):
            taps = p["dilated"][number]
            taps = taps * p["gain"][number] / jnp.sqrt(jnp.sum(taps**2, (0, 1)) + 1e-6)
            h = h + convolved(jax.nn.leaky_relu(h), taps, rhs_dilation=(3**number,))
        return jnp.tanh(convolved(h, p["out"]))

    def judged(p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jax.nn.leaky_relu(convolved(x, p["first"], window_strides=(2,)))
        h = jax.nn.leaky_relu(convolved(h, p["second"], window_strides=(2,), feature_group_count=6))
        return convolved(h, p["last"]), h

    def spectrum(x: jax.Array) -> jax.Array:
        frames = x[:, jnp.arange(0, x.shape[1] - 31, 8)[:, None] + jnp.arange(32), 0] * jnp.hanning(32)
        return jnp.log(jnp.abs(jnp.fft.rfft(frames)) + 1e-3)

    def step(g: Any, d: Any, g_state: Any, d_state: Any, spectra: jax.Array, real: jax.Array) -> Any:
        false = spoken(g, spectra)

        def of_judge(d: Any) -> jax.Array:
            return jnp.mean((judged(d, real)[0] - 1) ** 2) + jnp.mean(judged(d, lax.stop_gradient(false))[0] ** 2)

        d_loss, gradients = jax.value_and_grad(of_judge)(d)
        updates, d_state = optimizer.update(gradients, d_state)
        d = optax.apply_updates(d, updates)

        def of_maker(g: Any) -> jax.Array:
            result = spoken(g, spectra)
            said, seen = judged(d, result)
            near = jnp.mean(jnp.abs(spectrum(result) - spectrum(real)))
            alike = jnp.mean(jnp.abs(seen - judged(d, real)[1]))
            return jnp.mean((said - 1) ** 2) + 45 * near + 2 * alike

        g_loss, gradients = jax.value_and_grad(of_maker)(g)
        updates, g_state = optimizer.update(gradients, g_state)
        return optax.apply_updates(g, updates), d, g_state, d_state, d_loss, g_loss

    batch = (normal(16, 32, 20), normal(16, 32 * up, 1, seed=1, scale=0.3))
    return Step(step, (made, judge, optimizer.init(made), optimizer.init(judge), *batch))


def beam() -> Step:
    """Translations kept four at a time (Sutskever et al., 2014): a loop that ends when all are done, and rows that
    follow the best of `top_k`; nothing is trained."""
    words, width, batch, result, longest = 128, 48, 8, 4, 12
    params = {
        "table": weights(words, width),
        "before": weights(width, width, seed=1),
        "into": weights(width, width, seed=2),
        "out": weights(width, words, seed=3),
    }

    def step(p: Any, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        nothing_more = jnp.where(jnp.arange(words) == 0, 0.0, -1e9)

        def is_open(state: Any) -> jax.Array:
            return (state[0] < longest) & ~state[-1].all()

        def longer(state: Any) -> Any:
            place, h, text, score, done = state
            h = jnp.tanh(h @ p["before"] + p["table"][text[:, :, place]] @ p["into"])
            likely = jnp.where(done[..., None], nothing_more, jax.nn.log_softmax(h @ p["out"]))
            score, best = lax.top_k((score[..., None] + likely).reshape(batch, -1), result)
            source, word = best // words, (best % words).astype(jnp.int32)
            h, text = (jnp.take_along_axis(each, source[..., None], 1) for each in (h, text))
            done = jnp.take_along_axis(done, source, 1) | (word == 0)
            return place + 1, h, lax.dynamic_update_slice(text, word[..., None], (0, 0, place + 1)), score, done

        h = jnp.broadcast_to(seen[:, None], (batch, result, width))
        score = jnp.tile(jnp.where(jnp.arange(result) == 0, 0.0, -1e9), (batch, 1))
        text = jnp.ones((batch, result, longest + 4), jnp.int32)
        state = (jnp.int32(0), h, text, score, jnp.zeros((batch, result), bool))
        _, _, text, score, _ = lax.while_loop(is_open, longer, state)
        return text, score

    return Step(step, (params, normal(batch, width, seed=4)))


HELD_OUT = {each.__name__: each for each in (perceiver, flow, queue, rays, tasks, chunks, waves, beam)}
