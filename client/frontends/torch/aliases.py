"""Views and updates in place, of graphs whose values are functional arrays.

A tensor that an operator makes has a storage of its own. A view of it refers to the same storage, through the
operators that lead there. An update through a view is written back to the storage; other views read it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

View = Callable[[Any], Any]


class Storage:
    """The array behind a tensor and its views. version: number of updates."""

    __slots__ = ("value", "version")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.version = 0


class Tensor:
    """A tensor of the graph: a storage, or a view of it."""

    __slots__ = ("_seen", "_value", "inverses", "storage", "views")

    def __init__(
        self, storage: Storage, views: tuple[View, ...] = (), inverses: tuple[Any, ...] = (), value: Any = None
    ) -> None:
        self.storage = storage
        self.views = views
        self.inverses = inverses
        self._value = value if views else storage.value
        self._seen = storage.version

    def view(self, view: View, inverse: Any) -> Tensor:
        """What `view` reads of this tensor. inverse: see `write`."""
        return Tensor(self.storage, (*self.views, view), (*self.inverses, inverse), view(self.read()))

    def read(self) -> Any:
        """The array now."""
        if self._seen != self.storage.version:
            value = self.storage.value
            for view in self.views:
                value = view(value)
            self._value, self._seen = value, self.storage.version
        return self._value

    def write(self, value: Any) -> None:
        """Updates the tensor in place, for all that share its storage."""
        steps, whole = [], self.storage.value
        for view in self.views:
            steps.append(whole)
            whole = view(whole)
        whole = value
        for before, view, inverse in zip(reversed(steps), reversed(self.views), reversed(self.inverses), strict=True):
            whole = inverse(before, whole) if inverse is not None else _write_by_position(before, view, whole)
        self.storage.value = whole
        self.storage.version += 1
        self._value, self._seen = value, self.storage.version


def _write_by_position(base: jax.Array, view: View, value: jax.Array) -> jax.Array:
    """`base` with `value` at the places of `view`, found by a view of all positions."""
    positions = view(jnp.arange(base.size, dtype=jnp.int64).reshape(base.shape))
    return base.reshape(-1).at[positions.reshape(-1)].set(value.reshape(-1)).reshape(base.shape)


def inverse_of(name: str, args: tuple[Any, ...]) -> Any:
    """`inverse(base, new)`, the base after the view `name(base, *args)` has become `new`; None if there is no simple
    one.
    """
    if name in ("view", "unsqueeze", "squeeze", "_unsafe_view", "_reshape_alias", "reshape"):
        return lambda base, new: new.reshape(base.shape)
    if name in ("detach", "alias", "lift_fresh"):
        return lambda base, new: new
    if name in ("t", "transpose"):
        first, second = args if args else (0, -1)
        return lambda base, new: jnp.swapaxes(new, first, second) if new.ndim > 1 else new
    if name == "permute":
        return lambda base, new: jnp.transpose(new, _invert([dim % new.ndim for dim in args[0]]))
    if name in ("view_as_real", "view_as_complex"):
        of_parts = name == "view_as_real"
        return lambda base, new: (
            jax.lax.complex(new[..., 0], new[..., 1]) if of_parts else jnp.stack([new.real, new.imag], axis=-1)
        )
    if name == "real":
        return lambda base, new: jax.lax.complex(new, base.imag) if base.dtype.kind == "c" else new
    if name == "imag":
        return lambda base, new: jax.lax.complex(base.real, new)
    if name == "_conj":
        return lambda base, new: jnp.conj(new)
    if name == "slice":
        return lambda base, new: set_slice(base, new, *args)
    if name == "select":
        return lambda base, new: base.at[(slice(None),) * (args[0] % base.ndim) + (args[1],)].set(new)
    return None


def _invert(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def take_slice(x: Any, size: int, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """`size` elements of a dimension. start: also a number of the call."""
    dim %= x.ndim
    if isinstance(start, jax.Array):
        x = lax.dynamic_slice_in_dim(x, _first(start, x.shape[dim]), (size - 1) * step + 1, dim)
        start, end = None, None
    return x[_slice_index(dim, start, end, step)]


def set_slice(x: Any, new: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """The same elements replaced."""
    dim %= x.ndim
    if not isinstance(start, jax.Array):
        return x.at[_slice_index(dim, start, end, step)].set(new)
    first = _first(start, x.shape[dim])
    part = lax.dynamic_slice_in_dim(x, first, (new.shape[dim] - 1) * step + 1, dim)
    part = part.at[_slice_index(dim, None, None, step)].set(new.astype(x.dtype))
    return lax.dynamic_update_slice_in_dim(x, part, first, dim)


def _first(start: Any, size: int) -> Any:
    return jnp.where(start < 0, start + size, start)


def _slice_index(dim: int, start: Any, end: Any, step: int) -> tuple[slice, ...]:
    return (slice(None),) * dim + (slice(start, end, step),)
