"""What users change and read between calls of a step, beside eager PyTorch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
import shardwright.torch as swt
from tests.torch_frontend.models import floats

BATCHES = [(floats(4, 3, seed=n), floats(4, 2, seed=n + 9)) for n in range(4)]

Loop = Callable[[Callable[..., Any], Any, Any], Iterator[Any]]


def small() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def squares(model: Any, x: Any, y: Any) -> Any:
    return F.mse_loss(model(x), y)


def momentum(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def compare(session: sw.Session, loop: Loop, make: Any = small, loss_fn: Any = squares) -> None:
    """loop(call, model, optimizer): yields what has to be as eagerly."""
    eager = make()
    optimizer = momentum(eager)

    def call(*batch: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_fn(eager, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    wanted = [float(value) for value in loop(call, eager, optimizer)]
    model = make()
    of_model = momentum(model)
    step = swt.parallelize(session, model, of_model, loss_fn, effort="fast")
    assert [float(value) for value in loop(step, model, of_model)] == pytest.approx(wanted, rel=1e-5)


# ---- written to between calls --------------------------------------------------------------------


def zeroed(call: Any, model: Any, optimizer: Any) -> Iterator[Any]:
    yield call(*BATCHES[0])
    with torch.no_grad():
        model[0].weight.zero_()
    yield call(*BATCHES[1])
    with torch.no_grad():
        model[2].weight.clamp_(-0.1, 0.1)
        model[2].bias[0] = 3.0
    yield call(*BATCHES[2])


def written_through_data(call: Any, model: Any, optimizer: Any) -> Iterator[Any]:
    yield call(*BATCHES[0])
    model[0].weight.data.mul_(2.0)
    held = model[2].weight.data
    yield call(*BATCHES[1])
    held[0].add_(1.0)
    yield held.sum()
    yield call(*BATCHES[2])
    model[0].bias.data = torch.ones(4)
    yield call(*BATCHES[3])


def loaded(call: Any, model: Any, optimizer: Any) -> Iterator[Any]:
    best = copy.deepcopy(model.state_dict())
    yield call(*BATCHES[0])
    of_optimizer = copy.deepcopy(optimizer.state_dict())
    yield call(*BATCHES[1])
    model.load_state_dict(best)
    yield call(*BATCHES[1])
    optimizer.load_state_dict(of_optimizer)
    yield call(*BATCHES[2])
    yield call(*BATCHES[3])


def moments_reset(call: Any, model: Any, optimizer: Any) -> Iterator[Any]:
    yield call(*BATCHES[0])
    for entries in optimizer.state.values():
        entries["momentum_buffer"].mul_(-1.0)
    yield call(*BATCHES[1])
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.ones(4, 3)
    yield call(*BATCHES[2])
    optimizer.state.clear()
    yield call(*BATCHES[3])
    yield call(*BATCHES[0])


def averaged(call: Any, model: Any, optimizer: Any) -> Iterator[Any]:
    average = torch.optim.swa_utils.AveragedModel(model)
    for batch in BATCHES[:3]:
        yield call(*batch)
        average.update_parameters(model)
    yield squares(average, *BATCHES[0])


def another_optimizer(call: Any, model: Any, optimizer: Any) -> Iterator[Any]:
    other = torch.optim.Adam(model.parameters(), 0.01)
    yield call(*BATCHES[0])
    optimizer.zero_grad()
    squares(model, *BATCHES[1]).backward()
    other.step()
    yield call(*BATCHES[2])


def unfrozen(call: Any, model: Any, optimizer: Any) -> Iterator[Any]:
    model[0].requires_grad_(False)
    yield call(*BATCHES[0])
    model[0].requires_grad_(True)
    yield call(*BATCHES[1])
    yield call(*BATCHES[2])
    yield model[0].weight.sum()


def extended(call: Any, model: Any, optimizer: Any) -> Iterator[Any]:
    yield call(*BATCHES[0])
    model.append(torch.nn.Linear(2, 2))
    torch.nn.init.eye_(model[3].weight)
    optimizer.add_param_group({"params": list(model[3].parameters())})
    yield call(*BATCHES[1])
    yield call(*BATCHES[2])
    yield model[3].weight.sum()


# ---- read between calls --------------------------------------------------------------------------


def read_by_itself(call: Any, model: Any, optimizer: Any) -> Iterator[Any]:
    held = model.state_dict()["0.weight"]
    for batch in BATCHES[:2]:
        yield call(*batch)
        yield held.sum()
    yield model(BATCHES[0][0]).square().mean()
    yield call(*BATCHES[2])
    yield copy.deepcopy(model)[0].weight.sum()
    yield call(*BATCHES[3])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    assert type(saved["model"]["0.weight"]) is torch.Tensor
    yield from (value.sum() for value in saved["model"].values())
    yield from (entries["momentum_buffer"].sum() for entries in saved["optimizer"]["state"].values())
    yield torch.nn.utils.parameters_to_vector(model.parameters()).norm()


@pytest.mark.parametrize(
    "loop",
    [
        zeroed, written_through_data, loaded, moments_reset, averaged, another_optimizer, unfrozen, extended,
        read_by_itself,
    ],
)  # fmt: skip
def test_values_are_those_of_eager_torch(session: sw.Session, loop: Loop) -> None:
    compare(session, loop)


def test_gradients_that_no_step_keeps_are_not_none(session: sw.Session) -> None:
    model = small()
    optimizer = momentum(model)
    step = swt.parallelize(session, model, optimizer, squares, effort="fast")
    step(*BATCHES[0])
    with pytest.raises(sw.errors.ArrayError, match=r"gradient of model\.0\.weight is not kept") as caught:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert "whole step" in caught.value.remedy
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    step(*BATCHES[1])


def test_gradients_that_a_step_leaves(session: sw.Session) -> None:
    """Clipped outside between two steps, as in loops that accumulate."""

    def backward(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = squares(model, x, y)
        loss.backward()
        return loss.detach()

    def update(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.step()
        optimizer.zero_grad()
        return squares(model, x, y).detach()

    def loop(calls: Any, model: Any) -> Iterator[float]:
        for batch in BATCHES[:2]:
            calls[0](*batch)
            yield float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            yield float(calls[1](*batch))

    eager, model = small(), small()
    optimizer, of_model = momentum(eager), momentum(model)
    wanted = list(loop([lambda *b: backward(eager, optimizer, *b), lambda *b: update(eager, optimizer, *b)], eager))
    steps = [swt.parallelize(session, model, of_model, each, effort="fast") for each in (backward, update)]
    assert list(loop(steps, model)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.cluster
def test_a_session_s_last_values_are_in_the_module() -> None:
    """Training goes on in another session as if there were one."""
    eager, model = small(), small()
    optimizer, of_model = momentum(eager), momentum(model)
    wanted = []
    for batch in BATCHES:
        optimizer.zero_grad()
        loss = squares(eager, *batch)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    losses = []
    for batches in (BATCHES[:2], BATCHES[2:]):
        with sw.connect(devices=1) as session:
            step = swt.parallelize(session, model, of_model, squares, effort="fast")
            losses += [step(*batch).item() for batch in batches]
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert squares(model, *BATCHES[0]).item() == pytest.approx(squares(eager, *BATCHES[0]).item(), rel=1e-5)
