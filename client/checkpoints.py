"""Saving state from the servers to files, and restoring it, for `Session` and `Step`.

Only commands and descriptions pass through the client. Each worker writes and reads its own part of the arrays, in a
directory visible to all of them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardwright.checkpoints import trees
from shardwright.checkpoints.directories import MAX_STEP
from shardwright.client.argument_checks import check_number
from shardwright.client.array_specs import (
    ArraySpec,
    ArrayType,
    array_spec,
    array_type,
    host_value,
    spec_of,
    spec_of_stored,
)
from shardwright.client.arrays import RemoteArray
from shardwright.client.limits import SAVE_POLL_S
from shardwright.client.pending_arrays import PendingArrays
from shardwright.client.placement import Placement, parts_of
from shardwright.client.pytrees import rebuild, structure_of
from shardwright.client.resharding import materialize
from shardwright.dtypes import to_element_type
from shardwright.errors import CheckpointError, ServerUnavailableError, ShardwrightError
from shardwright.plans.layouts import Layout
from shardwright.plans.shard_pieces import chunk_shape
from shardwright.plans.shardings import Mesh
from shardwright.proto.v1 import common_pb2, master_pb2
from shardwright.protocol import wire

if TYPE_CHECKING:
    from shardwright.client.array_store import ArrayStore
    from shardwright.client.cluster_view import ClusterView
    from shardwright.client.connection import MasterConnection
    from shardwright.client.step_queue import StepQueue
    from shardwright.client.step_result import StepResult

_log = logging.getLogger("shardwright")

#: The most that `max_to_keep` may ask for.
_MAX_KEPT = (1 << 31) - 1


class Save:
    """A checkpoint on its way to the disk; training may go on meanwhile.

    step: its number in the directory. written_bytes, save_s: known when it is done.
    """

    def __init__(self, master: MasterConnection, result: StepResult, directory: str, step: int) -> None:
        self.directory = directory
        self.step = step
        self.written_bytes = 0
        self.save_s = 0.0
        self._master = master
        self._result = result
        self._error: ShardwrightError | None = None
        self._is_seen = False
        self._thread = threading.Thread(target=self._follow, name="shardwright-save", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it is complete, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is complete. Raises CheckpointError, or the failure of the step."""
        self._thread.join()
        if self._error is not None:
            self._is_seen = True
            raise self._error

    def settle(self) -> None:
        """Returns when it is complete or has failed; its error is still to be met."""
        self._thread.join()

    def take_unreported_error(self) -> ShardwrightError | None:
        """Waits; returns an error not raised before: the caller must report it."""
        self._thread.join()
        was_seen, self._is_seen = self._is_seen, True
        return None if was_seen else self._error

    def __repr__(self) -> str:
        state = "under way" if not self.is_done else "failed" if self._error is not None else "complete"
        return f"Save({os.path.join(self.directory, str(self.step))}, {state})"

    def _follow(self) -> None:
        """Waits for the end of the save: by then a failed save's files are gone, and the next may begin."""
        try:
            self._result.wait()
        except ShardwrightError as error:
            self._error = error
            if isinstance(error, ServerUnavailableError):
                return
        try:
            self.written_bytes, self.save_s = self._await_end()
        except ShardwrightError as error:
            self._error = self._error or error

    def _await_end(self) -> tuple[int, float]:
        deadline_s = time.monotonic() + self._master.info.grace_s
        while True:
            try:
                return self._master.wait_for_save(self._result.number)
            except ServerUnavailableError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(SAVE_POLL_S)


def read_structure(state: Any) -> tuple[trees.Tree, list[Any]]:
    """Structure and leaves of a state. Raises CheckpointError where it cannot be written down."""
    return structure_of(state, _spec)


def check_step(step: int | None) -> None:
    """Raises OptionError unless it can be the number of a checkpoint; None: it is not given."""
    if step is not None:
        check_number("step", step, 0, MAX_STEP)


def check_max_to_keep(max_to_keep: int | None) -> None:
    """Raises OptionError unless so many checkpoints can be kept; None: all."""
    if max_to_keep is not None:
        check_number("max_to_keep", max_to_keep, 1, _MAX_KEPT)


def save_leaves(
    steps: StepQueue,
    tree: trees.Tree,
    leaves: Sequence[Any],
    folder: str,
    *,
    step: int | None,
    max_to_keep: int | None,
) -> Save:
    """Saves the leaves of a state, a pytree of that structure."""
    names = [leaf.name for leaf in trees.leaves_of(tree)]
    _check_leaves(names, leaves)
    if step is None:
        step = max(list_checkpoints(steps.cluster, folder), default=-1) + 1
    order = master_pb2.SaveArrays(
        directory=folder, step=step, tree_json=trees.to_text(tree), max_to_keep=max_to_keep or 0
    )
    request = master_pb2.RunStepsRequest(save=order)
    materialize(leaves, [None] * len(leaves))
    kinds = [array_type(name, _spec(leaf)) for name, leaf in zip(names, leaves, strict=True)]
    temporary = _upload_leaves(steps.arrays, leaves, kinds)
    try:
        for number, (kind, leaf) in enumerate(zip(kinds, leaves, strict=True)):
            _add_arguments(request, kind, *(temporary.get(number) or _locate_handle(steps.arrays, leaf)))
        result = steps.submit(request, f"save of {folder}/{step}", is_followed=True)
    finally:
        for ids, _ in temporary.values():
            steps.arrays.free(*ids)
    return Save(steps.cluster.master, result, folder, step)


def list_checkpoints(cluster: ClusterView, folder: str) -> tuple[int, ...]:
    """See `Session.checkpoints`."""
    request = master_pb2.ListCheckpointsRequest(session_id=cluster.info.session_id, directory=folder)
    return tuple(cluster.ask_first_node("ListCheckpoints", request).steps)


def restore(steps: StepQueue, folder: str, *, step: int | None, like: Any) -> Any:
    """See `Session.restore`."""
    cluster = steps.cluster
    check_step(step)
    if step is None:
        step = max(list_checkpoints(steps.cluster, folder), default=None)
        if step is None:
            raise CheckpointError("there is no complete checkpoint", where=folder, remedy="save one first")
    request = master_pb2.DescribeCheckpointRequest(session_id=cluster.info.session_id, directory=folder, step=step)
    reply = cluster.ask_first_node("DescribeCheckpoint", request)
    stored = {array.name: array.type for array in reply.arrays}
    if not reply.has_checksums:
        _warn_of_missing_checksums(f"{folder}/{step}")
    pending = PendingRestore(steps, folder, step)
    if like is None:
        return rebuild(trees.from_text(reply.tree_json), lambda leaf: pending.handle(leaf.name, _spec_in(stored, leaf)))
    tree, leaves = structure_of(like, _spec)
    where = f"{folder}/{step}"
    handles = []
    for leaf, like_leaf in zip(trees.leaves_of(tree), leaves, strict=True):
        spec = _spec_like(like_leaf, stored.get(leaf.name))
        _check_type(leaf.name, spec, stored, where)
        handles.append(pending.handle(leaf.name, spec))
    return jax.tree.unflatten(jax.tree.structure(like), handles)


@cache
def _warn_of_missing_checksums(checkpoint: str) -> None:
    """Once for each checkpoint."""
    _log.warning(
        "%s is restored unchecked: it holds no checksums, as it was written by an earlier version or another program, "
        "and bits that have changed since would not be seen. The next save writes them.",
        checkpoint,
    )


class PendingRestore(PendingArrays[str]):
    """A checkpoint with arrays still to read."""

    def __init__(self, steps: StepQueue, directory: str, step: int) -> None:
        super().__init__(steps)
        self._directory = directory
        self._step = step

    def _read(self, chosen: Sequence[tuple[str, RemoteArray, Placement]]) -> None:
        order = master_pb2.RestoreArrays(directory=self._directory, step=self._step)
        request = master_pb2.RunStepsRequest(restore=order)

        def add_part(to: master_pb2.RunStepsRequest, name: str, layout: Layout, first_row: int) -> None:
            to.restore.parts.add(name=name, layout=wire.layout_to_proto(layout), first_row=first_row)

        self._submit(chosen, request, f"restore of {self._directory}/{self._step}", add_part)


def _spec(leaf: Any) -> ArraySpec:
    return leaf.spec if isinstance(leaf, RemoteArray) else spec_of(leaf)


def _spec_like(leaf: Any, stored: common_pb2.ArrayType | None) -> ArraySpec:
    """Type of a leaf of `like`: of a numpy array its own, also of 64 bits, if the checkpoint has that."""
    is_numpy = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc"
    if is_numpy and stored is not None and stored.element_type == to_element_type(leaf.dtype):
        return array_spec(leaf.shape, leaf.dtype)
    return _spec(leaf)


def _value_to_save(leaf: Any, name: str) -> np.ndarray:
    """The contents of a leaf. Raises CheckpointError where the type that JAX gives it does not hold them."""
    value = host_value(leaf, _spec(leaf))
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "iu" and not np.array_equal(value, leaf):
        raise CheckpointError(
            f"{name} holds integers of {leaf.dtype} beyond {value.dtype}, as which JAX without x64 takes them",
            remedy="save the handle that a step returned, or under jax.enable_x64(True)",
        )
    return value


def _upload_leaves(
    arrays: ArrayStore, leaves: Sequence[Any], kinds: Sequence[ArrayType]
) -> dict[int, tuple[tuple[int, ...], Placement]]:
    """(ids, placement) by number, of leaves uploaded for a save."""
    mesh = Mesh.of({"x": 1})
    places = {
        number: Layout.replicated(kind.element_type, kind.shape, mesh)
        for number, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True))
        if not isinstance(leaf, RemoteArray)
    }
    values = [(_value_to_save(leaves[number], kinds[number].name), place) for number, place in places.items()]
    uploaded = arrays.upload(values)
    return {number: (ids, place) for (number, place), ids in zip(places.items(), uploaded, strict=True)}


def as_handles(arrays: ArrayStore, leaves: Sequence[Any]) -> list[RemoteArray]:
    """Handles of the leaves of a state; arrays and numbers among them are sent to the servers."""
    specs = [_spec(leaf) for leaf in leaves]
    kinds = [array_type(f"leaf {number}", spec) for number, spec in enumerate(specs)]
    uploaded = _upload_leaves(arrays, leaves, kinds)
    return [
        leaf
        if isinstance(leaf, RemoteArray)
        else RemoteArray(arrays, spec, ids=uploaded[number][0], place=uploaded[number][1])
        for number, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
    ]


def _locate_handle(arrays: ArrayStore, handle: RemoteArray) -> tuple[tuple[int, ...], Placement]:
    """Ids and placement of its parts."""
    ids, place = arrays.usable_ids(handle), handle._place
    assert place is not None
    return ids, place


def _add_arguments(request: master_pb2.RunStepsRequest, kind: ArrayType, ids: Sequence[int], place: Placement) -> None:
    """Adds an array of the state to a save."""
    parts = parts_of(place)
    chunk = chunk_shape(kind.shape, parts)
    request.arguments.extend(ids)
    request.save.parts.extend(
        master_pb2.SavedPart(name=kind.name, shape=kind.shape, chunk=chunk, first_row=first_row)
        for _, first_row in parts
    )


def _check_leaves(names: Sequence[str], leaves: Sequence[Any]) -> None:
    if not leaves:
        raise CheckpointError("the state holds no array")
    for name, leaf in zip(names, leaves, strict=True):
        if 0 in _spec(leaf).shape:
            raise CheckpointError(f"{name} has no elements", remedy="leave it out: Orbax does not keep empty arrays")


def _check_type(name: str, spec: ArraySpec, stored: Mapping[str, common_pb2.ArrayType], where: str) -> None:
    """Raises CheckpointError unless the checkpoint has the array with the same type."""
    if name not in stored:
        some = ", ".join(sorted(stored)[:5])
        raise CheckpointError(f"the checkpoint has no array {name!r}; it has {some}, …", where=where)
    kind, stored_type = array_type(name, spec), stored[name]
    if (kind.element_type, kind.shape) != (stored_type.element_type, tuple(stored_type.dimensions)):
        raise CheckpointError(
            f"{name} is {kind.element_type}{list(kind.shape)}, but "
            f"{stored_type.element_type}{list(stored_type.dimensions)} in the checkpoint",
            where=where,
            remedy="restore with a state of the types that were saved",
        )


def _spec_in(stored: Mapping[str, common_pb2.ArrayType], leaf: trees.Leaf) -> ArraySpec:
    if leaf.name not in stored:
        raise CheckpointError(
            f"{leaf.name} of the checkpoint is no array", remedy="pass like=..., a pytree of the arrays to restore"
        )
    kind = stored[leaf.name]
    return spec_of_stored(kind.element_type, tuple(kind.dimensions), key_impl=leaf.key_impl, is_weak=leaf.is_weak)
