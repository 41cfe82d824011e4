"""Results of steps are tensors to the loop that calls them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
import shardwright.torch as swt
from tests.torch_frontend.models import floats

COUNT = 4

#: Elements of a result that does not come with the step's answer.
SIZE = 4096


@pytest.fixture(scope="module")
def step(session: sw.Session) -> Any:
    """A step that gives a loss and a vector, and leaves the model as it is."""
    model = torch.nn.Linear(8, 4)
    torch.nn.init.eye_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(model: Any, x: Any) -> Any:
        y = model(x)
        return F.mse_loss(y, x[:, :4] * 0.5), y.detach().mean(0).repeat(SIZE // 4), (y.detach() > 0).sum()

    return swt.parallelize(session, model, optimizer, loss, effort="fast")


@pytest.fixture
def results(step: Any) -> list[Any]:
    return [step(floats(8, 8, seed=n)) for n in range(COUNT)]


@pytest.fixture
def losses(results: list[Any]) -> list[Any]:
    return [loss for loss, _, _ in results]


class Mean:
    """Adds up as torchmetrics' `MeanMetric` does."""

    def __init__(self) -> None:
        self.value, self.weight = torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value: Any) -> None:
        value = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.float32)
        weight = torch.broadcast_to(torch.as_tensor(1.0, dtype=torch.float32, device=value.device), value.shape)
        if torch.isnan(value).any():
            return
        self.value += (value * weight).sum()
        self.weight += weight.sum()


def mean_of(losses: list[Any]) -> float:
    metric = Mean()
    for loss in losses:
        metric.update(loss)
    return float(metric.value / metric.weight)


def add_up(losses: list[Any]) -> Any:
    total = torch.zeros(())
    for loss in losses:
        total += loss.detach()
    return total


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save({"loss": value}, file)
    file.seek(0)
    return torch.load(file)["loss"]


USES: dict[str, Callable[[list[Any]], Any]] = {
    "item": lambda losses: losses[0].item(),
    "float": lambda losses: float(losses[1]),
    "format": lambda losses: f"{losses[0]:.4f}",
    "str": lambda losses: str(losses[0]),
    "repr": repr,
    "isinstance": lambda losses: isinstance(losses[0], torch.Tensor) and torch.is_tensor(losses[0]),
    "tensor": torch.tensor,
    "tensor of one": lambda losses: torch.as_tensor(losses[0]).clone(),
    "stack": torch.stack,
    "cat": lambda losses: torch.cat([loss.reshape(1) for loss in losses]),
    "sum": sum,
    "max": max,
    "accumulated": add_up,
    "metric": mean_of,
    "numpy": lambda losses: np.asarray(losses[0]),
    "numpy of several": np.asarray,
    "numpy's mean": np.mean,
    ".numpy()": lambda losses: losses[2].numpy(),
    "tolist": lambda losses: losses[0].tolist(),
    "tensor on the left": lambda losses: torch.ones(3) * losses[0],
    "tensor on the right": lambda losses: losses[0] - torch.ones(3),
    "number on the left": lambda losses: 1 - losses[0] / 2,
    "power": lambda losses: 2 ** losses[0] ** 2,
    "comparison": lambda losses: [bool(losses[0] < losses[1]), bool(losses[0] == losses[0]), losses[0] > 5],
    "isnan": lambda losses: torch.isnan(losses[0]),
    "detach": lambda losses: losses[0].detach().cpu(),
    "data": lambda losses: losses[0].data,
    "clone": lambda losses: losses[0].detach().clone() + 1,
    "to": lambda losses: losses[0].to("cpu", torch.float64),
    "double": lambda losses: losses[0].double(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda losses: pickle.loads(pickle.dumps(losses[0])),
    "save": lambda losses: saved(losses[0]),
    "shape": lambda losses: (losses[0].shape, losses[0].dim(), losses[0].numel(), losses[0].size()),
    "kind": lambda losses: (losses[0].dtype, losses[0].device, losses[0].requires_grad, losses[0].is_leaf),
    "new": lambda losses: torch.zeros_like(losses[0]) + losses[0].new_ones(2),
    "assignment": lambda losses: torch.zeros(2).index_put_((torch.tensor([1]),), losses[0]),
    "in a linear": lambda losses: F.linear(torch.ones(1, 1), losses[0].reshape(1, 1)),
    "gradient of another": lambda losses: torch.autograd.grad(losses[0] * WEIGHT, WEIGHT),
    "key": lambda losses: {loss: n for n, loss in enumerate(losses)}[losses[2]],
    "default dict": lambda losses: dict(enumerate(losses))[2] * 2,
}

WEIGHT = torch.ones((), requires_grad=True)


@pytest.mark.parametrize("name", USES)
def test_a_loss_is_used_as_a_tensor(name: str, losses: list[Any]) -> None:
    plain = [loss.cpu() for loss in (result.detach().clone() for result in losses)]
    assert all(type(value) is torch.Tensor for value in plain)
    actual, expected = USES[name](losses), USES[name](plain)
    torch.testing.assert_close(actual, expected) if not isinstance(expected, str | bool | list | dict | tuple) else None
    assert type(actual) is type(expected) or isinstance(actual, torch.Tensor)
    assert str(actual) == str(expected)


def test_results_that_a_function_takes_are_read_in_one_round_trip(
    step: Any, results: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trips = []
    transfer = step._session.arrays._reader._transfer
    fetch = transfer.fetch
    monkeypatch.setattr(transfer, "fetch", lambda parts: trips.append(len(parts)) or fetch(parts))
    vectors = [vector for _, vector, _ in results]
    assert not trips
    stacked = torch.stack([vector.detach() for vector in vectors])
    assert trips == [COUNT]
    assert torch.equal(stacked[1], vectors[1])
    assert trips == [COUNT]


def test_shape_and_dtype_read_nothing(results: list[Any]) -> None:
    loss, vector, count = results[0]
    assert (loss.shape, vector.shape, count.dtype) == ((), (SIZE,), torch.int64)
    assert (vector.detach().ndim, vector.numel(), vector.requires_grad) == (1, SIZE, False)
    assert loss._tensor is None is vector._tensor


@pytest.mark.parametrize(
    "use",
    [
        lambda loss: loss.backward(),
        lambda loss: torch.autograd.grad(loss, WEIGHT),
        lambda loss: torch.autograd.backward([loss]),
    ],
)
def test_gradients_of_a_result_are_refused(use: Any, losses: list[Any]) -> None:
    with pytest.raises(sw.ArgumentError, match="has computed the gradients") as caught:
        use(losses[0])
    assert "leave the call out" in caught.value.remedy


def test_a_result_changed_in_place_is_passed_as_it_is_now(session: sw.Session, results: list[Any]) -> None:
    double = swt.parallelize(session, torch.nn.Identity(), None, lambda model, x: model(x) * 2, effort="fast")
    _, vector, _ = results[0]
    before = vector.cpu().clone()
    torch.testing.assert_close(double(vector).cpu(), 2 * before)
    vector.add_(1)
    torch.testing.assert_close(double(vector).cpu(), 2 * (before + 1))
    torch.testing.assert_close(vector.clone(), before + 1)
