"""The durable store: what it gives back, and what it says of files that it does not take."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from shardwright.errors import StateStoreError
from shardwright.server.master.store import FILE_NAME, PlanRow, ProgramRow, SessionRow, StateStore

ROW = SessionRow(
    session_id="a1", name="run-7", last_number=12, highest_id=40, is_told=True, snapshot=9, snapshot_bytes=1 << 40,
    executables=("p2", "p1"), kept=b"\0x", snapshot_kept=b"y",
)  # fmt: skip
PROGRAM = ProgramRow(program_id="h1", gzip=b"\x1f\x8b", text_bytes=7)
PLAN = PlanRow(plan_id="p1", program_id="h1", json_gzip=b"{}", first_device=2)


def fill(folder: Path) -> None:
    store = StateStore(folder, "cluster")
    store.put_session(SessionRow(session_id="b2"))
    store.put_session(SessionRow(session_id="a1", name="run-7"))
    store.put_program("a1", PROGRAM)
    store.put_plan("a1", PLAN, PROGRAM)
    store.put_plan("b2", PLAN, PROGRAM)
    store.put_executors(3, (0, 1), {0: 4000, 1: 4001})
    store.put_executors(4, (1, 2), {1: 4002, 2: 4003})
    store.put_session(ROW).result(10)
    store.close()


def test_all_of_it_comes_back(tmp_path: Path) -> None:
    fill(tmp_path)
    store = StateStore(tmp_path, "cluster")
    loaded = store.loaded
    assert set(loaded.sessions) == {ROW, SessionRow(session_id="b2")}
    assert (loaded.generation, loaded.team, loaded.ports) == (4, (1, 2), {1: 4002, 2: 4003})
    assert (loaded.programs, loaded.plans) == ((PROGRAM,), (PLAN,))
    assert set(loaded.holds) == {("a1", "program", "h1"), ("a1", "plan", "p1"), ("b2", "plan", "p1")}
    store.close()
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_contents_go_with_the_last_session_that_holds_them(tmp_path: Path) -> None:
    fill(tmp_path)
    store = StateStore(tmp_path, "cluster")
    store.delete_session("a1").result(10)
    store.close()
    store = StateStore(tmp_path, "cluster")
    assert [row.session_id for row in store.loaded.sessions] == ["b2"]
    assert (store.loaded.programs, store.loaded.plans) == ((PROGRAM,), (PLAN,)), "its plan still needs the program"
    store.delete_session("b2").result(10)
    store.close()
    store = StateStore(tmp_path, "cluster")
    assert (store.loaded.sessions, store.loaded.programs, store.loaded.plans, store.loaded.holds) == ((), (), (), ())
    store.close()


def test_one_master_at_a_time(tmp_path: Path) -> None:
    store = StateStore(tmp_path, "cluster")
    with pytest.raises(StateStoreError, match="another master") as caught:
        StateStore(tmp_path, "cluster")
    assert "a directory of its own" in caught.value.remedy
    store.close()
    StateStore(tmp_path, "cluster").close()


def change(folder: Path, statement: str) -> None:
    database = sqlite3.connect(folder / FILE_NAME)
    database.execute(statement)
    database.commit()
    database.close()


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("PRAGMA user_version = 99", "schema 99"),
        ("PRAGMA application_id = 5", "another program"),
        ("DROP TABLE sessions", "damaged"),
    ],
)
def test_what_it_does_not_take(tmp_path: Path, statement: str, says: str) -> None:
    fill(tmp_path)
    change(tmp_path, statement)
    with pytest.raises(StateStoreError, match=says) as caught:
        StateStore(tmp_path, "cluster")
    assert caught.value.where == str(tmp_path / FILE_NAME)
    assert caught.value.remedy


def test_the_state_of_another_cluster_is_not_taken(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(StateStoreError, match="another cluster file"):
        StateStore(tmp_path, "other")


@pytest.mark.parametrize("contents", [b"no database " * 500, b"SQLite format 3\0" + bytes(range(256)) * 40])
def test_a_file_that_is_none(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(contents)
    with pytest.raises(StateStoreError, match="damaged") as caught:
        StateStore(tmp_path, "cluster")
    assert "move it away" in caught.value.remedy


def test_pages_that_were_overwritten(tmp_path: Path) -> None:
    fill(tmp_path)
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    data[4096:-100] = b"\xff" * (len(data) - 4196)
    path.write_bytes(data)
    with pytest.raises(StateStoreError, match="damaged"):
        StateStore(tmp_path, "cluster")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateStoreError, match="cannot be used"):
        StateStore(tmp_path / "file" / "state", "cluster")


def test_a_write_that_fails_fails_alone(tmp_path: Path) -> None:
    store = StateStore(tmp_path, "cluster")
    first = store.put_session(ROW)
    bad = store.put_session(SessionRow(session_id="x", name=None))  # type: ignore[arg-type]
    last = store.put_session(SessionRow(session_id="b2"))
    assert first.result(10) is None
    with pytest.raises(StateStoreError, match="cannot be read or written"):
        bad.result(10)
    assert last.result(10) is None
    store.close()
    store = StateStore(tmp_path, "cluster")
    assert {row.session_id for row in store.loaded.sessions} == {"a1", "b2"}
    store.close()
