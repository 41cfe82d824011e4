"""Multiply two matrices on eight CPU devices: once as the planner likes, once with the contracted dimension pinned.

    python examples/smoke/matmul.py

Uses the server at SERVER_IP/SERVER_PORT, or starts an embedded one with eight CPU devices.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a script finds the other examples

import shardwright as sw
from examples.smoke.check import check


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def contracted_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """The same for two long thin matrices, split along the contracted dimension: partial products are summed."""
    return sw.annotate(sw.annotate(a, {1: "data"}) @ sw.annotate(b, {0: "data"}), {0: None, 1: None})


def main() -> None:
    random = np.random.default_rng(0)
    a, b = (random.normal(size=size).astype(np.float32) for size in ((512, 256), (256, 384)))
    wide, tall = (random.normal(size=size).astype(np.float32) for size in ((32, 8192), (8192, 32)))
    with sw.connect() as session:
        check(session, matmul, a, b)
        check(session, contracted_matmul, wide, tall, mesh="8")


if __name__ == "__main__":
    main()
