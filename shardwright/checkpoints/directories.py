"""Checkpoint directories: a user's name of one, and the workers' path."""

from __future__ import annotations

import os
import re
from typing import Any

from shardwright.errors import CheckpointError

#: The largest number of a checkpoint.
MAX_STEP = (1 << 63) - 1

#: Stores that Orbax reads and writes, by the scheme of their URLs.
STORES = ("gs", "s3", "az", "hf")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(/?)(.*)", re.DOTALL)


def resolve_directory(directory: Any, *, is_local: bool) -> str:
    """`directory` as the workers are to see it.

    | directory                       | becomes                                                            |
    |---------------------------------|--------------------------------------------------------------------|
    | `gs://…`, or another of STORES  | itself                                                             |
    | an absolute path                | itself, without `.`, `..` and `//`                                 |
    | a relative path, `~`, `~user`   | what it means here, where the workers are here too; else refused   |
    | anything else                   | refused: nothing, blanks, another scheme, what is no text          |

    Args:
      is_local: whether the workers run on this machine, as this user.

    Raises CheckpointError.
    """
    text = _text(directory)
    url = _URL.match(text)
    if url is not None:
        return _check_url(text, url)
    if os.path.isabs(text):
        return os.path.abspath(text)
    if not is_local:
        raise _refusal(
            directory,
            "is relative to this program's own directories, which the server's workers do not have",
            "name an absolute path, as the workers see it",
        )
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise _refusal(directory, "begins with the home of a user who is not known", "name an absolute path")
    return os.path.abspath(expanded)


def _text(directory: Any) -> str:
    try:
        text = os.fspath(directory)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise _refusal(directory, "is no path", "name a directory, by a string or a pathlib.Path")
    if not text.strip():
        raise _refusal(directory, "names no directory", 'name one; "." is the working directory')
    try:
        is_name = "\0" not in text.encode().decode()
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise _refusal(directory, "holds characters that no path may have", "name another directory")
    return text


def _check_url(text: str, url: re.Match[str]) -> str:
    scheme, second_slash, rest = url.groups()
    if scheme.lower() not in STORES:
        stores = ", ".join(f"{store}://" for store in STORES)
        raise _refusal(text, "is of a scheme that Orbax does not take", f"name an absolute path, or one of {stores}")
    if not second_slash:
        raise _refusal(text, "has lost a slash, as in pathlib.Path", "pass the URL as a string")
    if not rest.strip("/"):
        raise _refusal(text, "names no bucket", f"name one: {scheme}://bucket/folder")
    return text


def _refusal(directory: Any, why: str, remedy: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint directory {directory!r} {why}", where="directory", remedy=remedy)
