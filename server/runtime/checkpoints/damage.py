"""What is wrong where arrays of a checkpoint cannot be read: which of them, and the file that their bytes lie in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorstore as ts

from shardwright.errors import CheckpointError

#: How tensorstore says that bytes are not as they were written.
_DAMAGE = re.compile(r"DATA_LOSS|CRC-32C|Digest mismatch|Error decoding|Data corruption|decompress")
#: How it names a file, and a value of its database.
_FILE = re.compile(r'"([^"]*(?:/d/[0-9a-f]{32}|manifest\.ocdbt|\.json|\.zarray))"')
_KEY = re.compile(r'Error (?:reading|opening) "([^"]+)" in OCDBT')
#: Names in one message.
_NAMED = 5
_REMEDY = "restore an earlier checkpoint (step=…), or a copy of this one; arrays that are not named: with like=…"


class ChunkDamage(Exception):
    """A chunk of an array is not as it was written; key: of its value in the database."""

    def __init__(self, key: str) -> None:
        super().__init__(f'Error reading "{key}" in OCDBT database: Digest mismatch')


def of_arrays(item: Any, step: int, errors: Mapping[str, Exception], base: Any) -> CheckpointError:
    """The error of arrays, by name, that cannot be read.

    Args:
      item: folder of the checkpoint's PyTree.
      base: tensorstore's specification of the place of the database, where there is one.
    """
    name, error = next(iter(errors.items()))
    text = str(error)
    file = _file_in(text) or _file_of_value(text, base) or os.fspath(item)
    others = [repr(other) for other in list(errors)[1:_NAMED]]
    if len(errors) > _NAMED:
        others.append(f"{len(errors) - _NAMED} more")
    also = f" (and of {', '.join(others)})" if others else ""
    if _DAMAGE.search(text):
        what = f"array {name!r}{also} is damaged: its bytes are not as they were written (their checksum differs)"
    else:
        what = f"array {name!r}{also}: {shorten(error)}"
    return CheckpointError(f"checkpoint {step} cannot be read: {what}", where=file, remedy=_REMEDY)


def is_refusal(error: Exception) -> bool:
    """Whether the file may not be read or written."""
    return isinstance(error, PermissionError) or "PERMISSION_DENIED" in str(error)


def shorten(error: Exception) -> str:
    """The first line of an error, without tensorstore's notes for itself."""
    lines = str(error).partition(" [tensorstore_spec=")[0].strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _file_in(text: str) -> str | None:
    names = _FILE.findall(text.partition(" [tensorstore_spec=")[0])
    return names[-1] if names else None


def _file_of_value(text: str, base: Any) -> str | None:
    """The file in which the database keeps the value that an error names."""
    match = _KEY.search(text)
    if match is None or base is None:
        return None
    try:
        store = ts.KvStore.open(base).result()
        manifest = ts.ocdbt.dump(store).result()
        root = manifest["versions"][-1]["root"]["location"]
        for key, location in _values(store, root, b""):
            if key == match[1].encode():
                return os.path.join(store.url.removeprefix("file://"), location)
    except (ValueError, KeyError, IndexError, OSError):  # damaged as well
        pass
    return None


def _values(store: Any, node: str, prefix: bytes) -> Iterator[tuple[bytes, str]]:
    """Keys below a node, and the files of their values below the store's place."""
    for entry in ts.ocdbt.dump(store, node).result()["entries"]:
        if "subtree_common_prefix" in entry:
            yield from _values(store, entry["location"], prefix + entry["subtree_common_prefix"])
        elif "indirect_value" in entry:
            _, folder, place = entry["indirect_value"].split(":", 2)
            yield prefix + entry["key"], folder + place.rsplit(":", 2)[0]
