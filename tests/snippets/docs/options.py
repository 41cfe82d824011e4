"""docs/options.md: a step, its state and a batch."""

import jax
import numpy as np

from examples.mlp.train import init, spirals
from examples.mlp.train import train_step as _step

params, opt_state = init(jax.random.key(0))
batch = spirals(np.random.default_rng(0))


def train_step(params, opt_state, batch):
    return _step(params, opt_state, *batch)
