"""Run as every rank: PyTorch training on the ranks' shares equals one process on the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwright.horovod.torch as hvd
from shardwright.errors import OptionError

SHARE, STEPS = 4, 6


class Model(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 8, sparse=sparse)
        self.norm = torch.nn.LayerNorm(8)
        self.out = torch.nn.Linear(8, 1)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, ids):
        return self.out(self.norm(self.table(ids))).squeeze(-1)


def batches(size: int):
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randint(0, 20, (SHARE * size,), generator=draw), torch.randn(SHARE * size, generator=draw)


def train(model, optimizer, part, around_step=lambda model, optimizer: optimizer.step()) -> None:
    for ids, targets in batches(hvd.size()):

        def closure(ids=ids, targets=targets):
            optimizer.zero_grad()
            loss = ((model(part(ids)) - part(targets)) ** 2).mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            around_step(model, optimizer)


def mine(array):
    return array[hvd.rank() * SHARE :][:SHARE]


def clipped(model, optimizer) -> None:
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()


def clipped_alone(model, optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def check(make, sparse=False, together=None, alone=None, tolerance=1e-5, **options) -> None:
    torch.manual_seed(hvd.rank())
    model = Model(sparse)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    single = copy.deepcopy(model)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    assert wrapped is optimizer
    assert isinstance(wrapped, type(make(single.parameters())))
    assert scheduler.optimizer is wrapped
    train(model, wrapped, mine, *([together] if together else []))
    train(single, make(single.parameters()), lambda array: array, *([alone] if alone else []))
    for (name, ours), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=tolerance), (make, name, (ours - theirs).abs().max())
    assert model.unused.weight.grad is None
    everyone = hvd.allgather_object({name: value.numpy() for name, value in model.state_dict().items()})
    assert all((other[name] == everyone[0][name]).all() for other in everyone for name in other)


def check_optimizer_state() -> None:
    model = Model(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5 if hvd.rank() == 0 else 0.1)
    if hvd.rank() == 0:  # as after a checkpoint that rank 0 alone has read
        model(torch.arange(3)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.5
    moments = optimizer.state[model.out.weight]["exp_avg"]
    assert torch.equal(moments, hvd.broadcast(moments, 0))
    assert float(moments.abs().sum()) > 0


def check_in_place() -> None:
    tensor = torch.full((3,), float(hvd.rank()))
    assert hvd.allreduce_(tensor, "sum") is tensor
    assert tensor.tolist() == [sum(range(hvd.size()))] * 3
    tensor = torch.full((3,), float(hvd.rank()))
    assert hvd.broadcast_(tensor, 1).tolist() == [1.0] * 3


def check_refusals() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    sgd = torch.optim.SGD(parameters, lr=0.1)
    for options, where in [
        ({"op": "max"}, "op"),
        ({"compression": hvd.Compression.top_k(0.1)}, "compression"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"gradient_predivide_factor": 2.0, "op": "sum"}, "gradient_predivide_factor"),
        ({"named_parameters": [("a", parameters[0]), ("a", parameters[0])]}, "named_parameters"),
    ]:
        with pytest.raises(OptionError) as caught:
            hvd.DistributedOptimizer(sgd, **options)
        assert caught.value.where == where


def main() -> None:
    hvd.init()
    check(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    check(lambda params: torch.optim.Adam(params, lr=0.01), gradient_predivide_factor=2.0)
    check(lambda params: torch.optim.SGD(params, lr=0.1), sparse=True)
    check(lambda params: torch.optim.SGD(params, lr=0.1), sparse=True, sparse_as_dense=True)
    check(lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3), tolerance=1e-4)
    check(lambda params: torch.optim.SGD(params, lr=0.1), together=clipped, alone=clipped_alone)
    check(lambda params: torch.optim.SGD(params, lr=0.1), compression=hvd.Compression.bf16, tolerance=2e-2)
    check_optimizer_state()
    check_in_place()
    check_refusals()
    hvd.shutdown()


if __name__ == "__main__":
    main()
