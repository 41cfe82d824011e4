"""What a session holds open on the servers and here, from its opening to its end."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from shardwright.client.array_store import ArrayStore
from shardwright.client.cluster_view import ClusterView
from shardwright.client.connection import Dialer, MasterConnection, SessionInfo
from shardwright.client.handles import Handles
from shardwright.client.journal import Entry
from shardwright.client.limits import LAST_LINES_S
from shardwright.client.node_failures import explain_node_failure
from shardwright.client.program_cache import ProgramCache
from shardwright.client.protection import Snapshot
from shardwright.client.recovery import Recovery
from shardwright.client.releases import Releases
from shardwright.client.relocation import relocate
from shardwright.client.session_saves import SessionSaves
from shardwright.client.steady_calls import SteadyCalls
from shardwright.client.step_queue import StepQueue
from shardwright.client.stream import StepStream
from shardwright.client.transfer import ArrayTransfer, Upload
from shardwright.errors import SessionError, ShardwrightError
from shardwright.package import VERSION

if TYPE_CHECKING:
    from shardwright.client.automatic_saves import AutomaticSaves
    from shardwright.client.embedded import EmbeddedServer

_log = logging.getLogger("shardwright")


class SessionState:
    """The parts of one session; its steps and handles hold the ones that they need, and each of those holds this.

    It is closed with the last of them, by `close`, or at this program's end. server: the embedded server that ends with
    it, if any.

    | part    | what it is                                                              |
    |---------|-------------------------------------------------------------------------|
    | cluster | the nodes that there are, and what was said at the opening              |
    | arrays  | ids, contents, layouts, handles, releases                               |
    | steps   | programs to be run, moves, errors of earlier steps; survival of losses  |
    | saves   | checkpoints                                                             |
    """

    def __init__(self, address: str, dialer: Dialer, server: EmbeddedServer | None, name: str = "") -> None:
        self.server = server
        self._pid = os.getpid()
        is_gone: Callable[[], bool] = (lambda: False) if server is None else server.has_ended
        self.master = MasterConnection(address, dialer, is_gone)
        info = self.master.open(VERSION, name)
        taken_up = self.master.taken_up
        this, lock = weakref.ref(self), threading.RLock()
        self._transfer = ArrayTransfer(info, dialer, partial(explain_node_failure, self.master), self.master.retries)
        self._stream = StepStream(
            self.master.run_steps,
            info.session_id,
            self.master.cancel_steps,
            reconnect_s=info.grace_s,
            first_number=taken_up.last_step + 1 if taken_up is not None else 1,
            is_gone=is_gone,
        )
        self._stream.drain_heard = partial(_meet_drain, this)
        self._stream.write_again = partial(_write_again, self._transfer)
        self._automatic_saves: AutomaticSaves | None = None
        self.readers: list[weakref.WeakMethod[Callable[[], None]]] = []  # what frameworks bring in before the end
        self.cluster = ClusterView(self.master, self._stream, self._transfer, name)
        handles = Handles(self.master, self._stream)
        recovery = Recovery(
            self.cluster, handles, self._stream, self._transfer.put,
            relocate=partial(_relocate, this), lose_kept=partial(_lose_kept, this),
        )  # fmt: skip
        calls = SteadyCalls(self.cluster, self._stream, recovery, lock)
        self._releases = Releases(lock, self._stream, self.master)
        self.arrays = ArrayStore(self.cluster, self._transfer, recovery, calls, self._releases, handles, self)
        self.steps = StepQueue(self.arrays, ProgramCache(self.arrays, lock), self._stream, recovery, calls, lock)
        self.saves = SessionSaves(self.steps, is_local=server is not None)
        _open_states.add(self)

    @property
    def info(self) -> SessionInfo:
        """The server's reply to opening the session, with the nodes of now."""
        return self.cluster.info

    @property
    def draining(self) -> str:
        """See `Session.draining`."""
        return self._stream.draining

    def save_by(self, automatic: AutomaticSaves | None) -> None:
        """From now on the kept state is written to checkpoints beside the steps; None: it is not."""
        self._automatic_saves = automatic
        self.steps.step_sent = (lambda: None) if automatic is None else automatic.save_if_due

    def close(self) -> None:
        """See `Session.close`."""
        self._read_last_values()
        self._say_last_lines()
        error = self._close()
        if error is not None:
            raise error

    def leave(self) -> None:
        """See `Session.leave`."""
        self._read_last_values()
        self._say_last_lines()
        error = self._close(leaves=True)
        if error is not None:
            raise error

    def _read_last_values(self) -> None:
        if self.cluster.is_closed or os.getpid() != self._pid:
            return
        for reader in [reader() for reader in self.readers]:
            try:
                if reader is not None:
                    reader()
            except ShardwrightError as error:
                _log.warning("the session ends, and its last values are not here: %s", error)
                return

    def _say_last_lines(self, timeout_s: float | None = None) -> None:
        """What the last steps say by `jax.debug`; a callback's error that no call has raised goes to the log."""
        if self.cluster.is_closed or os.getpid() != self._pid:
            return
        self.steps.debug_lines.wait(timeout_s=timeout_s)
        error = self.steps.debug_lines.take_error()
        if error is not None:
            _log.error("%s", error, exc_info=error.__cause__)

    def close_quietly(self) -> None:
        """Closes without raising, when no caller is left; a session with a name waits for the next program."""
        error = self._close(leaves=bool(self.cluster.name))
        if error is not None:
            _log.error("the last save failed: %s", error)

    def _close(self, *, leaves: bool = False) -> ShardwrightError | None:
        """The error of a save, not raised before. leaves: the session stays on the servers."""
        if self.cluster.is_closed or os.getpid() != self._pid:  # a forked child leaves its parent's session alone
            return None
        if self._automatic_saves is not None:
            self._automatic_saves.settle()
        error = self.saves.last_save.take_error()
        has_name = bool(self.cluster.name)
        leaves = leaves or (has_name and self._stream.has_lost_session)  # a successor's is not ours to close
        self.cluster.is_closed = True
        self._releases.close()
        self._stream.close()
        self._transfer.close()
        self.master.close(leaves=leaves)
        if self.server is not None:
            self.server.close()
        return error

    def __del__(self) -> None:
        if hasattr(self, "saves"):  # else it was never opened
            self.close_quietly()


def _write_again(transfer: ArrayTransfer, uploads: Sequence[Upload]) -> None:
    """Arguments of steps that run again by themselves, to executors that have started; not in the stream's thread."""

    def write() -> None:
        try:
            transfer.put(list({upload.array_id: upload for upload in uploads}.values()))
        except (ShardwrightError, RuntimeError) as error:  # lost again, or closed: then the steps fail
            _log.warning("arguments of steps that wait could not be written again: %s", error)

    threading.Thread(target=write, name="shardwright-uploads", daemon=True).start()


def _meet_drain(state_ref: weakref.ref[SessionState], is_over: bool) -> None:
    """The servers, or a node of them, are about to end, or not any more."""
    state = state_ref()
    if state is None or state._automatic_saves is None:
        return
    if is_over:
        state._automatic_saves.forget_last_save()
    else:
        state._automatic_saves.begin_last_save()


def _relocate(
    state_ref: weakref.ref[SessionState], base: Snapshot, entries: Sequence[Entry], check: Callable[[], None]
) -> int:
    """See `Recovery`."""
    state = state_ref()
    if state is None:
        raise SessionError("the session is closed", remedy="open a new one with connect()")
    return relocate(state.steps, base, entries, check)


def _lose_kept(state_ref: weakref.ref[SessionState]) -> bool:
    """All arrays are gone; whether some were kept."""
    state = state_ref()
    if state is None or state.steps.kept is None:
        return False
    state.steps.kept.is_lost = True
    return True


_open_states: weakref.WeakSet[SessionState] = weakref.WeakSet()


@atexit.register
def _close_states() -> None:
    for state in list(_open_states):
        state._say_last_lines(LAST_LINES_S)
        state.close_quietly()
