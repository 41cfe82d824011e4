"""Tensors that a step reads beside its arguments, beside eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
import shardwright.torch as swt
from tests.torch_frontend.models import floats

BATCHES = [(floats(4, 3, seed=n), floats(4, 3, seed=n + 9)) for n in range(4)]


def linear(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 3)


Step = Callable[..., Any]
#: Makes a step, runs it, and yields what has to be as eagerly. parallelize(model, optimizer, loss_fn): the step.
Loop = Callable[[Callable[..., Step]], Iterator[Any]]


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def weights(parallelize: Callable[..., Step]) -> Iterator[Any]:
    """Changed in place, and replaced."""
    held = {"weights": torch.ones(3)}
    model = linear()
    step = parallelize(model, sgd(model), lambda m, x, y: (held["weights"] * (m(x) - y) ** 2).mean())
    yield step(*BATCHES[0])
    held["weights"].mul_(5)
    yield step(*BATCHES[1])
    held["weights"] = torch.full((3,), 0.5)
    yield step(*BATCHES[2])
    held["weights"][1] = 7.0
    yield step(*BATCHES[3])


def target_network(parallelize: Callable[..., Step]) -> Iterator[Any]:
    model = linear()
    target = copy.deepcopy(model)

    def loss(model: Any, x: Any, y: Any) -> Any:
        with torch.no_grad():
            aim = target(y)
        return F.mse_loss(model(x), aim)

    step = parallelize(model, sgd(model), loss)
    yield step(*BATCHES[0])
    yield step(*BATCHES[1])
    target.load_state_dict(model.state_dict())
    yield step(*BATCHES[2])
    with torch.no_grad():
        for mine, its in zip(target.parameters(), model.parameters(), strict=True):
            mine.lerp_(its, 0.5)
    yield step(*BATCHES[3])


def average_in_the_step(parallelize: Callable[..., Step]) -> Iterator[Any]:
    """A step that updates another module."""
    model = linear()
    average = copy.deepcopy(model).requires_grad_(False)

    def loss(model: Any, x: Any, y: Any) -> Any:
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.5)
        return F.mse_loss(model(x), average(y))

    step = parallelize(model, sgd(model), loss)
    for batch in BATCHES[:3]:
        yield step(*batch)
    yield average.weight.sum()
    average.weight.zero_()
    yield step(*BATCHES[3])
    yield average.weight.sum()


def two_models(parallelize: Callable[..., Step]) -> Iterator[Any]:
    """Each step reads the other's model."""
    first, second = linear(), linear(1)
    optimizers = sgd(first), sgd(second)
    one = parallelize(first, optimizers[0], lambda m, x, y: F.mse_loss(second(m(x)), y))
    other = parallelize(second, optimizers[1], lambda m, x, y: F.mse_loss(m(first(x)), y))
    for batch in BATCHES[:3]:
        yield one(*batch)
        yield other(*batch)
    yield first.weight.sum()
    yield second.weight.sum()


@pytest.mark.parametrize("loop", [weights, target_network, average_in_the_step, two_models])
def test_values_are_those_of_eager_torch(session: sw.Session, loop: Loop) -> None:
    def run_eagerly(model: Any, optimizer: Any, loss_fn: Any) -> Step:
        def step(*batch: Any) -> Any:
            optimizer.zero_grad()
            loss = loss_fn(model, *batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def parallelize(model: Any, optimizer: Any, loss_fn: Any) -> Step:
        return swt.parallelize(session, model, optimizer, loss_fn, effort="fast")

    wanted = [float(value) for value in loop(run_eagerly)]
    assert [float(value) for value in loop(parallelize)] == pytest.approx(wanted, rel=1e-5)


def test_parameters_of_a_list_made_before_are_refused(session: sw.Session) -> None:
    model = linear()
    parameters = list(model.parameters())

    def loss(model: Any, x: Any, y: Any) -> Any:
        return F.mse_loss(model(x), y) + sum(parameter.square().sum() for parameter in parameters)

    step = swt.parallelize(session, model, sgd(model), loss)
    with pytest.raises(sw.UnsupportedProgramError, match=r"uses model\.weight of a list") as caught:
        step(*BATCHES[0])
    assert "model.parameters()" in caught.value.remedy
