"""docs/debugging-a-plan.md: a step that has run once, its state and a batch."""

import jax
import numpy as np

import shardwright as sw
from examples.mlp.train import init, spirals, train_step

session = sw.connect()
step = session.parallelize(train_step, donate_argnums=(0, 1))
batch = spirals(np.random.default_rng(0))
params, opt_state, loss = step(*step.init(init, jax.random.key(0)), *batch)
