"""Claims on a directory: one session at a time saves in it, from its first save there until it is closed.

A claim is a small file in the folder of the session's newest save, temporary or complete, a directory thus holds
nothing but saves. It names the session and its server's process, and is renewed every RENEW_S. It counts

- on the server that it names, while the session is open;
- elsewhere, while it was renewed within LEASE_S by the clock of the file system, and, on the same machine,
  while that process runs.

The claims of a killed server thus lapse by themselves, and so does a copy of a checkpoint with its claim. A new session
looks for claims, makes one, and looks again: of two that come at the same moment both may be refused, but never does a
second one go on.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardwright.errors import CheckpointError
from shardwright.server.tuning import LEASE_S, RENEW_S

#: The file of a claim.
FILE = "_shardwright_save"

#: Whether a session of this server is open.
IsOpen = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A session's, for a directory.

    token: of the save, "session/number"; directory: without links; machine: where the server runs, the same for all
    processes that see each other's numbers; pid, started: its process, and the clock tick of its start.
    """

    token: str
    directory: str
    machine: str
    host: str
    pid: int
    started: str

    @property
    def session_id(self) -> str:
        return session_of(self.token)


def session_of(token: str) -> str:
    return token.partition("/")[0]


def write(folder: Any, token: str) -> None:
    """Claim the directory of `folder`, the folder of a save."""
    machine, pid = _machine(), os.getppid()  # the daemon: it outlives this process, and so do its sessions
    claim = Claim(
        token=token,
        directory=_directory_of(folder),
        machine=machine,
        host=socket.gethostname(),
        pid=pid,
        started=_start_tick(pid) or "",
    )
    (folder / FILE).write_text(json.dumps(asdict(claim)))


def read(folder: Any) -> Claim | None:
    """The claim in the folder of a save; None if there is none. An unreadable one has no known owner."""
    file = folder / FILE
    try:
        text = file.read_bytes().decode(errors="replace") if file.exists() else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    if text is None:
        return None
    try:
        claim = Claim(**json.loads(text))
    except (ValueError, TypeError):
        claim = None
    if claim is not None and isinstance(claim.token, str):
        return claim
    return Claim(token=text or "unknown", directory="", machine="", host="another machine", pid=0, started="")


def remove(folder: Any) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        (folder / FILE).unlink()


def of_session(claims: dict[Any, Claim], token: str) -> list[Any]:
    """The folders with claims of the session of `token`."""
    return [folder for folder, claim in claims.items() if claim.session_id == session_of(token)]


def require_free(directory: str, claims: dict[Any, Claim], token: str, is_open: IsOpen) -> None:
    """Raises CheckpointError naming the holder if one of the claims is another session's and counts."""
    for folder, claim in claims.items():
        if not is_blocking(folder, claim, token, is_open):
            continue
        if _is_of_this_server(claim):
            hint = "its server closes it by itself soon after its program has ended"
        else:
            hint = f"where its server was killed, the directory is free within {LEASE_S:.0f} s"
        raise CheckpointError(
            f"session {claim.session_id} saves in this directory (server process {claim.pid} on {claim.host})",
            where=directory,
            remedy=f"save in another directory, or close that session first; {hint}",
        )


def is_blocking(folder: Any, claim: Claim, token: str, is_open: IsOpen) -> bool:
    """Whether it keeps the session of `token` out."""
    if claim.session_id == session_of(token):
        return False
    if claim.machine == _machine() and claim.directory != _directory_of(folder):
        return False  # a copy
    if _is_of_this_server(claim):
        return is_open(claim.session_id)
    if claim.machine == _machine() and _start_tick(claim.pid) != claim.started:
        return False
    return _age_s(folder) < LEASE_S


class ClaimRenewer:
    """Renews the claims of this server's sessions until they are closed."""

    def __init__(self, is_open: IsOpen) -> None:
        self._is_open = is_open
        self._lock = threading.Lock()
        self._folders: dict[tuple[str, str], set[Any]] = {}  # by session and directory
        self._thread: threading.Thread | None = None

    def add(self, session_id: str, directory: str, folders: Iterable[Any]) -> None:
        """These folders of saves hold the session's claims."""
        with self._lock:
            self._folders.setdefault((session_id, directory), set()).update(folders)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="claims", daemon=True)
                self._thread.start()

    def settle(self, session_id: str, directory: str, folder: Any) -> None:
        """`folder` is the newest save now: its claim stands for the directory, and earlier ones go."""
        with self._lock:
            earlier = self._folders.get((session_id, directory), set())
            self._folders[session_id, directory] = {folder}
        for folder_before in earlier - {folder}:
            remove(folder_before)

    def release(self, session_id: str) -> None:
        """The session is closed."""
        with self._lock:
            keys = [key for key in self._folders if key[0] == session_id]
            folders = [folder for key in keys for folder in self._folders.pop(key)]
        for folder in folders:
            remove(folder)

    def _run(self) -> None:
        while True:
            time.sleep(RENEW_S)
            with self._lock:
                held = {key: set(folders) for key, folders in self._folders.items()}
            for session_id in {key[0] for key in held if not self._is_open(key[0])}:
                self.release(session_id)
            for key, folders in held.items():
                for folder in folders:
                    self._renew(key, folder)

    def _renew(self, key: tuple[str, str], folder: Any) -> None:
        try:
            renew(folder)
        except FileNotFoundError:  # abandoned, or taken over
            with self._lock:
                self._folders.get(key, set()).discard(folder)
        except OSError:
            pass  # the next time, perhaps; else it lapses


def renew(folder: Any) -> None:
    """Raises FileNotFoundError where the claim is gone."""
    file = folder / FILE
    if "://" not in os.fspath(file):
        os.utime(file)  # now, by the clock of the file system
    else:
        file.write_text(file.read_text())


def _is_of_this_server(claim: Claim) -> bool:
    pid = os.getppid()
    return (claim.machine, claim.pid, claim.started) == (_machine(), pid, _start_tick(pid) or "")


def _directory_of(folder: Any) -> str:
    directory: str = os.fspath(folder.parent)
    return directory if "://" in directory else os.path.realpath(directory)


def _age_s(folder: Any) -> float:
    """Seconds since a claim was renewed, by the clock of the file system."""
    probe = folder.parent / f".{FILE}-{uuid.uuid4().hex}"
    try:
        probe.write_text("")
        now_s = probe.stat().mtime
        probe.unlink()
    except OSError:
        now_s = time.time()
    try:
        return float(now_s - (folder / FILE).stat().mtime)
    except FileNotFoundError:
        return LEASE_S  # released in between


@cache
def _machine() -> str:
    """This boot of this machine, and the name space of its processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{uuid.getnode():x}"


def _start_tick(pid: int) -> str | None:
    """The tick at which a process of this machine started; None where it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
