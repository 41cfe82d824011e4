"""Gradient scalers on the servers beside those of eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
import shardwright.torch as swt
from tests.torch_frontend.comparison import adamw, distance, relative
from tests.torch_frontend.models import floats, ids


def small() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def half_loss(model: Any, x: Any, y: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.float16):
        return F.cross_entropy(model(x), y)


def scaler() -> Any:
    """Too large a scale at first, so that steps are left out; it grows again after two good ones."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)


def batches(count: int = 8) -> list[Any]:
    return [(floats(8, 8, seed=n), ids(8, below=4, seed=n)) for n in range(count)]


def train_eagerly(model: Any, optimizer: Any, scaler: Any, data: Any, clip: bool) -> list[float]:
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = half_loss(model, x, y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def test_steps_with_infinite_gradients_are_left_out(session: sw.Session) -> None:
    eager, eager_scaler = small(), scaler()
    eager_optimizer = adamw(eager)
    wanted = train_eagerly(eager, eager_optimizer, eager_scaler, batches(), clip=False)
    counts = {int(each["step"]) for each in eager_optimizer.state.values()}
    assert counts < {*range(8)}  # some steps were left out
    model, mine = small(), scaler()
    optimizer = adamw(model)
    step = swt.parallelize(session, model, optimizer, half_loss, scaler=mine)
    found = [step(*batch).item() for batch in batches()]
    assert relative(found, wanted) < 1e-3
    state = step.state_dict()
    assert state["scaler"] == eager_scaler.state_dict()
    assert mine.get_scale() == eager_scaler.get_scale()
    assert {int(each["step"]) for each in optimizer.state.values()} == counts
    assert distance(state["model"], eager.state_dict()) < 1e-3


@pytest.mark.dear
def test_a_whole_step_that_clips_unscaled_gradients(session: sw.Session, tmp_path: Any) -> None:
    eager, eager_scaler = small(), scaler()
    wanted = train_eagerly(eager, adamw(eager), eager_scaler, batches(), clip=True)
    model, mine = small(), scaler()

    def train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = half_loss(model, x, y)
        mine.scale(loss).backward()
        mine.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        mine.step(optimizer)
        mine.update()
        return loss.detach()

    step = swt.parallelize(session, model, adamw(model), train, scaler=mine)
    found = [step(*batch).item() for batch in batches()[:4]]
    step.save(tmp_path / "run").wait()
    step(*batches()[0])
    step.restore(tmp_path / "run")
    found += [step(*batch).item() for batch in batches()[4:]]
    assert relative(found, wanted) < 1e-3
    step.sync()
    assert mine.state_dict() == eager_scaler.state_dict()
    step.load_state_dict({"scaler": {**mine.state_dict(), "scale": 8.0}})
    step(*batches()[0])
    assert step.state_dict()["scaler"]["scale"] == 8.0


def test_a_scaler_that_is_not_passed_is_refused(session: sw.Session) -> None:
    model, mine = small(), scaler()

    def train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        mine.scale(half_loss(model, x, y)).backward()
        mine.step(optimizer)

    with pytest.raises(sw.errors.OptionError, match="gradient scaler") as caught:
        swt.parallelize(session, model, adamw(model), train)(*batches()[0])
    assert "scaler=" in caught.value.remedy
    assert mine._scale is None


def test_a_scaler_that_is_off_is_refused(session: sw.Session) -> None:
    model = small()
    with pytest.raises(sw.errors.OptionError, match="off"):
        swt.parallelize(session, model, adamw(model), half_loss, scaler=torch.amp.GradScaler("cpu", enabled=False))
