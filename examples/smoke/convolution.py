"""Convolve images on eight CPU devices: once as the planner likes, once with the output channels pinned.

    python examples/smoke/convolution.py

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


def convolution(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """Images [batch, height, width, inputs], kernel [height, width, inputs, outputs]."""
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def convolution_by_channels(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """The same with batch and output channels split."""
    return convolution(sw.annotate(images, {0: "data"}), sw.annotate(kernel, {3: "model"}))


def main() -> None:
    random = np.random.default_rng(0)
    images, kernel = (random.normal(size=size).astype(np.float32) for size in ((16, 32, 32, 8), (3, 3, 8, 16)))
    with sw.connect() as session:
        check(session, convolution, images, kernel)
        check(session, convolution_by_channels, images, kernel, mesh="2x4")


if __name__ == "__main__":
    main()
