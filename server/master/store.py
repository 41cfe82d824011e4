"""The master's state on disk: an embedded database in its state directory (SQLite in WAL mode).

One thread writes, in the order of the calls, as many at a time as are waiting: one transaction, one flush to the disk.
A call returns a future, done once its change is on the disk.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from shardwright.errors import ShardwrightError, StateStoreError
from shardwright.server.master.row_checks import Damage, Value, checksum_of, read_rows
from shardwright.server.tuning import STORE_BUSY_S

_log = logging.getLogger("shardwright.server")

#: Of the file's header: "SHWT".
APPLICATION_ID = 0x53485754
#: Of the schema; another one is refused, but for the one before, whose rows had no checksums.
VERSION = 2
FILE_NAME = "state.sqlite3"
_LOCK_NAME = "master.lock"

_SCHEMA = """
CREATE TABLE cluster (
  one INTEGER PRIMARY KEY CHECK (one = 1), hash TEXT NOT NULL, generation INTEGER NOT NULL, crc32 INTEGER
);
CREATE TABLE nodes (
  number INTEGER PRIMARY KEY, data_port INTEGER NOT NULL, takes_part INTEGER NOT NULL, crc32 INTEGER
);
CREATE TABLE sessions (
  id TEXT PRIMARY KEY, name TEXT NOT NULL, owner TEXT NOT NULL, salt TEXT NOT NULL, last_number INTEGER NOT NULL,
  highest_id INTEGER NOT NULL, is_told INTEGER NOT NULL, snapshot INTEGER NOT NULL, snapshot_bytes INTEGER NOT NULL,
  kept BLOB NOT NULL, snapshot_kept BLOB NOT NULL, crc32 INTEGER
);
CREATE TABLE executables (
  session_id TEXT NOT NULL, plan_id TEXT NOT NULL, crc32 INTEGER, PRIMARY KEY (session_id, plan_id)
);
CREATE TABLE programs (id TEXT PRIMARY KEY, gzip BLOB NOT NULL, text_bytes INTEGER NOT NULL, crc32 INTEGER);
CREATE TABLE plans (
  id TEXT PRIMARY KEY, program_id TEXT NOT NULL, json_gzip BLOB NOT NULL, first_device INTEGER NOT NULL,
  team TEXT NOT NULL, crc32 INTEGER
);
CREATE TABLE binaries (
  plan_id TEXT NOT NULL, number INTEGER NOT NULL, header TEXT NOT NULL, stablehlo BLOB NOT NULL,
  partitioned_gzip BLOB NOT NULL, serialized BLOB, crc32 INTEGER, PRIMARY KEY (plan_id, number)
);
CREATE TABLE holds (
  session_id TEXT NOT NULL, kind TEXT NOT NULL, item_id TEXT NOT NULL, crc32 INTEGER,
  PRIMARY KEY (session_id, kind, item_id)
);
"""
TABLES = ("cluster", "nodes", "sessions", "executables", "programs", "plans", "binaries", "holds")
_UNUSED = """
DELETE FROM plans WHERE id NOT IN (SELECT item_id FROM holds WHERE kind = 'plan');
DELETE FROM binaries WHERE plan_id NOT IN (SELECT id FROM plans);
DELETE FROM programs WHERE id NOT IN (SELECT item_id FROM holds WHERE kind = 'program')
  AND id NOT IN (SELECT program_id FROM plans);
"""
#: Before those: what belongs to sessions that are no more.
_OF_NOBODY = """
DELETE FROM executables WHERE session_id NOT IN (SELECT id FROM sessions);
DELETE FROM holds WHERE session_id NOT IN (SELECT id FROM sessions);
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
    "plan", its id). lost: why, by id, of sessions whose rows were damaged; lost_names: their names, by id.
    """

    generation: int = 0
    team: tuple[int, ...] = ()
    ports: Mapping[int, int] = field(default_factory=dict)
    sessions: tuple[SessionRow, ...] = ()
    programs: tuple[ProgramRow, ...] = ()
    plans: tuple[PlanRow, ...] = ()
    binaries: tuple[BinaryRow, ...] = ()
    holds: tuple[tuple[str, str, str], ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    lost_names: Mapping[str, str] = field(default_factory=dict)


_Write = Callable[[sqlite3.Connection], object]


class StateStore:
    """The database of one master; a second one of the same directory is refused.

    cluster_hash: of the cluster file; the directory belongs to that cluster from its first use on. Raises
    StateStoreError: the directory cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str], cluster_hash: str) -> None:
        self.directory = Path(directory).absolute()
        self._cluster_hash = cluster_hash
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
            values = (
                row.session_id, row.name, row.owner, row.salt, row.last_number, row.highest_id, row.is_told,
                row.snapshot, row.snapshot_bytes, row.kept, row.snapshot_kept,
            )  # fmt: skip
            _insert(database, "sessions", values, "REPLACE")
            database.execute("DELETE FROM executables WHERE session_id = ?", (row.session_id,))
            for plan_id in row.executables:
                _insert(database, "executables", (row.session_id, plan_id), "REPLACE")

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
            _insert(database, "programs", (row.program_id, row.gzip, row.text_bytes), "IGNORE")
            _insert(database, "holds", (session_id, "program", row.program_id), "IGNORE")

        return self._submit(write)

    def put_plan(self, session_id: str, row: PlanRow, program: ProgramRow) -> Future[None]:
        """Store a plan and its program, and that the session holds the plan."""

        def write(database: sqlite3.Connection) -> None:
            _insert(database, "programs", (program.program_id, program.gzip, program.text_bytes), "IGNORE")
            plan = (row.plan_id, row.program_id, row.json_gzip, row.first_device, json.dumps(row.team))
            _insert(database, "plans", plan, "IGNORE")
            _insert(database, "holds", (session_id, "plan", row.plan_id), "IGNORE")

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
            for row in rows:
                values = (row.plan_id, row.number, row.header, row.stablehlo, row.partitioned_gzip, row.serialized)
                _insert(database, "binaries", values, "REPLACE")

        return self._submit(write)

    def put_executors(self, generation: int, team: Sequence[int], ports: Mapping[int, int]) -> Future[None]:
        """Store the number of the executors that are about to be started, their nodes, and the ports of nodes' data."""

        def write(database: sqlite3.Connection) -> None:
            _insert(database, "cluster", (1, self._cluster_hash, generation), "REPLACE")
            database.execute("DELETE FROM nodes")
            for node, port in ports.items():
                _insert(database, "nodes", (node, port, node in team), "REPLACE")

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
                return _read(database, self.path, cluster_hash)
            finally:
                database.close()
        except sqlite3.Error as caught:
            raise _failure(self.path, caught) from None


def _open(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    database = sqlite3.connect(path, timeout=STORE_BUSY_S, isolation_level=None, check_same_thread=False)
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
            _insert(database, "cluster", (1, cluster_hash, 0), "REPLACE")
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {VERSION}")
        return
    if application != APPLICATION_ID:
        raise StateStoreError(
            "this is a database of another program", where=str(path), remedy="name another directory with --state-dir"
        )
    if version not in (VERSION, VERSION - 1):
        raise StateStoreError(
            f"the state was written by another version of Shardwright (schema {version}, this one reads {VERSION})",
            where=str(path),
            remedy="start that version, or move the file away: sessions of before are then gone, checkpoints are not",
        )
    (damage,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if damage != "ok":
        raise _damaged(path, damage)
    if version == VERSION - 1:
        with database:
            database.execute("BEGIN IMMEDIATE")
            for table in TABLES:
                database.execute(f"ALTER TABLE {table} ADD COLUMN crc32 INTEGER")
            database.execute(f"PRAGMA user_version = {VERSION}")


def _read(database: sqlite3.Connection, path: Path, cluster_hash: str) -> StoredState:
    """What is whole. Damaged rows are named in the log, and go, once the file as it was has been copied."""
    damages: list[Damage] = []
    rows = {table: read_rows(database, table, damages) for table in TABLES}
    generation = _generation(rows["cluster"], damages, path, cluster_hash)
    state = _state_of(rows)
    if any(damage.table in ("cluster", "nodes") for damage in damages):
        state = replace(state, team=(), ports={})
    if damages:
        _put_aside(database, damages, path)
        with database:
            database.execute("BEGIN IMMEDIATE")
            _delete_damaged(database, damages)
            if not state.team:
                database.execute("DELETE FROM nodes")
            _insert(database, "cluster", (1, cluster_hash, generation), "REPLACE")
    lost, lost_names = _lost_sessions(rows, damages)
    return replace(state, generation=generation, lost=lost, lost_names=lost_names)


def _state_of(rows: Mapping[str, Sequence[tuple[Any, ...]]]) -> StoredState:
    loaded: dict[str, list[str]] = {}
    for session_id, plan_id in rows["executables"]:
        loaded.setdefault(session_id, []).append(plan_id)
    sessions = [
        SessionRow(
            session_id=row[0], name=row[1], owner=row[2], salt=row[3], last_number=row[4], highest_id=row[5],
            is_told=bool(row[6]), snapshot=row[7], snapshot_bytes=row[8], kept=row[9], snapshot_kept=row[10],
            executables=tuple(loaded.get(row[0], ())),
        )
        for row in rows["sessions"]
    ]  # fmt: skip
    ids = {row.session_id for row in sessions}
    return StoredState(
        team=tuple(number for number, _, takes_part in rows["nodes"] if takes_part),
        ports={number: port for number, port, _ in rows["nodes"]},
        sessions=tuple(sessions),
        programs=tuple(ProgramRow(program_id=row[0], gzip=row[1], text_bytes=row[2]) for row in rows["programs"]),
        plans=tuple(
            PlanRow(
                plan_id=row[0],
                program_id=row[1],
                json_gzip=row[2],
                first_device=row[3],
                team=tuple(json.loads(row[4])),
            )
            for row in rows["plans"]
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
            for row in rows["binaries"]
        ),
        holds=tuple((row[0], row[1], row[2]) for row in rows["holds"] if row[0] in ids),
    )


def _generation(clusters: Sequence[tuple[Any, ...]], damages: Sequence[Damage], path: Path, cluster_hash: str) -> int:
    """Of the last executors. Raises StateStoreError where the state is not known to be this cluster's.

    Where it is damaged: a number above all that were given out, one a start, so that no executor of before is taken up.
    """
    if not clusters:
        damage = next((damage for damage in damages if damage.table == "cluster"), None)
        if damage is not None and damage.row[1] == cluster_hash:
            return int(time.time())
        how = "the row of table cluster is gone" if damage is None else str(damage).partition(";")[0]
        raise _damaged(path, f"{how}: whether the state is this cluster's cannot be known")
    _, stored_hash, generation = clusters[0]
    if stored_hash != cluster_hash:
        raise StateStoreError(
            "the state is that of a cluster with another cluster file",
            where=str(path),
            remedy="give each cluster a directory of its own; after a change of the file move this one away: sessions "
            "of before are then gone, checkpoints are not",
        )
    return int(generation)


def _put_aside(database: sqlite3.Connection, damages: Sequence[Damage], path: Path) -> None:
    """Name the damaged rows, and keep a copy of the file with them."""
    copy = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    with closing(sqlite3.connect(copy)) as target:
        database.backup(target)
    for damage in damages:
        _log.error("the state is damaged: %s", damage)
    _log.error("all else of the state is whole, and goes on; the file as it was is kept as %s", copy)


def _delete_damaged(database: sqlite3.Connection, damages: Sequence[Damage]) -> None:
    """Take the rows out, and what belonged to them alone."""
    for damage in damages:
        database.execute(f"DELETE FROM {damage.table} WHERE rowid = ?", (damage.rowid,))
    for statement in _OF_NOBODY.strip().split(";")[:-1]:
        database.execute(statement)
    _delete_unused(database)


def _lost_sessions(
    rows: Mapping[str, Sequence[tuple[Any, ...]]], damages: Sequence[Damage]
) -> tuple[dict[str, str], dict[str, str]]:
    """Why sessions are lost, and their names, by id: those of damaged rows, and those that only other rows name."""
    why = {str(damage.row[0]): str(damage) for damage in damages if damage.table == "sessions"}
    names = {str(damage.row[0]): str(damage.row[1]) for damage in damages if damage.table == "sessions"}
    if why:
        orphans = {row[0] for table in ("executables", "holds") for row in rows[table]}
        orphans -= {row[0] for row in rows["sessions"]}
        why |= {session_id: next(iter(why.values())) for session_id in orphans - why.keys()}
    return why, names


def _insert(database: sqlite3.Connection, table: str, values: Sequence[Value], otherwise: str) -> None:
    """Insert a row with its checksum; otherwise: what becomes of a row with that key, "REPLACE" or "IGNORE"."""
    marks = ", ".join("?" * (len(values) + 1))
    row = (*values, checksum_of(table, values))
    database.execute(f"INSERT OR {otherwise} INTO {table} VALUES ({marks})", row)


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
