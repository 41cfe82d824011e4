"""Bounds of programs whose equal layers may not take every layout."""

from __future__ import annotations

import jax
import optax
import pytest

import shardwright as sw
from examples.llama.model import Config, make_steps


@pytest.mark.dear
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_layers_confined_by_a_forced_strategy_are_bounded() -> None:
    config = Config(layers=4, heads=4, kv_heads=2, width=64, hidden=64, context=32, batch=8)
    init, step, _ = make_steps(config, optax.sgd(0.1))
    state, tokens = jax.eval_shape(init, jax.random.key(0)), jax.eval_shape(lambda: jax.numpy.zeros((8, 33), "int32"))
    program = sw.lower(step, *state, tokens, donate_argnums=(0, 1), platform="cpu")
    plan = sw.plan(program.as_text(), 4, mesh="2x2", force="mixed", stages=1, micro_batches=1, cache=False)
    assert isinstance(plan, sw.Plan)
    assert 0 < plan.cost.lower_bound_s <= plan.cost.step_s * 1.0001
