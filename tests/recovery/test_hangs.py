"""Executors that hang: the watchdog replaces them, and training goes on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.recovery.soak import TRAININGS, run_training
from tests.recovery.training import assert_same, run
from tests.two_nodes import Running

pytestmark = pytest.mark.cluster


def maybe_endless(x: jax.Array, is_endless: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda value: (value[0] < 0) | is_endless, jnp.sin, x)


def test_a_frozen_executor_is_replaced(healed: Running) -> None:
    servers, session = healed
    address = session._state.master.address
    with sw.connect(address) as alone:
        expected = run(alone, 16)

    def disturb(number: int) -> None:
        if number == 9:
            servers[1].executors()[0].suspend()

    with sw.connect(address) as protected:
        assert_same(run(protected, 16, snapshot_every=4, after_call=disturb), expected)
        (report,) = protected.recoveries
        assert "has been silent" in report.loss


@pytest.mark.parametrize("kind", ["program", "pipeline"])
def test_an_executor_that_is_frozen_before_the_first_step(healed: Running, kind: str) -> None:
    """Steps are refused by the executors that follow it, and run on them again; of a pipeline each has some arrays."""
    servers, session = healed
    with sw.connect(session._state.master.address) as alone:
        expected = run_training(alone, TRAININGS[kind])
    with sw.connect(session._state.master.address) as protected:
        servers[1].executors()[0].suspend()
        losses, state = run_training(protected, TRAININGS[kind], snapshot_every=3)
        assert len(protected.recoveries) == 1
    assert losses == expected[0]
    for leaf, expected_leaf in zip(state, expected[1], strict=True):
        np.testing.assert_array_equal(leaf, expected_leaf)


def test_an_endless_step_is_tried_once_more_and_then_fails(healed: Running) -> None:
    with sw.connect(healed[1]._state.master.address, snapshot_every=2) as session:
        step = session.parallelize(maybe_endless, step_timeout=4)
        x = np.full(4, 0.5, np.float32)
        results = [step(x, False) for _ in range(5)]
        with pytest.raises(sw.StepTimeoutError, match="did not end within 4 s"):
            np.asarray(step(x, True))
        for result in results:
            np.testing.assert_array_equal(result, x)
        np.testing.assert_array_equal(step(results[0], False), x)
        assert len(session.recoveries) == 1
