"""Checkpoints as files, in Orbax's own format: `DIRECTORY/STEP/default`, a PyTree in OCDBT.

Orbax writes and reads the formats, names and commits directories; what is ours is
which boxes of an array a process writes (`shardwright/pieces.py`), and that no process waits for
another here: the master orders the phases begin → write → commit (or abandon). Plain
`orbax.checkpoint.CheckpointManager` reads the result. Paths are whatever Orbax takes
(`gs://…` too); all workers must see the same file system.
"""

from __future__ import annotations

import asyncio
import json
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

from shardwright import trees
from shardwright.dtypes import to_element_type
from shardwright.errors import CheckpointError
from shardwright.layouts import Slices

#: Orbax's name of the only item of a checkpoint.
ITEM = "default"
#: Largest chunk in which arrays are stored and read.
CHUNK_BYTES = 32 << 20
#: Seconds until a directory that one node has made must be seen by the others (network file systems cache).
SEEN_WITHIN_S = 20.0

_TOKEN = "_shardwright_save"
_STRUCTURE = "shardwright_tree"
_METADATA = "_METADATA"
_STEP_METADATA = "_CHECKPOINT_METADATA"

T = TypeVar("T")


#: A box of an array, and its contents.
Block = tuple[Slices, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
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
    """What a checkpoint holds: the structure, the arrays by their names in it, and when it was complete."""

    tree: trees.Tree
    arrays: dict[str, StoredType]
    saved_at: datetime | None


# ---- which checkpoints there are -------------------------------------------------------


def steps(directory: str) -> tuple[int, ...]:
    """Numbers of the complete checkpoints, ascending; none where the directory does not exist."""

    def found() -> tuple[int, ...]:
        folder = epath.Path(directory)
        if not folder.exists():
            return ()
        name_format = ocp.path.step.standard_name_format()
        return tuple(sorted(item.step for item in name_format.find_all(folder)))

    return _checked(directory, "cannot be listed", found)


def keep_latest(directory: str, count: int) -> None:
    """Remove all but the latest `count` complete checkpoints, oldest first; each at once or not at all."""
    for step in steps(directory)[:-count]:
        final = epath.Path(directory) / str(step)
        doomed = _temporary(directory, step).get()
        if doomed != final:  # where a rename is atomic
            final.rename(doomed)
        doomed.rmtree()


# ---- one save, in phases ------------------------------------------------------------------


def begin(directory: str, step: int, token: str) -> None:
    """By one process, before any writes: a directory that does not count as a checkpoint yet.

    What interrupted saves have left in `directory` is removed. Raises CheckpointError where `step` does not
    come after those that are there, or nothing can be written.
    """

    def made() -> None:
        folder = epath.Path(directory)
        latest = max(steps(directory), default=-1)
        if step <= latest or (folder / str(step)).exists():
            raise CheckpointError(
                f"checkpoint {max(step, latest)} is there already, and {step} does not come after it",
                where=directory,
                remedy="restore the latest, or save in another directory",
            )
        for left in folder.glob(f"*{ocp.path.atomicity.TMP_DIR_SUFFIX}*"):
            left.rmtree()
        temporary = _temporary(directory, step)
        asyncio.run(temporary.create())
        (temporary.get() / ITEM).mkdir()
        (temporary.get() / _TOKEN).write_text(token)

    _checked(directory, "cannot be written", made)


def write(directory: str, step: int, token: str, tree: trees.Tree, parts: dict[str, Part]) -> int:
    """By every process, at the same time: its parts of all arrays; returns their bytes.

    Raises CheckpointError where the directory that `begin` has made is not seen here.
    """
    _await_token(directory, step, token)
    item = trees.build(tree, lambda leaf: parts[leaf.name], trees.plain)
    arguments = ocp.args.PyTreeSave(item, custom_metadata={_STRUCTURE: trees.to_json(tree)})

    def written() -> int:
        handler = _handler()
        for future in asyncio.run(handler.async_save(_temporary(directory, step).get() / ITEM, args=arguments)) or ():
            future.result()
        handler.close()
        return sum(part.nbytes for part in parts.values())

    return _checked(directory, "cannot be written", written)


def commit(directory: str, step: int) -> None:
    """By the process that began, once all have written: from now on it is a checkpoint."""

    def committed() -> None:
        temporary = _temporary(directory, step)
        handler = _handler()
        handler.finalize(temporary.get() / ITEM)
        handler.close()
        (temporary.get() / _TOKEN).unlink()
        facts = {
            "item_handlers": {ITEM: ocp.PyTreeCheckpointHandler().typestr()},
            "commit_timestamp_nsecs": time.time_ns(),
        }
        (temporary.get() / _STEP_METADATA).write_text(json.dumps(facts))
        asyncio.run(temporary.finalize())

    _checked(directory, "cannot be written", committed)


def abandon(directory: str, step: int) -> None:
    """Remove what `begin` and `write` have made, unless it was committed."""
    if step not in steps(directory):
        _temporary(directory, step).get().rmtree(missing_ok=True)


# ---- reading --------------------------------------------------------------------------------


def contents(directory: str, step: int) -> Contents:
    """What checkpoint `step` holds, whoever wrote it. Raises CheckpointError where it is not complete, or not there."""
    if step not in steps(directory):
        raise CheckpointError(
            f"there is no complete checkpoint {step}", where=directory, remedy="`shardwright checkpoints` lists them"
        )

    def read() -> Contents:
        metadata = ocp.PyTreeCheckpointHandler().metadata(_item(directory, step))
        own = (metadata.custom_metadata or {}).get(_STRUCTURE)
        arrays: dict[str, StoredType] = {}
        found = _tree_of(metadata.tree, (), arrays)
        tree = found if own is None else trees.from_json(own)
        return Contents(tree=tree, arrays=arrays, saved_at=_saved_at(directory, step))

    return _checked(directory, f"holds no PyTree that can be read as checkpoint {step}", read)


def read(directory: str, step: int, boxes: Sequence[tuple[str, Slices]]) -> list[np.ndarray]:
    """The boxes of arrays, by name, of checkpoint `step`."""

    async def all_boxes() -> list[np.ndarray]:
        item = _item(directory, step)
        facts = json.loads((item / _METADATA).read_text())
        context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
        stores = {name: _open(item, name, facts, context) for name in {name for name, _ in boxes}}
        opened = dict(zip(stores, await asyncio.gather(*stores.values()), strict=True))
        return list(await asyncio.gather(*(opened[name][box].read() for name, box in boxes)))

    return _checked(directory, f"checkpoint {step} cannot be read", lambda: asyncio.run(all_boxes()))


def _open(item: Any, name: str, facts: dict[str, Any], context: Any) -> Any:
    is_ocdbt = facts.get("use_ocdbt", True)
    info = ocp.type_handlers.ParamInfo(
        name=name,
        parent_dir=item,
        is_ocdbt_checkpoint=is_ocdbt,
        use_zarr3=facts.get("use_zarr3", False),
        raise_array_data_missing_error=facts.get("store_array_data_equal_to_fill_value", True),
        ts_context=context,
    )
    spec = ocp.type_handlers.get_json_tspec_read(
        info, use_ocdbt=is_ocdbt, raise_array_data_missing_error=info.raise_array_data_missing_error
    )
    return ts.open(ts.Spec(spec), open=True, context=context)


def _item(directory: str, step: int) -> Any:
    """The folder of the PyTree: ours, the only item of another's checkpoint, or the checkpoint itself."""
    folder = epath.Path(directory) / str(step)
    candidates = [folder / ITEM, folder, *sorted(folder.iterdir())]
    return next((item for item in candidates if (item / _METADATA).exists()), folder / ITEM)


def _saved_at(directory: str, step: int) -> datetime | None:
    """Local time; None where the writer has not said it."""
    facts = epath.Path(directory) / str(step) / _STEP_METADATA
    written_ns = json.loads(facts.read_text()).get("commit_timestamp_nsecs") if facts.exists() else None
    return datetime.fromtimestamp(written_ns / 1e9) if written_ns else None


def _tree_of(value: Any, path: tuple[str, ...], arrays: dict[str, StoredType]) -> trees.Tree:
    """The structure as Orbax has it: dicts, lists, and what is empty."""
    if value is None:
        return trees.Node(kind="none")
    if isinstance(value, dict):
        items = [(key, _tree_of(value[key], (*path, str(key)), arrays)) for key in sorted(value)]
        return trees.Node(kind="dict", children=tuple(items))
    if isinstance(value, list | tuple):
        entries = [(n, _tree_of(child, (*path, str(n)), arrays)) for n, child in enumerate(value)]
        return trees.Node(kind="list" if isinstance(value, list) else "tuple", children=tuple(entries))
    name = ".".join(path)
    if hasattr(value, "dtype"):  # else a string or another thing that is no array
        arrays[name] = StoredType(element_type=to_element_type(np.dtype(value.dtype)), shape=tuple(value.shape))
    return trees.Leaf(name=name)


# ---- Orbax ------------------------------------------------------------------------------------


class _PartHandler(ocp.type_handlers.TypeHandler):  # type: ignore[misc]
    """Writes `Part`s. To whoever reads them they are numpy arrays, unless asked for as `jax.Array`s with a sharding."""

    def typestr(self) -> str:
        return "np.ndarray"

    async def serialize(self, values: Sequence[Part], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Returns when all is written; the caller has a thread for that."""
        await asyncio.gather(*(self._write(part, info) for part, info in zip(values, infos, strict=True)))
        return []

    async def _write(self, part: Part, info: Any) -> None:
        if not part.blocks:
            return
        spec = ocp.type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=True,
            global_shape=part.shape,
            local_shape=part.chunk,
            dtype=part.blocks[0][1].dtype,
            process_index=ocp.multihost.process_index(),
            arg=ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES),
        )
        store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
        await asyncio.gather(
            *(store[box].write(block, can_reference_source_data_indefinitely=True) for box, block in part.blocks)
        )

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> list[Any]:
        raise NotImplementedError("boxes are read, not whole parts")

    async def metadata(self, infos: Sequence[Any]) -> list[Any]:
        raise NotImplementedError("the metadata is what Orbax says of a numpy array")


def _handler() -> Any:
    known = (Part, _PartHandler()), (jax.Array, ocp.type_handlers.ArrayHandler())  # Orbax warns without the second
    registry = ocp.type_handlers.create_type_handler_registry(*known)
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)


def _temporary(directory: str, step: int) -> Any:
    final = epath.Path(directory) / str(step)
    return ocp.path.atomicity_defaults.get_default_temporary_path_class(final).from_final(final)


def _await_token(directory: str, step: int, token: str) -> None:
    file = _temporary(directory, step).get() / _TOKEN
    deadline_s = time.monotonic() + SEEN_WITHIN_S
    while not (file.exists() and file.read_text() == token):
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                "a worker does not see the directory that another has made",
                where=directory,
                remedy="name a directory on a file system that all workers share",
            )
        time.sleep(0.2)


def _checked(directory: str, what: str, act: Callable[[], T]) -> T:
    """`act()`; whatever goes wrong in files and formats becomes a CheckpointError."""
    try:
        return act()
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        raise CheckpointError(f"the checkpoint directory {what}: {reason}", where=directory) from error
