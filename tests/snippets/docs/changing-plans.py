"""docs/changing-plans.md: a step, its state and a batch."""

import numpy as np

from examples.mlp.train import init as _init
from examples.mlp.train import spirals
from examples.mlp.train import train_step as _step

init = _init
batch = spirals(np.random.default_rng(0))


def train_step(params, opt_state, batch):
    return _step(params, opt_state, *batch)
