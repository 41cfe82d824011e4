"""ATen operators in terms of jax.numpy and lax: one table, filled by topic."""

from shardwright.client.frontends.torch.lowerings import (
    convolutions,
    creation,
    grids,
    indexing,
    linear_algebra,
    losses,
    normalization,
    pointwise,
    pooling,
    random,
    reductions,
    scans,
    shapes,
)
from shardwright.client.frontends.torch.lowerings.registry import TABLE, Call, find

__all__ = [
    "TABLE", "Call", "convolutions", "creation", "find", "grids", "indexing", "linear_algebra", "losses",
    "normalization", "pointwise", "pooling", "random", "reductions", "scans", "shapes",
]  # fmt: skip
