"""Files that hold secrets: read only where nobody else can read them.

The rule is PostgreSQL's: mode 0600 or stricter; a file of root, read by another user, may be readable by its group
(0640), which is how Kubernetes and certificate tools hand secrets to a service.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from shardwright.input_files import open_input, read_descriptor
from shardwright.tuning import PIPE_WAIT_S

#: Mode bits of the group and of others.
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_secret_file(path: Path, refuse: Callable[[str, str], Exception]) -> bytes:
    """The contents. `refuse(problem, remedy)` makes the error that is raised where others can read or change the file.

    Raises OSError where it cannot be read at all.
    """
    descriptor = open_input(path)
    problem = exposure_of(path, os.fstat(descriptor))
    if problem is not None:
        os.close(descriptor)
        raise refuse(*problem)
    return read_descriptor(descriptor, path, wait_s=PIPE_WAIT_S)


def exposure_of(path: Path, facts: os.stat_result, reader: int | None = None) -> tuple[str, str] | None:
    """(problem, remedy) of a file that others than its reader (a user's number; default: this process') can read or
    change; None where they cannot.
    """
    if not stat.S_ISREG(facts.st_mode):
        return None  # a pipe of the shell, such as <(vault read …): nobody else's to open
    me = os.geteuid() if reader is None else reader
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid not in (me, 0):
        return f"{path} belongs to user {facts.st_uid}, not to the user of this process", f"chown {me} {path}"
    allowed = stat.S_IRGRP if facts.st_uid == 0 and me != 0 else 0
    if mode & _OTHERS & ~allowed:
        return f"{path} can be read or changed by other users (mode {mode:04o})", f"chmod 600 {path}"
    return None
