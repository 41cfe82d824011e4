"""Collectives in the order of arguments that Horovod has for Keras."""

from __future__ import annotations

from typing import Any

from shardwright.horovod import collectives as plain
from shardwright.ranks import Compression, ReduceOp


def allreduce(
    value: Any,
    name: str | ReduceOp | None = None,
    average: bool | ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | str | None = None,
    compression: Any = Compression.none,
) -> Any:
    """The reduction over all ranks, at each: the average unless `op` (or `average=False`) says otherwise."""
    if isinstance(name, ReduceOp):
        name, average = None, name
    return plain.allreduce(value, average, name, compression, op, prescale_factor, postscale_factor)


def allgather(value: Any, name: str | None = None) -> Any:
    """The arrays of all ranks, one after the other along dimension 0."""
    return plain.allgather(value, name)


def broadcast(value: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The value of rank `root_rank`, at every rank."""
    return plain.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp | str = ReduceOp.AVERAGE) -> Any:
    """This rank's rows of the reduction over all ranks."""
    return plain.reducescatter(value, name, Compression.none, op)
