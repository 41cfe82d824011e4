"""Real text on every machine: the sources of Python's standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}


def standard_library_text(limit_bytes: int = 8_000_000) -> bytes:
    """The standard library's sources, concatenated in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    chunks: list[bytes] = []
    size = 0
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED & set(path.relative_to(root).parts):
            continue
        chunks.append(path.read_bytes())
        size += len(chunks[-1])
        if size >= limit_bytes:
            break
    if size < 100_000:
        raise SystemExit(f"no sources of the standard library under {root}; on Debian: apt-get install python3")
    return b"".join(chunks)[:limit_bytes]


def split(text: bytes, held_out: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """(training, validation) bytes, the validation part from the end."""
    values = np.frombuffer(text, np.uint8)
    cut = int(len(values) * (1 - held_out))
    return values[:cut], values[cut:]


def batches(values: np.ndarray, batch: int, context: int, seed: int = 0) -> Iterator[tuple[np.ndarray]]:
    """Endless batches of random crops, int32 [batch, context + 1]: inputs and, shifted by one, targets."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(values) - context - 1, batch)
        yield (np.stack([values[start : start + context + 1] for start in starts]).astype(np.int32),)
