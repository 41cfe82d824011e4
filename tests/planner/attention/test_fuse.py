"""Attention as people write it becomes calls, with the numbers that it had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright
from shardwright.cost import hardware_profile
from shardwright.hlo import parse
from shardwright.planner.attention import Fused, fuse_attention, kernel_limits
from shardwright.planner.graph.inlining import inline_calls
from tests.planner.attention.written_out import run, write_out

pytestmark = pytest.mark.dear

B, T, N, D = 2, 24, 4, 16
LOW = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Case:
    attend: Callable[..., Any]
    mask: str = "causal"
    kv_heads: int = N
    more: tuple[int, ...] | None = None
    scale: float = D**-0.5


def _causal(s: Any, low: float = LOW) -> Any:
    return jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, jnp.asarray(low, s.dtype))


def _softmax(s: Any) -> Any:
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def _safe_softmax(s: Any) -> Any:
    """As PyTorch has it: 0 in rows that see no key."""
    seen = jnp.isfinite(s).any(-1, keepdims=True)
    return jnp.where(seen, jax.nn.softmax(jnp.where(seen, s, 0)), 0)


def _einsums(q: Any, k: Any, v: Any, logits: Callable[[Any], Any], softmax: Any = jax.nn.softmax) -> Any:
    p = softmax(logits(jnp.einsum("btnd,bsnd->bnts", q, k)))
    return jnp.einsum("bnts,bsnd->btnd", p.astype(v.dtype), v)


def _grouped(q: Any, k: Any, v: Any) -> Any:
    q = q.reshape(B, T, 2, N // 2, D)
    s = jnp.einsum("btkgd,bskd->bkgts", q, k) * D**-0.5
    return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(_causal(s)), v).reshape(B, T, N, D)


def _repeated(q: Any, k: Any, v: Any) -> Any:
    k, v = jnp.repeat(k, N // 2, 2), jnp.repeat(v, N // 2, 2)
    return _einsums(q, k, v, lambda s: _causal(s * D**-0.5), _softmax)


def _exponentials(s: Any) -> Any:
    return jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))


def _divided(q: Any, k: Any, v: Any) -> Any:
    """The sum in float32, divided by after the product, whose dimensions come in another order."""
    e = _exponentials(_causal(jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=jnp.float32) * D**-0.5))
    out = jnp.einsum("bnts,bsnd->btnd", e.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (out / jnp.moveaxis(e.sum(-1), 1, 2)[..., None]).astype(v.dtype)


def _divided_in_groups(q: Any, k: Any, v: Any) -> Any:
    """Times a reciprocal, of heads that share key heads; the maximum has a gradient too."""
    s = _causal(jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, 2, N // 2, D), k) * D**-0.5)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    out = jnp.einsum("bkgts,bskd->bkgtd", e, v) * (1 / e.sum(-1, keepdims=True))
    return jnp.einsum("bkgtd->btkgd", out).reshape(B, T, N, D)


def _window(s: Any) -> Any:
    away = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    return jnp.where((away >= 0) & (away < 5), s * D**-0.5, -jnp.inf)


def _padding(s: Any, valid: Any) -> Any:
    """Rows and keys of padding hidden, beside a causal mask."""
    seen = jnp.tril(jnp.ones((T, T), bool)) & valid[:, None, :, None] & valid[:, None, None, :]
    return jnp.where(seen, s, -1e9)


def _merged(q: Any, k: Any, v: Any) -> Any:
    """Batch and heads as one dimension, the scale's root on q and on k."""
    q, k, v = (each.transpose(0, 2, 1, 3).reshape(B * N, T, D) for each in (q, k, v))
    s = jnp.matmul(q * D**-0.25, (k * D**-0.25).transpose(0, 2, 1)).reshape(B, N, T, T)
    low = jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0, -jnp.inf).astype(s.dtype)
    p = jax.nn.softmax(s + low)
    return jnp.matmul(p.reshape(B * N, T, T), v).reshape(B, N, T, D).transpose(0, 2, 1, 3)


def _one_head(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(_causal(q @ k.T / jnp.sqrt(D).astype(q.dtype), -1e9)) @ v


CASES = {
    "jax": Case(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")),
    "plain": Case(lambda q, k, v: _einsums(q, k, v, lambda s: s * 0.25), mask="none"),
    "grouped": Case(_grouped, kv_heads=2),
    "repeated": Case(_repeated, kv_heads=2),
    "divided": Case(_divided),
    "divided again": Case(jax.checkpoint(_divided)),
    "divided in groups": Case(_divided_in_groups, kv_heads=2),
    "window": Case(lambda q, k, v: _einsums(q, k, v, _window), mask="window of 5"),
    "merged": Case(_merged),
    "vmapped": Case(jax.vmap(jax.vmap(_one_head, 1, 1))),
    "again": Case(jax.checkpoint(lambda q, k, v: _einsums(q, k, v, lambda s: _causal(s * 0.25)))),
    "multiplied": Case(
        lambda q, k, v: _einsums(
            q, k, v, lambda s: 0.25 * s * jnp.tril(jnp.ones((T, T))) - 1e10 * (1 - jnp.tril(jnp.ones((T, T))))
        )
    ),
    "bias": Case(lambda q, k, v, b: _einsums(q, k, v, lambda s: s * 0.25 + b), mask="bias", more=(1, N, T, T)),
    "padded": Case(
        lambda q, k, v, b: _einsums(q, k, v, lambda s: jnp.where(b[:, None, None, :] < 0, -1e9, s * 0.25)),
        mask="bias",
        more=(B, T),
    ),
    "lengths": Case(
        lambda q, k, v, b: jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=1 + (b > 0).sum(-1).astype(jnp.int32), implementation="xla"
        ),
        mask="bias",
        more=(B, T - 1),
    ),
    "padding": Case(
        lambda q, k, v, b: _einsums(q, k, v, lambda s: _padding(s * 0.25, b > 0)), mask="bias", more=(B, T)
    ),
    "rows hidden": Case(
        lambda q, k, v, b: _einsums(q, k, v, lambda s: jnp.where(b[:, None, :, None] < 0, -1e9, s * 0.25)),
        mask="bias",
        more=(B, T),
    ),
    "rows dropped": Case(
        lambda q, k, v, b: _einsums(
            q, k, v, lambda s: jnp.where(b[:, None, :, None] < 0, -jnp.inf, s * 0.25), _safe_softmax
        ),
        mask="bias",
        more=(B, T),
    ),
}


def _step(cases: dict[str, Case]) -> Callable[..., Any]:
    """The loss of all cases, and its gradients."""

    def loss(arguments: dict[str, Any]) -> Any:
        outs = [
            jnp.square(jnp.sin(case.attend(*arguments[name]).astype(jnp.float32))).sum() for name, case in cases.items()
        ]
        return sum(outs)

    return jax.value_and_grad(loss)


def _arguments(cases: dict[str, Case], dtype: Any) -> dict[str, Any]:
    def arrays(case: Case) -> list[Any]:
        kv = (B, T, case.kv_heads, D)
        shapes = [(B, T, N, D), kv, kv, *([case.more] if case.more else [])]
        return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    return {name: arrays(case) for name, case in cases.items()}


def _fuse(step: Callable[..., Any], *arguments: Any, option: str = "auto", hardware: str = "h100") -> Fused:
    text = shardwright.lower(step, *arguments, platform="cuda").as_text()
    limits = kernel_limits(option, hardware_profile(hardware).attention)
    assert limits is not None
    return fuse_attention(inline_calls(parse(text)), limits)


@cache
def _fused(dtype: str, option: str) -> tuple[Any, Fused]:
    step, arguments = _step(CASES), _arguments(CASES, dtype)
    module = inline_calls(parse(shardwright.lower(step, arguments, platform="cuda").as_text()))
    limits = kernel_limits(option, hardware_profile("h100").attention)
    assert limits is not None
    return module, fuse_attention(module, limits)


def test_all_become_calls() -> None:
    _, fused = _fused("bfloat16", "auto")
    kinds = [each.note.kind for each in fused.replaced]
    assert (kinds.count("forward"), kinds.count("again"), kinds.count("backward")) == (len(CASES), 2, len(CASES))
    assert not fused.left_alone


def test_arrays_of_scores_are_gone() -> None:
    _, fused = _fused("bfloat16", "auto")
    scores = [i for i in fused.module.instructions() for leaf in i.shape.leaves if leaf.dimensions[-2:] == (T, T)]
    assert not [each for each in scores if each.opcode in ("dot", "exponential")]
    assert max(leaf.dimensions[:1] for i in scores for leaf in i.shape.leaves if len(leaf.dimensions) == 4) <= (B,)


def test_masks_and_scales_are_told() -> None:
    _, fused = _fused("bfloat16", "auto")
    masks = sorted(each.note.words.split(",")[0] for each in fused.replaced if each.note.kind == "forward")
    assert masks == sorted(case.mask for case in CASES.values())
    assert {round(each.call.scale, 5) for each in fused.replaced} <= {0.25, 1.0}


def test_heads_that_share_key_heads_stay_few() -> None:
    _, fused = _fused("bfloat16", "auto")
    assert sorted(each.call.kv_heads for each in fused.replaced if each.note.kind == "backward")[:3] == [2] * 3


def test_numbers_are_the_same() -> None:
    module, fused = _fused("float32", "on")
    random = np.random.default_rng(0)
    arguments = [
        random.standard_normal(parameter.shape.leaves[0].dimensions).astype(np.float32)
        for parameter in module.entry.parameters
    ]
    expected = run(module, arguments)
    results = run(write_out(parse(fused.module.to_text())), arguments)
    for one, other in zip(expected, results, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * float(np.abs(one).max()) + 1e-7)


def test_float32_stays_unless_asked_for() -> None:
    _, fused = _fused("float32", "auto")
    assert not fused.replaced
    assert all("float32" in note.reason for note in fused.left_alone)


@pytest.mark.parametrize(
    "attend",
    [
        pytest.param(lambda q, k, v: _einsums(q, k, v, lambda s: _causal(5 * jnp.tanh(s / 20))), id="soft-cap"),
        pytest.param(
            lambda q, k, v: _einsums(q, k, v, _causal, lambda s: jnp.exp(s) / (1 + jnp.exp(s).sum(-1, keepdims=True))),
            id="one more",
        ),
        pytest.param(lambda q, k, v: _einsums(q, k, v, _causal, lambda s: s / s.sum(-1, keepdims=True)), id="linear"),
        pytest.param(
            lambda q, k, v: _einsums(q, k, v, _causal, _exponentials) / (2 + v.sum(-1, keepdims=True)), id="undivided"
        ),
        pytest.param(
            lambda q, k, v: (
                _einsums(q, k, v, _causal, _exponentials)
                / _exponentials(_causal(jnp.einsum("btnd,bsnd->bnts", q, k))).sum(-1).reshape(B, T, N, 1)
            ),
            id="divided by others' sums",
        ),
        pytest.param(
            lambda q, k, v: _einsums(q, k, v, lambda s: jnp.einsum("bnts,nm->bmts", s, v[0, :4, :, 0])), id="mixed"
        ),
        pytest.param(lambda q, k, v: _einsums(q, k, v, lambda s: s, lambda s: jax.nn.softmax(s, -2)), id="over rows"),
        pytest.param(
            lambda q, k, v: _einsums(q, k, v, lambda s: s, lambda s: jax.nn.softmax(s) * (q[0, 0, 0, 0] > 0)),
            id="dropped",
        ),
    ],
)
def test_others_stay(attend: Callable[..., Any]) -> None:
    cases = {"only": Case(attend)}
    fused = _fuse(_step(cases), _arguments(cases, "bfloat16"))
    assert not fused.replaced


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3)])
def test_some_gradients_alone(wanted: tuple[int, ...]) -> None:
    """Of q, k, v or the bias: the others are not made."""
    case = {"only": CASES["bias"]}

    def loss(arguments: list[Any], others: list[Any]) -> Any:
        chosen = dict(zip(wanted, arguments, strict=True))
        out = CASES["bias"].attend(*(chosen.get(place, other) for place, other in enumerate(others)))
        return jnp.square(out).astype(jnp.float32).sum()

    shapes = _arguments(case, "bfloat16")["only"]
    fused = _fuse(jax.grad(loss), [shapes[place] for place in wanted], shapes)
    assert [each.note.kind for each in fused.replaced] == ["forward", "backward"]


@pytest.mark.parametrize(
    ("softmax", "reason"),
    [
        pytest.param(lambda s: jax.nn.softmax(5 * jnp.tanh(s / 20)), "constant", id="soft-cap"),
        pytest.param(lambda s: _exponentials(s) / (1 + _exponentials(s).sum(-1, keepdims=True)), "sum to 1", id="more"),
        pytest.param(
            lambda s: jax.nn.softmax(s) * jax.random.bernoulli(jax.random.key(0), 0.9, s.shape) / 0.9,
            "sum to 1",
            id="dropped",
        ),
    ],
)
def test_what_is_no_softmax_of_scores_is_told(softmax: Callable[..., Any], reason: str) -> None:
    def step(q: Any, k: Any, v: Any) -> Any:
        return _einsums(q, k, v, _causal, softmax)

    fused = _fuse(step, *_arguments({"only": CASES["plain"]}, "bfloat16")["only"])
    assert not fused.replaced
    assert [reason in note.reason for note in fused.left_alone] == [True]


@pytest.mark.parametrize("is_shared_first", [False, True])
def test_scores_of_two_products_with_unlike_heads_make_no_wrong_call(is_shared_first: bool) -> None:
    """Latent attention: components of keys with positions are one head's, shared by all."""

    def step(q: Any, k: Any, v: Any) -> Any:
        own, shared = jnp.einsum("btnd,bsnd->bnts", q, k), jnp.einsum("btnd,bsd->bnts", q, k[:, :, 0])
        scores = shared + own if is_shared_first else own + shared
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(_causal(scores)), v)

    fused = _fuse(step, *_arguments({"only": CASES["plain"]}, "bfloat16")["only"])
    assert all("other heads" in note.reason for note in fused.left_alone)
    for each in fused.replaced:
        assert each.call.heads == each.call.kv_heads == N


def test_returned_probabilities_stay() -> None:
    def step(q: Any, k: Any, v: Any) -> Any:
        p = jax.nn.softmax(jnp.einsum("btnd,bsnd->bnts", q, k))
        return jnp.einsum("bnts,bsnd->btnd", p, v), p

    fused = _fuse(step, *_arguments({"only": CASES["plain"]}, "bfloat16")["only"])
    assert not fused.replaced
    assert [note.reason for note in fused.left_alone]


@pytest.mark.parametrize(
    ("rows", "keys", "seen", "mask"),
    [
        (24, 16, lambda t, s: t >= s, "causal"),
        (16, 24, lambda t, s: t >= s, "causal"),
        (16, 24, lambda t, s: t + 8 >= s, "bias"),
        (24, 24, lambda t, s: (t >= s) | (t > 11), "bias"),
        (24, 24, lambda t, s: t <= s, "bias"),
        (24, 24, lambda t, s: (t >= s) & (t // 8 == s // 8), "bias"),
        (24, 24, lambda t, s: (t >= s) & (t - s < 24), "causal"),
        (24, 24, lambda t, s: t - s < 24, "none"),
    ],
)
def test_only_the_kernels_masks_are_no_bias(rows: int, keys: int, seen: Callable[..., Any], mask: str) -> None:
    def step(q: Any, k: Any, v: Any) -> Any:
        mask = seen(jnp.arange(rows)[:, None], jnp.arange(keys)[None, :])
        return _einsums(q, k, v, lambda s: jnp.where(mask, s, -jnp.inf))

    shapes = [jax.ShapeDtypeStruct((B, size, N, D), "bfloat16") for size in (rows, keys, keys)]
    fused = _fuse(step, *shapes)
    assert [each.note.words.split(",")[0] for each in fused.replaced] == [mask]


@pytest.mark.parametrize("checkpoint", [True, False])
def test_layers_in_a_loop(checkpoint: bool) -> None:
    """The mask is made outside of the loop, and gone with it. Without checkpoints, no probabilities are kept."""

    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            q, k, v = (jnp.einsum("btnd,de->btne", x, each) for each in w)
            return x + _einsums(q, k, v, lambda s: _causal(s * 0.25)), None

        return jax.lax.scan(jax.checkpoint(layer) if checkpoint else layer, x, weights)[0].astype(jnp.float32).mean()

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((3, 3, D, D), (B, T, N, D))]
    fused = _fuse(jax.grad(loss), *shapes)
    kinds = ["again", "backward", "forward"] if checkpoint else ["backward", "forward"]
    assert sorted(each.note.kind for each in fused.replaced) == kinds
    assert {each.note.words.split(",")[0] for each in fused.replaced} == {"causal"}
    assert not [i for i in fused.module.instructions() for leaf in i.shape.leaves if leaf.dimensions[-2:] == (T, T)]


STACKED = {name: CASES[name] for name in ("jax", "grouped", "repeated", "merged", "vmapped", "bias", "rows dropped")}


def test_numbers_of_layers_whose_probabilities_were_stacked() -> None:
    """Each layer has attention of many forms; backward loops read what forward loops computed of most."""

    def loss(weights: Any, x: Any, more: dict[str, Any]) -> Any:
        def layer(x: Any, w: Any) -> Any:
            for (name, case), (q, k, v, o) in zip(STACKED.items(), w, strict=True):
                keys = x[:, :, : case.kv_heads]
                parts = (jnp.einsum("btnd,de->btne", *each) for each in ((x, q), (keys, k), (keys, v)))
                x = x + jnp.einsum("btnd,de->btne", case.attend(*parts, *more.get(name, ())), o)
            return x, None

        return jnp.square(jax.lax.scan(layer, x, weights)[0]).mean()

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, len(STACKED), 4, D, D), (B, T, N, D))]
    more = {name: [jax.ShapeDtypeStruct(case.more, "float32")] for name, case in STACKED.items() if case.more}
    text = shardwright.lower(jax.value_and_grad(loss, (0, 1)), *shapes, more, platform="cuda").as_text()
    module = inline_calls(parse(text))
    limits = kernel_limits("on", hardware_profile("h100").attention)
    assert limits is not None
    fused = fuse_attention(module, limits)
    kinds = [each.note.kind for each in fused.replaced]
    assert [kinds.count(kind) for kind in ("forward", "backward", "again")] == [len(STACKED), len(STACKED), 2]
    random = np.random.default_rng(0)
    arguments = [
        (random.standard_normal(parameter.shape.leaves[0].dimensions) * (0.1 if number == 0 else 1)).astype(np.float32)
        for number, parameter in enumerate(module.entry.parameters)
    ]
    expected, results = run(module, arguments), run(write_out(parse(fused.module.to_text())), arguments)
    for one, other in zip(expected, results, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * float(np.abs(one).max()))
