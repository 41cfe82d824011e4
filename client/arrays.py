"""Handles of arrays that live on the servers."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import jax
import numpy as np

from shardwright.client.array_operators import ArrayOperators
from shardwright.client.placement import Placement, RowParts, held_boxes
from shardwright.errors import ArrayError
from shardwright.xla import private

if TYPE_CHECKING:
    from shardwright.client.array_specs import ArraySpec
    from shardwright.client.step_result import StepResult


class Pending(Protocol):
    """Source of an array that does not exist yet: an initializer before its run, a checkpoint before its read."""

    def materialize(self, targets: Mapping[int, Placement | None]) -> None:
        """Makes it. targets: the needed handles, by `id()`, with their placement (None: any)."""


class Store(Protocol):
    """What a handle needs of its session; see `ArrayStore`."""

    def free(self, *array_ids: int) -> None: ...

    def note_handle(self, handle: RemoteArray) -> None: ...

    def announce(self, handle: RemoteArray) -> None: ...

    def fetch(self, handle: RemoteArray) -> np.ndarray: ...

    def group_with_announced(self, handle: RemoteArray) -> Mapping[int, Placement | None]: ...

    def steadily(self, act: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class RemoteDevice:
    """A device of the servers: its position in the cluster."""

    id: int


class RemoteSharding(jax.sharding.SingleDeviceSharding):
    """Sharding of an array on the servers, as text, with the methods of `str`; to JAX, the device of its fetched
    contents. Which part of the array lies on which device of the servers says `devices_indices_map`.
    """

    def __init__(self, text: str, place: Placement | None = None) -> None:
        super().__init__(jax.local_devices()[0])
        self._text = text
        self._place = place

    def devices_indices_map(self, global_shape: Sequence[int]) -> Mapping[Any, tuple[slice, ...]]:
        """Device of the servers → its part of the array, as `jax.debug.visualize_array_sharding` draws it.

        A part that is no box of the array (of a view that is split within a dimension) is given by the box around it.
        """
        shape = tuple(global_shape)
        if self._place is None:
            return super().devices_indices_map(shape)
        return {RemoteDevice(number): box[: len(shape)] for number, box in held_boxes(self._place, shape).items()}

    def __repr__(self) -> str:
        return self._text

    def __contains__(self, part: str) -> bool:
        return part in self._text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(str, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._text, name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str | RemoteSharding):
            return self._text == str(other)
        return bool(super().__eq__(other))  # type: ignore[no-untyped-call]

    __hash__ = jax.sharding.SingleDeviceSharding.__hash__


class RemoteArray(ArrayOperators):
    """An array on the servers: a result of a step, or of `step.init`.

    It is a `jax.Array`: operators, methods and functions of JAX and numpy return the same results on it and on a local
    array of the same contents; each call reads the contents. Nothing is read before; `shape`, `dtype` and their
    dependents (`jnp.zeros_like`, `jax.eval_shape`) never read. Dropping the handle frees the array. A donated handle
    raises on use, and so does the handle of a failed step. The contents of a PRNG key are its `uint32` words;
    `to_jax()` returns the key itself.
    """

    __slots__ = (
        "__weakref__",
        "_deleted",
        "_ids",
        "_is_batch",
        "_is_owned",
        "_pending",
        "_place",
        "_read_ahead",
        "_result",
        "_store",
        "spec",
    )

    def __new__(cls, store: Store, spec: ArraySpec, **rest: Any) -> RemoteArray:
        del store, rest
        return jax.Array.__new__(RemoteKey if spec.is_key else cls)

    def __init__(
        self,
        store: Store,
        spec: ArraySpec,
        *,
        ids: tuple[int, ...] = (),
        place: Placement | None = None,
        result: StepResult | None = None,
        pending: Pending | None = None,
    ) -> None:
        self._store: Store = store
        self.spec = spec
        self._ids = ids  # one, or as many as its place has parts
        self._place = place
        self._result = result  # of the step that computes it
        self._pending = pending  # what has yet to make it
        self._deleted = ""  # why it is gone
        self._read_ahead: np.ndarray | None = None  # read with those of others, until they are asked for
        self._is_batch = False  # workers read it themselves, wherever a step wants it
        self._is_owned = False  # its place is that of a step which updates it in place
        self._set_result()

    # ---- what it is, without reading it ------------------------------------------

    @property
    def sharding(self) -> RemoteSharding:
        """Its text maps dimensions to mesh axes, e.g. `[data, -] on data=2 × model=4`."""
        return RemoteSharding(self._layout_text(), self._place)

    def _layout_text(self) -> str:
        if self._place is None:
            return "not placed yet"
        if isinstance(self._place, RowParts):
            return str(self._place)
        return f"{self._place.sharding} on {self._place.mesh}"

    def is_deleted(self) -> bool:
        """Whether it was donated to a step, or deleted."""
        return bool(self._deleted)

    @property
    def why_deleted(self) -> str:
        """The reason of deletion, e.g. "donated to update"; "" while the array exists."""
        return self._deleted

    def delete(self) -> None:
        """Frees the array now, whoever still holds the handle."""
        if not self._deleted:
            self._store.free(*self._ids)
            self._deleted = "deleted"
            self._read_ahead = None

    def is_ready(self) -> bool:
        """Whether it is computed."""
        return self._pending is None and (self._result is None or self._result.is_done)

    def __repr__(self) -> str:
        state = self._deleted or self._layout_text()
        return f"RemoteArray(shape={self.shape}, dtype={self.dtype}, {state})"

    # ---- reading it ----------------------------------------------------------------

    def block_until_ready(self) -> RemoteArray:
        """Returns when it is computed; raises the step's error."""
        self._require_ready()
        if self._result is not None:
            self._result.wait_for_lines()
        return self

    def copy_to_host_async(self) -> None:
        """Announces a read: the first read of an announced handle reads others in the same round trip.

        Raises nothing; the read itself reports errors.
        """
        self._store.announce(self)

    def __array__(self, dtype: Any = None, context: None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a remote array is always copied")
        value = self._fetch()
        return value if dtype is None else value.astype(dtype)

    def to_jax(self) -> Any:
        """A JAX array on this machine; of a PRNG key the key."""
        return self._contents()

    def _contents(self) -> Any:
        from shardwright.client.array_specs import result_value

        return result_value(self._fetch(), self.spec)

    def devices(self) -> set[Any]:
        """The device of the fetched contents."""
        return self.sharding.device_set

    @property
    def device(self) -> Any:
        """The device of the fetched contents."""
        (device,) = self.sharding.device_set
        return device

    def item(self, *args: int) -> Any:
        """The only element, or the named one, converted to a Python number."""
        return self._fetch().item(*args)

    def tolist(self) -> Any:
        return self._fetch().tolist()

    def tobytes(self, order: Any = "C") -> bytes:
        return self._fetch().tobytes(order)

    def __float__(self) -> float:
        return float(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __complex__(self) -> complex:
        return complex(self._number())

    def __bool__(self) -> bool:
        return bool(self._fetch()) if self.size == 1 and not self.spec.is_key else bool(self._contents())

    def __index__(self) -> int:
        return operator.index(self._contents() if self.shape else self._fetch().item())

    def __format__(self, spec: str) -> str:
        return repr(self) if self._deleted else format(self._read_with_warning("format")[()], spec)

    def __str__(self) -> str:
        return repr(self) if self._deleted else str(self._read_with_warning("str"))

    def _number(self) -> Any:
        """The only element; of larger arrays JAX's own error."""
        return self._fetch().item() if not self.shape and not self.spec.is_key else self._contents()

    def __reduce__(self) -> NoReturn:
        raise ArrayError(
            "a remote array cannot be pickled: it belongs to its session", remedy="pickle np.asarray(handle)"
        )

    def __del__(self) -> None:
        if self._ids and not self._deleted:
            self._store.free(*self._ids)

    # ---- for the session and its steps -------------------------------------------------------------

    def _require_ready(self) -> None:
        """Waits until computed; raises an error with the reason otherwise."""
        if self._deleted:
            raise ArrayError(
                f"this array of shape {list(self.shape)} was {self._deleted}",
                remedy="use the result that the step returned in its place, or leave it out of donate_argnums",
            )
        if self._pending is not None:
            self._store.steadily(self._materialize)
        if self._result is not None:
            self._result.wait()

    def _materialize(self) -> None:
        if self._pending is not None:
            self._pending.materialize(self._store.group_with_announced(self))

    def _adopt(self, other: RemoteArray) -> None:
        """Becomes `other`, whose handle is empty afterwards; the former array is freed."""
        self._store.free(*self._ids)
        self._ids, self._place, self._result = other._ids, other._place, other._result
        self._pending = None
        other._ids = ()
        self._set_result()

    def relocate(self, ids: tuple[int, ...], place: Placement | None, *, is_settled: bool) -> None:
        """Lies elsewhere, after a recovery on other nodes. is_settled: as the step wants it that updates it."""
        self._ids, self._place = ids, place
        self._is_owned = self._is_owned and is_settled
        self._store.note_handle(self)

    def _set_result(self) -> None:
        """Links the handle to the step that computes it."""
        if self._result is not None and self._ids:
            self._result.handles[self._ids[0]] = weakref.ref(self)
        if self._ids:
            self._store.note_handle(self)
        if self._deleted:  # while it waited
            self._store.free(*self._ids)

    def _donate(self, step: str, *, is_reused: bool) -> None:
        """Marks it donated to a step; an array not reused by the step is freed."""
        self._deleted = f"donated to {step}"
        self._read_ahead = None
        if not is_reused:
            self._store.free(*self._ids)

    @property
    def _is_computed(self) -> bool:
        """Whether it can be read at once, from the servers."""
        if self._deleted or self._pending is not None or self._place is None:
            return False
        result = self._result
        return result is None or (result.is_done and result.error is None and self._ids[0] not in result.values)

    def _fetch(self) -> np.ndarray:
        contents = self._read()
        if self._result is not None:
            self._result.wait_for_lines()
        return contents

    def _read(self) -> np.ndarray:
        """Its contents, whatever its step has yet to say: where a caller holds a lock."""
        self._require_ready()
        if self._result is not None and len(self._ids) == 1 and self._ids[0] in self._result.values:
            return self._result.values[self._ids[0]]
        return self._store.fetch(self)


class RemoteKey(RemoteArray):
    """An array of PRNG keys on the servers."""

    __slots__ = ()


for _type in (RemoteArray, RemoteKey):
    private.register_array_type(_type, lambda array: array._read_with_warning("a function of JAX"))
private.register_key_type(RemoteKey, lambda array: array._contents())
