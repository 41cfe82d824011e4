"""Run as every rank: synchronised batch normalization equals PyTorch's own on the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwright.horovod.torch as hvd
from shardwright.errors import CollectiveError

ROUNDS = 3


def rows_of(rank: int, share: int) -> slice:
    """Rank 0 has `share` rows of each batch, every later one two more than the one before."""
    start = sum(share + 2 * earlier for earlier in range(rank))
    return slice(start, start + share + 2 * rank)


def net(make, kind: str, momentum) -> torch.nn.Module:
    torch.manual_seed(3)
    first, second = (
        (torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)) if kind == "1d" else (conv(3, 5), conv(5, 2))
    )  # fmt: skip
    return torch.nn.Sequential(first, make(5, momentum=momentum), torch.nn.Tanh(), second, make(2, affine=False))


def conv(inputs: int, outputs: int) -> torch.nn.Module:
    return torch.nn.Conv2d(inputs, outputs, 3, padding=1)


def check(kind: str, momentum: float | None, share: int, converted: bool) -> None:
    plain = torch.nn.BatchNorm1d if kind == "1d" else torch.nn.BatchNorm2d
    whole = net(plain, kind, momentum)
    ours = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole)) if converted else None
    ours = ours or net(hvd.SyncBatchNorm, kind, momentum)
    assert isinstance(ours[1], hvd.SyncBatchNorm)
    mine = rows_of(hvd.rank(), share)
    rows = rows_of(hvd.size() - 1, share).stop
    draw = torch.Generator().manual_seed(5)
    for _ in range(ROUNDS):
        x = torch.randn((rows, 3, *((4, 4) if kind == "2d" else ())), generator=draw) * 3 + 100
        own, all_rows = x[mine].clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = ours(own), whole(all_rows)
        assert torch.allclose(y, expected[mine], atol=1e-4)
        weight = torch.randn(expected.shape, generator=draw)
        (y * weight[mine]).sum().backward()
        (expected * weight).sum().backward()
        assert torch.allclose(own.grad, all_rows.grad[mine], atol=1e-4)
    for parameter, other in zip(ours.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(hvd.allreduce(parameter.grad, "sum"), other.grad, atol=1e-3, rtol=1e-4)
    for name, buffer in whole.named_buffers():
        assert torch.allclose(dict(ours.named_buffers())[name], buffer, rtol=1e-5, atol=1e-4), name
    x = x[mine] if share else x
    assert torch.allclose(ours.eval()(x), whole.eval()(x), atol=1e-4)


def check_bfloat16() -> None:
    layer = hvd.SyncBatchNorm(4, dtype=torch.bfloat16)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(hvd.rank())).bfloat16()
    y = layer(x)
    assert y.dtype is torch.bfloat16
    everything = torch.from_numpy(hvd.allgather(y.detach().float().numpy()))
    assert float(everything.mean(0).abs().max()) < 0.02
    assert float((everything.std(0, unbiased=False) - 1).abs().max()) < 0.02


def check_refusals() -> None:
    layer = hvd.SyncBatchNorm(4)
    for shape in ((4,), (2, 3)):
        with pytest.raises(CollectiveError):
            layer(torch.ones(shape))


def main() -> None:
    hvd.init()
    for kind in ("1d", "2d"):
        check(kind, 0.1, 3, converted=False)
        check(kind, None, 0, converted=True)  # rank 0 has no rows
    check_bfloat16()
    check_refusals()
    hvd.shutdown()


if __name__ == "__main__":
    main()
