"""The daemon of the master's own node, in a process of its own beside a master with a state directory.

It outlives the master by the server's grace, with its executor and the snapshots in its memory. A lock in the state
directory tells whether one runs: a restarted master finds it, and starts none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from shardwright.errors import ServerUnavailableError
from shardwright.server.master.store import take_lock
from shardwright.server.tuning import NODE_END_POLL_S, NODE_LOG_BYTES, NODE_LOOK_S, NODE_PAUSE_S, TAKE_OVER_S

LOCK_NAME = "node-0.lock"
LOG_NAME = "node-0.log"

_log = logging.getLogger("shardwright.server")


class NodeLock:
    """Held by the daemon until its end. Raises ServerUnavailableError if another daemon holds it."""

    def __init__(self, directory: Path) -> None:
        until_s = time.monotonic() + TAKE_OVER_S
        while (lock := take_lock(directory / LOCK_NAME)) is None:
            if time.monotonic() > until_s:
                raise ServerUnavailableError("the daemon of this node runs already", where=str(directory))
            time.sleep(NODE_END_POLL_S)
        self._lock = lock


class OwnNode:
    """Sees to it that the daemon runs. command: starts it."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self._command = command
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        """What the daemon writes to standard error: its log, and its executor's."""
        return self._directory / LOG_NAME

    async def run(self) -> int:
        """Start the daemon whenever there is none; returns the exit code of one that a person has to look after."""
        if self.is_running():
            _log.info("the daemon of this node has outlived the master before")
        while True:
            code = None if self._process is None else self._process.poll()
            if code == 1:
                return code
            if (self._process is None or code is not None) and not self.is_running():
                if code is not None:
                    _log.warning("the daemon of this node ended with exit code %d; starting it again", code)
                    await asyncio.sleep(NODE_PAUSE_S)
                self._start()
            await asyncio.sleep(NODE_LOOK_S)

    def is_running(self) -> bool:
        """Whether a daemon holds the lock."""
        lock = take_lock(self._directory / LOCK_NAME)
        if lock is not None:
            lock.close()
        return lock is None

    async def wait_for_end(self, seconds: float) -> None:
        """Return when the daemon has ended, as the master asked it to."""
        until_s = time.monotonic() + seconds
        while self.is_running() or (self._process is not None and self._process.poll() is None):
            if time.monotonic() > until_s:
                _log.warning("the daemon of this node has not ended within %g s", seconds)
                return
            await asyncio.sleep(NODE_END_POLL_S)

    def _start(self) -> None:
        path = self.log_path
        if path.exists() and path.stat().st_size > NODE_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
                start_new_session=True, env=dict(os.environ),
            )  # fmt: skip
