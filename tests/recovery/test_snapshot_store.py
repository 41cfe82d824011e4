"""What a daemon keeps of snapshots, and what it drops."""

from __future__ import annotations

import pytest

from shardwright.errors import ArrayError, ResourceLimitError
from shardwright.server.worker.snapshot_store import SnapshotStore


def put(store: SnapshotStore, session: str, number: int, complete: int, sizes: dict[tuple[int, int], int]) -> int:
    """Offers parts and puts what is missing; how many."""
    missing = offer(store, session, number, complete, sizes)
    for key in missing:
        buffer = store.buffer(session, key)
        buffer[:] = key[0]
        store.complete(session, key, buffer)
    return len(missing)


def offer(
    store: SnapshotStore, session: str, number: int, complete: int, sizes: dict[tuple[int, int], int]
) -> list[tuple[int, int]]:
    return store.offer(session, number, sizes, keep=(complete,), order=(1, number))


def test_contents_that_did_not_change_are_kept_and_not_asked_for_again() -> None:
    store = SnapshotStore(1000)
    assert put(store, "a", 10, 0, {(1, 0): 100, (1, 1): 100, (2, 0): 50}) == 3
    assert put(store, "a", 20, 10, {(1, 0): 100, (1, 1): 100, (3, 0): 50}) == 1
    assert store.list_parts("a", 10) == [(1, 0), (1, 1), (2, 0)]
    assert store.list_parts("a", 20) == [(1, 0), (1, 1), (3, 0)]
    assert store.held_bytes == 300
    store.retain({"a": 20}, order=(1, 20))
    assert store.held_bytes == 250
    assert store.list_parts("a", 10) == []
    assert store.get("a", (3, 0)).tolist() == [3] * 50
    with pytest.raises(ArrayError, match="not in this node's memory"):
        store.get("a", (2, 0))


def test_failed_snapshots_leave_nothing_behind() -> None:
    store = SnapshotStore(1000)
    put(store, "a", 10, 0, {(1, 0): 100})
    for number in range(11, 30):  # none of them is ever complete
        put(store, "a", number, 10, {(number, 0): 100})
        assert store.held_bytes == 200
    assert store.list_parts("a", 10) == [(1, 0)]


def test_what_is_announced_and_did_not_come_is_not_listed() -> None:
    store = SnapshotStore(1000)
    assert offer(store, "a", 1, 0, {(1, 0): 10, (2, 0): 10}) == [(1, 0), (2, 0)]
    buffer = store.buffer("a", (1, 0))
    buffer[:] = 7
    store.complete("a", (1, 0), buffer)
    assert store.list_parts("a", 1) == [(1, 0)]
    assert offer(store, "a", 2, 0, {(1, 0): 10, (2, 0): 10}) == [(2, 0)]
    with pytest.raises(ArrayError, match="was not announced"):
        store.buffer("a", (9, 0))


def test_two_executors_add_to_one_snapshot() -> None:
    store = SnapshotStore(1000)
    put(store, "a", 5, 0, {(1, 0): 10})
    put(store, "a", 5, 0, {(1, 1): 10})
    assert store.list_parts("a", 5) == [(1, 0), (1, 1)]


def test_sessions_that_ended_are_forgotten() -> None:
    store = SnapshotStore(1000)
    put(store, "a", 1, 0, {(1, 0): 10})
    put(store, "b", 1, 0, {(1, 0): 20})
    store.retain({"b": 0}, order=(1, 1))
    assert store.held_bytes == 20
    assert store.list_parts("a", 1) == []
    assert store.list_parts("b", 1) == [(1, 0)]


def test_memory_is_limited() -> None:
    store = SnapshotStore(100)
    put(store, "a", 1, 0, {(1, 0): 60})
    with pytest.raises(ResourceLimitError, match="120 B of a node's host memory, the limit is 100 B"):
        offer(store, "a", 2, 1, {(2, 0): 60})
    assert store.list_parts("a", 1) == [(1, 0)]
    assert put(store, "a", 3, 1, {(1, 0): 60, (3, 0): 40}) == 1


def test_while_nobody_knows_what_the_client_needs_all_is_kept() -> None:
    store = SnapshotStore(1000)
    put(store, "a", 1, 0, {(1, 0): 10})
    put(store, "a", 2, 1, {(2, 0): 10})
    store.offer("a", 3, {(3, 0): 10}, keep=None, order=(1, 3))
    store.retain({"a": 0}, order=(1, 3))
    assert store.list_parts("a", 1) == [(1, 0)]
    assert store.list_parts("a", 2) == [(2, 0)]


def test_words_that_come_late_drop_nothing() -> None:
    """Streams and calls are in order each, not one beside another."""
    store = SnapshotStore(1000)
    put(store, "a", 8, 5, {(1, 0): 10})
    with pytest.raises(ArrayError, match="a later one was offered"):
        store.offer("a", 7, {(7, 0): 10}, keep=(5,), order=(1, 7))
    store.retain({}, order=(1, 7))  # said before the session was known
    assert store.list_parts("a", 8) == [(1, 0)]
    store.retain({}, order=(1, 9))
    assert store.held_bytes == 0
    with pytest.raises(ArrayError, match="the session has ended"):
        store.offer("a", 9, {(9, 0): 10}, keep=(), order=(1, 9))
    assert store.held_bytes == 0


def test_a_master_that_has_begun_anew_is_believed() -> None:
    store = SnapshotStore(1000)
    put(store, "a", 8, 5, {(1, 0): 10})
    put(store, "b", 8, 5, {(1, 0): 10})
    store.retain({"a": 0}, order=(0, 0))
    assert store.held_bytes == 10
    store.offer("a", 2, {(7, 0): 10}, keep=(8,), order=(1, 1))
    assert store.list_parts("a", 8) == [(1, 0)]


def test_contents_of_a_part_that_was_dropped_meanwhile_are_not_those_of_its_successor() -> None:
    store = SnapshotStore(1000)
    offer(store, "a", 1, 0, {(1, 0): 10})
    old = store.buffer("a", (1, 0))
    offer(store, "a", 2, 0, {})
    offer(store, "a", 3, 0, {(1, 0): 10})
    old[:] = 1
    store.complete("a", (1, 0), old)
    assert store.list_parts("a", 3) == []
