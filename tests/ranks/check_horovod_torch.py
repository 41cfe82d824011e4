"""Run as every rank: Horovod's calls of PyTorch, against what each rank can work out of all ranks' inputs."""

from __future__ import annotations

import warnings

import pytest
import torch

import shardwright.horovod.torch as hvd
from shardwright.errors import CollectiveError
from shardwright.horovod.reductions import IntegerAverageWarning


def input_of(rank: int, shape: tuple[int, ...] = (6, 3), dtype: torch.dtype = torch.float64) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(-50, 50, shape, generator=draw).to(dtype)


def everyones(*args, **kwargs) -> torch.Tensor:
    """[ranks, …]: the inputs of all ranks."""
    return torch.stack([input_of(rank, *args, **kwargs) for rank in range(hvd.size())])


def check_reductions() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.int32, torch.int64, torch.float16, torch.float64):
        x, whole = input_of(rank, dtype=dtype), everyones(dtype=dtype).double()
        mean = whole.sum(0) / size
        expected = mean.trunc() if not dtype.is_floating_point else mean
        for found in (hvd.allreduce(x), hvd.allreduce(x, True, "named"), hvd.synchronize(hvd.allreduce_async(x))):
            assert found.dtype is dtype
            assert torch.equal(found, expected.to(dtype)), dtype
        in_place = x.clone()
        assert hvd.allreduce_(in_place, average=False) is in_place
        assert torch.equal(in_place.double(), whole.sum(0))
        assert hvd.synchronize(hvd.allreduce_async_(in_place, op=hvd.Max)) is in_place
        group = [x.clone(), x.clone()]
        hvd.grouped_allreduce_(group, op=hvd.Min)
        assert all(torch.equal(part.double(), whole.amin(0)) for part in group)
        half = hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.5).double()
        assert torch.equal(half, (whole.sum(0) * 0.5).to(dtype).double())
        rows = hvd.reducescatter(x, op=hvd.Sum)
        assert torch.equal(rows.double(), whole.sum(0)[rank * 6 // size : (rank + 1) * 6 // size])
    flags = torch.tensor([rank == 0, False])
    assert hvd.allreduce(flags, op=hvd.Sum).tolist() == [True, False]
    assert hvd.broadcast_(input_of(rank), size - 1).equal(input_of(size - 1))
    assert hvd.synchronize(hvd.broadcast_async_(input_of(rank), 0)).equal(input_of(0))


def gradient(call, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The gradient at x of the sum of what a call gives, times weights."""
    x = x.clone().requires_grad_()
    (call(x) * weights).sum().backward()
    assert x.grad is not None
    return x.grad


def check_gradients(process_set=hvd.global_process_set) -> None:
    size, rank = process_set.size(), process_set.rank()
    x = input_of(hvd.rank())
    weights = torch.stack(
        [torch.arange(18.0, dtype=torch.float64).reshape(6, 3) * (place + 1) for place in range(size)]
    )
    mean, total = weights.mean(0), weights.sum(0)

    def same(call, expected: torch.Tensor, own: torch.Tensor = weights[rank]) -> None:
        assert torch.allclose(gradient(call, x, own), expected)

    same(lambda x: hvd.allreduce(x, process_set=process_set), mean)
    same(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, process_set=process_set), 2 * total)
    same(lambda x: hvd.grouped_allreduce([x], op=hvd.Sum, process_set=process_set)[0], total)
    root = process_set.ranks[0]
    same(lambda x: hvd.broadcast(x, root, process_set=process_set), mean if rank == 0 else torch.zeros_like(mean))
    gathered = torch.cat([weights[0] * (place + 1) for place in range(size)])
    same(lambda x: hvd.allgather(x, process_set=process_set), weights[0] * (rank + 1), gathered)
    received = torch.ones(6, 3, dtype=torch.float64) * (rank + 1)
    sent = torch.cat([torch.full((6 // size, 3), place + 1.0, dtype=torch.float64) for place in range(size)])
    same(lambda x: hvd.alltoall(x, process_set=process_set), sent, received)
    splits = [6 // size] * size
    same(lambda x: hvd.alltoall(x, splits, process_set=process_set)[0], sent, received)
    mine = torch.full((6 // size, 3), rank + 1.0, dtype=torch.float64)
    same(lambda x: hvd.reducescatter(x, process_set=process_set), sent, mine)
    same(lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=process_set), size * sent, mine)
    with pytest.raises(CollectiveError, match="no gradient"):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max, process_set=process_set), x, weights[rank])


def check_process_sets() -> None:
    even = hvd.add_process_set([rank for rank in range(hvd.size()) if rank % 2 == 0])
    odd = hvd.add_process_set([rank for rank in range(hvd.size()) if rank % 2 == 1])
    check_gradients(odd if hvd.rank() % 2 else even)
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict())
    start = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=even, groups=2)
    model(torch.full((1, 2), float(hvd.rank() + 1))).sum().backward()
    optimizer.step()
    moved = float((start - model.weight).mean())
    expected = [1 + sum(even.ranks) / even.size(), hvd.rank() + 1.0][hvd.rank() % 2]  # outside it: its own gradient
    assert moved == pytest.approx(expected)
    assert hvd.remove_process_set(odd)
    assert hvd.remove_process_set(even)


def check_join() -> None:
    """The average divides by all ranks; a call that needs all fails where it is made, and join waits on."""
    size = hvd.size()
    for first in range(size):
        if hvd.rank() != first:
            found = hvd.allreduce(torch.full((3000,), 6, dtype=torch.int64))
            assert int(found[0]) == 6 * (size - 1) // size
            found = hvd.allreduce(torch.full((3000,), 6.0))
            assert torch.equal(found, torch.full((3000,), 6.0 * (size - 1) / size))
            with pytest.raises(hvd.HorovodInternalError):
                hvd.broadcast(torch.ones(3), hvd.rank())
        last = hvd.join()
        assert last != first
        assert hvd.allgather_object(last) == [last] * size


def check_sparse() -> None:
    def table(rank: int) -> torch.Tensor:
        return input_of(rank, (5, 2)).masked_fill(torch.arange(5)[:, None] == rank, 0)

    rows = table(hvd.rank()).to_sparse(1)
    mean = sum(table(rank) for rank in range(hvd.size())) / hvd.size()
    assert torch.allclose(hvd.sparse_allreduce_async(rows, "a", hvd.Average)().to_dense(), mean)
    for as_dense in (False, True):
        embedding = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(embedding.parameters())), sparse_as_dense=as_dense
        )
        embedding(torch.tensor([hvd.rank(), 4])).sum().backward()
        optimizer.step()
        assert embedding.weight.grad is not None
        assert embedding.weight.grad.is_sparse


def check_optimizers() -> None:
    model = torch.nn.Linear(2, 2)
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match="no name"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), named[:1])
    with pytest.raises(ValueError, match="two groups"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), groups=[[model.bias], [model.bias]])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), momentum=0.9), named)
    hvd.broadcast_optimizer_state(optimizer)
    assert model.weight.grad is not None
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.step()


def main() -> None:
    warnings.simplefilter("ignore", IntegerAverageWarning)
    hvd.init(timeout_s=60)
    check_reductions()
    check_gradients()
    check_process_sets()
    check_join()
    check_sparse()
    check_optimizers()
    hvd.broadcast_object(torch.nn.Linear(2, 2).state_dict())
    hvd.shutdown()


if __name__ == "__main__":
    main()
