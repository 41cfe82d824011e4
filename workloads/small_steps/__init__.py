"""Small training steps of many kinds, with arrays: each is planned, proven and computed beside `jax.jit`.

`python -m oracles.small_steps` runs them.
"""

from __future__ import annotations

from workloads.small_steps.held_out import HELD_OUT
from workloads.small_steps.networks import NETWORKS
from workloads.small_steps.solvers import SOLVERS

SMALL_STEPS = {**NETWORKS, **SOLVERS, **HELD_OUT}
