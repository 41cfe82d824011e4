"""Rows of the store, checked one by one: a damaged one costs what it holds, and says so, and no other.

Each row has a CRC-32 of its other columns, in its last one; rows of a store of before that have none are judged by the
types of their columns alone.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from shardwright.proto.v1 import master_pb2

#: What is lost with a row of each table, and what is not.
_LOSSES = {
    "cluster": "the executors of before are not taken up; sessions go on from their snapshots",
    "nodes": "the executors of before are not taken up; sessions go on from their snapshots",
    "sessions": "the session is lost, and its client told; its checkpoints and all other sessions are not",
    "executables": "one program of the session is loaded again when its client asks",
    "programs": "the program is lost with its plans; its clients send it again",
    "plans": "the plan is lost, and its clients plan again",
    "binaries": "what was compiled is lost, and compiled again",
    "holds": "the session lets go of one program or plan; its client sends it again",
}
_KINDS: dict[str, type] = {"INTEGER": int, "TEXT": str, "BLOB": bytes}
_WORDS = {int: "a number", str: "text", bytes: "bytes", float: "a fraction", type(None): "nothing"}
#: Bytes of a value in a message.
_SHOWN = 40

Value = int | str | bytes | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Of a table; kind: of its values."""

    name: str
    kind: type
    may_be_null: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A row that is not as it was written.

    key: its values in the primary key. column: the wrong one; "": any may be. row: its values but the checksum.
    """

    table: str
    key: tuple[Value, ...]
    column: str
    why: str
    rowid: int
    row: tuple[Value, ...]

    def __str__(self) -> str:
        key = ", ".join(show(value) for value in self.key)
        column = f", column {self.column}" if self.column else ""
        return f"table {self.table}, row {key}{column}: {self.why}; {_LOSSES[self.table]}"


def checksum_of(table: str, values: Sequence[Value]) -> int:
    """Of a row's values but the last, which holds it."""
    checksum = zlib.crc32(table.encode())
    for value in values:
        data = value if isinstance(value, bytes) else str(int(value) if isinstance(value, bool) else value).encode()
        kind = type(value).__name__ if value is None or isinstance(value, bytes | str) else "int"
        checksum = zlib.crc32(data, zlib.crc32(f"{kind} {len(data)} ".encode(), checksum))
    return checksum


def read_rows(database: sqlite3.Connection, table: str, damages: list[Damage]) -> list[tuple[Value, ...]]:
    """The rows that are whole, without their checksums; the others are added to `damages`."""
    facts = database.execute(f"PRAGMA table_info({table})").fetchall()
    columns = [
        Column(name=name, kind=_KINDS[kind], may_be_null=not not_null) for _, name, kind, not_null, _, _ in facts[:-1]
    ]
    keys = [number for number, fact in enumerate(facts) if fact[5]]
    whole = []
    for rowid, *stored in database.execute(f"SELECT rowid, * FROM {table} ORDER BY rowid"):
        row, checksum = tuple(stored[:-1]), stored[-1]
        wrong = None
        if checksum is None:
            wrong = _find_wrong(columns, row)
        elif checksum != checksum_of(table, row):
            wrong = _find_wrong(columns, row) or ("", "it is not as it was written (its checksum differs)")
        if wrong is None:
            whole.append(row)
        else:
            key = tuple(row[number] for number in keys)
            damages.append(Damage(table=table, key=key, column=wrong[0], why=wrong[1], rowid=rowid, row=row))
    return whole


def show(value: Value) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _find_wrong(columns: Sequence[Column], row: Sequence[Value]) -> tuple[str, str] | None:
    """The first column whose value can be none of it, and why."""
    for column, value in zip(columns, row, strict=True):
        if value is None and column.may_be_null:
            continue
        if type(value) is not column.kind:
            return column.name, f"it holds {_WORDS[type(value)]}, {show(value)}, in place of {_WORDS[column.kind]}"
        if isinstance(value, int) and value < 0:
            return column.name, f"{value} is below 0"
        if column.name == "id" and not value:
            return column.name, "it is empty"
        if column.name.endswith("kept") and not _is_kept_state(value):
            return column.name, "it is no description of a kept state"
        if column.name == "team" and not _is_team(value):
            return column.name, f"{show(value)} is no list of nodes"
        if isinstance(value, bytes) and value[:1] in (b"\x1f", b"\x78"):
            try:
                zlib.decompress(value, 47)
            except zlib.error as error:
                return column.name, f"its contents cannot be unpacked ({error})"
    return None


def _is_kept_state(value: Value) -> bool:
    assert isinstance(value, bytes)
    try:
        description = master_pb2.KeptState.FromString(value).description
        return not description or isinstance(json.loads(description), dict)
    except (DecodeError, ValueError, RecursionError):
        return False


def _is_team(value: Value) -> bool:
    try:
        team = json.loads(str(value))
    except (ValueError, RecursionError):
        return False
    return isinstance(team, list) and all(type(node) is int and node >= 0 for node in team)
