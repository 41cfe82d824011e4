"""The stored part of a master's state, and its times: the store follows the state, the state never waits for it.

Sessions are written after a change, at the latest at the next tick; answers to clients wait for `settle` first. ADR 52
has the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import zlib
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from shardwright.errors import ShardwrightError
from shardwright.protocol import wire
from shardwright.server.master import binaries, recovered
from shardwright.server.master import events as ev
from shardwright.server.master.content_store import PlanRecord
from shardwright.server.master.executables import NodesOf
from shardwright.server.master.programs import StoredProgram
from shardwright.server.master.store import PlanRow, ProgramRow, SessionRow, StateStore, StoredState

if TYPE_CHECKING:
    from shardwright.server.master.state import MasterState

#: Told how a change ended that the store was asked for.
_NoteEnd = Callable[[ShardwrightError | None], None]

_log = logging.getLogger("shardwright.server")


class Contents:
    """Programs and plans of a store, read. compiled: by plan."""

    def __init__(self, stored: StoredState, team: tuple[int, ...], nodes_of: NodesOf) -> None:
        """Blocking: plans are parsed. Unreadable ones are left out; their clients plan again.

        team: of which the executors of before, or others, will be. Plans for another one are left out as well.
        """
        self.programs = {
            row.program_id: StoredProgram(program_id=row.program_id, gzip=row.gzip, text_bytes=row.text_bytes)
            for row in stored.programs
        }
        self.plans: dict[str, PlanRecord] = {}
        for row in stored.plans:
            if row.team != team:
                continue
            plan, program = row.plan_id[:12], self.programs.get(row.program_id)
            if program is None:
                _log.warning("the plan %s is made again: its program is lost", plan)
                continue
            try:
                text = gzip.decompress(row.json_gzip).decode()
                self.plans[row.plan_id] = PlanRecord.of(text, program, row.first_device, row.team)
            except (ShardwrightError, ValueError, OSError, EOFError, zlib.error) as error:
                _log.warning("the plan %s of before the restart cannot be read, and is made again: %s", plan, error)
        self.compiled: dict[str, ev.ProgramInfo] = {}
        for plan_id, record in self.plans.items():
            rows = [row for row in stored.binaries if row.plan_id == plan_id]
            try:
                if rows:
                    self.compiled[plan_id] = binaries.to_program(plan_id, record, rows, nodes_of)
            except ShardwrightError as error:
                _log.info("%s", error)


class Ledger:
    """Of one master. Use it on one thread, that of an event loop.

    tell: gets a SnapshotNamed whenever the disk names another snapshot of a session, none any more, or cannot be
    written. call_soon: calls a function on that thread, from any other; RuntimeError where there is none any more.
    """

    def __init__(
        self,
        store: StateStore,
        state: MasterState,
        tell: Callable[[ev.SnapshotNamed], None],
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._store = store
        self._state = state
        self._tell = tell
        self._call_on_loop = call_soon
        self._rows: dict[str, SessionRow] = {row.session_id: row for row in store.loaded.sessions}
        self._named = {row.session_id: row.snapshot for row in store.loaded.sessions}  # as it is on the disk
        self._ending: set[str] = set()  # sessions whose deletion is under way
        self._executors: tuple[int, tuple[int, ...], dict[int, int]] = (0, (), {})
        self._is_failing = False

    def write(self) -> None:
        """Have the store write what has changed."""
        formation, sessions = self._state.formation, self._state.sessions
        ports = {index: record.data_port for index, record in formation.nodes.items()}
        executors = (formation.generation, formation.team, ports)
        if executors != self._executors:
            self._executors = executors
            self._watch(self._store.put_executors(*executors))
        for session_id in self._on_disk - sessions.keys() - self._ending:
            self._ending.add(session_id)
            self._rows.pop(session_id, None)
            self._watch(self._store.delete_session(session_id), partial(self._note_deletion, session_id))
        for session in sessions.values():
            row = recovered.row_of(session)
            if self._rows.get(session.session_id) != row:
                self._rows[session.session_id] = row
                self._watch(self._store.put_session(row), partial(self._note_row, row))

    def with_ended(self, sessions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """What daemons are to keep of sessions, and all of those that are still on the disk: a next master has them."""
        return list((dict.fromkeys(self._on_disk, 0) | dict(sessions)).items())

    @property
    def _on_disk(self) -> Set[str]:
        """Ids of the sessions that a next master would find, and of those that are on their way there."""
        return self._named.keys() | self._rows.keys()

    async def settle(self) -> None:
        """Return once the state as it is now is on the disk. Raises StateStoreError."""
        self.write()
        await asyncio.wrap_future(self._store.flush())
        if self._is_failing:  # a change of before: once more
            self.write()
            await asyncio.wrap_future(self._store.flush())

    def after(self, act: Callable[[], None]) -> None:
        """Call `act` on the event loop, in order, once the state as it is now is on the disk, or cannot be written."""
        self.write()
        self._store.flush().add_done_callback(lambda _: self._call_soon(act))

    async def put_program(self, session_id: str, program: StoredProgram) -> None:
        """Store a program that the session holds now. Raises StateStoreError."""
        await asyncio.wrap_future(self._store.put_program(session_id, _program_row(program)))

    async def put_plan(self, session_id: str, plan_id: str, record: PlanRecord) -> None:
        """Store a plan that the session holds now. Raises StateStoreError."""
        assert record.program is not None
        row = PlanRow(
            plan_id=plan_id,
            program_id=record.program.program_id,
            json_gzip=record.json_gzip,
            first_device=record.first_device,
            team=record.team,
        )
        await asyncio.wrap_future(self._store.put_plan(session_id, row, _program_row(record.program)))

    def drop_plans(self, plan_ids: Sequence[str]) -> None:
        """Forget plans of a team that is no more."""
        if plan_ids:
            self._watch(self._store.delete_plans(plan_ids))

    async def put_program_info(self, program: ev.ProgramInfo) -> None:
        """Store what was compiled of a plan."""
        rows = await asyncio.to_thread(binaries.to_rows, program)
        self._watch(self._store.put_binaries(rows))

    def close(self) -> None:
        """Write all, and let go of the directory. Blocking, for milliseconds."""
        self.write()
        self._store.close()

    def _watch(self, future: Future[None], note: _NoteEnd = lambda error: None) -> None:
        future.add_done_callback(lambda done: self._call_soon(partial(self._note_end, done, note)))

    def _note_end(self, done: Future[None], note: _NoteEnd) -> None:
        error = done.exception()
        if error is not None and not self._is_failing:
            _log.error("the state is not written: %s", error)
        self._is_failing = error is not None
        note(None if error is None else wire.to_shardwright_error(error))

    def _note_row(self, row: SessionRow, error: ShardwrightError | None) -> None:
        """What could not be written is tried again with the next change, or at the next tick."""
        name, before = row.session_id, self._named.get(row.session_id, 0)
        if error is None:
            self._named[name] = row.snapshot
        elif self._rows.get(name) == row:
            del self._rows[name]
        if row.snapshot != before:
            self._tell(ev.SnapshotNamed(session_id=name, number=row.snapshot, error=error))

    def _note_deletion(self, session_id: str, error: ShardwrightError | None) -> None:
        self._ending.discard(session_id)
        if error is None:
            self._named.pop(session_id, None)
            self._tell(ev.SnapshotNamed(session_id=session_id, number=0))

    def _call_soon(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._call_on_loop(act)


def _program_row(program: StoredProgram) -> ProgramRow:
    return ProgramRow(program_id=program.program_id, gzip=program.gzip, text_bytes=program.text_bytes)
