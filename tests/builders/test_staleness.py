"""Late gradients: equal to a hand-written loop, slots of their variables, and loaded with optax alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright import strategies
from tests.builders.models import model


def gradient(w: Any, t: int) -> Any:
    return 2 * (w - t)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(0.1)], ids=["sgd", "adam"])
def test_gradients_are_applied_so_many_updates_late(steps: int, optimizer: Any) -> None:
    late = strategies.stale(optimizer, steps)
    w = jnp.arange(4.0)
    state = late.init(w)
    expected, inner, seen = jnp.arange(4.0), optimizer.init(jnp.arange(4.0)), []
    update = jax.jit(late.update)
    for t in range(8):
        updates, state = update(gradient(w, t), state, w)
        w = optax.apply_updates(w, updates)
        seen.append(gradient(expected, t))
        if t >= steps:
            changes, inner = optimizer.update(seen[t - steps], inner, expected)
            expected = optax.apply_updates(expected, changes)
        np.testing.assert_allclose(w, expected, rtol=1e-5, atol=1e-6)


def test_pending_gradients_are_slots() -> None:
    trains, late = model("embedding"), strategies.stale(optax.sgd(0.1, momentum=0.9), 2)

    def step(params: Any, opt_state: Any, ids: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(trains.loss)(params, ids, y)
        updates, opt_state = late.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    text = trains.text(step, (trains.params, late.init(trains.params)))
    made = sw.plan(text, 8, force=strategies.PS(), cache=False)
    assert isinstance(made, sw.Plan)
    lies = {variable.name: str(variable.sharding) for variable in made.parameters}
    slots = [name for name in lies if name.startswith("opt_state") and name.endswith("['table']")]
    assert len(slots) == 3
    assert {lies[name] for name in slots} == {"[data, -]"}


@pytest.mark.parametrize("steps", [-1, 1.5, True])
def test_steps_are_a_number(steps: Any) -> None:
    with pytest.raises(sw.OptionError, match="steps"):
        strategies.stale(optax.sgd(0.1), steps)


def test_optax_is_loaded_when_it_is_used() -> None:
    code = "import sys\nfrom shardwright import strategies\nstrategies.PS()\nprint(*sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"optax", "jax", "shardwright.planner"}.isdisjoint(child.stdout.split())
