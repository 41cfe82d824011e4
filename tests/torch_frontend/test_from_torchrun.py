"""Scripts of DistributedDataParallel and FSDP2, and the same after the changes of docs/from-torchrun.md."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed import all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
import shardwright.torch as swt
from shardwright.errors import OptionError, UnsupportedProgramError
from tests.torch_frontend.collectives import mean_over_ranks
from tests.torch_frontend.comparison import distance, relative
from tests.torch_frontend.test_module_sharding import ROOT, run_ranks

SCRIPTS = ROOT / "examples" / "torch"
X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py"])
def test_at_most_five_lines_change(name: str) -> None:
    before, after = ((SCRIPTS / folder / name).read_text().splitlines()[1:] for folder in ("torchrun", "ported"))
    lines = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    added, removed = ([line for line in lines if line[0] == sign] for sign in "+-")
    assert len(added) <= 5
    assert len(removed) <= 3  # each in another form among those


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py"])
def test_a_ported_script_trains_as_its_ranks_did(name: str, tmp_path: Path) -> None:
    outputs = [run_ranks(2, str(SCRIPTS / "torchrun" / name), "--save", str(tmp_path / "ranks.pt"))]
    command = [sys.executable, str(SCRIPTS / "ported" / name), "--save", str(tmp_path / "ported.pt")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    outputs.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    expected, actual = ([float(loss) for loss in re.findall(r"loss (\S+)", output)] for output in outputs)
    assert len(expected) == 8
    assert relative(actual, expected) < 1e-5
    states = [torch.load(tmp_path / f"{kind}.pt") for kind in ("ported", "ranks")]
    assert distance(*states) < 1e-4


# ---- torch.distributed in one process ------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[None]:
    swt.init_process_group("nccl", timeout=None)
    yield
    dist.destroy_process_group()


def linear() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y)


def gathered(logits: Any) -> Any:
    parts, whole = [torch.zeros_like(logits)], torch.zeros_like(logits)
    dist.all_gather(parts, logits.detach())
    dist.all_gather_into_tensor(output_tensor=whole, input_tensor=logits.detach())
    collected, objects = [torch.zeros_like(logits)], [None]
    dist.gather(logits.detach(), gather_list=collected, dst=0)
    dist.all_gather_object(objects, [7])
    assert objects == [[7]]
    return (parts[0] + whole + collected[0]) / 3


def with_collectives(model: Any, x: Any, y: Any) -> Any:
    dist.barrier()
    logits = torch.cat(torch.distributed.nn.functional.all_gather(model(x)))
    loss = torch.distributed.nn.functional.all_reduce(F.cross_entropy(logits, y)) / dist.get_world_size()
    metric = gathered(logits).sum()
    dist.all_reduce(metric, op=dist.ReduceOp.SUM, async_op=True).wait()
    dist.broadcast(metric, src=dist.get_rank())
    all_reduce(metric)
    return loss, mean_over_ranks(metric)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_collectives_in_a_step_are_those_of_one_rank(session: sw.Session, one_rank: None) -> None:
    model, optimizer = linear()
    with torch.no_grad():
        expected = [loss_of(model, X, Y), model(X).sum()]
    loss, metric = swt.parallelize(session, model, optimizer, with_collectives)(X, Y)
    torch.testing.assert_close([loss, metric], expected)


def test_results_go_through_collectives_outside(session: sw.Session, one_rank: None) -> None:
    model, optimizer = linear()
    step = swt.parallelize(session, model, optimizer, loss_of)
    expected = loss_of(model, X, Y).item()
    loss = step(X, Y)
    dist.all_reduce(loss)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    parts = [torch.zeros(())]
    dist.all_gather(parts, step.evaluate(X, Y))
    dist.broadcast(model.weight.data, 0)
    assert parts[0] < loss
    assert step(X, Y).item() == pytest.approx(parts[0].item(), rel=1e-5)


def test_a_wrapped_module_trains_as_the_one_inside(session: sw.Session, one_rank: None) -> None:
    def train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        with model.no_sync():
            (loss_of(model, x, y) / 2).backward()
        loss = loss_of(model, x, y)
        (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model, optimizer = linear()
    expected = [train(DistributedDataParallel(model), optimizer, X[:rows], Y[:rows]).item() for rows in (8, 6, 8)]
    model, optimizer = linear()
    wrapped = DistributedDataParallel(model)
    step = swt.parallelize(session, wrapped, optimizer, train)
    assert relative([step(X[:rows], Y[:rows]).item() for rows in (8, 6, 8)], expected) < 1e-5
    assert wrapped(X).shape == (8, 3)
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]


def test_fully_shard_asks_for_a_fully_sharded_plan(session: sw.Session) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    assert swt.fully_shard(model[0], reshard_after_forward=True) is model[0]
    step = swt.parallelize(session, model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of)
    step(X, Y)
    assert step.plan.origin == "forced: fsdp"


def test_messages_between_ranks_are_refused_in_a_step(session: sw.Session, one_rank: None) -> None:
    def send(model: Any, x: Any, y: Any) -> Any:
        dist.send(x, 1)
        return loss_of(model, x, y)

    with pytest.raises(UnsupportedProgramError, match=r"torch\.distributed\.send in a step"):
        swt.parallelize(session, *linear(), send)(X, Y)


def test_one_of_many_ranks_is_refused(session: sw.Session) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        with pytest.raises(OptionError, match="this is rank 1 of 2") as error:
            swt.parallelize(session, *linear(), loss_of)
        assert "init_process_group" in error.value.remedy
        with pytest.raises(OptionError, match="rank 1 of 2"):
            swt.init_process_group()
    finally:
        dist.destroy_process_group()
