"""Operators and methods of `jax.Array`, for remote arrays.

Every operator and method that computes reads the contents and calls the JAX array's own: results, types and errors are
JAX's. While a step is traced nothing is read: the handle stands in the jaxpr as a constant, later made an argument of
the step by the front end. Shape and type queries need neither.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax

from shardwright.client.limits import LARGE_FETCH_BYTES
from shardwright.errors import LargeFetchWarning
from shardwright.xla import private

if TYPE_CHECKING:
    from shardwright.client.array_specs import ArraySpec

_OPERATORS = (
    "abs add and divmod eq floordiv ge getitem gt invert iter le lshift lt matmul mod mul ne neg or pos pow radd rand "
    "rdivmod rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor setitem sub truediv "
    "xor contains copy deepcopy array_namespace dlpack dlpack_device"
)
_METHODS = (
    "all any argmax argmin argpartition argsort astype byteswap choose clip compress conj conjugate copy cumprod "
    "cumsum diagonal dot flatten max mean min nonzero prod ptp ravel repeat reshape round searchsorted sort squeeze "
    "std sum swapaxes take trace transpose var view to_device addressable_data"
)
_PROPERTIES = "T mT at flat real imag addressable_shards global_shards"

_is_tracing: ContextVar[bool] = ContextVar("shardwright_is_tracing", default=False)
_warned_operations: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


@contextmanager
def keep_handles() -> Iterator[None]:
    """While a step is traced: captured handles stay in its jaxpr, unread."""
    token = _is_tracing.set(True)
    try:
        yield
    finally:
        _is_tracing.reset(token)


class ArrayOperators(jax.Array):
    """Operators, methods and properties of `jax.Array`, on top of `spec` and a read function."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 100  # numpy's operators ask this class, as they do jax.Array
    _committed = False  # to no device: what is read may go to any

    if TYPE_CHECKING:
        spec: ArraySpec
        _store: Any

        def _contents(self) -> Any: ...

    # ---- what shape and type tell -------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> Any:
        return self.spec.dtype

    @property
    def weak_type(self) -> bool:
        return self.spec.weak_type

    @property
    def aval(self) -> Any:
        return _abstract(self.spec)

    @property
    def ndim(self) -> int:
        return len(self.spec.shape)

    @property
    def size(self) -> int:
        size = 1
        for extent in self.spec.shape:
            size *= extent
        return size

    @property
    def itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    @property
    def committed(self) -> bool:
        return False

    @property
    def is_fully_addressable(self) -> bool:
        return True

    @property
    def is_fully_replicated(self) -> bool:
        return True

    # ---- reading it for JAX -------------------------------------------------------

    def __jax_array__(self) -> Any:
        """The operand of JAX's functions: the contents, or the handle inside a traced step."""
        return self if _is_tracing.get() else self._read_with_warning("a function of JAX")

    def _read_with_warning(self, kind: str) -> Any:
        """The contents as a JAX array; warns at large ones."""
        if self.nbytes > LARGE_FETCH_BYTES:
            self._warn_of_size(kind)
        return self._contents()

    def _warn_of_size(self, kind: str) -> None:
        kinds = _warned_operations.setdefault(self._store, set())
        if kind in kinds:
            return
        kinds.add(kind)
        text = (
            f"{kind} reads {self.nbytes / 1e6:,.0f} MB from the servers: an array {self.dtype}{list(self.shape)}\n"
            "  remedy: compute on the servers, e.g. session.parallelize(tx.init)(params) for an optimizer's state; "
            "np.asarray(handle) reads without a word"
        )
        warnings.warn(text, LargeFetchWarning, stacklevel=frames_to_user())


@functools.cache
def _abstract(spec: ArraySpec) -> Any:
    return jax.typeof(spec.aval)


def frames_to_user() -> int:
    """`stacklevel` in the caller: frames up to the first one outside JAX and this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("shardwright", "jax"):
        level, frame = level + 1, frame.f_back
    return level


def _attribute(array: Any, name: str) -> Any:
    """`name` of the JAX array with these contents, or while a step is traced of the handle itself."""
    if _is_tracing.get():
        return private.attribute_while_traced(array, name)
    return getattr(array._read_with_warning(name.strip("_")), name)


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _attribute(self, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"As `jax.Array.{name}`."
    return method


def _property(name: str) -> property:
    return property(lambda self: _attribute(self, name), doc=f"As `jax.Array.{name}`.")


for _name in [*(f"__{operator}__" for operator in _OPERATORS.split()), *_METHODS.split()]:
    setattr(ArrayOperators, _name, _method(_name))
for _name in _PROPERTIES.split():
    setattr(ArrayOperators, _name, _property(_name))
