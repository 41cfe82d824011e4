"""States of many leaves are read, sent and freed in few round trips, and each leaf fails by itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import shardwright as sw
from tests.client.recorded import CallRecorder, open_recorded
from tests.client.test_arrays import comes_down_to, count_settled

COUNT = 300
#: Round trips that a state of so many small leaves may take.
FEW = 12


@pytest.fixture(scope="module")
def recorded(session: sw.Session) -> Iterator[tuple[sw.Session, CallRecorder]]:
    own, calls = open_recorded(session)
    with own:
        yield own, calls


@pytest.fixture(scope="module")
def own(recorded: tuple[sw.Session, CallRecorder]) -> sw.Session:
    """A session with the folder's server whose calls are recorded."""
    return recorded[0]


@pytest.fixture
def calls(recorded: tuple[sw.Session, CallRecorder]) -> CallRecorder:
    return recorded[1]


@pytest.fixture(scope="module")
def add(own: sw.Session) -> Any:
    """A step on a state of many leaves, some of them split over devices."""
    return own.parallelize(lambda state, x: {name: leaf + x for name, leaf in state.items()}, mesh="8")


def leaves(shape: tuple[int, ...] = (16,)) -> dict[str, np.ndarray]:
    return {f"leaf{number:03}": np.full(shape, number, np.float32) for number in range(COUNT)}


def assert_counts_up(state: dict[str, Any], first: int) -> None:
    for number, name in enumerate(sorted(state)):
        np.testing.assert_array_equal(state[name], np.float32(number + first))


def test_device_get_reads_all_leaves_together(add: Any, calls: CallRecorder) -> None:
    state = add(leaves(), np.float32(1))
    calls.clear()
    assert_counts_up(jax.device_get(state), first=1)
    assert calls.count("FetchArrays") <= 2
    assert_counts_up(jax.device_get(state), first=1)  # handles do not keep what was read
    assert calls.count("FetchArrays") <= 4


def test_leaves_that_are_read_one_after_another_bring_those_that_follow(add: Any, calls: CallRecorder) -> None:
    state = add(leaves(), np.float32(2))
    calls.clear()
    assert_counts_up(jax.tree.map(np.asarray, state), first=2)
    assert calls.count("FetchArrays") <= FEW


def test_leaves_of_every_kind(session: sw.Session) -> None:
    state = {
        "scalar": np.float32(3),
        "padded": np.arange(13, dtype=np.int32),
        "matrix": np.arange(48, dtype=np.float32).reshape(8, 6),
        "turned": np.arange(48, dtype=np.float64).reshape(6, 8).T,
        "bool": np.array([True, False, True]),
        "bfloat16": np.arange(16).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
        "large": np.random.default_rng(0).random((1024, 600), np.float32),
        "key": jax.random.key(7),
    }
    step = session.parallelize(lambda state: state | {"sums": [state["matrix"].sum(axis) for axis in (0, 1)]})
    result = step(state)
    expected = {name: jax.random.key_data(leaf) if name == "key" else jnp.asarray(leaf) for name, leaf in state.items()}
    expected["sums"] = [state["matrix"].sum(axis) for axis in (0, 1)]
    result["key"] = jax.random.key_data(result["key"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(result), expected)


def test_what_went_wrong_with_a_leaf_is_said_when_that_leaf_is_read(own: sw.Session, add: Any) -> None:
    state = add(leaves(), np.float32(1))
    names = sorted(state)  # the first few came with the reply of the step
    released = state[names[105]].block_until_ready()
    own._state.master.release(released._ids)  # behind its back; workers do it before the next step
    own.parallelize(lambda x: x * 2, donate_argnums=0)(state[names[103]]).block_until_ready()
    for handle in state.values():
        handle.copy_to_host_async()
    for number, name in enumerate(names):
        if name in (names[103], names[105]):
            continue
        np.testing.assert_array_equal(np.asarray(state[name]), np.float32(number + 1))
    with pytest.raises(sw.ArrayError, match="was donated to"):
        np.asarray(state[names[103]])
    with pytest.raises(sw.ArrayError, match="was released"):
        np.asarray(released)


def test_an_announced_handle_lives_no_longer_than_its_user_wants(own: sw.Session, add: Any) -> None:
    reader = own._state.arrays._reader
    others = {id(handle) for handle in reader.list_announced()}  # of tests before, in the same session
    state = add(leaves(), np.float32(1))
    for handle in state.values():
        handle.copy_to_host_async()
    first = np.asarray(state["leaf000"])  # brings the contents of all others
    gone = [weakref.ref(handle) for handle in state.values()]
    before = count_settled(own)
    del handle, state
    gc.collect()
    assert all(reference() is None for reference in gone)
    assert {id(handle) for handle in reader.list_announced()} <= others
    assert comes_down_to(own, before - COUNT)
    assert first[0] == 1


def test_many_arguments_are_sent_together(add: Any, calls: CallRecorder) -> None:
    calls.clear()
    state = add(leaves((2, 512)), np.float32(1))
    assert_counts_up(jax.device_get(state), first=1)
    assert calls.count("PutArrays") == 1, "what does not ride with the step comes in one call"


def test_many_dropped_handles_are_released_together(own: sw.Session, add: Any, calls: CallRecorder) -> None:
    state = add(leaves(), np.float32(1))
    before = count_settled(own)
    calls.clear()
    del state
    gc.collect()
    assert comes_down_to(own, before - COUNT)
    assert 0 < calls.count("ReleaseArrays") <= FEW


@pytest.mark.dear
def test_a_restored_state_is_read_or_saved_again_in_one_step(session: sw.Session, tmp_path: Path) -> None:
    session.save(leaves(), tmp_path / "first", step=0).wait()
    (mine,) = [each for each in session.status().sessions if session.info.session_id.startswith(each.session_id)]
    assert_counts_up(jax.device_get(session.restore(tmp_path / "first")), first=0)
    session.save(session.restore(tmp_path / "first"), tmp_path / "second", step=0).wait()
    (now,) = [each for each in session.status().sessions if session.info.session_id.startswith(each.session_id)]
    assert now.last_step - mine.last_step == 3  # a restore, another one, a save
    assert_counts_up(jax.device_get(session.restore(tmp_path / "second")), first=0)


def test_an_initialized_state_is_read_at_once(own: sw.Session, add: Any, calls: CallRecorder) -> None:
    calls.clear()
    state = add.init(lambda: {name: jnp.asarray(leaf) for name, leaf in leaves().items()})
    assert_counts_up(jax.device_get(state), first=0)
    assert calls.count("FetchArrays") <= 2
    state = add.init(lambda: {name: jnp.asarray(leaf) for name, leaf in leaves().items()})
    calls.clear()
    assert_counts_up(jax.tree.map(np.asarray, state), first=0)
    assert calls.count("FetchArrays") <= FEW
