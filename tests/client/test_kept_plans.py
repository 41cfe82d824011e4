"""`parallelize(plan=…)`: a step runs a plan that was found before, whatever arrays lie where."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.plans.plan import TAKEN_OVER

PARAMS = {"w": np.full((64, 64), 0.01, np.float32), "v": np.full((64, 16), 0.02, np.float32)}
X = np.linspace(0, 1, 32 * 64, dtype=np.float32).reshape(32, 64)


def step_with(function: Any) -> Any:
    def step(params: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return jnp.square(function(x @ params["w"]) @ params["v"]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return step


@pytest.mark.dear
def test_a_plan_from_a_file_runs_with_the_same_numbers_and_no_search(
    session: sw.Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = step_with(jnp.tanh)
    first = session.parallelize(step, donate_argnums=0, force="tensor", mesh="8")
    first.compile(PARAMS, X)
    (tmp_path / "plan.json").write_text(first.plan.to_json())

    again = session.parallelize(step, donate_argnums=0, plan=tmp_path / "plan.json")
    state, loss = again(PARAMS, X)
    wanted, wanted_loss = jax.jit(step)(PARAMS, X)
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-5)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5), state, wanted)
    assert again.plan.parameters == first.plan.parameters
    assert again.plan.origin == "forced: tensor"

    _, loss = again(state, X[:16])  # another program of the step: planned around the state as it lies
    assert float(loss) == pytest.approx(float(jax.jit(step)(wanted, X[:16])[1]), rel=1e-5)
    assert again.plan.parameters == first.plan.parameters
    assert not caplog.records or TAKEN_OVER not in caplog.text

    with caplog.at_level(logging.WARNING, logger="shardwright"):
        changed = session.parallelize(step_with(jnp.sin), plan=first.plan)
        _, loss = changed(PARAMS, X)
    assert float(loss) == pytest.approx(float(jax.jit(step_with(jnp.sin))(PARAMS, X)[1]), rel=1e-5)
    assert TAKEN_OVER in caplog.text
    assert "sine" in caplog.text


@pytest.mark.dear
def test_arrays_move_to_where_a_plan_has_them_and_replan_takes_a_plan(session: sw.Session) -> None:
    step = step_with(jnp.tanh)
    data = session.parallelize(step, donate_argnums=0, force="data", mesh="8")
    state, _ = data(PARAMS, X)
    tensor = session.parallelize(step, donate_argnums=0, force="tensor", mesh="8")
    plan = tensor.compile(PARAMS, X)
    again = session.parallelize(step, donate_argnums=0, plan=plan)
    state, loss = again(state, X)
    assert again.plan.parameters == plan.parameters
    one, _ = jax.jit(step)(PARAMS, X)
    assert float(loss) == pytest.approx(float(jax.jit(step)(one, X)[1]), rel=1e-5)
    assert again.replan(force="data", mesh="8").origin == "forced: data"
    assert again.replan(plan=plan).origin == "forced: tensor"
    with pytest.raises(sw.OptionError, match="plan="):
        again.replan(plan=plan, force="data")
    assert np.isfinite(np.asarray(again(state, X)[1]))
