"""The arrays of all sessions on this node's devices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np

from shardwright.errors import ArrayError, SessionError, ShardwrightError
from shardwright.plans.layouts import Layout, Slices, distinct_shards, logical_part, pad_to_stored
from shardwright.proto.v1 import worker_pb2
from shardwright.server.tuning import MAX_REMEMBERED_DROPS
from shardwright.xla.jax_shardings import jax_mesh, mesh_devices, to_named_sharding


@dataclass(slots=True, kw_only=True, eq=False)
class StoredArray:
    """An array and how it lies; `value` is global, its addressable shards are this node's.

    is_donated: a step has taken its buffers over, or is about to.
    """

    value: jax.Array
    layout: Layout
    is_donated: bool = False

    @property
    def is_computed(self) -> bool:
        """Whether reading it waits for nothing; also where it fails."""
        try:
            return self.is_donated or bool(self.value.is_ready())  # type: ignore[attr-defined]
        except RuntimeError:  # a step has taken its buffers over since
            return True

    def explains(self, error: Exception) -> bool:
        """Whether reading the array failed since a step takes its buffers over meanwhile.

        JAX has no type for that: its texts say so, or it stumbles over the missing buffers with a TypeError.
        """
        return self.is_donated and (isinstance(error, TypeError) or "deleted" in str(error) or "donated" in str(error))


class _SessionArrays:
    """gone: why those are that are asked for no more. withdrawn: of them, those that the master said it of."""

    def __init__(self) -> None:
        self.there: dict[int, StoredArray] = {}
        self.gone: dict[int, ShardwrightError] = {}
        self.withdrawn: set[int] = set()


def array_arrived(array_id: int, layout: Layout) -> worker_pb2.ArrayArrived:
    """What the master has to know of an array of which this node's shards are here."""
    return worker_pb2.ArrayArrived(
        array_id=array_id,
        logical_bytes=layout.size_bytes,
        first_device=layout.first_device,
        device_count=layout.mesh.device_count,
    )


class ArrayStore:
    """Arrays by (session, id). Thread-safe: steps and transfers come from different threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = 0
        self._sessions: dict[str, _SessionArrays] = {}

    def open(self, session_id: str) -> None:
        with self._changed:
            self._sessions.setdefault(session_id, _SessionArrays())

    def is_open(self, session_id: str) -> bool:
        with self._changed:
            return session_id in self._sessions

    def close(self, session_id: str) -> None:
        """Forget a session and free its arrays; whoever waits for one gets SessionError."""
        with self._changed:
            self._sessions.pop(session_id, None)
            self._note_change()

    def add(self, session_id: str, arrays: Iterable[tuple[int, StoredArray]], *, is_repeated: bool = False) -> None:
        """Raises ArrayError on an id in use, SessionError on a session that is not open.

        is_repeated: they may be there already, or gone again; then they stay so.
        """
        with self._changed:
            session = self._session(session_id)
            for array_id, stored in arrays:
                if is_repeated and (array_id in session.there or array_id in session.gone):
                    continue
                if array_id in session.there:
                    raise ArrayError(f"array id {array_id} is in use already", remedy="give each new array a new id")
                session.there[array_id] = stored
            self._note_change()

    def contents(self) -> dict[str, list[tuple[int, StoredArray]]]:
        """All arrays that are here, by session."""
        with self._changed:
            return {session_id: list(session.there.items()) for session_id, session in self._sessions.items()}

    def require(self, session_id: str) -> None:
        """Raises SessionError unless the session is open."""
        with self._changed:
            self._session(session_id)

    def get_all(self, session_id: str, array_ids: Iterable[int]) -> list[StoredArray]:
        """Raises ArrayError naming the first missing one, and the reason."""
        with self._changed:
            session = self._session(session_id)
            return [self._find(session, array_id) or _raise_missing(array_id) for array_id in array_ids]

    def find(self, session_id: str, array_id: int) -> StoredArray | None:
        """The array, or None if this node holds nothing of it; raises the reason of a deleted one."""
        with self._changed:
            return self._find(self._session(session_id), array_id)

    def all_arrays(self) -> list[StoredArray]:
        """Of all sessions."""
        with self._changed:
            return [stored for session in self._sessions.values() for stored in session.there.values()]

    @property
    def version(self) -> int:
        """Another one after each change."""
        return self._version

    def wake(self) -> None:
        """End `wait_for_change` without a change."""
        with self._changed:
            self._note_change()

    def wait_for_change(self, version: int, timeout_s: float) -> int:
        """The version by now, as soon as it is another one."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, timeout=timeout_s)
            return self._version

    def first_unsettled(self, session_id: str, array_ids: Sequence[int], start: int) -> tuple[int, bool]:
        """Position, from `start` on, of the first array that is neither computed nor known never to come.

        And whether it is being computed. All are settled: their number, and False.
        """
        with self._changed:
            session = self._sessions.get(session_id)
            for position in range(start, len(array_ids) if session is not None else start):
                assert session is not None
                stored = session.there.get(array_ids[position])
                if stored is None and array_ids[position] not in session.gone:
                    return position, False
                if stored is not None and not stored.is_computed:
                    return position, True
        return len(array_ids), False

    def wait_until_settled(self, session_id: str, array_id: int) -> None:
        """Block until an array that is being computed is; raises nothing."""
        with contextlib.suppress(Exception):  # whoever reads it meets that
            stored = self.find(session_id, array_id)
            if stored is not None:
                wait_until_computed(stored)

    def drop(self, session_id: str, array_ids: Iterable[int], why: ShardwrightError | None = None) -> None:
        """Free arrays (unknown ones too: they will not come); `why` is told to whoever asks later."""
        with self._changed:
            session = self._sessions.get(session_id)
            if session is None:
                return
            for array_id in array_ids:
                session.there.pop(array_id, None)
                session.gone[array_id] = why or ArrayError(f"array {array_id} was released")
            while len(session.gone) > MAX_REMEMBERED_DROPS:
                del session.gone[next(iter(session.gone))]
            self._note_change()

    def withdraw(self, session_id: str, array_ids: Sequence[int], why: ShardwrightError | None) -> None:
        """Free arrays as the master says; until a step reads or makes arrays of these ids."""
        with self._changed:
            self.drop(session_id, array_ids, why)
            session = self._sessions.get(session_id)
            if session is not None:
                session.withdrawn.update(array_ids)
                if len(session.withdrawn) > 2 * MAX_REMEMBERED_DROPS:  # seldom, and then all at once
                    session.withdrawn.intersection_update(session.gone)

    def expect(self, session_id: str, array_ids: Iterable[int]) -> None:
        """A step reads or makes arrays of these ids: what the master said of such ids before is over.

        After a loss the same ids are made again, on some of the nodes; the others hear of it here only.
        """
        with self._changed:
            session = self._sessions.get(session_id)
            for array_id in session.withdrawn.intersection(array_ids) if session is not None else ():
                assert session is not None
                session.withdrawn.remove(array_id)
                session.gone.pop(array_id, None)

    def _note_change(self) -> None:
        self._version += 1
        self._changed.notify_all()

    def _session(self, session_id: str) -> _SessionArrays:
        try:
            return self._sessions[session_id]
        except KeyError:
            raise SessionError(f"no session {session_id[:8]} on this worker", remedy="open a new session") from None

    def _find(self, session: _SessionArrays, array_id: int) -> StoredArray | None:
        if array_id in session.there:
            return session.there[array_id]
        if array_id in session.gone:
            raise session.gone[array_id]
        return None


def _raise_missing(array_id: int) -> StoredArray:
    raise ArrayError(f"array {array_id} was never written", remedy="put it, or run the step that makes it")


# ---- numpy ↔ devices ---------------------------------------------------------
def sharding_of(layout: Layout) -> jax.sharding.NamedSharding:
    """jax's sharding of a layout over its devices of the job, in the memory in which programs have the array."""
    return _sharding_of(layout, layout.is_on_host)


@lru_cache(maxsize=1024)
def _sharding_of(layout: Layout, is_on_host: bool) -> jax.sharding.NamedSharding:
    mesh = jax_mesh(layout.mesh, mesh_devices()[layout.first_device :])
    return to_named_sharding(mesh, layout.sharding, is_on_host=is_on_host)


@lru_cache(maxsize=1)
def local_positions() -> dict[int, jax.Device]:
    """Device position → device, of this process."""
    here = jax.process_index()
    return {at: device for at, device in enumerate(mesh_devices()) if device.process_index == here}


def position_of(device: jax.Device) -> int:
    """Of a device of this process, its position in the cluster's order."""
    return next(at for at, mine in local_positions().items() if mine == device)


def is_here(layout: Layout) -> bool:
    """Whether a device of this node holds a part of such an array."""
    return any(position in layout.devices for position in local_positions())


def from_host(data: bytes, layout: Layout) -> StoredArray:
    """Put a whole logical array (C order, little endian) on those of its devices that are this node's, some of them.

    Raises ArrayError where the bytes do not fit the layout.
    """
    if len(data) != layout.size_bytes:
        raise ArrayError(f"{len(data)} bytes for an array of {layout.size_bytes}")
    host = pad_to_stored(np.frombuffer(data, dtype=layout.dtype).reshape(layout.shape), layout)
    value = jax.make_array_from_callback(layout.stored_shape, sharding_of(layout), host.__getitem__)
    return StoredArray(value=value, layout=layout)


def from_pieces(pieces: Sequence[np.ndarray], layout: Layout) -> StoredArray:
    """Put an array on this node's devices; `pieces` are its shards in the order of `distinct_shards`."""
    shards = distinct_shards(layout, local_positions())
    piece_at = {_bounds(shard.slices, layout): piece for shard, piece in zip(shards, pieces, strict=True)}
    value = jax.make_array_from_callback(
        layout.stored_shape, sharding_of(layout), lambda index: piece_at[_bounds(index or (), layout)]
    )
    return StoredArray(value=value, layout=layout)


def _bounds(index: Slices, layout: Layout) -> tuple[tuple[int, int], ...]:
    """First element and end along each dimension of the stored array."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, layout.stored_shape, strict=True))


@lru_cache(maxsize=1024)
def _shard_numbers(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[jax.Device, int]:
    """Of each device of this process, which of an array's addressable shards it holds."""
    return {device: number for number, device in enumerate(sharding.addressable_devices_indices_map(shape))}


def shard_to_host(stored: StoredArray, position: int) -> np.ndarray:
    """The shard at a device position of this node, once it is computed; ArrayError for another node's."""
    return np.ascontiguousarray(_shard_at(stored, position))


def copy_shard_to_host(stored: StoredArray, position: int) -> jax.Array:
    """A copy of the shard in this machine's memory, which is made beside what comes next.

    A step may take the array's buffers over at once. Reading the copy waits, and raises what made the array fail.
    """
    shard = _shard_at(stored, position)
    (device,) = shard.devices()
    copy: jax.Array = jax.device_put(shard, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))
    return copy


def _shard_at(stored: StoredArray, position: int) -> jax.Array:
    device = local_positions().get(position)
    if device is None:
        raise ArrayError(f"device {position} is not on this node", remedy="ask the node that owns it")
    value = stored.value
    return value.addressable_data(_shard_numbers(value.sharding, value.shape)[device])


def wait_until_computed(stored: StoredArray) -> None:
    """Returns once it is computed, or a later step takes it over; raises what made it fail."""
    try:
        if not stored.is_donated:
            stored.value.block_until_ready()
    except Exception as caught:
        if not stored.explains(caught):
            raise


def whole_to_host(stored: StoredArray) -> np.ndarray | None:
    """The logical array from this node's shards, once it is computed; None where other nodes hold parts."""
    layout = stored.layout
    positions = tuple(local_positions())
    if layout.sharding.is_replicated:
        return np.asarray(stored.value.addressable_data(0))
    shards = distinct_shards(layout, positions)
    if len(shards) != len(distinct_shards(layout, layout.devices)):
        return None
    whole = np.empty(layout.stored_shape, dtype=layout.dtype)
    for shard in shards:
        whole[shard.slices] = shard_to_host(stored, shard.holders[0])
    return np.ascontiguousarray(logical_part(whole, layout))
