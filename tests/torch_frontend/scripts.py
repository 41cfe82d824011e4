"""Training scripts as people write them, one of a kind, run eagerly or on servers."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardwright as sw
import shardwright.torch as swt

SCRIPTS: dict[str, Callable[[], Script]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """step: a loss function of the model and a batch, or a whole step, whose second parameter is `optimizer`. here: of
    eager PyTorch instead, where it has no such function. between: what is done after each call."""

    model: Any
    step: Callable[..., Any]
    batches: Sequence[tuple[Any, ...]]
    here: Callable[..., Any] | None = None
    optimizer: Callable[[Any], Any] = lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    between: Callable[[Any, Any], None] = lambda model, optimizer: None


def script(make: Callable[[], Script]) -> Callable[[], Script]:
    SCRIPTS[make.__name__] = make
    return make


def mlp(*widths: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers: list[Any] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def floats(*shape: int, seed: int = 1) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, below: int, seed: int = 0) -> Any:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def batches(make: Callable[[int], tuple[Any, ...]], count: int = 3) -> list[tuple[Any, ...]]:
    """Of a number, by which their values are drawn."""
    return [make(number) for number in range(count)]


def train_here(script: Script) -> tuple[list[float], dict[str, Any]]:
    """Losses and the module's state, trained by eager PyTorch."""
    torch._dynamo.reset()  # what an earlier script compiled, under other settings, does not count
    optimizer = script.optimizer(script.model)
    is_whole = list(inspect.signature(script.step).parameters)[1] in ("optimizer", "optimizers")
    losses = []
    for batch in script.batches:
        if is_whole:
            result = script.step(script.model, optimizer, *batch)
        else:
            optimizer.zero_grad()
            result = (script.here or script.step)(script.model, *batch)
            _loss_of(result).backward()
            optimizer.step()
        losses.append(_loss_of(result).item())
        script.between(script.model, optimizer)
    return losses, _values(script.model)


def train_on_servers(session: sw.Session, script: Script, **options: Any) -> tuple[list[float], dict[str, Any]]:
    """The same on servers."""
    optimizer = script.optimizer(script.model)
    step = swt.parallelize(session, script.model, optimizer, script.step, effort="fast", **options)
    losses = []
    for batch in script.batches:
        losses.append(_loss_of(step(*batch)).item())
        script.between(script.model, optimizer)
    return losses, _values(script.model)


def _loss_of(result: Any) -> Any:
    result = result[0] if isinstance(result, tuple) else result
    return result if isinstance(result, torch.Tensor) else result["loss"]


def _values(model: Any) -> dict[str, Any]:
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    return values | {name: value.detach().clone() for name, value in model.named_buffers()}
