"""Checkpoints that a policy asks for: of which states, with what in them, and what happens where one fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw


@pytest.fixture
def own(session: sw.Session) -> Iterator[sw.Session]:
    """A session of its own on the server that tests share."""
    assert session._state.server is not None
    with sw.connect(session._state.master.address, token=session._state.server.token) as own:
        yield own


def train(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    loss = jnp.mean((x * state["w"]) ** 2)
    return {"w": state["w"] * 0.5 + 1.0, "n": state["n"] + 1}, loss


def init() -> Any:
    return {"w": jnp.arange(16.0).reshape(4, 4), "n": jnp.int32(0)}


def state_after(steps: int) -> Any:
    state = init()
    for _ in range(steps):
        state, _ = train(state, X)
    return jax.tree.map(np.asarray, state)


X = np.ones((4, 4), np.float32)


def steps_of(session: sw.Session) -> sw.Step:
    return session.parallelize(train, donate_argnums=0)


def run(step: sw.Step, state: Any, count: int, session: sw.Session, directory: Path) -> Any:
    for _ in range(count):
        state, loss = step(state, X)
        float(loss)
        session.checkpoints(directory)  # waits for the save under way: none is passed over
    return state


def assert_is(session: sw.Session, directory: Path, number: int, updates: int | None = None) -> None:
    expected = state_after(number if updates is None else updates)
    for name, leaf in session.restore(directory, step=number).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-6)


def test_states_are_written_every_so_many_steps(own: sw.Session, tmp_path: Path) -> None:
    step, policy = steps_of(own), sw.CheckpointPolicy(directory=tmp_path, every=3, max_to_keep=2)
    state = step.init(init)
    own.keep(state, checkpoints=policy)
    state = run(step, state, 10, own, tmp_path)
    assert own.checkpoints(tmp_path) == (6, 9)
    assert_is(own, tmp_path, 6)
    assert_is(own, tmp_path, 9)
    assert int(state["n"]) == 10
    restored = step.restore(tmp_path, like=state)  # numbers go on from the latest
    own.keep(restored, checkpoints=policy)
    run(step, restored, 4, own, tmp_path)
    assert own.checkpoints(tmp_path) == (9, 12)
    assert_is(own, tmp_path, 12)


def test_numbers_count_on_from_the_given_one(own: sw.Session, tmp_path: Path) -> None:
    step = steps_of(own)
    state = step.init(init)
    own.keep(state, checkpoints=sw.CheckpointPolicy(directory=tmp_path, every=100), step=1_099)
    run(step, state, 3, own, tmp_path)
    assert own.checkpoints(tmp_path) == (1_100,)
    assert_is(own, tmp_path, 1_100, updates=1)


def test_a_state_in_another_layout_than_the_step_s_is_followed(own: sw.Session, tmp_path: Path) -> None:
    mesh = {"data": 4, "model": 2}
    step = own.parallelize(train, donate_argnums=0, mesh=mesh, force={"*w*": {0: "data", 1: None}})
    state = own.parallelize(init, mesh=mesh)()
    before = state["w"].sharding
    own.keep(state, checkpoints=sw.CheckpointPolicy(directory=tmp_path, every=2))
    state = run(step, state, 3, own, tmp_path)
    assert state["w"].sharding != before
    assert own.checkpoints(tmp_path) == (2,)
    assert_is(own, tmp_path, 2)


def test_seconds_count_too(own: sw.Session, tmp_path: Path) -> None:
    step = steps_of(own)
    state = step.init(init)
    own.keep(state, checkpoints=sw.CheckpointPolicy(directory=tmp_path, every_s=1e-3))
    run(step, state, 3, own, tmp_path)
    assert own.checkpoints(tmp_path) == (1, 2, 3)


def test_what_is_kept_next_is_not_written(own: sw.Session, tmp_path: Path) -> None:
    step = steps_of(own)
    state = step.init(init)
    own.keep(state, checkpoints=sw.CheckpointPolicy(directory=tmp_path, every=1))
    state = run(step, state, 1, own, tmp_path)
    other = step.init(init)
    own.keep(other, checkpoints=sw.CheckpointPolicy(directory=tmp_path / "other", every=1))
    run(step, state, 1, own, tmp_path)
    assert own.checkpoints(tmp_path) == (1,)
    assert own.checkpoints(tmp_path / "other") == ()


def test_a_save_that_fails_is_logged_and_training_goes_on(
    session: sw.Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert session._state.server is not None
    own = sw.connect(session._state.master.address, token=session._state.server.token)
    step = steps_of(own)
    state = step.init(init)
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "mine").touch()
    own.keep(state, checkpoints=sw.CheckpointPolicy(directory=tmp_path, every=2), step=0)
    with caplog.at_level(logging.ERROR, "shardwright"):
        state = run(step, state, 7, own, tmp_path)
    assert int(state["n"]) == 7
    assert own.checkpoints(tmp_path) == (2, 6)
    assert "checkpoint 4 was not written" in caplog.text
    state = run(step, state, 1, own, tmp_path)
    own.close()


@pytest.mark.parametrize(
    ("wrong", "word"),
    [({"every": 0}, "every"), ({"every_s": -1.0}, "every_s"), ({"every": 1, "max_to_keep": 0}, "max_to_keep"),
     ({"at_drain": False}, "every"), ({"every": True}, "every")],
)  # fmt: skip
def test_wrong_policies_are_refused(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(sw.OptionError, match=word) as caught:
        sw.CheckpointPolicy(directory="/x", **wrong)
    assert caught.value.remedy


def test_a_session_without_a_name_keeps_nothing_but_checkpoints(own: sw.Session, tmp_path: Path) -> None:
    with pytest.raises(sw.OptionError, match="no name") as caught:
        own.keep(init())
    assert "checkpoints" in caught.value.remedy
    with pytest.raises(sw.OptionError, match="step"):
        own.keep(init(), checkpoints=sw.CheckpointPolicy(directory=tmp_path, every=1), step=-1)
