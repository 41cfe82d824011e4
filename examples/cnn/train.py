"""Train a small convolutional network with batch normalization to tell shapes apart.

    python examples/cnn/train.py

The images (bars, crosses, frames under noise) are drawn on the fly. Uses the server at
SERVER_IP/SERVER_PORT, or starts an embedded one.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardwright as sw

SIZE = 16
BATCH = 64
CHANNELS = (1, 16, 32)
CLASSES = 3
OPTIMIZER = optax.adam(3e-3)


def init(key: jax.Array) -> tuple[Any, Any, Any]:
    """Parameters, running statistics of batch normalization, optimizer state."""
    keys = jax.random.split(key, len(CHANNELS))
    blocks, statistics = [], []
    for k, m, n in zip(keys[1:], CHANNELS[:-1], CHANNELS[1:], strict=True):
        kernel = jax.random.normal(k, (3, 3, m, n)) * (2 / (9 * m)) ** 0.5
        blocks.append({"kernel": kernel, "scale": jnp.ones(n), "offset": jnp.zeros(n)})
        statistics.append({"mean": jnp.zeros(n), "variance": jnp.ones(n)})
    features = CHANNELS[-1] * (SIZE // 2 ** len(blocks)) ** 2
    params = {"blocks": blocks, "head": jax.random.normal(keys[0], (features, CLASSES)) * features**-0.5}
    return params, statistics, OPTIMIZER.init(params)


def batch_norm(block: Any, statistics: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    """Normalize by this batch's statistics; returns the updated running ones too."""
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    running = {
        "mean": 0.9 * statistics["mean"] + 0.1 * mean,
        "variance": 0.9 * statistics["variance"] + 0.1 * variance,
    }
    return block["scale"] * (x - mean) * jax.lax.rsqrt(variance + 1e-5) + block["offset"], running


def loss_of(params: Any, statistics: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    x, running = images, []
    for block, old in zip(params["blocks"], statistics, strict=True):
        x = jax.lax.conv_general_dilated(x, block["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x, new = batch_norm(block, old, x)
        x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        running.append(new)
    logits = x.reshape(x.shape[0], -1) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), running


def train_step(
    params: Any, statistics: Any, opt_state: Any, images: jax.Array, labels: jax.Array
) -> tuple[Any, Any, Any, jax.Array]:
    gradient = jax.value_and_grad(loss_of, has_aux=True)
    (loss, statistics), gradients = gradient(params, statistics, images, labels)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), statistics, opt_state, loss


def example_arguments() -> tuple[Any, ...]:
    """Argument types of `train_step`, for `shardwright lower`."""
    images = jax.ShapeDtypeStruct((BATCH, SIZE, SIZE, 1), "float32")
    return (*jax.eval_shape(init, jax.random.key(0)), images, jax.ShapeDtypeStruct((BATCH,), "int32"))


def shapes(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Noisy images [BATCH, SIZE, SIZE, 1] of a bar, a cross or a frame, and which it is."""
    labels = random.integers(0, CLASSES, BATCH).astype(np.int32)
    images = random.normal(0, 0.5, (BATCH, SIZE, SIZE, 1)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        row, column = random.integers(3, SIZE - 3, 2)
        image[row, :] += 1
        if label == 1:
            image[:, column] += 1
        if label == 2:
            image[[1, -2], :] += 1
            image[:, [1, -2]] += 1
    return images, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    random = np.random.default_rng(0)
    with sw.connect() as session:
        step = session.parallelize(train_step, donate_argnums=(0, 1, 2))
        params, statistics, opt_state = step.init(init, jax.random.key(0))
        for number in range(1, steps + 1):
            params, statistics, opt_state, loss = step(params, statistics, opt_state, *shapes(random))
            if number == 1 or number % 20 == 0:
                print(f"step {number:>4}/{steps}  loss {float(loss):.4f}", flush=True)
        print(step.plan.explain())


if __name__ == "__main__":
    main()
