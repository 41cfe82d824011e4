"""JAX programs whose instructions the rules are tried on: whole training steps and single operations.

Shapes are small, and divisible by four wherever a program allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def s32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def u32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.uint32)


def pred(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


# ---- training steps --------------------------------------------------------
def _train_step(loss: Callable[..., Any], optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def _training(loss: Callable[..., Any], params: Any, optimizer: optax.GradientTransformation, *batch: Any) -> Program:
    return _train_step(loss, optimizer), (params, jax.eval_shape(optimizer.init, params), *batch)


def _adamw() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))


def _norm(x: Any, scale: Any, bias: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias


def _attention(x: Any, qkv: Any, out: Any, heads: int, causal: bool) -> Any:
    batch, length, width = x.shape
    q, k, v = jnp.split(x @ qkv, 3, axis=-1)
    q, k, v = (t.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3) for t in (q, k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / (width // heads) ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jax.nn.softmax(scores) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(batch, length, width) @ out


def _block(x: Any, p: Any, heads: int = 4, causal: bool = True, key: Any = None) -> Any:
    x = x + _attention(_norm(x, p["g1"], p["b1"]), p["qkv"], p["out"], heads, causal)
    hidden = jax.nn.gelu(_norm(x, p["g2"], p["b2"]) @ p["up"] + p["up_bias"])
    if key is not None:
        hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden / 0.9, 0.0)
    return x + hidden @ p["down"]


def _block_params(width: int) -> dict[str, Any]:
    vectors = {name: f32(width) for name in ("g1", "b1", "g2", "b2")}
    return vectors | {
        "qkv": f32(width, 3 * width), "out": f32(width, width),
        "up": f32(width, 4 * width), "up_bias": f32(4 * width), "down": f32(4 * width, width),
    }  # fmt: skip


def gpt2(labels: str = "gather", dropout: bool = False) -> Program:
    """Two layers with a tied embedding; `labels` picks how the cross entropy reads the target."""

    def loss(params: Any, tokens: Any, targets: Any, key: Any) -> Any:
        x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
        for number, layer in enumerate(params["layers"]):
            x = _block(x, layer, key=jax.random.fold_in(key, number) if dropout else None)
        logits = _norm(x, params["g"], params["b"]) @ params["wte"].T
        if labels == "one_hot":
            return -(jax.nn.one_hot(targets, logits.shape[-1]) * jax.nn.log_softmax(logits)).sum(-1).mean()
        if labels == "take_along_axis":
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    params = {"wte": f32(32, 16), "wpe": f32(16, 16), "g": f32(16), "b": f32(16)}
    params["layers"] = [_block_params(16) for _ in range(2)]
    return _training(loss, params, _adamw(), s32(4, 8), s32(4, 8), u32(2))


def gpt2_scan() -> Program:
    """The same with stacked layers, a scan and rematerialization."""

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        x = params["wte"][tokens]
        body = jax.checkpoint(lambda x, layer: (_block(x, layer), None))
        x, _ = lax.scan(body, x, params["layers"])
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["wte"].T, targets).mean()

    layers = jax.tree.map(lambda leaf: f32(2, *leaf.shape), _block_params(16))
    return _training(loss, {"wte": f32(32, 16), "layers": layers}, optax.sgd(0.1, momentum=0.9), s32(4, 8), s32(4, 8))


def mlp() -> Program:
    def loss(params: Any, x: Any, y: Any) -> Any:
        for weight, bias in params[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        return ((x @ params[-1][0] + params[-1][1] - y) ** 2).mean()

    params = [(f32(8, 16), f32(16)), (f32(16, 16), f32(16)), (f32(16, 4), f32(4))]
    return _training(loss, params, optax.adam(1e-3), f32(8, 8), f32(8, 4))


def cnn() -> Program:
    """Convolutions with batch norm, strides, both poolings, and a dense head."""

    def norm(x: Any, scale: Any, bias: Any) -> Any:
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias

    def convolve(x: Any, kernel: Any, stride: int) -> Any:
        return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(params: Any, x: Any, labels: Any) -> Any:
        x = jax.nn.relu(norm(convolve(x, params["c1"], 1), params["g1"], params["b1"]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(norm(convolve(x, params["c2"], 2), params["g2"], params["b2"]))
        x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") / 4
        x = x.reshape(x.shape[0], -1) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    params = {
        "c1": f32(3, 3, 4, 8), "g1": f32(8), "b1": f32(8),
        "c2": f32(3, 3, 8, 16), "g2": f32(16), "b2": f32(16), "head": f32(64, 8),
    }  # fmt: skip
    return _training(loss, params, optax.sgd(0.1), f32(4, 16, 16, 4), s32(4))


def lstm() -> Program:
    def loss(params: Any, xs: Any, y: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            hidden, memory = carry
            i, f, g, o = jnp.split(jnp.concatenate([x, hidden], -1) @ params["w"] + params["b"], 4, axis=-1)
            memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
            return (hidden, memory), hidden

        zeros = jnp.zeros((xs.shape[1], 8))
        (hidden, _), _ = lax.scan(cell, (zeros, zeros), xs)
        return ((hidden @ params["head"] - y) ** 2).mean()

    params = {"w": f32(12, 32), "b": f32(32), "head": f32(8, 4)}
    return _training(loss, params, optax.rmsprop(1e-3), f32(8, 4, 4), f32(4, 4))


def autoencoder() -> Program:
    """Strided down, transposed up: convolutions with dilated inputs."""

    def loss(params: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(x, params["down"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return ((lax.conv_transpose(jnp.tanh(y), params["up"], (2, 2), "SAME") - x) ** 2).mean()

    params = {"down": f32(4, 4, 4, 8), "up": f32(4, 4, 8, 4)}
    return _training(loss, params, optax.adam(1e-3), f32(4, 8, 8, 4))


def vit() -> Program:
    def loss(params: Any, images: Any, labels: Any) -> Any:
        batch = images.shape[0]
        patches = images.reshape(batch, 4, 4, 4, 4, 4).transpose(0, 1, 3, 2, 4, 5).reshape(batch, 16, 64)
        token = jnp.broadcast_to(params["token"], (batch, 1, 16))
        x = jnp.concatenate([token, patches @ params["embed"]], 1) + params["position"]
        x = _block(x, params["block"], causal=False)
        return optax.softmax_cross_entropy_with_integer_labels(x[:, 0] @ params["head"], labels).mean()

    params = {
        "token": f32(1, 1, 16), "embed": f32(64, 16), "position": f32(17, 16),
        "block": _block_params(16), "head": f32(16, 8),
    }  # fmt: skip
    return _training(loss, params, _adamw(), f32(4, 16, 16, 4), s32(4))


MODELS: dict[str, Callable[[], Program]] = {
    "gpt2": gpt2,
    "gpt2_one_hot": partial(gpt2, "one_hot"),
    "gpt2_take_along_axis_dropout": partial(gpt2, "take_along_axis", dropout=True),
    "gpt2_scan": gpt2_scan,
    "mlp": mlp,
    "cnn": cnn,
    "lstm": lstm,
    "autoencoder": autoencoder,
    "vit": vit,
}


# ---- single operations -----------------------------------------------------
def _convolution(layout: tuple[str, str, str], x: Any, kernel: Any, **options: Any) -> Program:
    options = {"window_strides": (1, 1), "padding": "SAME"} | options
    return partial(lax.conv_general_dilated, dimension_numbers=layout, **options), (x, kernel)


def _convolution_gradients(layout: tuple[str, str, str], x: Any, kernel: Any, **options: Any) -> Program:
    """Both gradients: dilations, reversal, and groups the other way round."""
    forward, _ = _convolution(layout, x, kernel, **options)
    return jax.grad(lambda a, b: jnp.sin(forward(a, b)).sum(), argnums=(0, 1)), (x, kernel)


def _convolutions() -> dict[str, Program]:
    nhwc, nchw = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
    variants: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
        "nhwc": (nhwc, f32(4, 8, 8, 4), f32(3, 3, 4, 8), {}),
        "nchw": (nchw, f32(4, 4, 8, 8), f32(8, 4, 3, 3), {}),
        "strided": (nhwc, f32(4, 8, 8, 4), f32(3, 3, 4, 8), {"window_strides": (2, 2)}),
        "valid": (nhwc, f32(4, 8, 8, 4), f32(5, 5, 4, 8), {"padding": "VALID"}),
        "rhs_dilated": (nhwc, f32(4, 8, 8, 4), f32(3, 3, 4, 8), {"rhs_dilation": (2, 2)}),
        "lhs_dilated": (nhwc, f32(4, 8, 8, 4), f32(3, 3, 4, 8), {"lhs_dilation": (2, 2), "padding": ((1, 2), (1, 2))}),
        "pointwise": (nhwc, f32(4, 8, 8, 4), f32(1, 1, 4, 8), {}),
        "patches": (nhwc, f32(4, 8, 8, 4), f32(4, 4, 4, 8), {"window_strides": (4, 4), "padding": "VALID"}),
        "grouped": (nhwc, f32(4, 8, 8, 8), f32(3, 3, 2, 16), {"feature_group_count": 4}),
        "grouped_nchw": (nchw, f32(4, 8, 8, 8), f32(16, 2, 3, 3), {"feature_group_count": 4, "window_strides": (2, 2)}),
        "grouped_dilated": (nhwc, f32(4, 8, 8, 8), f32(3, 3, 2, 8), {"feature_group_count": 4, "rhs_dilation": (2, 2)}),
        "grouped_pointwise": (nhwc, f32(4, 8, 8, 8), f32(1, 1, 4, 8), {"feature_group_count": 2}),
        "grouped_patches": (
            nhwc,
            f32(4, 8, 8, 8),
            f32(4, 4, 2, 8),
            {"feature_group_count": 4, "window_strides": (4, 4), "padding": "VALID"},
        ),
        "grouped_global": (nhwc, f32(4, 8, 8, 8), f32(8, 8, 2, 8), {"feature_group_count": 4, "padding": "VALID"}),
        "depthwise": (nhwc, f32(4, 8, 8, 8), f32(3, 3, 1, 8), {"feature_group_count": 8}),
        "multiplied": (nhwc, f32(4, 8, 8, 8), f32(3, 3, 1, 16), {"feature_group_count": 8}),
        "batch_grouped": (nhwc, f32(8, 8, 8, 4), f32(3, 3, 4, 8), {"batch_group_count": 4}),
    }
    one = ("NWC", "WIO", "NWC")
    variants["one_dimension"] = (one, f32(4, 8, 4), f32(3, 4, 8), {"window_strides": (1,)})
    grouped = {"feature_group_count": 4}
    variants["grouped_one_dimension"] = one, f32(4, 8, 8), f32(3, 2, 8), {"window_strides": (2,), **grouped}
    volume = ("NDHWC", "DHWIO", "NDHWC")
    variants["grouped_volume"] = (
        volume,
        f32(4, 4, 4, 4, 8),
        f32(3, 3, 3, 2, 8),
        {"window_strides": (1, 2, 1), **grouped},
    )
    programs = {}
    for name, (layout, x, kernel, options) in variants.items():
        programs[f"convolution_{name}"] = _convolution(layout, x, kernel, **options)
        programs[f"convolution_{name}_gradients"] = _convolution_gradients(layout, x, kernel, **options)
    return programs


def _windows() -> dict[str, Program]:
    x, tiles = f32(4, 8, 8, 4), ((1, 2, 4, 1), (1, 2, 4, 1), "VALID")

    def pool(reduction: Any, initial: float, padding: str, x: Any) -> Any:
        return lax.reduce_window(x, initial, reduction, (1, 2, 3, 1), (1, 2, 1, 1), padding)

    maximum = partial(pool, lax.max, -jnp.inf)
    return {
        "max_pool": (partial(maximum, "SAME"), (x,)),
        "max_pool_gradient": (jax.grad(lambda x: jnp.sin(maximum("VALID", x)).sum()), (x,)),
        "sum_pool": (partial(pool, lax.add, 0.0, "VALID"), (x,)),
        "sum_pool_gradient": (jax.grad(lambda x: jnp.sin(pool(lax.add, 0.0, "SAME", x)).sum()), (x,)),
        "tiled_max_pool": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *tiles), (x,)),
        "tiled_max_pool_gradient": (
            jax.grad(lambda x: jnp.sin(lax.reduce_window(x, -jnp.inf, lax.max, *tiles)).sum()),
            (x,),
        ),
        "tiled_sum_pool": (lambda x: lax.reduce_window(x, 0.0, lax.add, *tiles), (x,)),
        "cumulative_sum": (lambda x: lax.cumsum(x, 1), (x,)),
        "cumulative_window": (
            lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 8), (1, 1), ((0, 0), (7, 0))),
            (f32(4, 8),),
        ),
    }


def _products() -> dict[str, Program]:
    def general(contract: Any, batch: Any = ((), ())) -> Callable[..., Any]:
        return partial(lax.dot_general, dimension_numbers=(contract, batch))

    return {
        "dot_matrix": (general(((1,), (0,))), (f32(8, 4), f32(4, 12))),
        "dot_transposed": (general(((0,), (1,))), (f32(4, 8), f32(12, 4))),
        "dot_vector": (general(((1,), (0,))), (f32(8, 4), f32(4))),
        "dot_inner": (general(((0,), (0,))), (f32(8), f32(8))),
        "dot_batch": (general(((2,), (1,)), ((0,), (0,))), (f32(4, 8, 12), f32(4, 12, 16))),
        "dot_batches": (general(((3,), (3,)), ((0, 2), (0, 1))), (f32(4, 8, 4, 12), f32(4, 4, 16, 12))),
        "dot_two_contracted": (general(((1, 2), (0, 1))), (f32(8, 4, 12), f32(4, 12, 16))),
        "dot_many_free": (general(((0,), (2,))), (f32(4, 8, 12), f32(8, 16, 4))),
        "dot_integers": (general(((1,), (0,))), (s32(8, 4), s32(4, 12))),
        "dot_outer": (general(((), ())), (f32(4, 8), f32(12))),
    }


def _larger(a: Any, b: Any) -> Any:
    """Of two (number, place), that with the larger number."""
    is_a = a[0] >= b[0]
    return lax.select(is_a, a[0], b[0]), lax.select(is_a, a[1], b[1])


def _reductions() -> dict[str, Program]:
    x = f32(4, 8, 12)
    one = partial(lax.reduce, dimensions=(1,))
    return {
        "reduce_sum": (lambda x: x.sum((0, 2)), (x,)),
        "reduce_all": (lambda x: x.sum(), (x,)),
        "reduce_max": (lambda x: x.max(1), (x,)),
        "reduce_min": (lambda x: x.min(0), (x,)),
        "reduce_product": (lambda x: x.prod(2), (x,)),
        "reduce_and": (lambda x: x.all(1), (pred(4, 8, 12),)),
        "reduce_or": (lambda x: x.any((0, 1)), (pred(4, 8, 12),)),
        "reduce_bits": (lambda x: one(x, jnp.uint32(7), computation=lax.bitwise_and), (u32(4, 8, 12),)),
        "reduce_from_five": (lambda x: one(x, 5.0, computation=lax.add), (x,)),
        "reduce_from_half_max": (lambda x: one(x, 0.5, computation=lax.max), (x,)),
        "reduce_times_two": (lambda x: one(x, 2.0, computation=lax.mul), (x,)),
        "reduce_from_argument": (lambda x, i: lax.reduce(x, i, lax.add, (0,)), (x, f32())),
        "reduce_two_sums": (
            lambda x, y: lax.reduce((x, y), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,)),
            (x, x),
        ),
        "reduce_sum_and_largest": (
            lambda x, y: lax.reduce(
                (x, y), (0.0, np.int32(-(2**31))), lambda a, b: (a[0] + b[0], lax.max(a[1], b[1])), (0, 2)
            ),
            (x, s32(4, 8, 12)),
        ),
        "reduce_two_sums_from_one": (
            lambda x, y: lax.reduce((x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,)),
            (x, x),
        ),
        "reduce_first_above_half": (
            lambda x, y: lax.reduce((x, y), (0.5, np.int32(-1)), _larger, (1,)),
            (x, s32(4, 8, 12)),
        ),
        "reduce_odd_region": (lambda x: one(x, 0.0, computation=lambda a, b: a + b * b), (x,)),
        "argmax": (lambda x: jnp.argmax(x, 1), (x,)),
        "argmin_all": (jnp.argmin, (f32(4, 8),)),
    }


def _movement() -> dict[str, Program]:
    def reshape(source: tuple[int, ...], *target: int) -> Program:
        return (lambda x: x.reshape(target), (f32(*source),))

    x = f32(4, 8, 12)
    halves = jax.ShapeDtypeStruct((4, 8, 2), jnp.uint16)
    return {
        "reshape_merge": reshape((4, 8, 12), 32, 12),
        "reshape_merge_all": reshape((4, 8, 12), 384),
        "reshape_split": reshape((32, 12), 4, 8, 12),
        "reshape_split_minor": reshape((8, 48), 8, 4, 12),
        "reshape_heads": reshape((4, 8, 16), 4, 8, 4, 4),
        "reshape_add_one": reshape((8, 12), 1, 8, 1, 12),
        "reshape_drop_one": reshape((8, 1, 12, 1), 8, 12),
        "reshape_regroup": reshape((4, 12), 8, 6),
        "reshape_regroup_three": reshape((6, 4, 8), 12, 16),
        "reshape_patches": reshape((4, 16, 16, 4), 4, 4, 4, 4, 4, 4),
        "broadcast_scalar": (lambda x: jnp.broadcast_to(x, (4, 8)), (f32(),)),
        "broadcast_inner": (lambda x: lax.broadcast_in_dim(x, (8, 4, 12), (1,)), (f32(4),)),
        "broadcast_two": (lambda x: lax.broadcast_in_dim(x, (8, 4, 12), (0, 2)), (f32(8, 12),)),
        "transpose": (lambda x: x.transpose(2, 0, 1), (x,)),
        "slice_middle": (lambda x: x[:, 2:6], (x,)),
        "slice_strided": (lambda x: x[:, ::2], (x,)),
        "slice_odd": (lambda x: x[:, 1::2], (x,)),
        "slice_every_third": (lambda x: x[..., 2::3], (x,)),
        "slice_split": (lambda x: jnp.split(x, 3, -1), (x,)),
        "concatenate": (lambda x, y: jnp.concatenate([x, y, x], 1), (x, f32(4, 4, 12))),
        "slice_block": (lambda x: x[:, 4:8], (f32(4, 12),)),
        "slice_gate": (lambda x: x[:, 0:8], (f32(4, 32),)),
        "pad_edges": (lambda x: lax.pad(x, 1.0, ((0, 0, 0), (4, 4, 0), (0, 0, 0))), (x,)),
        "pad_between": (lambda x: lax.pad(x, 1.0, ((0, 0, 0), (1, 0, 1), (0, 0, 0))), (x,)),
        "pad": (lambda x: lax.pad(x, 1.0, ((0, 0, 0), (1, 2, 1), (0, 0, 0))), (x,)),
        "pad_negative": (lambda x: lax.pad(x, 1.0, ((0, 0, 0), (-2, 0, 0), (0, 0, 0))), (x,)),
        "reverse": (lambda x: x[:, ::-1], (x,)),
        "iota": (lambda: lax.broadcasted_iota(jnp.int32, (8, 12), 0), ()),
        "iota_minor": (lambda: lax.broadcasted_iota(jnp.float32, (8, 12), 1), ()),
        "bitcast_same": (lambda x: lax.bitcast_convert_type(x, jnp.uint32), (x,)),
        "bitcast_wider": (lambda x: lax.bitcast_convert_type(x, jnp.uint32), (halves,)),
        "bitcast_narrower": (lambda x: lax.bitcast_convert_type(x, jnp.uint16), (u32(4, 8),)),
        "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (0, i, 0), (4, 4, 12)), (x, s32())),
        "dynamic_update": (lambda x, y, i: lax.dynamic_update_slice(x, y, (0, i, 0)), (x, f32(4, 4, 12), s32())),
        "dynamic_slice_row": (lambda x, i: lax.dynamic_slice(x, (0, i, 0), (4, 1, 12)), (x, s32())),
        "dynamic_update_row": (lambda x, y, i: lax.dynamic_update_slice(x, y, (0, i, 0)), (x, f32(4, 1, 12), s32())),
        "sort": (lambda x: lax.sort(x, dimension=1), (x,)),
        "sort_pairs": (lambda x, y: lax.sort((x, y), dimension=2, num_keys=1), (x, s32(4, 8, 12))),
        "top_k": (lambda x: lax.top_k(x, 4), (f32(4, 8, 12),)),
    }


def _indexing() -> dict[str, Program]:
    table, tokens = f32(16, 8), s32(4, 8)
    logits, rows = f32(4, 8, 12), s32(4, 8, 1)

    def clamped(table: Any, tokens: Any) -> Any:
        return table.at[tokens].get(mode="clip")

    def added(table: Any, tokens: Any, updates: Any) -> Any:
        return table.at[tokens].add(updates)

    def column(table: Any, tokens: Any) -> Any:
        return table.at[:, tokens].get(mode="fill", fill_value=0.0)

    def windows(x: Any, starts: Any) -> Any:
        return jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), (4, 8)))(starts)

    def own_windows(x: Any, starts: Any) -> Any:
        return jax.vmap(lambda row, i: lax.dynamic_slice(row, (i,), (4,)))(x, starts)

    def own_updates(x: Any, y: Any, starts: Any) -> Any:
        return jax.vmap(lambda row, new, i: lax.dynamic_update_slice(row, new, (i,)))(x, y, starts)

    return {
        "embedding": (clamped, (table, tokens)),
        "embedding_column": (column, (table, tokens)),
        "embedding_row": (clamped, (table, s32(1))),
        "own_row": (jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 8))), (f32(4, 16, 8), s32(4))),
        "own_row_update": (
            jax.vmap(lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0))),
            (f32(4, 16, 8), f32(4, 1, 8), s32(4)),
        ),
        "rows_as_windows": (lambda x, i: jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), (1, 8)))(i), (table, s32(4))),
        "set_row": (lambda x, i, u: x.at[i].set(u), (table, s32(1), f32(1, 8))),
        "embedding_gradient": (added, (table, tokens, f32(4, 8, 8))),
        "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i, -1), (logits, rows)),
        "take_along_axis_gradient": (
            lambda x, i: jax.grad(lambda x: jnp.take_along_axis(x, i, -1).sum())(x),
            (logits, rows),
        ),
        "gather_two_indexed": (lambda x, i, j: x.at[i, j].get(mode="clip"), (f32(8, 12, 4), s32(8), s32(8))),
        "scatter_two_indexed": (lambda x, i, j, u: x.at[i, j].add(u), (f32(8, 12, 4), s32(8), s32(8), f32(8, 4))),
        "gather_windows": (windows, (f32(16, 8), s32(4))),
        "gather_own_windows": (own_windows, (f32(4, 16), s32(4))),
        "scatter_own_windows": (own_updates, (f32(4, 16), f32(4, 4), s32(4))),
        "scatter_set": (lambda x, i, u: x.at[i].set(u, unique_indices=True), (table, s32(4), f32(4, 8))),
        "scatter_max": (lambda x, i, u: x.at[i].max(u), (table, s32(8), f32(8, 8))),
        "scatter_multiply": (lambda x, i, u: x.at[i].multiply(u), (table, s32(8), f32(8, 8))),
        "scatter_min": (lambda x, i, u: x.at[:, i].min(u), (f32(4, 16), s32(8), f32(4, 8))),
        "scatter_integers": (lambda x, i, u: x.at[i].add(u), (s32(16, 8), s32(8), s32(8, 8))),
    }


def _others() -> dict[str, Program]:
    x = f32(4, 8)
    return {
        "select_scalar": (lax.select, (pred(), x, x)),
        "clamp": (lambda x: lax.clamp(-0.5, x, 0.5), (x,)),
        "clamp_arrays": (lax.clamp, (x, x, x)),
        "bits": (lambda k: jax.random.bits(jax.random.wrap_key_data(k), (4, 8)), (u32(2),)),
        "bit_generator": (
            lambda k: jax.random.bits(jax.random.wrap_key_data(k, impl="unsafe_rbg"), (4, 8)),
            (u32(4),),
        ),
        "unary": (
            lambda x: [f(x) for f in (
                jnp.abs, jnp.exp, jnp.tanh, lax.rsqrt, jnp.floor, jnp.sign, lax.erf, jnp.isfinite, lax.cbrt, jnp.cos,
                jnp.tan, jnp.arcsin, jnp.cosh, lax.logistic, jnp.log1p, jnp.expm1, jnp.round, lax.erf_inv, lax.lgamma,
                lambda x: lax.reduce_precision(x, 5, 10), lambda x: x.astype(jnp.bfloat16),
            )],
            (x,),
        ),
        "integers": (
            lambda x, y: (lax.population_count(x), lax.clz(x), x ^ y, x << y, lax.shift_right_logical(x, y), ~x, x % 3),
            (u32(4, 8), u32(4, 8)),
        ),
        "complex": (lambda x, y: (lambda z: (z.real, z.imag, jnp.abs(z)))(lax.complex(x, y)), (x, x)),
        "binary": (lambda x, y: (jnp.arctan2(x, y), x**y, jnp.minimum(x, y), lax.rem(x, y), x <= y), (x, x)),
        "fourier": (jnp.fft.fft, (jax.ShapeDtypeStruct((4, 8), jnp.complex64),)),
        "conditional": (lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x), (pred(), x)),
        "barrier": (lambda x, y: lax.optimization_barrier((x, y)), (x, f32(8))),
    }  # fmt: skip


def _decompositions() -> dict[str, Program]:
    """Library calls of linear algebra, with a batch."""
    x = f32(4, 8, 8)
    return {
        "library_cholesky": (jnp.linalg.cholesky, (x,)),
        "library_eigh": (lambda x: jnp.linalg.eigh(x, symmetrize_input=False), (x,)),
        "library_svd": (lambda x: jnp.linalg.svd(x, full_matrices=False), (x,)),
        "library_qr": (jnp.linalg.qr, (x,)),
        "library_lu": (jax.scipy.linalg.lu_factor, (x,)),
        "library_solve": (jax.scipy.linalg.solve_triangular, (x, f32(4, 8, 12))),
    }


def operations() -> dict[str, Program]:
    """Single operations in every variant of dimension numbers that matters to a rule."""
    groups = (
        _convolutions, _windows, _products, _reductions, _movement, _indexing, _others, _decompositions,
    )  # fmt: skip
    return {name: program for group in groups for name, program in group().items()}


def hlo_text(program: Program) -> str:
    function, arguments = program
    return jax.jit(function, keep_unused=True).lower(*arguments).as_text("hlo")
