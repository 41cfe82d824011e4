"""Checks by values in a step's Python code: made on the servers, and without effect on the state where they fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
import shardwright.torch as swt
from tests.torch_frontend.models import floats, ids

X, Y = floats(4, 3), floats(4, 2, seed=2)
CLASSES = ids(8, below=4)
BAD = torch.full_like(X, torch.nan)


def asserted(model: Any, x: Any, y: Any) -> Any:
    assert torch.isfinite(x).all(), "a batch with NaNs"
    return F.mse_loss(model(x), y)


def raised(model: Any, x: Any, y: Any) -> Any:
    is_strict = True
    if is_strict and not torch.isfinite(x).all():
        raise ValueError("a batch with NaNs")
    return F.mse_loss(model(x), y)


def one_of_two(model: Any, x: Any, y: Any) -> Any:
    if x.isinf().any() or x.isnan().any():
        raise ValueError("a batch with NaNs")
    return F.mse_loss(model(x), y)


def distributed(model: Any, x: Any, y: Any) -> Any:
    # Asked for: a process in which Dynamo has compiled something has it off by default.
    return -torch.distributions.Normal(model(x), 1.0, validate_args=True).log_prob(y).mean()


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (asserted, "assert torch.isfinite"),
        (raised, "if is_strict"),
        (one_of_two, "x.isnan"),
        (distributed, "loc of Normal"),
    ],
)
def test_a_check_that_fails_is_an_error_and_changes_nothing(
    session: sw.Session, loss_fn: Callable[..., Any], text: str
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    step = swt.parallelize(session, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), loss_fn)
    first = step(X, Y)
    assert first.item() == pytest.approx(loss_fn(torch.nn.Linear(3, 2), X, Y).item(), abs=10)
    before = model.weight.clone()
    loss = step(BAD, Y)
    with pytest.raises(sw.errors.CheckError, match=text) as caught:
        loss.item()
    assert "test_checks.py" in caught.value.where
    assert torch.equal(model.weight, before)
    assert step(X, Y).item() < first.item()


def test_a_check_that_nobody_looks_at_shows_in_a_later_call(session: sw.Session) -> None:
    step = swt.parallelize(session, torch.nn.Linear(3, 2), None, asserted)
    step(BAD, Y)
    with pytest.raises(sw.errors.CheckError, match="isfinite"):
        [step(X, Y) for _ in range(20)]


@pytest.mark.parametrize("weights", [None, torch.ones(8)])
def test_a_value_that_bincount_has_no_place_for_is_an_error(weights: Any, session: sw.Session) -> None:
    step = swt.parallelize(session, torch.nn.Identity(), None, lambda model, y: torch.bincount(y, weights, minlength=3))
    with pytest.raises(sw.errors.CheckError, match="below minlength"):
        step(CLASSES).tolist()
