"""What XLA:TPU gathers as bfloat16: values that only products at the default precision read.

Expected answers are read off programs that libtpu 0.0.42.1 compiled for v5e, one gather of a split `w` each.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardwright as sw
from shardwright.client.lowering import lower
from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.hlo import parse
from shardwright.planner.costs.rounded_uses import NOTHING_ROUNDED, find_rounded_uses, rounded_uses_of
from shardwright.planner.graph.dataflow import build_dataflow
from shardwright.planner.graph.inlining import inline_calls

HIGHEST, DEFAULT = lax.Precision.HIGHEST, lax.Precision.DEFAULT
CONVOLUTION = ("NHWC", "HWIO", "NHWC")

Step = Callable[[Any, Any], Any]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def scan(w: Any, x: Any) -> Any:
    return lax.scan(lambda carry, one: (jnp.tanh(carry @ one), None), x, jnp.stack([w, w[::-1]]))[0]


def convolve(w: Any, x: Any, **options: Any) -> Any:
    image, kernel = x.reshape(1, 2, 4, 8), w.reshape(1, 1, 8, 8)
    return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=CONVOLUTION, **options)


ROUNDED: dict[str, Step] = {
    "product": lambda w, x: x @ w,
    "turned": lambda w, x: x @ w.T,
    "reshaped": lambda w, x: x.reshape(4, 16) @ w.reshape(16, 4),
    "sliced and reversed": lambda w, x: x @ w[::-1, :4],
    "padded": lambda w, x: x @ jnp.pad(w, ((0, 0), (0, 3))),
    "concatenated": lambda w, x: x @ jnp.concatenate([w, jnp.ones((8, 2))], 1),
    "clipped below": lambda w, x: x @ jnp.maximum(w, 0.0),
    "absolute": lambda w, x: x @ jnp.abs(w),
    "selected": lambda w, x: x @ jnp.where(x > 0, w, 0.0),
    "largest": lambda w, x: x @ jnp.max(w.reshape(2, 4, 8), 0).T,
    "twice": lambda w, x: x @ w + jnp.tanh(x) @ w,
    "forward and backward": lambda w, x: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w) @ w))(x),
    "other side exact": lambda w, x: jnp.dot(x, w, precision=(HIGHEST, DEFAULT)),
    "converted": lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
    "behind a barrier": lambda w, x: x @ lax.optimization_barrier(w),
    "in a loop": scan,
    "convolution": convolve,
    "rows looked up": lambda w, x: w[jnp.arange(4)] @ x,
}
EXACT: dict[str, Step] = {
    "exact product": lambda w, x: jnp.dot(x, w, precision=HIGHEST),
    "exact this side": lambda w, x: jnp.dot(x, w, precision=(DEFAULT, HIGHEST)),
    "exact and not": lambda w, x: x @ w + jnp.dot(x, w, precision=HIGHEST),
    "exact convolution": lambda w, x: convolve(w, x, precision=HIGHEST),
    "scaled": lambda w, x: x @ (w * 0.5),
    "activated": lambda w, x: x @ jnp.tanh(w),
    "also squared": lambda w, x: (x @ w, jnp.sum(w**2)),
    "also a result": lambda w, x: (x @ w, w),
    "compared": lambda w, x: x @ jnp.where(w > 0, w, 0.0),
    "summed": lambda w, x: x @ jnp.sum(w.reshape(2, 4, 8), 0).T,
    "vector": lambda w, x: x[0] @ w,
    "row": lambda w, x: x[:1] @ w,
    "half": lambda w, x: x.astype(jnp.float16) @ w.astype(jnp.float16),
    "only looked up": lambda w, x: w[jnp.arange(4)],
    "solved": lambda w, x: lax.linalg.triangular_solve(w, x, left_side=True),
}


def is_rounded(step: Step, dtype: Any = jnp.float32) -> bool:
    flow = build_dataflow(inline_calls(parse(lower(step, *(jax.ShapeDtypeStruct((8, 8), dtype),) * 2).hlo_text)))
    return (flow.parameters[0], 0) in find_rounded_uses(flow).leaves


@pytest.mark.parametrize("name", ROUNDED)
def test_what_only_products_read_is_rounded(name: str) -> None:
    assert is_rounded(ROUNDED[name])


@pytest.mark.parametrize("name", EXACT)
def test_what_anything_else_reads_is_not(name: str) -> None:
    assert not is_rounded(EXACT[name])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_only_float32_is_rounded(dtype: Any) -> None:
    assert not is_rounded(ROUNDED["product"], dtype)


@pytest.mark.parametrize("name", ["cpu", "a100", "h100"])
def test_other_compilers_round_nothing(name: str) -> None:
    flow = build_dataflow(parse(lower(ROUNDED["product"], f32(8, 8), f32(8, 8)).hlo_text))
    assert rounded_uses_of(flow, hardware_profile(name)) == NOTHING_ROUNDED
    assert rounded_uses_of(flow, hardware_profile("tpu-v5e")).uses


def update(params: dict[str, Any], x: Any, y: Any) -> tuple[Any, Any]:
    def loss(params: dict[str, Any]) -> Any:
        return jnp.mean((jax.nn.gelu(x @ params["a"]) @ params["b"] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


WIDE, BYTES = 512, 512 * 512 * 4


@pytest.fixture(scope="module")
def text() -> str:
    params = {"a": f32(WIDE, WIDE), "b": f32(WIDE, WIDE)}
    return lower(update, params, f32(64, WIDE), f32(64, WIDE), donate_argnums=(0,)).hlo_text


TPU = Cluster.from_json(
    json.dumps({
        "name": "t", "platform": "tpu", "hardware": "tpu-v5e", "insecure": True, "workers": [],
        "master": {"ip": "10.0.0.1", "port": 2222, "devices": 4},
    })
)  # fmt: skip


def test_weights_are_gathered_in_half_the_bytes_and_nothing_else_is(text: str) -> None:
    """XLA:TPU gathers what is written here, to the byte; its updated weights and gradients travel whole."""
    fsdp, zero1 = (sw.plan(text, TPU, force=force) for force in ("fsdp", "zero1"))
    gathers = [[(c.payload_bytes, c.sent_as) for c in p.collectives if c.kind == "all-gather"] for p in (fsdp, zero1)]
    assert gathers == [[(BYTES // 2, "bf16")] * 2, [(BYTES, "")] * 2]
    for plan in (fsdp, zero1):
        assert [c.payload_bytes for c in plan.collectives if c.kind == "reduce-scatter"] == [BYTES] * 2
    assert fsdp.cost.step_s < zero1.cost.step_s


def test_the_proof_of_another_compiler_expects_whole_values(text: str) -> None:
    plan = sw.plan(text, TPU, force="fsdp")
    proof = plan.prove()
    assert proof.holds, proof.explain()
    assert {line.payload_bytes for line in proof.lines if line.kind == "all-gather"} == {BYTES}
