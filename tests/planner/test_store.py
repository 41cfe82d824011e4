"""Stores: what was put comes back, bounds hold, and damage is a miss."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.options.cache_folder import CACHE_VARIABLE
from shardwright.planner.cache.store import FileStore, MemoryStore, Store, default_store

Make = Callable[..., Store]


@pytest.fixture(params=["memory", "folder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "memory":
        return MemoryStore
    return lambda **limits: FileStore(tmp_path / "store", **limits)


def test_what_was_put_last_comes_back(make: Make) -> None:
    store = make()
    assert store.get(b"a") is None
    for value in (b"", b"one", os.urandom(10_000)):
        store.put(b"a", value)
        store.put(b"a/../b", b"other")
        assert store.get(b"a") == value


def test_the_least_recently_used_entry_goes_first(make: Make) -> None:
    store = make(max_entries=3)
    for key in (b"a", b"b", b"c"):
        store.put(key, b"x")
    assert store.get(b"a") == b"x"
    store.put(b"d", b"x")
    assert [store.get(key) for key in (b"a", b"b", b"c", b"d")] == [b"x", None, b"x", b"x"]


def test_bytes_are_bounded(make: Make) -> None:
    store = make(max_bytes=100)
    for i in range(10):
        store.put(bytes([i]), b"x" * 30)
    assert sum(store.get(bytes([i])) is not None for i in range(10)) in (2, 3)
    store.put(b"large", b"x" * 101)
    assert store.get(b"large") is None


def test_replacing_an_entry_frees_its_bytes(make: Make) -> None:
    store = make(max_bytes=200)
    store.put(b"other", b"x" * 20)
    for _ in range(20):
        store.put(b"a", b"x" * 60)
    assert store.get(b"other") is not None


def test_damaged_entries_are_misses_and_removed(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for damage in (lambda data: data[:-1], lambda data: b"", lambda data: data[:-1] + b"?"):
        store.put(b"a", b"value")
        (path,) = tmp_path.iterdir()
        path.write_bytes(damage(path.read_bytes()))
        assert store.get(b"a") is None
        assert not path.exists()


def test_a_folder_that_cannot_be_used_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = FileStore(tmp_path / "file")
    store.put(b"a", b"value")
    assert store.get(b"a") is None


def test_unfinished_files_of_the_dead_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "old.part", tmp_path / "new.part"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (0, 0))
    FileStore(tmp_path).put(b"a", b"value")
    assert (old.exists(), new.exists()) == (False, True)


def _hammer(folder: Path, seed: int) -> None:
    store = FileStore(folder, max_entries=4)
    for i in range(200):
        key = (i * seed) % 7
        value = store.get(bytes([key]))
        assert value in (None, bytes([key]) * 5000)
        store.put(bytes([key]), bytes([key]) * 5000)


def test_processes_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_hammer, args=(tmp_path, seed)) for seed in (1, 2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert not list(tmp_path.glob("*.part"))
    assert len(list(tmp_path.iterdir())) <= 7


def test_the_variable_names_the_folder_or_says_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    store = default_store("plans")
    assert store is not None
    store.put(b"a", b"value")
    assert len(list((tmp_path / "plans").iterdir())) == 1
    other = default_store("segments")
    assert other is not None
    assert other.get(b"a") is None
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert default_store("plans") is None
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    store = default_store("plans")
    assert store is not None
    store.put(b"a", b"value")
    assert list((tmp_path / "xdg" / "shardwright" / "plans").iterdir())
