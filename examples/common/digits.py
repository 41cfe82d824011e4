"""Real images of scikit-learn: 1,797 handwritten digits of 8 × 8 pixels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def digits(held_out: int = 297) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(training, validation), each images float32 [count, 8, 8] in 0 … 1 and labels int32 [count]."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise SystemExit("scikit-learn, which brings the images, is missing: pip install scikit-learn") from None
    loaded = load_digits()
    images, labels = loaded.images.astype(np.float32) / 16, loaded.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    training, validation = order[:-held_out], order[-held_out:]
    return (images[training], labels[training]), (images[validation], labels[validation])


def batches(
    images: np.ndarray, labels: np.ndarray, batch: int, shape: tuple[int, int, int], seed: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless random batches: images float32 [batch, *shape] (height, width, channels) and labels int32 [batch].

    Pixels and channels are repeated to the shape, whose height and width are multiples of 8.
    """
    height, width, channels = shape
    random = np.random.default_rng(seed)
    while True:
        chosen = random.integers(0, len(labels), batch)
        enlarged = images[chosen].repeat(height // 8, axis=1).repeat(width // 8, axis=2)
        yield np.repeat(enlarged[..., None], channels, axis=3), labels[chosen]
