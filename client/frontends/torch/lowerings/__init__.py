"""ATen operators in terms of jax.numpy and lax: one table, filled by topic."""

from shardwright.client.frontends.torch.lowerings import (
    alignment,
    convolutions,
    creation,
    grids,
    indexing,
    linear_algebra,
    losses,
    normalization,
    pointwise,
    pooling,
    quantization,
    random,
    reductions,
    scans,
    shapes,
)
from shardwright.client.frontends.torch.lowerings.registry import TABLE, Call, find

__all__ = [
    "TABLE", "Call", "alignment", "convolutions", "creation", "find", "grids", "indexing", "linear_algebra", "losses",
    "normalization", "pointwise", "pooling", "quantization", "random", "reductions", "scans", "shapes",
]  # fmt: skip
