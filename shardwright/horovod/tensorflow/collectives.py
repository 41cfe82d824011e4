"""Collectives in the order of arguments that Horovod has for TensorFlow. Devices and scopes of names have no effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.horovod import collectives as plain
from shardwright.horovod.process_sets import global_process_set, resolve
from shardwright.ranks import Compression, ReduceOp


def allreduce(
    tensor: Any,
    average: bool | ReduceOp | str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """The reduction over all ranks, at each: the average unless `op` (or `average=False`) says otherwise."""
    return plain.allreduce(tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | ReduceOp | str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """`allreduce` of a list, as one message a type."""
    given = list(plain.check_tensors(tensors))
    return list(plain.allreduce(given, average, name, compression, op, prescale_factor, postscale_factor, process_set))


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction over all ranks."""
    return plain.reducescatter(tensor, name, compression, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
    """`reducescatter` of a list, with its arguments."""
    return list(reducescatter(list(plain.check_tensors(tensors)), *args, **kwargs))


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = global_process_set
) -> Any:
    """The arrays of all ranks, one after the other along dimension 0."""
    return plain.allgather(tensor, name, process_set)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> list[Any]:
    """`allgather` of a list, as one message."""
    return list(plain.allgather(list(plain.check_tensors(tensors)), name, process_set))


def broadcast(
    tensor: Any,
    root_rank: int = 0,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """The value of rank `root_rank`, at every rank."""
    return plain.broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    variables: Sequence[Any], root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """`broadcast` into variables."""
    given = list(variables)
    values = plain.broadcast([variable.numpy() for variable in given], root_rank, name, resolve(process_set))
    for variable, value in zip(given, values, strict=True):
        variable.assign(value)
    return given


def broadcast_variables(
    variables: Sequence[Any], root_rank: int = 0, process_set: Any = global_process_set, inplace: bool = False
) -> None:
    """Put the values of rank `root_rank` into variables of TensorFlow or Keras at every rank."""
    broadcast_(variables, root_rank, None, process_set)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Rows for each rank → rows from each; with `splits`, `(rows, received_splits)`."""
    return plain.alltoall(tensor, splits, name, process_set)
