"""docs/from-autodist.md: an embedding model, its batches, and AutoDist's file of nodes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardwright as sw

optimizer = optax.sgd(0.1, momentum=0.9)
_random = np.random.default_rng(0)
params = {"table": _random.normal(size=(1000, 32)).astype("float32"), "w": np.ones((32, 8), "float32")}
opt_state = optimizer.init(params)
ids = _random.integers(0, 1000, (64, 5)).astype("int32")
targets = np.zeros((64, 8), "float32")
data = [(ids, targets)] * 3


def loss_of(params, ids, targets):
    return jnp.mean((params["table"][ids].mean(1) @ params["w"] - targets) ** 2)


def train_step(params, opt_state, ids, targets):
    loss, gradients = jax.value_and_grad(loss_of)(params, ids, targets)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


text = sw.lower(train_step, params, opt_state, ids, targets, donate_argnums=(0, 1)).hlo_text
Path("step.hlo").write_text(text)
Path("resource_spec.yml").write_text(
    "nodes:\n"
    "  - {address: 10.0.0.1, gpus: [0, 1], chief: true, network_bandwidth: 25}\n"
    "  - {address: 10.0.0.2, gpus: [0, 1], ssh_config: workers}\n"
    "ssh:\n"
    "  workers: {username: me, key_file: ~/.ssh/id_rsa}\n"
)
