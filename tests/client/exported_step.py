"""A training step written by plain JAX with 64-bit types, in every format, and what it computes.

`python -m tests.client.exported_step FOLDER` writes train.{hlo,pb,mlir,mlirbc}, donated.{hlo,mlir}, eval.hlo and
expected.npz. Its state: float64 weights, a float32 bias, an int64 counter, a key; int64 labels are data.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

FEATURES, CLASSES, ROWS, STEPS = 12, 4, 16, 4


def logits_of(w: Any, b: Any, x: Any) -> Any:
    return x @ w + b


def loss_of(w: Any, b: Any, x: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits_of(w, b, x)), labels[:, None], axis=1)
    return -picked.mean()


def train(w: Any, b: Any, count: Any, key: Any, x: Any, labels: Any) -> Any:
    key, noise = jax.random.split(key)
    noisy = x + 0.01 * jax.random.normal(noise, x.shape)
    loss, (dw, db) = jax.value_and_grad(loss_of, argnums=(0, 1))(w, b, noisy, labels)
    rate = 0.5 / (1.0 + count / 2**40)
    return w - rate * dw, (b - rate * db).astype(b.dtype), count + 2**40, key, loss


def evaluate(w: Any, b: Any, x: Any, labels: Any) -> Any:
    return loss_of(w, b, x, labels)


def start() -> tuple[np.ndarray, ...]:
    """The first state."""
    random = np.random.default_rng(0)
    return (
        random.normal(size=(FEATURES, CLASSES)),
        np.zeros(CLASSES, np.float32),
        np.int64(2**40 + 1),
        np.array([0, 7], np.uint32),
    )


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    return random.normal(size=(ROWS, FEATURES)), random.integers(0, CLASSES, ROWS)


def write(folder: Path) -> None:
    jax.config.update("jax_enable_x64", True)
    arguments = (*start(), *batch(0))
    plain, donated = jax.jit(train), jax.jit(train, donate_argnums=(0, 1, 2, 3))
    lowered = plain.lower(*arguments)
    module = lowered.compiler_ir("hlo")
    (folder / "train.hlo").write_text(lowered.as_text("hlo", debug_info=True))
    (folder / "train.pb").write_bytes(module.as_serialized_hlo_module_proto())
    (folder / "train.mlir").write_text(lowered.as_text(debug_info=True))
    (folder / "train.mlirbc").write_bytes(export.export(plain)(*arguments).mlir_module_serialized)
    (folder / "donated.hlo").write_text(donated.lower(*arguments).as_text("hlo"))
    (folder / "donated.mlir").write_text(donated.lower(*arguments).as_text())
    w, b, *_, x, labels = arguments
    (folder / "eval.hlo").write_text(jax.jit(evaluate).lower(w, b, x, labels).as_text("hlo", debug_info=True))
    state, losses, scores = start(), [], []
    for number in range(STEPS):
        *state, loss = plain(*state, *batch(number))
        losses.append(loss)
        scores.append(jax.jit(evaluate)(*state[:2], *batch(99)))
    np.savez(folder / "expected.npz", *state, losses=losses, scores=scores)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
