"""Functions of Python and PyTorch in the form that is traced: of symbols, and without limits of one device."""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._meta_registrations import _meta_grouped_mm_common as _of_gpu_kernel


def infer_grouped_mm(
    mat_a: Any, mat_b: Any, scale_a: Any, scale_b: Any, offs: Any = None, bias: Any = None, scale_result: Any = None,
    out_dtype: Any = None, use_fast_accum: bool = False,
) -> Any:  # fmt: skip
    """The result of `torch.nn.functional.grouped_mm`, of any element type: PyTorch's own form knows that of its GPU
    kernel, bfloat16 alone. Scaled products go to that one."""
    if scale_a is not None or scale_b is not None:
        return _of_gpu_kernel(
            mat_a, mat_b, scale_a, scale_b, offs, bias, scale_result, out_dtype=out_dtype, use_fast_accum=use_fast_accum
        )
    groups = [offs.size(0)] if mat_a.dim() == mat_b.dim() == 2 else []
    groups = [mat_a.size(0)] if mat_a.dim() == mat_b.dim() == 3 else groups
    return mat_a.new_empty([*groups, mat_a.size(-2), mat_b.size(-1)], dtype=out_dtype or mat_a.dtype)


#: Functions of `math` that PyTorch has for symbols.
_OF_SYMBOLS = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")


@contextlib.contextmanager
def compute_with_symbols() -> Iterator[None]:
    """`min`, `max` and functions of `math` of numbers that only the call or the servers know, and of scalar tensors."""
    with contextlib.ExitStack() as stack:
        for name in _OF_SYMBOLS:
            form = functools.partial(_compute, getattr(math, name), getattr(torch, f"_sym_{name}"))
            stack.enter_context(mock.patch.object(math, name, form))
        for name in ("min", "max"):
            stack.enter_context(mock.patch.object(builtins, name, _extreme(name)))
        yield


def _compute(function: Callable[[Any], float], of_symbol: Callable[[Any], Any], value: Any) -> Any:
    is_symbol = isinstance(value, torch.SymInt | torch.SymFloat)
    return of_symbol(torch.sym_float(value)) if is_symbol else function(value)


def _extreme(name: str) -> Callable[..., Any]:
    plain, of_symbols = getattr(builtins, name), getattr(torch, f"sym_{name}")
    of_tensors = torch.minimum if name == "min" else torch.maximum

    def choose(*values: Any, **options: Any) -> Any:
        if len(values) < 2 or options or not any(isinstance(v, torch.SymFloat | torch.Tensor) for v in values):
            return plain(*values, **options)
        if not any(isinstance(value, torch.Tensor) for value in values):
            return functools.reduce(of_symbols, values)
        if any(isinstance(value, torch.Tensor) and value.dim() for value in values):
            return plain(*values)
        return functools.reduce(of_tensors, [torch.as_tensor(value) for value in values])

    return choose
