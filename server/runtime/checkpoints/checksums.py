"""Checksums of a checkpoint: a bit that has changed since the save is an error that names the file, not a number.

| what                                     | is checked by                                                   |
|------------------------------------------|-----------------------------------------------------------------|
| chunks of arrays, in `d/…`               | a CRC-32 each, in `_shardwright_checksums`                      |
| which chunk lies where, types and shapes | the CRC-32C of each node of the database (OCDBT), by tensorstore|
| all other files: names, structure, times | a CRC-32 each, in `_shardwright_checksums`                      |
| `_shardwright_checksums`                 | a CRC-32 of its own                                             |

Each process writes a table of the chunks that it wrote; when all have, the first makes the one file of them, which lies
beside the claim. A checkpoint without it is of an earlier version, or another program's: it is read unchecked.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from shardwright.errors import CheckpointError
from shardwright.server.runtime.checkpoints import claims

#: Orbax's metadata of an item.
METADATA = "_METADATA"
#: The file of the checksums; with a number behind, of the chunks that one process wrote.
FILE = "_shardwright_checksums"
#: Names of arrays in one message.
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayChecksums:
    """Of an array's chunks, by key; see `chunks.py`."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    crc32: dict[str, int] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return len(self.crc32) == prod(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """Of a checkpoint: of its files, by name below it, and of its arrays, by name."""

    files: dict[str, int]
    arrays: dict[str, ArrayChecksums]


def names_of_arrays(item: Any) -> list[str]:
    """The names that Orbax's metadata of a PyTree has; nodes without leaves are no arrays."""
    leaves = json.loads((item / METADATA).read_bytes())["tree_metadata"].values()
    return [
        ".".join(str(key["key"]) for key in leaf["key_metadata"])
        for leaf in leaves
        if not leaf["value_metadata"].get("skip_deserialize")
    ]


def write_part(folder: Any, process: int, arrays: Mapping[str, ArrayChecksums]) -> None:
    """Store the checksums of the chunks that a process has written."""
    (folder / f"{FILE}.{process}").write_text(_to_text(Checksums(files={}, arrays=dict(arrays))))


def write(folder: Any, item: str) -> None:
    """Store the checksums of a checkpoint, once all is written but the mark of its commit. Raises CheckpointError."""
    arrays: dict[str, ArrayChecksums] = {}
    parts = [file for file in folder.iterdir() if file.name.startswith(f"{FILE}.")]
    for part in parts:
        for name, value in _from_text(part.read_text()).arrays.items():
            arrays.setdefault(name, ArrayChecksums(shape=value.shape, chunk=value.chunk)).crc32.update(value.crc32)
    missing = [name for name in names_of_arrays(folder / item) if name not in arrays or not arrays[name].is_whole]
    if missing:
        raise CheckpointError(
            f"not all parts of {_list(missing)} were written, or this node does not see them",
            where=str(folder),
            remedy="name a directory on a file system that all workers share",
        )
    for part in parts:
        part.unlink()
    files = {name: zlib.crc32(file.read_bytes()) for name, file in _covered_files(folder, item)}
    (folder / FILE).write_text(_to_text(Checksums(files=files, arrays=arrays)))


def has_checksums(folder: Any) -> bool:
    """Whether it was written with them."""
    return bool((folder / FILE).exists())


def check(folder: Any, item: str) -> Checksums | None:
    """Check the files of the item; returns all checksums, None without any.

    Raises CheckpointError naming a file that is gone, or not as it was written, and the arrays.
    """
    if not has_checksums(folder):
        return None
    checksums = _read(folder, item)
    for name, value in checksums.files.items():
        if not name.startswith(f"{item}/"):
            continue
        file = folder / name
        try:
            contents = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            contents = None
        if contents is None or zlib.crc32(contents) != value:
            what = "is gone" if contents is None else "is damaged: it is not as it was written (its checksum differs)"
            raise CheckpointError(
                f"the file {name} of the checkpoint {what}; without it none of its arrays can be read, which are "
                f"{_list(list(checksums.arrays))}",
                where=str(file),
                remedy="restore an earlier checkpoint (step=…), or a copy of this one",
            )
    return checksums


def is_intact(folder: Any, item: str, name: str) -> bool:
    """Whether a file is as it was written, as far as there are checksums."""
    if not has_checksums(folder):
        return True
    value = _read(folder, item).files.get(name)
    return value is None or zlib.crc32((folder / name).read_bytes()) == value


def _read(folder: Any, item: str) -> Checksums:
    file = folder / FILE
    try:
        return _from_text(file.read_bytes().decode())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    arrays: list[str] = []
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError):
        arrays = names_of_arrays(folder / item)
    raise CheckpointError(
        f"the file {FILE} of the checkpoint is damaged: it is not as it was written (its checksum differs); without it "
        f"none of its arrays can be checked, and none is read: {_list(arrays)}",
        where=str(file),
        remedy="restore an earlier checkpoint (step=…), or a copy of this one; or remove this file, and all is read "
        "unchecked",
    )


def _to_text(checksums: Checksums) -> str:
    """A line with the checksum of the next, and that."""
    text = json.dumps(asdict(checksums), sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}\n{text}"


def _from_text(text: str) -> Checksums:
    """Raises ValueError, and what else wrong JSON raises."""
    checksum, _, body = text.partition("\n")
    if int(checksum, 16) != zlib.crc32(body.encode()):
        raise ValueError("the checksum differs")
    facts = json.loads(body)
    arrays = {
        name: ArrayChecksums(shape=tuple(value["shape"]), chunk=tuple(value["chunk"]), crc32=value["crc32"])
        for name, value in facts["arrays"].items()
    }
    return Checksums(files=facts["files"], arrays=arrays)


def _list(arrays: Sequence[str]) -> str:
    names = [repr(name) for name in arrays[:_NAMED]]
    if len(arrays) > _NAMED:
        names.append(f"{len(arrays) - _NAMED} more")
    return ", ".join(names)


def _covered_files(folder: Any, item: str) -> Iterator[tuple[str, Any]]:
    """Files by their names below `folder`: all but data, which has checksums of its own, and claims, which change."""
    for prefix, place in (("", folder), (f"{item}/", folder / item)):
        for file in sorted(place.iterdir()):
            if file.name not in (claims.FILE, FILE) and not file.is_dir():
                yield prefix + file.name, file
