"""A worker's share of saves and restores, as the master commands them.

A save is a numbered step that copies what this process writes to host memory, so that the
next step may reuse the devices' buffers; then, while training goes on, `write` and `finish`
follow. Of equal shards on several processes one writes, a different one from shard to
shard. No process waits for another here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from shardwright import trees, wire
from shardwright.errors import CheckpointError, SessionError, ShardwrightError
from shardwright.layouts import Layout, Shard, distinct_shards
from shardwright.proto.v1 import master_pb2, worker_pb2
from shardwright.server.runtime.arrays import ArrayStore, StoredArray, assemble, local_positions
from shardwright.server.runtime.checkpoints import files
from shardwright.server.runtime.checkpoints.pieces import chunk_shape, pieces
from shardwright.xla.layouts import mesh_devices

#: Bytes read from files before they are put on the devices.
READ_AHEAD_BYTES = 1 << 30
#: Saves of several sessions that are written at the same time.
_WRITERS = 4

#: (sequence, error, bytes written): a command was carried out.
Done = Callable[[int, ShardwrightError | None, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """A save whose arrays are in host memory; `token` is the same on all workers."""

    directory: str
    step: int
    token: str
    max_to_keep: int
    tree: trees.Tree
    parts: dict[str, files.Part]


class CheckpointWorker:
    """One per executor process. `snapshot`, `restore`, `carry_out` and `forget` are called by its command thread."""

    def __init__(self, store: ArrayStore, done: Done) -> None:
        self._store = store
        self._done = done
        self._lock = threading.Lock()
        self._saves: dict[tuple[str, int], _Save] = {}
        self._pool = ThreadPoolExecutor(max_workers=_WRITERS, thread_name_prefix="checkpoints")

    # ---- saving ----------------------------------------------------------------------------

    def snapshot(self, step: master_pb2.RunStepsRequest) -> None:
        """Copy this process' part of the arrays, once they are computed. The first process makes the directory."""
        save = step.save
        token = f"{step.session_id}/{step.number}"
        if jax.process_index() == 0:
            files.begin(save.directory, save.step, token)
        try:
            parts = {
                name: self._part(step.session_id, array_id, number)
                for number, (array_id, name) in enumerate(zip(step.arguments, save.names, strict=True))
            }
        except Exception:
            if jax.process_index() == 0:
                files.abandon(save.directory, save.step)
            raise
        with self._lock:
            self._saves[step.session_id, step.number] = _Save(
                directory=save.directory,
                step=save.step,
                token=token,
                max_to_keep=save.max_to_keep,
                tree=trees.from_text(save.tree_json),
                parts=parts,
            )

    def carry_out(self, command: worker_pb2.ExecutorCommand) -> None:
        """`write` or `finish`, in the background; answered when it is done."""
        self._pool.submit(self._carry_out, command)

    def forget(self, session_id: str) -> None:
        """The session is closed: what it was saving is dropped, unless it is being committed this moment."""
        with self._lock:
            dropped = [self._saves.pop(key) for key in list(self._saves) if key[0] == session_id]
        for save in dropped:
            self._pool.submit(_abandon, save)

    def _carry_out(self, command: worker_pb2.ExecutorCommand) -> None:
        error, written = None, 0
        try:
            if command.WhichOneof("kind") == "write_checkpoint":
                written = self._write(command.write_checkpoint)
            else:
                self._finish(command.finish_checkpoint)
        except Exception as caught:
            error = wire.as_our_error(caught)
        self._done(command.sequence, error, written)

    def _write(self, order: worker_pb2.WriteCheckpoint) -> int:
        with self._lock:
            save = self._saves.get((order.session_id, order.number))
        if save is None:
            raise SessionError("nothing was copied for this save", remedy="save again")
        return files.write(save.directory, save.step, save.token, save.tree, save.parts)

    def _finish(self, order: worker_pb2.FinishCheckpoint) -> None:
        with self._lock:
            save = self._saves.pop((order.session_id, order.number), None)
        if save is None or jax.process_index() != 0:
            return
        if not order.is_commit:
            _abandon(save)
            return
        files.commit(save.directory, save.step)
        if save.max_to_keep:
            files.keep_latest(save.directory, save.max_to_keep)

    def _part(self, session_id: str, array_id: int, number: int) -> files.Part:
        stored = self._store.find(session_id, array_id)
        if stored is None:  # it lies on other nodes only
            return files.Part(shape=(), dtype=np.dtype(np.uint8), chunk=(), blocks=())
        layout = stored.layout
        blocks = []
        for position in _written_here(layout, number):
            shard = _shard_at(stored, position)
            blocks += [(piece.box, shard[piece.within].reshape(piece.shape)) for piece in pieces(layout, position)]
        return files.Part(shape=layout.user_shape, dtype=layout.dtype, chunk=chunk_shape(layout), blocks=tuple(blocks))

    # ---- restoring -------------------------------------------------------------------------

    def restore(self, step: master_pb2.RunStepsRequest) -> None:
        """Read this process' shards of the arrays that the step makes, and put them on its devices."""
        order = step.restore
        wanted = [
            (array_id, name, wire.layout_from_proto(layout))
            for array_id, name, layout in zip(step.outputs, order.names, order.layouts, strict=True)
        ]
        for batch in _batches(wanted):
            boxes = [
                (name, piece.box)
                for _, name, layout in batch
                for shard in _local_shards(layout)
                for piece in pieces(layout, shard.holders[0])
            ]
            blocks = iter(files.read(order.directory, order.step, boxes))
            made = [(array_id, _put(name, layout, blocks)) for array_id, name, layout in batch]
            self._store.add(step.session_id, made)


def _abandon(save: _Save) -> None:
    if jax.process_index() == 0:
        files.abandon(save.directory, save.step)


def _written_here(layout: Layout, number: int) -> Iterator[int]:
    """Positions of this process' devices whose shards it writes; `number` spreads copies over the processes."""
    devices = mesh_devices()
    here = jax.process_index()
    for at, shard in enumerate(distinct_shards(layout, layout.devices)):
        processes = sorted({devices[position].process_index for position in shard.holders})
        if processes[(number + at) % len(processes)] == here:
            yield next(position for position in shard.holders if devices[position].process_index == here)


def _shard_at(stored: StoredArray, position: int) -> np.ndarray:
    """A copy of the shard on a device of this process: the device's own buffer may be reused by the next step."""
    device = local_positions()[position]
    data = next(shard.data for shard in stored.value.addressable_shards if shard.device == device)
    return np.array(data, copy=True)


def _local_shards(layout: Layout) -> tuple[Shard, ...]:
    return distinct_shards(layout, local_positions())


def _batches(
    wanted: Sequence[tuple[int, str, Layout]],
) -> Iterator[list[tuple[int, str, Layout]]]:
    """Arrays with a shard here, in batches of about READ_AHEAD_BYTES."""
    batch: list[tuple[int, str, Layout]] = []
    size_bytes = 0
    for item in wanted:
        shards = _local_shards(item[2])
        if shards:
            batch.append(item)
            size_bytes += len(shards) * item[2].shard_bytes
        if size_bytes >= READ_AHEAD_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _put(name: str, layout: Layout, blocks: Iterator[np.ndarray]) -> StoredArray:
    """The array on this process' devices, from the blocks of its shards in order; padding is zeros."""
    data, devices = [], []
    positions = local_positions()
    for shard in _local_shards(layout):
        host = np.zeros(layout.shard_shape, layout.dtype)
        for piece in pieces(layout, shard.holders[0]):
            block = next(blocks)
            if block.dtype != layout.dtype:
                raise CheckpointError(f"{name} is stored as {block.dtype}, not {layout.dtype}")
            host[piece.within] = block.reshape(host[piece.within].shape)
        data += [host] * len(shard.holders)
        devices += [positions[position] for position in shard.holders]
    return assemble(data, devices, layout)
