"""A damaged row of the store: it is named, with what is lost; all others are there, and stay."""

from __future__ import annotations

import gzip
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import SessionError, StateStoreError
from shardwright.proto.v1 import master_pb2
from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import machine, recovered
from shardwright.server.master.ledger import Contents
from shardwright.server.master.nodes import Member
from shardwright.server.master.sessions import unknown_session
from shardwright.server.master.state import MasterState
from shardwright.server.master.store import (
    FILE_NAME,
    TABLES,
    BinaryRow,
    PlanRow,
    ProgramRow,
    SessionRow,
    StateStore,
    StoredState,
)
from tests.server.simulation import IDENTITY, WAIT_S

KEPT = master_pb2.KeptState(description=b'{"tree": {}}', array_ids=[1, 2], updates=3).SerializeToString()
SESSIONS = [
    SessionRow(
        session_id=name, name=f"run-{name}", last_number=12, highest_id=40, snapshot=9, snapshot_bytes=1 << 40,
        executables=("p1", "p2"), kept=KEPT, snapshot_kept=KEPT,
    )
    for name in ("a1", "b2")
]  # fmt: skip
PROGRAMS = [
    ProgramRow(program_id=name, gzip=gzip.compress(name.encode() * 99), text_bytes=198) for name in ("h1", "h2")
]
PLANS = [
    PlanRow(plan_id=f"p{n}", program_id=f"h{n}", json_gzip=gzip.compress(b"{}"), first_device=0, team=(0, 1))
    for n in (1, 2)
]
BINARIES = [
    BinaryRow(plan_id=f"p{n}", number=0, header="{}", stablehlo=b"x", partitioned_gzip=b"y", serialized=b"z")
    for n in (1, 2)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a store with two rows in each table but `cluster`."""
    store = StateStore(tmp_path, "cluster")
    store.put_executors(4, (0, 1), {0: 4000, 1: 4001})
    for session in SESSIONS:
        store.put_session(session)
        for program, plan in zip(PROGRAMS, PLANS, strict=True):
            store.put_program(session.session_id, program)
            store.put_plan(session.session_id, plan, program)
    store.put_binaries(BINARIES).result(10)
    store.close()
    return tmp_path


def change(folder: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(folder / FILE_NAME, isolation_level=None)) as database:
        assert database.execute(statement, values).rowcount == 1


def value_of(folder: Path, table: str, column: str) -> Any:
    database = sqlite3.connect(folder / FILE_NAME)
    (value,) = database.execute(f"SELECT {column} FROM {table} ORDER BY rowid LIMIT 1").fetchone()
    database.close()
    return value


def schema() -> Iterator[tuple[str, str, str]]:
    """(table, column, its kind) of all there are, but the checksums."""
    from shardwright.server.master.store import _SCHEMA

    database = sqlite3.connect(":memory:")
    database.executescript(_SCHEMA)
    for table in TABLES:
        for _, column, kind, *_ in database.execute(f"PRAGMA table_info({table})").fetchall()[:-1]:
            if (table, column) != ("cluster", "one"):
                yield table, column, kind


def wrong_values(kind: str, value: Any) -> list[Any]:
    """What may stand in a column in place of its value."""
    if kind == "INTEGER":
        return [value ^ 1, -5, 10**9, "abc", b"\xff", 1.5]
    if kind == "TEXT":
        return [value[:-1] + chr(ord(value[-1]) ^ 1) if value else "x", value[: len(value) // 2] + "[0,", b"\xff", ""]
    data = bytearray(value or b"\0")
    data[len(data) // 2] ^= 1
    return [bytes(data), bytes(value[: len(value) // 2]), "abc", b""]


def load(folder: Path) -> StoredState:
    store = StateStore(folder, "cluster")
    store.close()
    Contents(store.loaded, (0, 1), lambda devices: frozenset())
    return store.loaded


def count(state: StoredState) -> dict[str, int]:
    sizes = {name: len(getattr(state, name)) for name in ("sessions", "programs", "plans", "binaries", "holds")}
    return {
        **sizes,
        "executables": sum(len(session.executables) for session in state.sessions),
        "nodes": len(state.ports),
    }


@pytest.mark.parametrize(("table", "column", "kind"), [pytest.param(*at, id=f"{at[0]}.{at[1]}") for at in schema()])
def test_a_damaged_row_is_named_and_lost_alone(
    folder: Path, table: str, column: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole, good = count(load(folder)), (folder / FILE_NAME).read_bytes()
    value = value_of(folder, table, column)
    for wrong in wrong_values(kind, value):
        if wrong == value:
            continue
        (folder / FILE_NAME).write_bytes(good)
        caplog.clear()
        try:
            change(folder, f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT min(rowid) FROM {table})", wrong)
        except sqlite3.IntegrityError:  # of a key that may hold numbers alone
            continue
        if (table, column) == ("cluster", "hash"):
            with pytest.raises(StateStoreError, match="table cluster, row 1") as refused:
                load(folder)
            assert "move it away" in refused.value.remedy
            continue
        state = load(folder)
        text = caplog.text
        assert f"table {table}, row " in text
        assert "lost" in text or "again" in text or "not taken up" in text
        expected = dict(whole)
        if table in ("cluster", "nodes"):
            expected["nodes"] = 0
            assert state.team == ()
        elif table == "sessions":
            expected |= {"sessions": 1, "executables": 2, "holds": 4}
            assert "a1" in state.lost
            assert "damaged" in unknown_session("a1", state.lost).message
        elif table == "executables":
            expected["executables"] -= 1
        elif table in whole:
            expected[table] -= 1
        after = count(state)
        for name in ("sessions", "executables", "nodes", table):
            assert after.get(name) == expected.get(name), (name, wrong)
        assert state.generation >= 4
        caplog.clear()
        again = load(folder)
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "said once"
        assert again.lost == {}
        assert count(again)["sessions"] == expected["sessions"]
    assert list(folder.glob(f"{FILE_NAME}.damaged-*")) or table == "cluster"


def test_a_flipped_checksum_is_damage_too(folder: Path) -> None:
    change(folder, "UPDATE sessions SET crc32 = crc32 + 1 WHERE id = 'a1'")
    assert [session.session_id for session in load(folder).sessions] == ["b2"]


def test_a_store_of_the_version_before_is_taken_over(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its rows have no checksums: what cannot be is found, and the rest goes on."""
    database = sqlite3.connect(folder / FILE_NAME, isolation_level=None)
    for table in TABLES:
        database.execute(f"ALTER TABLE {table} DROP COLUMN crc32")
    database.execute("PRAGMA user_version = 1")
    database.execute("UPDATE sessions SET snapshot_kept = ? WHERE id = 'b2'", (KEPT.replace(b"{", b"["),))
    database.execute("UPDATE plans SET team = '[0,' WHERE id = 'p2'")
    database.close()
    state = load(folder)
    assert [session.session_id for session in state.sessions] == ["a1"]
    assert [plan.plan_id for plan in state.plans] == ["p1"]
    assert "table sessions, row 'b2', column snapshot_kept" in caplog.text
    assert "table plans, row 'p2', column team" in caplog.text


def test_the_client_of_a_lost_session_is_told(folder: Path) -> None:
    """By its id whenever it asks, by its name once: then the name is free."""
    change(folder, "UPDATE sessions SET last_number = 'abc' WHERE id = 'a1'")
    stored = load(folder)
    members = tuple(Member(index=node, address=f"host:{node}", device_count=2) for node in (0, 1))
    state = MasterState.create(members, IDENTITY, Limits(), wait_s=WAIT_S, now_s=0.0)
    recovered.restore(state, stored, 0.0)
    (end,) = machine.handle(state, ev.StepsOpened(stream=1, session_id="a1"), 1.0)
    assert isinstance(end, do.EndStream)
    assert isinstance(end.error, SessionError)
    assert "row 'a1', column last_number" in end.error.message
    asked = ev.SessionRequested(call=1, session_id="c3", name="run-a1", salt="x")
    (refusal,) = machine.handle(state, asked, 1.0)
    assert isinstance(refusal, do.Fail)
    assert "row 'a1', column last_number" in refusal.error.message
    assert "checkpoint" in refusal.error.remedy
    assert not any(isinstance(command, do.Fail) for command in machine.handle(state, asked, 2.0))
    assert "b2" in state.sessions
