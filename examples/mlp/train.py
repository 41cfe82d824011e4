"""Train a multilayer perceptron with SGD on points of two interleaved spirals.

    python examples/mlp/train.py

Uses the server at SERVER_IP/SERVER_PORT, or starts an embedded one.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardwright as sw

WIDTHS = (2, 256, 256, 2)
BATCH = 512
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def init(key: jax.Array) -> tuple[Any, Any]:
    """Parameters and optimizer state."""
    keys = jax.random.split(key, len(WIDTHS) - 1)
    params = [
        {"weight": jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, "bias": jnp.zeros(n)}
        for k, m, n in zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]
    return params, OPTIMIZER.init(params)


def loss_of(params: Any, points: jax.Array, labels: jax.Array) -> jax.Array:
    x = points
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    logits = x @ params[-1]["weight"] + params[-1]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(params: Any, opt_state: Any, points: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, points, labels)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def example_arguments() -> tuple[Any, ...]:
    """Argument types of `train_step`, for `shardwright lower`."""
    params, opt_state = jax.eval_shape(init, jax.random.key(0))
    points, labels = jax.ShapeDtypeStruct((BATCH, 2), "float32"), jax.ShapeDtypeStruct((BATCH,), "int32")
    return params, opt_state, points, labels


def spirals(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A batch of points [BATCH, 2] and which spiral each lies on."""
    labels = random.integers(0, 2, BATCH).astype(np.int32)
    radius = random.uniform(0.1, 1.0, BATCH)
    angle = 6 * radius + np.pi * labels + random.normal(0, 0.05, BATCH)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return points.astype(np.float32), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    random = np.random.default_rng(0)
    with sw.connect() as session:
        step = session.parallelize(train_step, donate_argnums=(0, 1))
        params, opt_state = step.init(init, jax.random.key(0))
        for number in range(1, steps + 1):
            params, opt_state, loss = step(params, opt_state, *spirals(random))
            if number == 1 or number % 50 == 0:
                print(f"step {number:>4}/{steps}  loss {float(loss):.4f}", flush=True)
        print(step.plan.explain())


if __name__ == "__main__":
    main()
