"""Horovod's collectives of PyTorch: with gradients, and in place.

The gradient of a call is a collective of the gradients, so every rank runs `backward` of the same calls in the same
order. As Horovod's, it is of the average over ranks of the loss where the call averages or moves rows, of its sum where
the call sums:

| call | its gradient at this rank, of gradients g of the results |
|---|---|
| allreduce, Average or Sum | the same reduction of g |
| allgather | this rank's rows of the average of g |
| broadcast | the average of g at the root, zeros elsewhere |
| alltoall | the rows of g, sent back |
| reducescatter | all ranks' g, one after the other; times the number of ranks for Sum |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shardwright import ranks
from shardwright.errors import CollectiveError
from shardwright.horovod import collectives as plain
from shardwright.horovod.arguments import read_name, read_op, submit
from shardwright.horovod.collectives import check_tensors
from shardwright.horovod.errors import as_value_errors
from shardwright.horovod.process_sets import global_process_set, members, resolve
from shardwright.ranks import Compression, Handle, ReduceOp

_Tensors = Sequence[Any]


class _Collective(torch.autograd.Function):  # type: ignore[misc]
    """Tensors through a collective, whose gradients go through another one."""

    @staticmethod
    def forward(context: Any, run: Callable[[_Tensors], _Tensors], back: Callable[[_Tensors], _Tensors], *tensors: Any):  # type: ignore[no-untyped-def]
        context.back = back
        results = tuple(run([tensor.detach() for tensor in tensors]))
        context.mark_non_differentiable(*[result for result in results if not result.is_floating_point()])
        return results

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return None, None, *context.back(gradients)


def _differentiate(tensors: _Tensors, run: Callable[[_Tensors], _Tensors], back: Callable[[_Tensors], _Tensors]) -> Any:
    """The results of `run`, through which gradients flow by `back`."""
    return _Collective.apply(run, back, *tensors)


def _needs_gradient(tensors: Any) -> bool:
    if not torch.is_grad_enabled():
        return False
    listed = tensors if isinstance(tensors, list | tuple) else [tensors]
    return any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in listed)


# ---- allreduce --------------------------------------------------------------------
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
    """The reduction over all ranks, at each; gradients flow through averages and sums."""
    chosen = read_op(op, average)

    def run(value: Any) -> Any:
        return plain.allreduce(value, None, name, compression, chosen, prescale_factor, postscale_factor, process_set)

    def back(gradients: _Tensors) -> Any:
        _check_gradient(chosen)
        return allreduce(
            list(gradients), None, None, Compression.none, chosen, prescale_factor, postscale_factor, process_set
        )

    if not _needs_gradient(tensor):
        return run(tensor)
    if isinstance(tensor, torch.Tensor):
        return _differentiate([tensor], lambda tensors: [run(tensors[0])], back)[0]
    return list(_differentiate(tensor, run, back))


def _check_gradient(op: ReduceOp) -> None:
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise CollectiveError(
            f"{op.value} over ranks has no gradient", where="allreduce", remedy="op=Average or Sum, or tensor.detach()"
        )


def allreduce_(
    tensor: Any,
    average: bool | ReduceOp | str | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Any:
    """`allreduce` into the tensor itself."""
    chosen = read_op(op, average)
    with torch.no_grad():
        reduced = plain.allreduce(
            tensor.detach(), None, name, Compression.none, chosen, prescale_factor, postscale_factor, process_set
        )
        return tensor.copy_(reduced)


def allreduce_async_(
    tensor: Any,
    average: bool | ReduceOp | str | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Handle:
    """`allreduce_` in the background."""
    chosen, within = read_op(op, average), resolve(process_set)
    return submit("allreduce", name, within, lambda: allreduce_(
        tensor, None, name, chosen, prescale_factor, postscale_factor, within
    ))  # fmt: skip


def grouped_allreduce(
    tensors: _Tensors,
    average: bool | ReduceOp | str | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> list[Any]:
    """`allreduce` of a list, as one message a type."""
    return list(
        allreduce(
            list(check_tensors(tensors)), average, name, compression, op, prescale_factor, postscale_factor, process_set
        )
    )


def grouped_allreduce_(
    tensors: _Tensors,
    average: bool | ReduceOp | str | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> _Tensors:
    """`grouped_allreduce` into the tensors themselves."""
    with torch.no_grad():
        given = [tensor.detach() for tensor in check_tensors(tensors)]
        reduced = grouped_allreduce(
            given, average, name, Compression.none, op, prescale_factor, postscale_factor, process_set
        )
        for tensor, result in zip(tensors, reduced, strict=True):
            tensor.copy_(result)
    return tensors


def grouped_allreduce_async_(
    tensors: _Tensors,
    average: bool | ReduceOp | str | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Handle:
    """`grouped_allreduce_` in the background."""
    chosen, within = read_op(op, average), resolve(process_set)
    return submit("allreduce", name, within, lambda: grouped_allreduce_(
        tensors, None, name, chosen, prescale_factor, postscale_factor, within
    ))  # fmt: skip


def sparse_allreduce_async(
    tensor: Any, name: str | None = None, op: ReduceOp | str | None = None, process_set: Any = global_process_set
) -> Callable[[], Any]:
    """The sum or average of sparse tensors, as their indices and rows; a function that waits for the result."""
    chosen, within = read_op(op), members(process_set)
    _check_gradient(chosen)
    parts = tensor.detach().coalesce()
    sent = {"indices": parts.indices().t().contiguous(), "rows": parts.values().contiguous()}
    handle = submit(
        "sparse_allreduce", name, within, lambda: ranks.allgather(sent, name=read_name(name), process_set=within)
    )

    def wait() -> Any:
        gathered = ranks.synchronize(handle)
        rows = gathered["rows"] / within.size() if chosen is ReduceOp.AVERAGE else gathered["rows"]
        whole = torch.sparse_coo_tensor(gathered["indices"].t(), rows, tensor.shape, check_invariants=True)
        return whole.coalesce()

    return wait


# ---- allgather, broadcast ---------------------------------------------------------
def allgather(tensor: Any, name: str | None = None, process_set: Any = global_process_set) -> Any:
    """The tensors of all ranks, one after the other along dimension 0, which may differ."""
    if not _needs_gradient(tensor):
        return plain.allgather(tensor, name, process_set)
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(tensors: _Tensors, name: str | None = None, process_set: Any = global_process_set) -> list[Any]:
    """`allgather` of a list, as one message."""
    given, within = list(check_tensors(tensors)), members(process_set)

    def back(gradients: _Tensors) -> _Tensors:
        averages = plain.allreduce(list(gradients), None, None, Compression.none, None, 1.0, 1.0, within)
        counts = np.asarray([[tensor.shape[0] if tensor.dim() else 1 for tensor in given]], np.int64)
        ends = plain.allgather(counts, None, within).cumsum(axis=0)
        place = within.rank()
        return [
            average[end - count : end].reshape(tensor.shape)
            for average, tensor, end, count in zip(averages, given, ends[place], counts[0], strict=True)
        ]

    if not _needs_gradient(given):
        return list(plain.allgather(given, name, within))
    return list(_differentiate(given, lambda sent: plain.allgather(list(sent), name, within), back))


def broadcast(tensor: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set) -> Any:
    """The tensor of rank `root_rank` (its number in the job), at every rank."""
    if not _needs_gradient(tensor):
        return plain.broadcast(tensor, root_rank, name, process_set)

    def back(gradients: _Tensors) -> _Tensors:
        averages = plain.allreduce(list(gradients), None, None, Compression.none, None, 1.0, 1.0, process_set)
        return averages if ranks.rank() == root_rank else [torch.zeros_like(average) for average in averages]

    given = tensor if isinstance(tensor, list | tuple) else [tensor]
    results = _differentiate(given, lambda sent: plain.broadcast(list(sent), root_rank, name, process_set), back)
    return list(results) if isinstance(tensor, list | tuple) else results[0]


def broadcast_(tensor: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set) -> Any:
    """`broadcast` into the tensor itself."""
    with torch.no_grad():
        return tensor.copy_(plain.broadcast(tensor.detach(), root_rank, name, process_set))


def broadcast_async_(
    tensor: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set
) -> Handle:
    """`broadcast_` in the background."""
    within = resolve(process_set)
    return submit("broadcast", name, within, lambda: broadcast_(tensor, root_rank, name, within))


# ---- alltoall ---------------------------------------------------------------------
def alltoall(tensor: Any, splits: Any = None, name: str | None = None, process_set: Any = global_process_set) -> Any:
    """Rows for each rank → rows from each; with `splits`, `(rows, received_splits)`, the second an int32 tensor."""
    within = members(process_set)
    counts = splits.cpu().numpy() if isinstance(splits, torch.Tensor) else splits
    place = splits.device if isinstance(splits, torch.Tensor) else None
    received: list[Any] = []

    def run(sent: _Tensors) -> _Tensors:
        with as_value_errors():
            whole = counts if counts is not None else _equal_splits(sent[0], within.size())
            result = ranks.alltoall(sent[0], whole, name=read_name(name), process_set=within)
        rows, numbers = result if whole is not None else (result, None)
        received.append(numbers)
        return [rows]

    def back(gradients: _Tensors) -> _Tensors:
        with as_value_errors():
            return [ranks.alltoall(gradients[0].contiguous(), received[0], process_set=within)[0]]

    if not isinstance(tensor, torch.Tensor):
        return plain.alltoall(tensor, counts, name, process_set)
    rows = _differentiate([tensor], run, back)[0] if _needs_gradient(tensor) else run([tensor])[0]
    if splits is None:
        return rows
    numbers = torch.from_numpy(np.asarray(received[0], np.int32))
    return rows, numbers if place is None else numbers.to(place)


def _equal_splits(tensor: Any, size: int) -> list[int] | None:
    """As many rows for each rank; None where they do not divide, which the call refuses."""
    if not tensor.dim() or tensor.shape[0] % size:
        return None
    return [tensor.shape[0] // size] * size


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> Handle:
    """`alltoall` in the background, without gradients."""
    within = resolve(process_set)
    sent = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
    return submit("alltoall", name, within, lambda: alltoall(sent, splits, name, within))


# ---- reducescatter ----------------------------------------------------------------
def reducescatter(
    tensor: Any,
    name: str | ReduceOp | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction over all ranks; gradients flow through averages and sums."""
    name, op = (None, name) if isinstance(name, ReduceOp) else (name, op)
    chosen, within = read_op(op), members(process_set)

    def run(value: Any) -> Any:
        return plain.reducescatter(value, name, compression, chosen, within, prescale_factor, postscale_factor)

    def back(gradients: _Tensors) -> Any:
        _check_gradient(chosen)
        factor = (within.size() if chosen is ReduceOp.SUM else 1) * prescale_factor * postscale_factor
        return plain.allgather([gradient * factor for gradient in gradients], None, within)

    if not _needs_gradient(tensor):
        return run(tensor)
    if isinstance(tensor, torch.Tensor):
        return _differentiate([tensor], lambda tensors: [run(tensors[0])], back)[0]
    return list(_differentiate(tensor, run, back))


def grouped_reducescatter(
    tensors: _Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`reducescatter` of a list, as one message a type."""
    given = list(check_tensors(tensors))
    return list(reducescatter(given, name, compression, op, process_set, prescale_factor, postscale_factor))
