"""Numbers, flags and texts that a step reads beside its arguments, changed between calls, beside eager PyTorch."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
import shardwright.torch as swt
from tests.torch_frontend.models import floats

BATCHES = [(floats(4, 3, seed=n), floats(4, 2, seed=n + 9)) for n in range(5)]
WEIGHT = 0.5

Case = tuple[Any, Callable[..., Any], Callable[[int], None]]


class Counting(torch.nn.Module):
    """Warms up by a counter, and switches once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)
        self.calls = 0
        self.is_first = True

    def forward(self, x: Any) -> Any:
        self.calls += 1
        scale = min(1.0, self.calls / 3)
        if self.is_first:
            self.is_first = False
            scale = scale * 2
        return self.inner(x) * scale


def linear() -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def squares(model: Any, x: Any, y: Any) -> Any:
    return F.mse_loss(model(x), y)


def attribute() -> Case:
    model = linear()
    model.beta = 0.0
    return (
        model,
        lambda model, x, y: squares(model, x, y) + model.beta * model(x).square().mean(),
        lambda n: setattr(model, "beta", float(n)),
    )


def counter() -> Case:
    torch.manual_seed(0)
    return Counting(), squares, lambda n: None


def dropout() -> Case:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.0))
    return model, squares, lambda n: setattr(model[1], "p", float(n == 2))


def closure() -> Case:
    held: dict[str, Any] = {"weight": 0.0, "kind": "mean", "deep": [0.1, {"x": 1}]}
    scale = 1.0

    def loss(model: Any, x: Any, y: Any) -> Any:
        power = (model(x) - y).square() * scale
        return getattr(power, held["kind"])() * held["weight"] + power.mean() * held["deep"][1]["x"]

    def change(n: int) -> None:
        nonlocal scale
        scale = 1.0 + n
        held["weight"] = float(n)
        held["kind"] = "sum" if n == 3 else "mean"
        held["deep"][1]["x"] = n

    return linear(), loss, change


def global_number() -> Case:
    def change(n: int) -> None:
        globals()["WEIGHT"] = 0.5 + n

    change(0)
    return linear(), lambda model, x, y: squares(model, x, y) * WEIGHT, change


def setting_object() -> Case:
    settings = SimpleNamespace(smoothing=0.0, steps=2)

    class Config:
        rate = 1.0
        depth = 1

    config = Config()

    def loss(model: Any, x: Any, y: Any) -> Any:
        for _ in range(config.depth):
            x = x * 1.5
        return squares(model, x, y) * config.rate

    def change(n: int) -> None:
        config.rate = 1.0 + n
        config.depth = 1 + n % 2
        settings.smoothing = n

    return linear(), loss, change


def size() -> Case:
    held = {"rows": 2}

    def loss(model: Any, x: Any, y: Any) -> Any:
        return squares(model, x[: held["rows"]], y[: held["rows"]]) + torch.ones(held["rows"]).sum()

    return linear(), loss, lambda n: held.update(rows=2 + n % 2)


@pytest.mark.parametrize("make", [attribute, counter, dropout, closure, global_number, setting_object, size])
def test_what_is_read_counts_in_each_call(session: sw.Session, make: Callable[[], Case]) -> None:
    def losses(of_servers: bool) -> list[float]:
        model, loss_fn, change = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = swt.parallelize(session, model, optimizer, loss_fn, effort="fast") if of_servers else None
        values = []
        for number, batch in enumerate(BATCHES):
            change(number)
            if step is not None:
                values.append(step(*batch).item())
                continue
            optimizer.zero_grad()
            loss = loss_fn(model, *batch)
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return [*values, float(getattr(model, "calls", 0))]

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


def test_a_number_that_changes_makes_no_more_programs(session: sw.Session, caplog: pytest.LogCaptureFixture) -> None:
    model, _, change = attribute()
    loss_fn = lambda model, x, y: squares(model, x, y) * 3 + model.beta * model(x).square().sum()  # noqa: E731
    step = swt.parallelize(session, model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, effort="fast")
    with caplog.at_level("INFO", "shardwright"):
        for number, batch in enumerate(BATCHES):
            change(number)
            step(*batch)
    assert sum("ready after" in line for line in caplog.messages) == 2
    assert caplog.messages.count("model.beta changes: it is an argument of the step from now on") == 1


def test_python_s_random_numbers_are_refused(session: sw.Session) -> None:
    model = linear()
    step = swt.parallelize(
        session, model, torch.optim.SGD(model.parameters(), 0.1),
        lambda model, x, y: squares(model, x, y) * (1.0 if random.random() > 0.5 else 2.0),
    )  # fmt: skip
    with pytest.raises(sw.UnsupportedProgramError, match="draws numbers of random") as caught:
        step(*BATCHES[0])
    assert "pass them" in caught.value.remedy


def test_side_effects_are_told_once(
    session: sw.Session, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    model = linear()

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        loss = squares(model, x, y)
        seen.append(loss)
        model.last = loss
        print("traced")
        logging.getLogger("of_user").warning("traced")
        return loss

    step = swt.parallelize(session, model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    for batch in BATCHES[:2]:
        step(*batch)
    assert capsys.readouterr().out == "traced\n"
    assert not seen
    assert not hasattr(model, "last")
    told = [line for line in caplog.messages if "once a trace" in line]
    assert [line.split()[:2] for line in told] == [
        ["loss_fn", "prints:"], ["loss_fn", "logs:"], ["model", "gets"], ["seen", "gets"]
    ]  # fmt: skip
