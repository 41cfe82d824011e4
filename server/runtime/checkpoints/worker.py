"""A worker's share of saves and restores, as the master commands them.

A save is a numbered step that begins to copy what this process writes to host memory; the
next step may reuse the devices' buffers. While training goes on, `write` and `finish` follow.
Of equal shards on several processes one writes, a different one from shard to shard. No
process waits for another here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import jax
import numpy as np

from shardwright.checkpoints import trees
from shardwright.errors import CheckpointError, SessionError, ShardwrightError
from shardwright.plans.layouts import Layout, Shard, distinct_shards
from shardwright.plans.shard_pieces import shard_pieces, shift_rows
from shardwright.proto.v1 import master_pb2, worker_pb2
from shardwright.protocol import wire
from shardwright.server.runtime.arrays import ArrayStore, StoredArray, copy_shard_to_host, from_pieces, local_positions
from shardwright.server.runtime.checkpoints import claims, files
from shardwright.server.tuning import CHECKPOINT_READ_AHEAD_BYTES, CHECKPOINT_WRITERS, REMEMBERED_ORDERS
from shardwright.xla.jax_shardings import mesh_devices

#: (sequence, error, bytes written): a command was carried out.
OnDone = Callable[[int, ShardwrightError | None, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """A save whose arrays come to host memory; `token` is the same on all workers, "session/number"."""

    session_id: str
    directory: str
    step: int
    token: str
    max_to_keep: int
    tree: trees.Tree
    parts: dict[str, _Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What this process writes of one array: copies of shards, and the blocks of the array that they hold."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    shards: list[_ShardCopy]

    def read(self) -> files.ArrayPart:
        """The same, once it has arrived."""
        blocks = tuple(block for shard in self.shards for block in shard.read())
        return files.ArrayPart(shape=self.shape, chunk=self.chunk, blocks=blocks)


@dataclass(frozen=True, slots=True)
class _ShardCopy:
    """A copy of the shard of `layout` at a device position; its rows are those of the array from `first_row` on."""

    data: jax.Array
    layout: Layout
    position: int
    first_row: int

    def read(self) -> Iterator[files.Block]:
        shard = np.asarray(self.data)
        for piece in shard_pieces(self.layout, self.position):
            yield shift_rows(piece.box, self.first_row), shard[piece.within].reshape(piece.shape)


class CheckpointWorker:
    """One per executor process. `snapshot`, `restore`, `carry_out` and `forget` are called by its command thread."""

    def __init__(self, store: ArrayStore, done: OnDone) -> None:
        self._store = store
        self._done = done
        self._lock = threading.Lock()
        self._saves: dict[tuple[str, int], _Save] = {}
        self._claims = claims.ClaimRenewer(store.is_open)
        self._works: dict[tuple[str | None, str], Future[tuple[ShardwrightError | None, int]]] = {}  # by command
        self._pool = ThreadPoolExecutor(max_workers=CHECKPOINT_WRITERS, thread_name_prefix="checkpoints")

    # ---- saving ----------------------------------------------------------------------------

    def snapshot(self, step: master_pb2.RunStepsRequest) -> None:
        """Begin to copy this process' part of the arrays. The first process makes the directory."""
        save = step.save
        token = f"{step.session_id}/{step.number}"
        if jax.process_index() == 0:
            held = files.begin(save.directory, save.step, token, self._store.is_open)
            self._claims.add(step.session_id, save.directory, held)
        try:
            parts = self._parts(step)
        except Exception:
            if jax.process_index() == 0:
                files.abandon(save.directory, save.step, token)
            raise
        with self._lock:
            self._saves[step.session_id, step.number] = _Save(
                session_id=step.session_id,
                directory=save.directory,
                step=save.step,
                token=token,
                max_to_keep=save.max_to_keep,
                tree=trees.from_text(save.tree_json),
                parts=parts,
            )

    def carry_out(self, command: worker_pb2.ExecutorCommand) -> None:
        """`write` or `finish`, in the background; answered when it is done.

        A master that was started again may ask for what was done already: it gets the same answer.
        """
        key = command.WhichOneof("kind"), str(getattr(command, str(command.WhichOneof("kind"))))
        with self._lock:
            work = self._works.get(key)
            if work is None:
                work = self._works[key] = self._pool.submit(self._carry_out, command)
                while len(self._works) > REMEMBERED_ORDERS:
                    del self._works[next(iter(self._works))]
        work.add_done_callback(lambda done: self._done(command.sequence, *done.result()))

    def forget(self, session_id: str) -> None:
        """The session is closed: what it was saving is dropped, unless it is being committed this moment."""
        with self._lock:
            dropped = [self._saves.pop(key) for key in list(self._saves) if key[0] == session_id]
        self._claims.release(session_id)
        for save in dropped:
            self._pool.submit(_abandon, save)

    def _carry_out(self, command: worker_pb2.ExecutorCommand) -> tuple[ShardwrightError | None, int]:
        """Its error, and the bytes written."""
        error, written = None, 0
        try:
            if command.WhichOneof("kind") == "write_checkpoint":
                written = self._write(command.write_checkpoint)
            else:
                self._finish(command.finish_checkpoint)
        except Exception as caught:
            error = wire.to_shardwright_error(caught)
        return error, written

    def _write(self, order: worker_pb2.WriteCheckpoint) -> int:
        with self._lock:
            save = self._saves.get((order.session_id, order.number))
        if save is None:
            raise SessionError("nothing was copied for this save", remedy="save again")
        parts = {name: part.read() for name, part in save.parts.items()}
        return files.write(save.directory, save.step, save.token, save.tree, parts)

    def _finish(self, order: worker_pb2.FinishCheckpoint) -> None:
        with self._lock:
            save = self._saves.pop((order.session_id, order.number), None)
        if save is None or jax.process_index() != 0:
            return
        if not order.is_commit:
            _abandon(save)
            return
        try:
            folder = files.commit(save.directory, save.step, save.token)
        except Exception:  # its files would take the room of a checkpoint until the next save
            with suppress(OSError):
                _abandon(save)
            raise
        self._claims.settle(save.session_id, save.directory, folder)
        if save.max_to_keep:
            files.keep_latest(save.directory, save.max_to_keep)

    def _parts(self, step: master_pb2.RunStepsRequest) -> dict[str, _Part]:
        """By name, this process' part of each array; arrays on other nodes only are left out."""
        shards: dict[str, list[_ShardCopy]] = {part.name: [] for part in step.save.parts}
        for number, (array_id, part) in enumerate(zip(step.arguments, step.save.parts, strict=True)):
            stored = self._store.find(step.session_id, array_id)
            if stored is not None:
                shards[part.name] += [
                    _ShardCopy(copy_shard_to_host(stored, position), stored.layout, position, part.first_row)
                    for position in _positions_to_write(stored.layout, number)
                ]
        return {
            part.name: _Part(shape=tuple(part.shape), chunk=tuple(part.chunk), shards=shards[part.name])
            for part in step.save.parts
        }

    # ---- restoring -------------------------------------------------------------------------

    def restore(self, step: master_pb2.RunStepsRequest) -> None:
        """Read this process' shards of the arrays that the step makes, and put them on its devices."""
        order = step.restore
        wanted = [
            _RestoredArray(array_id, part.name, wire.layout_from_proto(part.layout), part.first_row)
            for array_id, part in zip(step.outputs, order.parts, strict=True)
        ]
        for batch in _batches(wanted):
            boxes = [
                (upload.name, shift_rows(piece.box, upload.first_row))
                for upload in batch
                for shard in _local_shards(upload.layout)
                for piece in shard_pieces(upload.layout, shard.holders[0])
            ]
            blocks = iter(files.read(order.directory, order.step, boxes))
            arrays = [(upload.array_id, _put(upload, blocks)) for upload in batch]
            self._store.add(step.session_id, arrays)


@dataclass(frozen=True, slots=True)
class _RestoredArray:
    """An array to make: the rows of `name` in a checkpoint from `first_row` on."""

    array_id: int
    name: str
    layout: Layout
    first_row: int


def _abandon(save: _Save) -> None:
    if jax.process_index() == 0:
        files.abandon(save.directory, save.step, save.token)


def _positions_to_write(layout: Layout, number: int) -> Iterator[int]:
    """Positions of this process' devices whose shards it writes; `number` spreads copies over the processes."""
    devices = mesh_devices()
    here = jax.process_index()
    for at, shard in enumerate(distinct_shards(layout, layout.devices)):
        processes = sorted({devices[position].process_index for position in shard.holders})
        if processes[(number + at) % len(processes)] == here:
            yield next(position for position in shard.holders if devices[position].process_index == here)


def _local_shards(layout: Layout) -> tuple[Shard, ...]:
    return distinct_shards(layout, local_positions())


def _batches(arrays: Sequence[_RestoredArray]) -> Iterator[list[_RestoredArray]]:
    """Arrays with a shard here, in batches of about CHECKPOINT_READ_AHEAD_BYTES."""
    batch: list[_RestoredArray] = []
    size_bytes = 0
    for array in arrays:
        shards = _local_shards(array.layout)
        if shards:
            batch.append(array)
            size_bytes += len(shards) * array.layout.shard_bytes
        if size_bytes >= CHECKPOINT_READ_AHEAD_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _put(array: _RestoredArray, blocks: Iterator[np.ndarray]) -> StoredArray:
    """The array on this process' devices, from the blocks of its shards in order; padding is zeros."""
    layout, data = array.layout, []
    for shard in _local_shards(layout):
        host = np.zeros(layout.shard_shape, layout.dtype)
        for piece in shard_pieces(layout, shard.holders[0]):
            block = next(blocks)
            if block.dtype != layout.dtype:
                raise CheckpointError(f"{array.name} is stored as {block.dtype}, not {layout.dtype}")
            host[piece.within] = block.reshape(host[piece.within].shape)
        data.append(host)
    return from_pieces(data, layout)
