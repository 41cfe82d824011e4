"""docs/checkpoints.md: a step and its data."""

import jax
import numpy as np

from examples.mlp.train import init, spirals
from examples.mlp.train import train_step as _step

init_fn, key = init, jax.random.key(0)
_random = np.random.default_rng(0)
data = [spirals(_random) for _ in range(3)]


def train_step(params, opt_state, batch):
    return _step(params, opt_state, *batch)
