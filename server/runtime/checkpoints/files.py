"""Checkpoints as files, in Orbax's own format: `DIRECTORY/STEP/default`, a PyTree in OCDBT.

Orbax writes and reads the formats, names and commits directories; what is ours is
which boxes of an array a process writes (`shardwright/plans/shard_pieces.py`), and that no process waits for
another here: the master orders the phases begin → write → commit (or abandon). Plain
`orbax.checkpoint.CheckpointManager` reads the result. Paths are whatever Orbax takes
(`gs://…` too); all workers must see the same file system.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from shardwright.checkpoints import trees
from shardwright.dtypes import to_element_type
from shardwright.errors import CheckpointError
from shardwright.plans.layouts import Slices
from shardwright.server.runtime.checkpoints import arrays, checksums, chunks, claims, damage, folders
from shardwright.server.runtime.checkpoints.checksums import METADATA
from shardwright.server.runtime.checkpoints.folders import ITEM, STRUCTURE
from shardwright.server.tuning import CHECKPOINT_CHUNK_BYTES, DIRECTORY_POLL_S, DIRECTORY_VISIBLE_S

T = TypeVar("T")


#: A box of an array, and its contents.
Block = tuple[Slices, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPart:
    """What this process writes of one array: blocks, each a box of `shape` and made of whole chunks."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for _, block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredType:
    """An array in a checkpoint; `element_type` is HLO's name."""

    element_type: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint holds: the structure, the arrays by their names in it, and when it was complete.

    has_checksums: whether damage to it would be seen.
    """

    tree: trees.Tree
    arrays: dict[str, StoredType]
    saved_at: datetime | None
    has_checksums: bool


# ---- which checkpoints there are -------------------------------------------------------


def steps(directory: str) -> tuple[int, ...]:
    """Numbers of the complete checkpoints, ascending; none where the directory does not exist."""
    return _with_checkpoint_errors(directory, "cannot be listed", lambda: tuple(folders.checkpoints(directory)))


def keep_latest(directory: str, count: int) -> None:
    """Remove those of our checkpoints that `count` later ones of ours follow, oldest first."""
    _with_checkpoint_errors(directory, "cannot be tidied", lambda: folders.keep_latest(directory, count))


# ---- one save, in phases ------------------------------------------------------------------


def begin(directory: str, step: int, token: str, is_open: claims.IsOpen = lambda session_id: True) -> list[Any]:
    """By one process, before any writes: makes the folder of the save, not yet a checkpoint.

    Leftovers of our broken saves in `directory` are removed. Returns the folders that hold the session's claims.

    Args:
      token: "session/number", of this save alone.
      is_open: whether a session of this server is open.

    Raises CheckpointError if another session saves in `directory`, `step` does not follow its checkpoints or names
    something else, or nothing can be written.
    """

    def make_folder() -> list[Any]:
        claims_by_folder = folders.read_claims(directory)
        held = claims.of_session(claims_by_folder, token)
        if not held:
            claims.require_free(directory, claims_by_folder, token, is_open)
        folders.remove_leftovers(directory, token, is_open)
        _require_next(directory, step)
        folder = folders.temporary_path(directory, step, token).get()
        folder.mkdir(parents=True)
        try:
            claims.write(folder, token)
            if not held:  # another may have begun at the same moment
                claims.require_free(directory, folders.read_claims(directory), token, is_open)
            (folder / ITEM).mkdir()
        except Exception:
            folder.rmtree(missing_ok=True)
            raise
        return [*held, folder]

    return _with_checkpoint_errors(directory, "cannot be written", make_folder)


def _require_next(directory: str, step: int) -> None:
    """Raises CheckpointError unless `step` comes after the checkpoints, and its name is free."""
    latest = max(folders.checkpoints(directory), default=-1)
    if step <= latest:
        raise CheckpointError(
            f"checkpoint {latest} is there already, and {step} does not come after it",
            where=directory,
            remedy="restore the latest, or save in another directory",
        )
    if str(step) in {child.name for child in folders.children(directory)}:
        raise CheckpointError(
            f"{os.path.join(directory, str(step))} is there already, and is no checkpoint that Orbax completed",
            where=directory,
            remedy="move it away, save under another number (step=…), or in another directory",
        )


def write(
    directory: str,
    step: int,
    token: str,
    tree: trees.Tree,
    parts: dict[str, ArrayPart],
    *,
    visible_s: float = DIRECTORY_VISIBLE_S,
) -> int:
    """By every process, at the same time: its parts of all arrays; returns their bytes.

    visible_s: seconds that the directory made by `begin` may take to be seen here.

    Raises CheckpointError where it is not seen by then.
    """
    folder = folders.temporary_path(directory, step, token).get()
    _await_claim(directory, folder, token, visible_s)
    item = trees.build(tree, lambda leaf: parts[leaf.name], trees.plain)
    arguments = ocp.args.PyTreeSave(item, custom_metadata={STRUCTURE: trees.to_json(tree)})

    def write_parts() -> int:
        part_handler = _PartHandler()
        handler = _handler(part_handler)
        for future in asyncio.run(handler.async_save(folder / ITEM, args=arguments)) or ():
            future.result()
        handler.close()
        checksums.write_part(folder, ocp.multihost.process_index(), part_handler.checksums)
        return sum(part.nbytes for part in parts.values())

    return _with_checkpoint_errors(directory, "cannot be written", write_parts)


def commit(directory: str, step: int, token: str) -> Any:
    """By the process that began, once all have written: from now on it is a checkpoint; returns its folder."""

    def commit_folder() -> Any:
        temporary = folders.temporary_path(directory, step, token)
        claim = claims.read(temporary.get())
        if claim is None or claim.token != token:
            raise CheckpointError(
                f"what was written of checkpoint {step} is gone: another session has taken the directory over",
                where=directory,
                remedy="save in a directory in which no other session saves",
            )
        handler = _handler()
        handler.finalize(temporary.get() / ITEM)
        handler.close()
        facts = {
            "item_handlers": {ITEM: ocp.PyTreeCheckpointHandler().typestr()},
            "commit_timestamp_nsecs": time.time_ns(),
        }
        (temporary.get() / folders.STEP_METADATA).write_text(json.dumps(facts))
        checksums.write(temporary.get(), ITEM)
        asyncio.run(temporary.finalize())
        return temporary.get_final()

    return _with_checkpoint_errors(directory, "cannot be written", commit_folder)


def abandon(directory: str, step: int, token: str) -> None:
    """Remove what `begin` and `write` have made, unless it was committed, or is another's by now."""
    folder = folders.temporary_path(directory, step, token).get()
    claim = claims.read(folder)
    if (claim is None or claim.token == token) and not folders.is_complete(folder):
        folder.rmtree(missing_ok=True)


# ---- reading --------------------------------------------------------------------------------


def contents(directory: str, step: int) -> Contents:
    """Contents of checkpoint `step`, by any writer.

    Raises CheckpointError if it is not complete, not there, or damaged, but for the chunks of arrays.
    """
    folder = epath.Path(directory) / str(step)
    if not folders.is_complete(folder):
        raise CheckpointError(
            f"there is no complete checkpoint {step}", where=directory, remedy="`shardwright checkpoints` lists them"
        )

    def read() -> Contents:
        has_checksums = checksums.check(folder, ITEM) is not None
        item = _item(directory, step)
        own = (arrays.facts_of(item).get("custom_metadata") or {}).get(STRUCTURE)
        tree, types = _foreign_contents(item, step) if own is None else _own_contents(item, step, own)
        saved_at = _read_save_time(directory, step)
        return Contents(tree=tree, arrays=types, saved_at=saved_at, has_checksums=has_checksums)

    return _with_checkpoint_errors(directory, f"holds no PyTree that can be read as checkpoint {step}", read)


def _own_contents(item: Any, step: int, structure: Any) -> tuple[trees.Tree, dict[str, StoredType]]:
    stores = asyncio.run(arrays.open_all(item, step, checksums.names_of_arrays(item)))
    types = {name: _stored_type(store.dtype.numpy_dtype, store.shape) for name, store in stores.items()}
    return trees.from_json(structure), types


def _foreign_contents(item: Any, step: int) -> tuple[trees.Tree, dict[str, StoredType]]:
    try:
        metadata = ocp.PyTreeCheckpointHandler().metadata(item)
    except Exception:
        asyncio.run(arrays.open_all(item, step, checksums.names_of_arrays(item)))  # names the array, and the file
        raise
    types: dict[str, StoredType] = {}
    return _tree_of(metadata.tree, (), types), types


def _stored_type(dtype: Any, shape: Sequence[int]) -> StoredType:
    return StoredType(element_type=to_element_type(np.dtype(dtype)), shape=tuple(shape))


def read(directory: str, step: int, boxes: Sequence[tuple[str, Slices]]) -> list[np.ndarray]:
    """The boxes of arrays, by name, of checkpoint `step`; by whole chunks, which are checked where there are checksums.

    Raises CheckpointError naming an array that is damaged, and the file.
    """

    def read_boxes() -> list[np.ndarray]:
        table = checksums.check(epath.Path(directory) / str(step), ITEM)
        return asyncio.run(arrays.read(_item(directory, step), step, boxes, table))

    return _with_checkpoint_errors(directory, f"checkpoint {step} cannot be read", read_boxes)


def _item(directory: str, step: int) -> Any:
    """The folder of the PyTree: ours, the only item of another's checkpoint, or the checkpoint itself."""
    folder = epath.Path(directory) / str(step)
    candidates = [folder / ITEM, folder, *sorted(folder.iterdir())]
    return next((item for item in candidates if (item / METADATA).exists()), folder / ITEM)


def _read_save_time(directory: str, step: int) -> datetime | None:
    """Local time; None where the writer has not said it, or it is damaged: nothing else rests on it."""
    folder = epath.Path(directory) / str(step)
    if not checksums.is_intact(folder, ITEM, folders.STEP_METADATA):
        return None
    written_ns = (folders.step_metadata(folder) or {}).get("commit_timestamp_nsecs")
    return datetime.fromtimestamp(written_ns / 1e9) if written_ns else None


def _tree_of(value: Any, path: tuple[str, ...], types: dict[str, StoredType]) -> trees.Tree:
    """The structure in Orbax's form: dicts, lists, and empty nodes."""
    if value is None:
        return trees.Node(kind="none")
    if isinstance(value, dict):
        items = [(key, _tree_of(value[key], (*path, str(key)), types)) for key in sorted(value)]
        return trees.Node(kind="dict", children=tuple(items))
    if isinstance(value, list | tuple):
        entries = [(n, _tree_of(child, (*path, str(n)), types)) for n, child in enumerate(value)]
        return trees.Node(kind="list" if isinstance(value, list) else "tuple", children=tuple(entries))
    name = ".".join(path)
    if hasattr(value, "dtype"):  # else a string or another thing that is no array
        types[name] = _stored_type(value.dtype, value.shape)
    return trees.Leaf(name=name)


# ---- Orbax ------------------------------------------------------------------------------------


class _PartHandler(ocp.type_handlers.TypeHandler):  # type: ignore[misc]
    """Writes `ArrayPart`s. Readers get numpy arrays, or `jax.Array`s on request of a sharding.

    checksums: of what was written, by name.
    """

    def __init__(self) -> None:
        self.checksums: dict[str, checksums.ArrayChecksums] = {}

    def typestr(self) -> str:
        return "np.ndarray"

    async def serialize(self, values: Sequence[ArrayPart], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Returns when all is written; the caller has a thread for that."""
        await asyncio.gather(*(self._write(part, info) for part, info in zip(values, infos, strict=True)))
        return []

    async def _write(self, part: ArrayPart, info: Any) -> None:
        if not part.blocks:
            return
        spec = ocp.type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=True,
            global_shape=part.shape,
            local_shape=part.chunk,
            dtype=part.blocks[0][1].dtype,
            process_index=ocp.multihost.process_index(),
            arg=ocp.SaveArgs(chunk_byte_size=CHECKPOINT_CHUNK_BYTES),
        )
        store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
        writes = [store[box].write(block, can_reference_source_data_indefinitely=True) for box, block in part.blocks]
        self.checksums[info.name] = await asyncio.to_thread(_checksums_of, part, tuple(spec["metadata"]["chunks"]))
        await asyncio.gather(*writes)

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> list[Any]:
        raise NotImplementedError("boxes are read, not whole parts")

    async def metadata(self, infos: Sequence[Any]) -> list[Any]:
        raise NotImplementedError("the metadata is what Orbax says of a numpy array")


def _checksums_of(part: ArrayPart, chunk: tuple[int, ...]) -> checksums.ArrayChecksums:
    values = checksums.ArrayChecksums(shape=part.shape, chunk=chunk)
    for box, block in part.blocks:
        values.crc32.update(chunks.checksums_of(block, box, chunk))
    return values


def _handler(parts: _PartHandler | None = None) -> Any:
    handlers = (
        (ArrayPart, parts or _PartHandler()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )  # Orbax warns without the second
    registry = ocp.type_handlers.create_type_handler_registry(*handlers)
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)


def _await_claim(directory: str, folder: Any, token: str, visible_s: float) -> None:
    deadline_s = time.monotonic() + visible_s
    while (claim := claims.read(folder)) is None or claim.token != token:
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                "a worker does not see the directory that another has made",
                where=directory,
                remedy="name a directory on a file system that all workers share",
            )
        time.sleep(DIRECTORY_POLL_S)


def _with_checkpoint_errors(directory: str, what: str, act: Callable[[], T]) -> T:
    """`act()`; whatever goes wrong in files and formats becomes a CheckpointError."""
    try:
        return act()
    except CheckpointError:
        raise
    except Exception as error:
        reason, remedy = _reason(error)
        raise CheckpointError(f"the checkpoint directory {what}: {reason}", where=directory, remedy=remedy) from error


def _reason(error: Exception) -> tuple[str, str]:
    """Why files could not be read or written, and what to do; tensorstore says of a full disk RESOURCE_EXHAUSTED."""
    number, text = getattr(error, "errno", None), str(error)
    if number in (errno.ENOSPC, errno.EDQUOT) or "RESOURCE_EXHAUSTED" in text:
        return "its disk is full", "free space there, or save in another directory; what was complete is still there"
    if damage.is_refusal(error):
        reason = "permission denied"
        return reason, "let the user that the servers run as write there, or name another directory"
    return damage.shorten(error), ""
