"""Predicted training throughput of GPT on one device beside published figures.

    python -m oracles.published

Published: tokens a second and device, MosaicML llm-foundry, scripts/train/benchmarking/README.md (bfloat16,
FlashAttention; 8 H100 of 80 GB, and 8 A100 of 40 GB with slower memory than the profile's 80 GB model). Predicted:
compute time of the step in examples/gpt2 (attention written out) on one device, from the hardware profile, without
collectives. Expected: a prediction below the published figure for models with much attention.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import shardwright as sw
from examples.gpt2.model import Config, make_steps
from shardwright.clusters.cluster import Cluster, ClusterNode
from shardwright.cost import hardware_profile

VOCABULARY = 50304


@dataclass(frozen=True, kw_only=True)
class PublishedThroughput:
    """tokens_per_s: of one device. layers, width, heads as in llm-foundry's yamls of that name."""

    name: str
    hardware: str
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    tokens_per_s: float


MEASURED = (
    PublishedThroughput(
        name="125m", hardware="a100", layers=12, width=768, heads=12, context=1024, batch=16, tokens_per_s=148289
    ),
    PublishedThroughput(
        name="350m", hardware="a100", layers=24, width=1024, heads=16, context=1024, batch=16, tokens_per_s=62523
    ),
    PublishedThroughput(
        name="760m", hardware="a100", layers=24, width=1536, heads=12, context=1024, batch=16, tokens_per_s=33422
    ),
    PublishedThroughput(
        name="1b", hardware="a100", layers=24, width=2048, heads=16, context=1024, batch=16, tokens_per_s=20959
    ),
    PublishedThroughput(
        name="760m", hardware="h100", layers=24, width=1536, heads=12, context=1024, batch=16, tokens_per_s=78581
    ),
    PublishedThroughput(
        name="1b", hardware="h100", layers=24, width=2048, heads=16, context=1024, batch=16, tokens_per_s=48910
    ),
)


def predict_tokens_per_s(case: PublishedThroughput) -> float:
    """Tokens a second of one device, by the cost model."""
    config = Config(vocabulary=VOCABULARY, context=case.context, layers=case.layers, width=case.width, heads=case.heads)
    init, train, _ = make_steps(config, optax.adamw(1e-4))
    state = jax.eval_shape(init, jax.random.key(0))
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16 if a.ndim else a.dtype), state)
    tokens = jax.ShapeDtypeStruct((case.batch, case.context + 1), jnp.int32)
    text = jax.jit(train, donate_argnums=(0, 1)).lower(*state, tokens).as_text("hlo")
    node = ClusterNode(index=0, ip="127.0.0.1", port=1, device_count=1, gpu_ids=(0,))
    cluster = Cluster(name="one", nodes=(node,), platform="cuda", hardware=case.hardware)
    return case.batch * case.context / sw.plan(text, cluster).cost.compute_s


def model_flops_utilization(case: PublishedThroughput, tokens_per_s: float) -> float:
    """Model FLOPs utilization: FLOP/s of the model (llm-foundry's count) over the device's bfloat16 peak."""
    parameters = 12 * case.layers * case.width**2 + (VOCABULARY + case.context) * case.width
    per_token = 3 * (2 * parameters + 4 * case.layers * case.width * case.context)
    return per_token * tokens_per_s / hardware_profile(case.hardware).peak_flops_per_s["bf16"]


def main() -> None:
    table = Table("model", "hardware", "published tokens/s", "predicted", "ratio", "published MFU", "predicted MFU")
    for case in MEASURED:
        predicted = predict_tokens_per_s(case)
        table.add_row(
            case.name,
            case.hardware,
            f"{case.tokens_per_s:,.0f}",
            f"{predicted:,.0f}",
            f"{predicted / case.tokens_per_s:.2f}",
            f"{model_flops_utilization(case, case.tokens_per_s):.2f}",
            f"{model_flops_utilization(case, predicted):.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
