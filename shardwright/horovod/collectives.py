"""Horovod's collectives of any framework: arrays of numpy, JAX, PyTorch and TensorFlow, numbers, and trees of them.

The order of arguments is that of `horovod.torch`. What differs between frameworks is in `torch` and `tensorflow`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright import ranks
from shardwright.errors import CollectiveError, RankLostError
from shardwright.horovod.arguments import is_own_compressor, read_cast, read_name, read_op, submit
from shardwright.horovod.errors import OptionValueError, as_value_errors
from shardwright.horovod.process_sets import global_process_set, resolve
from shardwright.horovod.reductions import Reduction
from shardwright.ranks import Compression, Handle, ReduceOp


# ---- reductions -------------------------------------------------------------------
def allreduce(
    tensor: Any,
    average: bool | ReduceOp | str | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Any:
    """The reduction over all ranks, at each: the average unless `op` (or `average=False`) says otherwise.

    A tree goes as one message a type. compression: `Compression.fp16`, `.bf16`, or one of your own.
    """
    chosen = read_op(op, average)
    if is_own_compressor(compression):
        return _compressed(compression, tensor, lambda value: allreduce(
            value, None, name, Compression.none, chosen, prescale_factor, postscale_factor, process_set
        ))  # fmt: skip
    with as_value_errors():
        return Reduction(
            function=ranks.allreduce,
            op=chosen,
            name=read_name(name),
            process_set=resolve(process_set),
            prescale=prescale_factor,
            postscale=postscale_factor,
            compression=read_cast(compression),
        )(tensor)


def allreduce_async(
    tensor: Any,
    average: bool | ReduceOp | str | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Handle:
    """`allreduce` in the background: a handle for `synchronize` and `poll`. The tensor must not change until then."""
    chosen, members = read_op(op, average), resolve(process_set)
    return submit("allreduce", name, members, lambda: allreduce(
        tensor, None, name, Compression.none, chosen, prescale_factor, postscale_factor, members
    ))  # fmt: skip


def reducescatter(
    tensor: Any,
    name: str | ReduceOp | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction over all ranks; the first n % size ranks get one row more."""
    name, op = (None, name) if isinstance(name, ReduceOp) else (name, op)
    chosen = read_op(op)
    if chosen is ReduceOp.ADASUM:
        raise CollectiveError(
            "Adasum of rows is not defined", where="op", remedy="op=Sum, Average, Min, Max or Product"
        )
    if is_own_compressor(compression) or read_cast(compression):
        return _compressed(compression, tensor, lambda value: reducescatter(
            value, name, Compression.none, chosen, process_set, prescale_factor, postscale_factor
        ))  # fmt: skip
    with as_value_errors():
        return Reduction(
            function=ranks.reducescatter,
            op=chosen,
            name=read_name(name),
            process_set=resolve(process_set),
            prescale=prescale_factor,
            postscale=postscale_factor,
        )(tensor)


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`reducescatter` in the background."""
    members = resolve(process_set)
    return submit("reducescatter", name, members, lambda: reducescatter(
        tensor, name, Compression.none, op, members, prescale_factor, postscale_factor
    ))  # fmt: skip


def _compressed(compression: Any, tensor: Any, exchange: Callable[[Any], Any]) -> Any:
    """A collective of what a compressor makes of each tensor, and back."""
    parts = tensor if isinstance(tensor, list | tuple) else [tensor]
    sent, contexts = zip(*[compression.compress(part) for part in parts], strict=True)
    results = [
        compression.decompress(result, context) for result, context in zip(exchange(list(sent)), contexts, strict=True)
    ]
    return results if isinstance(tensor, list | tuple) else results[0]


# ---- what moves without arithmetic ------------------------------------------------
def allgather(tensor: Any, name: str | None = None, process_set: Any = global_process_set) -> Any:
    """The arrays of all ranks, one after the other along dimension 0, which may differ."""
    with as_value_errors():
        return ranks.allgather(tensor, name=read_name(name), process_set=resolve(process_set))


def allgather_async(tensor: Any, name: str | None = None, process_set: Any = global_process_set) -> Handle:
    """`allgather` in the background."""
    members = resolve(process_set)
    return submit("allgather", name, members, lambda: allgather(tensor, name, members))


def broadcast(tensor: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set) -> Any:
    """The value of rank `root_rank` (its number in the job), at every rank."""
    with as_value_errors():
        return ranks.broadcast(tensor, root_rank, name=read_name(name), process_set=resolve(process_set))


def broadcast_async(
    tensor: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set
) -> Handle:
    """`broadcast` in the background."""
    members = resolve(process_set)
    return submit("broadcast", name, members, lambda: broadcast(tensor, root_rank, name, members))


def alltoall(tensor: Any, splits: Any = None, name: str | None = None, process_set: Any = global_process_set) -> Any:
    """Rows for each rank → rows from each; with `splits`, `(rows, received_splits)`."""
    with as_value_errors():
        return ranks.alltoall(tensor, splits, name=read_name(name), process_set=resolve(process_set))


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> Handle:
    """`alltoall` in the background."""
    members = resolve(process_set)
    return submit("alltoall", name, members, lambda: alltoall(tensor, splits, name, members))


#: A group is a list, which is a tree.
grouped_allreduce, grouped_allreduce_async = allreduce, allreduce_async
grouped_allgather, grouped_allgather_async = allgather, allgather_async
grouped_reducescatter, grouped_reducescatter_async = reducescatter, reducescatter_async


# ---- objects, waiting -------------------------------------------------------------
def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """The object of rank `root_rank`, at every rank, without pickle: docs/from-horovod.md has the types."""
    with as_value_errors():
        return ranks.broadcast_object(obj, root_rank, name=read_name(name), process_set=resolve(process_set))


def allgather_object(obj: Any, name: str | None = None, process_set: Any = global_process_set) -> list[Any]:
    """The objects of all ranks, in order."""
    with as_value_errors():
        return ranks.allgather_object(obj, name=read_name(name), process_set=resolve(process_set))


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> Callable[[Any], Any]:
    """`broadcast_object` as a function of the object. session: None, TensorFlow 1 has them."""
    if session is not None:
        raise OptionValueError("sessions are TensorFlow 1's", where="session", remedy="leave it out")
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def barrier(process_set: Any = global_process_set) -> None:
    """Returns once every rank has called it."""
    ranks.barrier(resolve(process_set))


def join(device: int = -1, *, process_set: Any = global_process_set) -> int:
    """Say that this rank has no data left; returns the rank that came last.

    A call of the others that cannot do without it fails at them, and this rank waits on. device: not used.
    """
    members = resolve(process_set)
    ranks.size()  # in a job
    while True:
        try:
            return ranks.join(members)
        except RankLostError:
            raise
        except CollectiveError:
            continue  # the others were told; the next call is theirs


def synchronize(handle: Any) -> Any:
    """Wait for the result of a call in the background, or raise its error."""
    with as_value_errors():
        return ranks.synchronize(handle)


def poll(handle: Any) -> bool:
    """Whether `synchronize` returns at once."""
    with as_value_errors():
        return ranks.poll(handle)


def check_tensors(tensors: Any) -> Sequence[Any]:
    """The tensors of a group. Raises OptionValueError for anything but a list or tuple."""
    if isinstance(tensors, list | tuple) and tensors:
        return tensors
    raise OptionValueError("a group is a list of tensors", where="tensors", remedy="pass [a, b, …]")
