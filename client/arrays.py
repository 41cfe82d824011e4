"""Handles of arrays that live on the servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from shardwright.client.places import Place, Rows
from shardwright.errors import ArrayError

if TYPE_CHECKING:
    from shardwright.client.frontends.jax import ArraySpec
    from shardwright.client.stream import StepResult
    from shardwright.client.workspace import Workspace


class Pending(Protocol):
    """What has yet to make an array: an initializer that has not run, a checkpoint that has not been read."""

    def materialize(self, wanted: Mapping[int, Place | None]) -> None:
        """Makes it; `wanted` are the handles that are needed, by `id()`, and how they are to lie: None, as it likes."""


class RemoteArray:
    """An array on the servers: a result of a step, or of `step.init`.

    Nothing is read until it is asked for: `np.asarray(handle)`, `float(handle)`,
    `handle.item()`. Dropping the handle frees the array. A donated handle, and
    one whose step failed, raises when it is used. `shape` and `dtype` are those
    JAX would show; the contents of a PRNG key are its `uint32` words, and
    `to_jax()` gives the key itself.
    """

    __slots__ = (
        "__weakref__",
        "_deleted",
        "_ids",
        "_is_owned",
        "_pending",
        "_place",
        "_read_ahead",
        "_result",
        "_session",
        "spec",
    )

    def __init__(
        self,
        session: Workspace,
        spec: ArraySpec,
        *,
        ids: tuple[int, ...] = (),
        place: Place | None = None,
        result: StepResult | None = None,
        pending: Pending | None = None,
    ) -> None:
        self._session = session
        self.spec = spec
        self._ids = ids  # one, or as many as its place has parts
        self._place = place
        self._result = result  # of the step that computes it
        self._pending = pending  # what has yet to make it
        self._deleted = ""  # why it is gone
        self._read_ahead: np.ndarray | None = None  # read with those of others, until they are asked for
        self._is_owned = False  # its place is that of a step which updates it in place

    # ---- what it is, without reading it ------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> Any:
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        return len(self.spec.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.spec.shape, dtype=np.int64))

    @property
    def sharding(self) -> str:
        """Which axes split which dimension, e.g. `[data, -] on data=2 × model=4`."""
        if self._place is None:
            return "not placed yet"
        if isinstance(self._place, Rows):
            return str(self._place)
        return f"{self._place.sharding} on {self._place.mesh}"

    @property
    def is_deleted(self) -> bool:
        """Whether it was donated to a step."""
        return bool(self._deleted)

    def __repr__(self) -> str:
        state = self._deleted or self.sharding
        return f"RemoteArray(shape={self.shape}, dtype={self.dtype}, {state})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a scalar")
        return self.shape[0]

    # ---- reading it ----------------------------------------------------------------

    def block_until_ready(self) -> RemoteArray:
        """Returns when it is computed; raises what went wrong."""
        self._ready()
        return self

    def copy_to_host_async(self) -> None:
        """Announces that it will be read: the first read of an announced handle reads others in the same round trip.

        Raises nothing: what is wrong with it is said when it is read.
        """
        self._session.announce(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a remote array is always copied")
        value = self._fetch()
        return value if dtype is None else value.astype(dtype)

    def to_jax(self) -> Any:
        """A JAX array on this machine; for a PRNG key the key."""
        from shardwright.client.frontends.jax import result_value

        return result_value(self._fetch(), self.spec)

    def item(self) -> Any:
        """The only element, as a Python number."""
        return self._fetch().item()

    def tolist(self) -> Any:
        return self._fetch().tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        return int(self._fetch().__index__())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and not self.shape else format(repr(self), spec)

    def __reduce__(self) -> NoReturn:
        raise ArrayError(
            "a remote array cannot be pickled: it belongs to its session", remedy="pickle np.asarray(handle)"
        )

    def __del__(self) -> None:
        if self._ids and not self._deleted:
            self._session.release_later(*self._ids)

    # ---- for the session and its steps -------------------------------------------------------------

    def _ready(self) -> None:
        """Computed, or an error that says why not."""
        if self._deleted:
            raise ArrayError(
                f"this array of shape {list(self.shape)} was {self._deleted}",
                remedy="use the result that the step returned in its place, or leave it out of donate_argnums",
            )
        if self._pending is not None:
            self._pending.materialize(self._session.wanted_with(self))
        if self._result is not None:
            self._result.wait()

    def _adopt(self, other: RemoteArray) -> None:
        """Becomes `other`, whose handle is empty afterwards; what it was before is freed."""
        self._session.release_later(*self._ids)
        self._ids, self._place, self._result = other._ids, other._place, other._result
        self._pending = None
        other._ids = ()

    def _donate(self, step: str, *, is_reused: bool) -> None:
        """Gone into a step; one that the step does not reuse is freed."""
        self._deleted = f"donated to {step}"
        self._read_ahead = None
        if not is_reused:
            self._session.release_later(*self._ids)

    @property
    def _is_computed(self) -> bool:
        """Whether it can be read at once, from the servers."""
        if self._deleted or self._pending is not None or self._place is None:
            return False
        result = self._result
        return result is None or (result.is_done and result.error is None and self._ids[0] not in result.values)

    def _fetch(self) -> np.ndarray:
        self._ready()
        if self._result is not None and len(self._ids) == 1 and self._ids[0] in self._result.values:
            return self._result.values[self._ids[0]]
        return self._session.fetch(self)
