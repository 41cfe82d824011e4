"""Steps on servers beside eager PyTorch on this machine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

import shardwright as sw
import shardwright.torch as swt

Optimizer = Callable[[Any], Any]


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def train_eagerly(
    model: Any, optimizer: Any, loss_fn: Any, batches: Sequence[Any], scheduler: Any = None
) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(model, *batch)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def relative(actual: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))


def distance(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """‖actual − expected‖ / ‖expected‖ over all tensors together."""
    assert actual.keys() == expected.keys()
    difference = sum(float((actual[k].double() - expected[k].double()).square().sum()) for k in expected)
    return float((difference / sum(float(v.double().square().sum()) for v in expected.values())) ** 0.5)


def compare(
    session: sw.Session,
    model: Any,
    make_optimizer: Optimizer,
    loss_fn: Any,
    batches: Sequence[Any],
    *,
    loss_bound: float = 1e-5,
    state_bound: float = 1e-5,
    moment_bound: float = 1e-4,
    make_scheduler: Any = None,
) -> Any:
    """Five steps both ways; returns the step. What has a bound of 0 is not compared."""
    eager = copy.deepcopy(model)
    eager_optimizer, optimizer = make_optimizer(eager), make_optimizer(model)
    schedulers = [make_scheduler(each) if make_scheduler else None for each in (eager_optimizer, optimizer)]
    wanted = train_eagerly(eager, eager_optimizer, loss_fn, batches, schedulers[0])
    step = swt.parallelize(session, model, optimizer, loss_fn, effort="fast")
    found = []
    for batch in batches:
        found.append(step(*batch).item())
        if schedulers[1] is not None:
            schedulers[1].step()
    assert relative(found, wanted) < loss_bound, (found, wanted)
    state = step.state_dict()
    buffers = {name for name, _ in eager.named_buffers()}
    wanted_model = eager.state_dict()
    floating = {k: v for k, v in wanted_model.items() if v.is_floating_point()}
    counted = {k: v for k, v in wanted_model.items() if not v.is_floating_point()}
    for name, value in counted.items():
        assert torch.equal(state["model"][name], value), name
    if state_bound:
        assert distance({k: state["model"][k] for k in floating}, floating) < state_bound
    held = {k: v for k, v in floating.items() if k in buffers}
    if held:
        assert distance({k: state["model"][k] for k in held}, held) < max(loss_bound, 1e-5)
    if moment_bound:
        assert distance(_moments(state["optimizer"]), _moments(eager_optimizer.state_dict())) < moment_bound
    return step


def _moments(state: Any) -> dict[str, Any]:
    return {f"{p}.{k}": v for p, entries in state["state"].items() for k, v in entries.items() if v is not None}
