"""The table of lowerings, and what a lowering knows of the call that it stands for.

A lowering is called with arrays in place of tensors and otherwise with the operator's own arguments. Its result is
brought to the dtype that PyTorch computed for it; its shape has to be right. Keys are operator names without the
namespace, `add` for all overloads or `add.Tensor` for one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as _KIND
from torch._prims_common import elementwise_dtypes

from shardwright.client.frontends.torch.dtypes import numpy_type

Lowering = Callable[..., Any]

TABLE: dict[str, Lowering] = {}

DEFAULT = _KIND.DEFAULT
TO_FLOAT = _KIND.INT_TO_FLOAT
TO_BOOL = _KIND.ALWAYS_BOOL
TO_INT = _KIND.BOOL_TO_LONG

_HALF_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Call:
    """One operator in the graph.

    node: of torch.fx. result: the fake tensor, or tensors, of its result. types: its arguments, fake tensors among
    them. draw: makes a random key of its own.
    """

    node: Any
    result: Any
    types: tuple[Any, ...]
    draw: Callable[[], jax.Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the only result."""
        return tuple(self.result.shape)

    @property
    def dtype(self) -> np.dtype:
        """Element type of the only result."""
        return numpy_type(self.result.dtype)


def find(op: Any) -> Lowering | None:
    """The lowering of an overload."""
    name = str(op.name()).partition("::")[2]
    return TABLE.get(name) or TABLE.get(name.partition(".")[0])


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Registers `function(call, *arguments)`."""

    def register(function: Lowering) -> Lowering:
        for name in names:
            assert name not in TABLE, name
            TABLE[name] = function
        return function

    return register


def pointwise(
    *names: str, kind: Any = DEFAULT, widens: bool = False, keeps_digits: bool = False
) -> Callable[[Lowering], Lowering]:
    """Registers `function(*arguments)`: its arrays and numbers come in the type that PyTorch computes in.

    widens: 16-bit floats are computed in float32, for formulas of several steps. keeps_digits: only beside a number
    that a 16-bit float does not hold, 0.99 or a learning rate.
    """

    def register(function: Lowering) -> Lowering:
        @functools.wraps(function)
        def lower(call: Call, *args: Any, **kwargs: Any) -> Any:
            is_wide = widens or (keeps_digits and any(map(has_digits, [*call.types, *kwargs.values()])))
            dtype = compute_type(call.types, kind, widens=is_wide)
            return function(*(_cast(arg, dtype) for arg in args), **{k: _cast(v, dtype) for k, v in kwargs.items()})

        lowers(*names)(lower)
        return function

    return register


def has_digits(value: Any) -> bool:
    """Whether a 16-bit float may not hold a number: one that the servers know, or a tensor without dimensions."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and value.dtype in (torch.float32, torch.float64)
    if isinstance(value, float):
        return float(np.asarray(value, jnp.bfloat16)) != value
    return isinstance(value, torch.SymFloat) or is_array(value)


def compute_type(types: Sequence[Any], kind: Any = DEFAULT, *, widens: bool = False) -> np.dtype:
    """The type in which PyTorch computes an elementwise operator of these arguments."""
    operands = [_without_symbols(operand) for operand in types if _is_operand(operand)]
    wide, narrow = elementwise_dtypes(*operands, type_promotion_kind=kind)
    is_half = wide is torch.float32 and any(isinstance(t, torch.Tensor) and t.dtype in _HALF_TYPES for t in operands)
    return numpy_type(narrow if is_half and not widens and narrow in _HALF_TYPES else wide)


def _is_operand(value: Any) -> bool:
    return isinstance(value, torch.Tensor | bool | int | float | complex | torch.SymInt | torch.SymFloat)


def _without_symbols(value: Any) -> Any:
    if isinstance(value, torch.SymFloat):
        return 0.0
    return 0 if isinstance(value, torch.SymInt) else value


def _cast(value: Any, dtype: np.dtype) -> Any:
    return value.astype(dtype) if is_array(value) and value.dtype != dtype else value


def is_array(value: Any) -> bool:
    """Whether a lowering's argument is an array: a tensor of the graph, or a number known only to the servers."""
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def widen(value: jax.Array) -> jax.Array:
    """16-bit floats as float32; others as they are."""
    return value.astype(jnp.float32) if value.dtype in (jnp.bfloat16, jnp.float16) else value


def axes_of(dims: Any, rank: int) -> tuple[int, ...]:
    """Non-negative, of one or several dimensions; of None or none all."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(rank))
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(dim % rank if rank else 0 for dim in dims) if rank else ()
