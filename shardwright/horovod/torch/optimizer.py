"""Horovod's optimizer of PyTorch, by its arguments: `sw.ranks.torch_optimizer` does the work."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardwright.horovod.arguments import read_cast, read_op
from shardwright.horovod.errors import OptionValueError, as_value_errors
from shardwright.horovod.process_sets import global_process_set, resolve
from shardwright.ranks import Compression, ReduceOp, torch_optimizer
from shardwright.ranks.compression import Cast


def DistributedOptimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """`optimizer` itself, which from now on steps with the gradients of all ranks.

    num_groups, groups: checked, and without effect: all gradients of one type go in one message. A rank outside of
    process_set steps alone. Raises OptionValueError, a ValueError.
    """
    _check_groups(groups if groups is not None else num_groups or None)
    if num_groups:
        warnings.warn("num_groups is called groups", DeprecationWarning, stacklevel=2)
    with as_value_errors():
        return torch_optimizer.DistributedOptimizer(
            optimizer,
            named_parameters,
            read_cast(compression) if compression is None or isinstance(compression, Cast) else compression,
            backward_passes_per_step,
            read_op(op),
            gradient_predivide_factor,
            sparse_as_dense,
            resolve(process_set),
        )


def _check_groups(groups: Any) -> None:
    if groups is None or (type(groups) is int and groups > 0):
        return
    remedy = "a number of groups from 1, or a list of lists of parameters"
    if not isinstance(groups, list):
        raise OptionValueError(f"{groups!r}", where="groups", remedy=remedy)
    seen: set[int] = set()
    for group in groups:
        for param in group if isinstance(group, list | tuple) else [group]:
            if not isinstance(param, torch.Tensor):
                raise OptionValueError(f"a {type(param).__name__} is no parameter", where="groups", remedy=remedy)
            if id(param) in seen:
                raise OptionValueError("a parameter is in two groups", where="groups", remedy="put each into one")
            seen.add(id(param))


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0) -> None:
    """Put the tensors of rank `root_rank` into those of every rank: a `state_dict()`, `named_parameters()`, a list."""
    with as_value_errors():
        torch_optimizer.broadcast_parameters(params, root_rank)


def broadcast_optimizer_state(optimizer: Any, root_rank: int = 0, model: Any = None) -> None:
    """Load the state of rank `root_rank`'s optimizer at every rank: learning rates and moments, where there are any.

    Where there is no state yet, gradients that are missing become zeros, as Horovod leaves them. model: not used.
    """
    with as_value_errors():
        torch_optimizer.broadcast_optimizer_state(optimizer, root_rank)
    if optimizer.state:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
