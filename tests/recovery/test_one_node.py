"""A server of one node: its executor is killed, its daemon keeps the snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.recovery.training import State, assert_same, run, train, train_by_key


def kill_executor(session: sw.Session) -> None:
    import psutil

    server = session._state.server
    assert server is not None
    for child in psutil.Process(server.pid).children(recursive=True):
        if "worker.executor" in " ".join(child.cmdline()):
            child.kill()


@pytest.fixture(scope="module")
def session() -> Iterator[sw.Session]:
    with sw.connect(devices=2, snapshot_every=5) as session:
        yield session


def train_aloud(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    state, loss = train_by_key(state, x)
    jax.debug.print("{}", state[2])
    return state, loss


def test_training_goes_on_with_the_same_losses_and_says_nothing_twice(
    session: sw.Session, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = run(session, 20, function=train_aloud)

    def disturb(number: int) -> None:
        if number == 13:
            kill_executor(session)

    before = len(session.recoveries)
    assert_same(run(session, 20, function=train_aloud, after_call=disturb), expected)
    assert len(session.recoveries) == before + 1
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [int(count) for *_, count in lines] == 2 * list(range(1, 21))
    numbers = [int(number.rstrip(":")) for _, number, _ in lines]
    assert numbers == sorted({*numbers})


@pytest.mark.dear
def test_checkpoints_are_of_the_states_that_there_would_have_been(session: sw.Session, tmp_path: Path) -> None:
    """The executor dies between the fourth and the sixth step, and right behind a save."""
    step = session.parallelize(lambda state, x: {"w": jnp.sin(state["w"]) + x}, donate_argnums=0)
    state: Any = step({"w": np.ones((4, 4), np.float32)}, np.float32(0))
    session.keep(state, checkpoints=sw.CheckpointPolicy(directory=tmp_path, every=2))
    expected, before = [np.asarray(state["w"])], len(session.recoveries)
    for number in range(1, 13):
        state = step(state, np.float32(number))
        expected.append(np.asarray(jnp.sin(expected[-1]) + number))
        if number in (5, 8):
            kill_executor(session)
        np.asarray(state["w"])
        session.checkpoints(tmp_path)
    assert len(session.recoveries) == before + 2
    numbers = session.checkpoints(tmp_path)
    assert {2, 4, 6, 10, 12} <= {*numbers} <= {2, 4, 6, 8, 9, 10, 12}
    for number in numbers:
        np.testing.assert_allclose(session.restore(tmp_path, step=number)["w"], expected[number], rtol=1e-6)


@pytest.mark.dear
def test_wrong_options() -> None:
    with sw.connect(devices=1) as session:
        for wrong in (0, -1, 2.5, True, "10"):
            with pytest.raises(sw.OptionError, match="snapshot_every"):
                session.parallelize(train, snapshot_every=wrong)  # type: ignore[arg-type]
    with pytest.raises(sw.OptionError, match="snapshot_every"):
        sw.connect(snapshot_every=0)
