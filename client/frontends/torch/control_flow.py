"""`torch.cond`, `scan`, `map`, `associative_scan` and `flex_attention` while a step is traced: as plain operators.

Of a condition both sides are computed; loops over the first dimension are written out.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree

from shardwright.client.frontends.torch.labels import user_line
from shardwright.errors import UnsupportedProgramError


@contextlib.contextmanager
def write_out() -> Iterator[None]:
    """The operators that PyTorch's functions call in these forms."""
    forms = {
        ("cond", "cond_op"): _choose,
        ("scan", "scan_op"): _scan,
        ("map", "map_impl"): _map,
        ("associative_scan", "associative_scan_op"): _accumulate,
        ("while_loop", "while_loop_op"): _repeat,
    }
    with contextlib.ExitStack() as stack:
        for (file, name), form in forms.items():
            module = importlib.import_module(f"torch._higher_order_ops.{file}")
            stack.enter_context(mock.patch.object(module, name, form))
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        attend = importlib.import_module("torch._higher_order_ops.flex_attention").math_attention
        stack.enter_context(mock.patch.object(flex, "flex_attention_hop", attend))
        stack.enter_context(mock.patch.object(flex, "_validate_device"))  # of its GPU kernels
        stack.enter_context(mock.patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True))
        yield


def _choose(condition: Any, of_true: Callable[..., Any], of_false: Callable[..., Any], operands: Sequence[Any]) -> Any:
    if isinstance(condition, bool):
        return (of_true if condition else of_false)(*operands)
    sides = [side(*operands) for side in (of_true, of_false)]
    chosen = [torch.where(condition, a, b) for a, b in zip(*map(_pytree.tree_leaves, sides), strict=True)]
    return _pytree.tree_unflatten(chosen, _pytree.tree_structure(sides[0]))


def _scan(
    combine: Callable[..., Any], init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any] = ()
) -> Any:
    carry, rows = list(init), []
    for number in range(xs[0].shape[0]):
        results = _pytree.tree_leaves(combine(*carry, *(x[number] for x in xs), *additional_inputs))
        carry, row = results[: len(carry)], results[len(carry) :]
        rows.append(row)
    return (*carry, *(torch.stack(column) for column in zip(*rows, strict=True)))


def _map(function: Callable[..., Any], xs: Sequence[Any], others: Sequence[Any]) -> Any:
    count = xs[0].shape[0]
    results = [function(*(x[number] for x in xs), *others) for number in range(count)]
    rows = map(_pytree.tree_leaves, results)
    stacked = [torch.stack(column) for column in zip(*rows, strict=True)]
    return _pytree.tree_unflatten(stacked, _pytree.tree_structure(results[0]))


def _accumulate(combine: Callable[..., Any], xs: Sequence[Any], additional_inputs: Sequence[Any] = ()) -> Any:
    rows = [[x[0] for x in xs]]
    for number in range(1, xs[0].shape[0]):
        rows.append(_pytree.tree_leaves(combine(*rows[-1], *(x[number] for x in xs), *additional_inputs)))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _repeat(
    condition: Callable[..., Any], body: Callable[..., Any], carried: Sequence[Any], others: Sequence[Any]
) -> Any:
    """As often as the trace can tell, by counting from a constant."""
    values = list(carried)
    while _is_known(condition(*values, *others)):
        values = list(_pytree.tree_leaves(body(*values, *others)))
    return tuple(values)


def _is_known(condition: Any) -> bool:
    """A condition that depends on constants alone. Raises UnsupportedProgramError of others."""
    constant = getattr(condition, "constant", None)
    if isinstance(condition, torch.Tensor) and constant is None:
        raise UnsupportedProgramError(
            "while_loop repeats as often as values ask for, and a step has a fixed length",
            where=user_line(),
            remedy="loop in Python to the largest number, with torch.where for what has ended",
        )
    return bool(condition if constant is None else constant)
