"""The token of a server on loopback: a file of its user, by port, that servers, workers and clients of that user share.

Whoever comes first makes the file, and it stays: servers and workers start in any order, and a server that was
restarted takes the clients that it had. Other users of the machine cannot read it.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from shardwright.clusters.secret_files import read_secret_file
from shardwright.errors import AuthenticationError, ClusterConfigError


def path_of(port: int) -> Path:
    """`$XDG_STATE_HOME/shardwright/tokens/PORT`, by default in `~/.local/state`.

    Not in `$XDG_RUNTIME_DIR`, which services and cron jobs lack, and which a log-out removes under running servers.
    """
    return _state_home() / "shardwright" / "tokens" / str(port)


def _state_home() -> Path:
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():
        return given
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:
        raise ClusterConfigError(
            "this user has no home directory, where the token of local servers could be kept",
            where="XDG_STATE_HOME",
            remedy="set XDG_STATE_HOME to a directory of this user's own",
        ) from None


def read_token(port: int) -> str | None:
    """The token of servers of this user at a port of this machine; None where there never was one.

    Raises AuthenticationError, with the file's name, where this process cannot read it, or others can.
    """
    path = path_of(port)

    def refuse(problem: str, remedy: str) -> AuthenticationError:
        return AuthenticationError(problem, remedy=remedy)

    try:
        token = read_secret_file(path, refuse).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AuthenticationError(
            f"the token of the server on this machine's port {port}, in {path}, cannot be read ({error.strerror})",
            remedy="run as the user who started the server, or set SHARDWRIGHT_TOKEN to the server's token",
        ) from None
    if not token:
        raise refuse(f"{path} is empty", f"rm {path}; the next server makes it again")
    return token


def read_or_make_token(port: int) -> str:
    """The same; makes one where there is none.

    Raises ClusterConfigError where it cannot be written.
    """
    path = path_of(port)
    while (token := read_token(port)) is None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_new(path, secrets.token_urlsafe(32))
        except OSError as error:
            raise ClusterConfigError(
                f"the token of this server cannot be kept here ({error.strerror or error})",
                where=str(path),
                remedy="set XDG_STATE_HOME to a directory that this user can write, or name a security.token_file",
            ) from None
    return token


def _write_new(path: Path, token: str) -> None:
    """Make the file with all of its contents at once, unless another process was faster."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # of mode 0600
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(token + "\n")
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(draft)
