"""The master's state on disk: an embedded database in its state directory (SQLite in WAL mode).

One thread writes, in the order of the calls, as many at a time as are waiting: one transaction, one flush to the disk.
A call returns a future, done once its change is on the disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from shardwright.errors import ShardwrightError, StateStoreError

#: Of the file's header: "SHWT".
APPLICATION_ID = 0x53485754
#: Of the schema; another one is refused.
VERSION = 1
FILE_NAME = "state.sqlite3"
_LOCK_NAME = "master.lock"
#: Seconds that a write may wait for a reader (a backup, a person with a shell).
_BUSY_S = 10.0

_SCHEMA = """
CREATE TABLE cluster (one INTEGER PRIMARY KEY CHECK (one = 1), hash TEXT NOT NULL, generation INTEGER NOT NULL);
CREATE TABLE nodes (number INTEGER PRIMARY KEY, data_port INTEGER NOT NULL, takes_part INTEGER NOT NULL);
CREATE TABLE sessions (
  id TEXT PRIMARY KEY, name TEXT NOT NULL, owner TEXT NOT NULL, salt TEXT NOT NULL, last_number INTEGER NOT NULL,
  highest_id INTEGER NOT NULL, is_told INTEGER NOT NULL, snapshot INTEGER NOT NULL, snapshot_bytes INTEGER NOT NULL,
  kept BLOB NOT NULL, snapshot_kept BLOB NOT NULL
);
CREATE TABLE executables (session_id TEXT NOT NULL, plan_id TEXT NOT NULL, PRIMARY KEY (session_id, plan_id));
CREATE TABLE programs (id TEXT PRIMARY KEY, gzip BLOB NOT NULL, text_bytes INTEGER NOT NULL);
CREATE TABLE plans (
  id TEXT PRIMARY KEY, program_id TEXT NOT NULL, json_gzip BLOB NOT NULL, first_device INTEGER NOT NULL,
  team TEXT NOT NULL
);
CREATE TABLE binaries (
  plan_id TEXT NOT NULL, number INTEGER NOT NULL, header TEXT NOT NULL, stablehlo BLOB NOT NULL,
  partitioned_gzip BLOB NOT NULL, serialized BLOB, PRIMARY KEY (plan_id, number)
);
CREATE TABLE holds (
  session_id TEXT NOT NULL, kind TEXT NOT NULL, item_id TEXT NOT NULL, PRIMARY KEY (session_id, kind, item_id)
);
"""
_UNUSED = """
DELETE FROM plans WHERE id NOT IN (SELECT item_id FROM holds WHERE kind = 'plan');
DELETE FROM binaries WHERE plan_id NOT IN (SELECT id FROM plans);
DELETE FROM programs WHERE id NOT IN (SELECT item_id FROM holds WHERE kind = 'program')
  AND id NOT IN (SELECT program_id FROM plans);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A session. last_number: of its steps; highest_id: of its arrays. is_told, snapshot…: see `Snapshots`.

    session_id: a hash of its secret, which is nowhere here; salt: see `session_secrets.py`. executables: plans that it
    has loaded, or is loading. kept, snapshot_kept: serialized `KeptState`s.
    """

    session_id: str
    name: str = ""
    owner: str = ""
    salt: str = ""
    last_number: int = 0
    highest_id: int = 0
    is_told: bool = False
    snapshot: int = 0
    snapshot_bytes: int = 0
    executables: tuple[str, ...] = ()
    kept: bytes = b""
    snapshot_kept: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRow:
    """A program, as `StoredProgram` has it."""

    program_id: str
    gzip: bytes
    text_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A plan, as `PlanRecord` has it."""

    plan_id: str
    program_id: str
    json_gzip: bytes
    first_device: int
    team: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryRow:
    """A compiled program of a plan, see `binaries.py`."""

    plan_id: str
    number: int
    header: str
    stablehlo: bytes
    partitioned_gzip: bytes
    serialized: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """All that a master left.

    generation: of the last executors; team: their nodes; ports: of their data, by node. holds: (session, "program" or
    "plan", its id).
    """

    generation: int = 0
    team: tuple[int, ...] = ()
    ports: Mapping[int, int] = field(default_factory=dict)
    sessions: tuple[SessionRow, ...] = ()
    programs: tuple[ProgramRow, ...] = ()
    plans: tuple[PlanRow, ...] = ()
    binaries: tuple[BinaryRow, ...] = ()
    holds: tuple[tuple[str, str, str], ...] = ()


_Write = Callable[[sqlite3.Connection], object]


class StateStore:
    """The database of one master; a second one of the same directory is refused.

    cluster_hash: of the cluster file; the directory belongs to that cluster from its first use on. Raises
    StateStoreError: the directory cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str], cluster_hash: str) -> None:
        self.directory = Path(directory).absolute()
        self.path = self.directory / FILE_NAME
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = take_lock(self.directory / _LOCK_NAME)
        except OSError as error:
            raise StateStoreError(
                f"the state directory cannot be used: {error.strerror or error}",
                where=str(self.directory),
                remedy="name a local directory that the server's user may write, with --state-dir",
            ) from None
        if self._lock is None:
            raise StateStoreError(
                "another master uses this state directory",
                where=str(self.directory),
                remedy="stop it, or give each master a directory of its own",
            )
        try:
            self.loaded = self._load(cluster_hash)
        except BaseException:
            self._lock.close()
            raise
        self._writes: queue.SimpleQueue[tuple[_Write, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is waiting, and let go of the directory. May be called twice."""
        if self._lock is not None:
            self._writes.put(None)
            self._thread.join()
            self._lock.close()
            self._lock = None

    # ---- changes ---------------------------------------------------------------------------

    def put_session(self, row: SessionRow) -> Future[None]:
        """Store a session, or what has changed of it."""

        def write(database: sqlite3.Connection) -> None:
            database.execute(
                "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.session_id, row.name, row.owner, row.salt, row.last_number, row.highest_id, row.is_told,
                    row.snapshot, row.snapshot_bytes, row.kept, row.snapshot_kept,
                ),
            )  # fmt: skip
            database.execute("DELETE FROM executables WHERE session_id = ?", (row.session_id,))
            pairs = [(row.session_id, plan_id) for plan_id in row.executables]
            database.executemany("INSERT INTO executables VALUES (?, ?)", pairs)

        return self._submit(write)

    def delete_session(self, session_id: str) -> Future[None]:
        """Forget a session, and the programs and plans that no other one holds."""

        def write(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
            for table in ("executables", "holds"):
                database.execute(f"DELETE FROM {table} WHERE session_id = ?", (session_id,))
            _delete_unused(database)

        return self._submit(write)

    def put_program(self, session_id: str, row: ProgramRow) -> Future[None]:
        """Store a program, and that the session holds it."""

        def write(database: sqlite3.Connection) -> None:
            values = (row.program_id, row.gzip, row.text_bytes)
            database.execute("INSERT OR IGNORE INTO programs VALUES (?, ?, ?)", values)
            database.execute("INSERT OR IGNORE INTO holds VALUES (?, 'program', ?)", (session_id, row.program_id))

        return self._submit(write)

    def put_plan(self, session_id: str, row: PlanRow, program: ProgramRow) -> Future[None]:
        """Store a plan and its program, and that the session holds the plan."""

        def write(database: sqlite3.Connection) -> None:
            values = (program.program_id, program.gzip, program.text_bytes)
            database.execute("INSERT OR IGNORE INTO programs VALUES (?, ?, ?)", values)
            plan = (row.plan_id, row.program_id, row.json_gzip, row.first_device, json.dumps(row.team))
            database.execute("INSERT OR IGNORE INTO plans VALUES (?, ?, ?, ?, ?)", plan)
            database.execute("INSERT OR IGNORE INTO holds VALUES (?, 'plan', ?)", (session_id, row.plan_id))

        return self._submit(write)

    def delete_plans(self, plan_ids: Sequence[str]) -> Future[None]:
        """Forget plans, whoever holds them, and what was compiled of them."""

        def write(database: sqlite3.Connection) -> None:
            rows = [(plan_id,) for plan_id in plan_ids]
            database.executemany("DELETE FROM holds WHERE kind = 'plan' AND item_id = ?", rows)
            _delete_unused(database)

        return self._submit(write)

    def put_binaries(self, rows: Sequence[BinaryRow]) -> Future[None]:
        """Store what was compiled of a plan."""

        def write(database: sqlite3.Connection) -> None:
            values = [
                (row.plan_id, row.number, row.header, row.stablehlo, row.partitioned_gzip, row.serialized)
                for row in rows
            ]
            database.executemany("INSERT OR REPLACE INTO binaries VALUES (?, ?, ?, ?, ?, ?)", values)

        return self._submit(write)

    def put_executors(self, generation: int, team: Sequence[int], ports: Mapping[int, int]) -> Future[None]:
        """Store the number of the executors that are about to be started, their nodes, and the ports of nodes' data."""

        def write(database: sqlite3.Connection) -> None:
            database.execute("UPDATE cluster SET generation = ?", (generation,))
            database.execute("DELETE FROM nodes")
            rows = [(node, port, node in team) for node, port in ports.items()]
            database.executemany("INSERT INTO nodes VALUES (?, ?, ?)", rows)

        return self._submit(write)

    def flush(self) -> Future[None]:
        """Done once all changes before it are."""
        return self._submit(lambda database: None)

    def _submit(self, write: _Write) -> Future[None]:
        future: Future[None] = Future()
        self._writes.put((write, future))
        return future

    # ---- the writing thread ----------------------------------------------------------------

    def _write_all(self) -> None:
        database = _open(self.path)
        is_closing = False
        while not is_closing:
            waiting = [self._writes.get()]
            while not self._writes.empty():
                waiting.append(self._writes.get())
            is_closing = None in waiting
            writes = [write for write in waiting if write is not None]
            if not self._commit(database, writes):
                for write in writes:  # so that only those fail that have to
                    self._commit(database, [write], is_last=True)
        database.close()

    def _commit(
        self, database: sqlite3.Connection, writes: Sequence[tuple[_Write, Future[None]]], *, is_last: bool = False
    ) -> bool:
        """Carry out changes in one transaction; whether it went well. is_last: their futures get the error."""
        try:
            with database:
                database.execute("BEGIN IMMEDIATE")
                for write, _ in writes:
                    write(database)
        except sqlite3.Error as caught:
            for _, future in writes if is_last else ():
                future.set_exception(_failure(self.path, caught))
            return False
        for _, future in writes:
            future.set_result(None)
        return True

    # ---- reading ---------------------------------------------------------------------------

    def _load(self, cluster_hash: str) -> StoredState:
        try:
            database = _open(self.path)
            try:
                _prepare(database, self.path, cluster_hash)
                return _read(database)
            finally:
                database.close()
        except sqlite3.Error as caught:
            raise _failure(self.path, caught) from None


def _open(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")  # a commit survives the machine, not only the process
    return database


def _prepare(database: sqlite3.Connection, path: Path, cluster_hash: str) -> None:
    """Make the tables of a new file; refuse what is not ours."""
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    (count,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not count:
        with database:
            database.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.strip().split(";")[:-1]:
                database.execute(statement)
            database.execute("INSERT INTO cluster VALUES (1, ?, 0)", (cluster_hash,))
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {VERSION}")
        return
    if application != APPLICATION_ID:
        raise StateStoreError(
            "this is a database of another program", where=str(path), remedy="name another directory with --state-dir"
        )
    if version != VERSION:
        raise StateStoreError(
            f"the state was written by another version of Shardwright (schema {version}, this one reads {VERSION})",
            where=str(path),
            remedy="start that version, or move the file away: sessions of before are then gone, checkpoints are not",
        )
    (damage,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if damage != "ok":
        raise _damaged(path, damage)
    (stored_hash,) = database.execute("SELECT hash FROM cluster").fetchone()
    if stored_hash != cluster_hash:
        raise StateStoreError(
            "the state is that of a cluster with another cluster file",
            where=str(path),
            remedy="give each cluster a directory of its own; after a change of the file move this one away: sessions "
            "of before are then gone, checkpoints are not",
        )


def _read(database: sqlite3.Connection) -> StoredState:
    loaded: dict[str, list[str]] = {}
    for session_id, plan_id in database.execute("SELECT * FROM executables ORDER BY rowid"):
        loaded.setdefault(session_id, []).append(plan_id)
    sessions = [
        SessionRow(
            session_id=row[0], name=row[1], last_number=row[2], highest_id=row[3], is_told=bool(row[4]),
            snapshot=row[5], snapshot_bytes=row[6], kept=row[7], snapshot_kept=row[8], owner=row[9], salt=row[10],
            executables=tuple(loaded.get(row[0], ())),
        )
        for row in database.execute(
            "SELECT id, name, last_number, highest_id, is_told, snapshot, snapshot_bytes, kept, snapshot_kept, owner, "
            "salt FROM sessions ORDER BY rowid"
        )
    ]  # fmt: skip
    (generation,) = database.execute("SELECT generation FROM cluster").fetchone()
    programs = database.execute("SELECT * FROM programs").fetchall()
    plans = database.execute("SELECT * FROM plans").fetchall()
    nodes = database.execute("SELECT * FROM nodes ORDER BY number").fetchall()
    return StoredState(
        generation=generation,
        team=tuple(number for number, _, takes_part in nodes if takes_part),
        ports={number: port for number, port, _ in nodes},
        sessions=tuple(sessions),
        programs=tuple(ProgramRow(program_id=row[0], gzip=row[1], text_bytes=row[2]) for row in programs),
        plans=tuple(
            PlanRow(
                plan_id=row[0],
                program_id=row[1],
                json_gzip=row[2],
                first_device=row[3],
                team=tuple(json.loads(row[4])),
            )
            for row in plans
        ),
        binaries=tuple(
            BinaryRow(
                plan_id=row[0],
                number=row[1],
                header=row[2],
                stablehlo=row[3],
                partitioned_gzip=row[4],
                serialized=row[5],
            )
            for row in database.execute("SELECT * FROM binaries").fetchall()
        ),
        holds=tuple(database.execute("SELECT * FROM holds").fetchall()),
    )


def _delete_unused(database: sqlite3.Connection) -> None:
    for statement in _UNUSED.strip().split(";")[:-1]:
        database.execute(statement)


def _failure(path: Path, caught: sqlite3.Error) -> ShardwrightError:
    code = getattr(caught, "sqlite_errorcode", sqlite3.SQLITE_NOTADB) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
        return _damaged(path, str(caught))
    if code == sqlite3.SQLITE_FULL:
        return StateStoreError("the disk is full", where=str(path), remedy="free space there")
    return StateStoreError(
        f"it cannot be read or written: {caught}", where=str(path), remedy="check its disk, and who may write it"
    )


def _damaged(path: Path, how: str) -> StateStoreError:
    return StateStoreError(
        f"the file is damaged, or no state of Shardwright: {how}",
        where=str(path),
        remedy="move it away, and start again: sessions of before are then gone, checkpoints are not",
    )


def take_lock(path: Path) -> IO[bytes] | None:
    """The locked file; None: another process holds it. The lock ends with the process, or when the file is closed."""
    file = os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600), "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    return file
