"""What users change in Python between the calls of a step, and in PyTorch's switches: one function a habit."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.torch_frontend.habits_of_state import BATCHES, habit, momentum, small, squares, train

CALLS = 0
RATES = types.SimpleNamespace(aux=0.0)


# ---- numbers and tables --------------------------------------------------------------------------


@habit
def lists_in_closures(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    weights, terms = [1.0], [squares]

    def loss(model: Any, x: Any, y: Any) -> Any:
        return sum(weight * term(model, x, y) for weight, term in zip(weights, terms, strict=True))

    step = parallelize(model, momentum(model), loss)
    yield step(*BATCHES[0])
    weights.append(0.5)
    terms.append(lambda model, x, y: model(x).abs().mean())
    yield step(*BATCHES[1])
    weights[1] = 0.1
    yield step(*BATCHES[2])
    terms[0] = lambda model, x, y: F.l1_loss(model(x), y)
    yield step(*BATCHES[3])
    del weights[0], terms[0]
    yield step(*BATCHES[4])


@habit
def global_counter(parallelize: Callable[..., Any]) -> Iterator[Any]:
    def loss(model: Any, x: Any, y: Any) -> Any:
        global CALLS  # noqa: PLW0603
        CALLS += 1
        return squares(model, x, y) * min(1.0, CALLS / 4)

    globals()["CALLS"] = 0
    model = small()
    step = parallelize(model, momentum(model), loss)
    for batch in BATCHES:
        yield step(*batch)
    yield CALLS


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 1.0
    kind: str = "mean"


@dataclasses.dataclass(slots=True)
class Slotted:
    rate: float = 1.0


class Kind(enum.Enum):
    MEAN = "mean"
    SUM = "sum"


@habit
def configurations_replaced(parallelize: Callable[..., Any]) -> Iterator[Any]:
    config, slotted, kind, pair, named = Config(), Slotted(), Kind.MEAN, (1.0, ["mean"]), {"mean"}
    ordered = collections.OrderedDict(rate=1.0)
    recent = collections.deque([1.0], maxlen=1)

    def loss(model: Any, x: Any, y: Any) -> Any:
        errors = (model(x) - y).square()
        total = getattr(errors, kind.value)() + getattr(errors, config.kind)() * config.rate * slotted.rate
        return (total * pair[0] + errors.sum() * ("sum" in named)) * ordered["rate"] * recent[0]

    model = small()
    step = parallelize(model, torch.optim.SGD(model.parameters(), 0.01), loss)
    yield step(*BATCHES[0])
    config = dataclasses.replace(config, rate=2.0)
    yield step(*BATCHES[0])
    slotted.rate = 3.0
    yield step(*BATCHES[0])
    kind = Kind.SUM
    yield step(*BATCHES[0])
    pair = (0.1, ["mean"])
    yield step(*BATCHES[0])
    named.add("sum")
    yield step(*BATCHES[0])
    ordered["rate"] = 0.5
    yield step(*BATCHES[0])
    recent.append(0.5)
    yield step(*BATCHES[0])


class Criterion:
    """With a property, a class variable and a private number."""

    scale = 1.0

    def __init__(self) -> None:
        self._smoothing = 0.0
        self.history: list[float] = []

    @property
    def smoothing(self) -> float:
        return self._smoothing

    @classmethod
    def weigh(cls, value: Any) -> Any:
        return value * cls.scale

    @staticmethod
    def power(value: Any) -> Any:
        return value ** (2 if RATES.aux > 0.5 else 1)

    def __call__(self, model: Any, x: Any, y: Any) -> Any:
        return self.power(self.weigh(squares(model, x, y))) + self.smoothing * model(x).square().mean()


@habit
def objects_of_the_user(parallelize: Callable[..., Any]) -> Iterator[Any]:
    criterion, model = Criterion(), small()
    RATES.aux = 0.0
    step = parallelize(model, momentum(model), criterion)
    yield step(*BATCHES[0])
    criterion._smoothing = 0.5
    yield step(*BATCHES[1])
    Criterion.scale = 2.0
    yield step(*BATCHES[2])
    RATES.aux = 1.0
    yield step(*BATCHES[3])
    Criterion.scale = 1.0


@habit
def criteria_of_torch(parallelize: Callable[..., Any]) -> Iterator[Any]:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(2))
    model = small()
    step = parallelize(model, momentum(model), lambda m, x, y: criterion(m(x), (y[:, 0] > 0).long()))
    yield step(*BATCHES[0])
    criterion.label_smoothing = 0.3
    yield step(*BATCHES[1])
    criterion.reduction = "sum"
    yield step(*BATCHES[2])
    criterion.weight = torch.tensor([0.1, 0.2])
    yield step(*BATCHES[3])
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    yield step(*BATCHES[4])


@habit
def arguments_bound_anew(parallelize: Callable[..., Any]) -> Iterator[Any]:
    held = {"loss": functools.partial(F.huber_loss, delta=1.0)}
    model = small()
    step = parallelize(model, momentum(model), lambda m, x, y: held["loss"](m(x), y))
    yield step(*BATCHES[0])
    held["loss"] = functools.partial(F.huber_loss, delta=0.1)
    yield step(*BATCHES[1])
    held["loss"].keywords["delta"] = 0.3
    yield step(*BATCHES[2])
    held["loss"] = F.l1_loss
    yield step(*BATCHES[3])


@habit
def schedulers_read_in_the_step(parallelize: Callable[..., Any]) -> Iterator[Any]:
    """A weight that follows the rate, an epoch of the scheduler, a count of epochs."""
    model = small()
    optimizer = momentum(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def loss(model: Any, x: Any, y: Any) -> Any:
        rate = optimizer.param_groups[0]["lr"]
        return squares(model, x, y) * (1 + rate) + scheduler.last_epoch * scheduler.get_last_lr()[0]

    step = parallelize(model, optimizer, loss)
    for batch in BATCHES[:4]:
        yield step(*batch)
        scheduler.step()


@habit
def iterators_in_the_step(parallelize: Callable[..., Any]) -> Iterator[Any]:
    numbers = itertools.count(1)
    model = small()
    step = parallelize(model, momentum(model), lambda m, x, y: squares(m, x, y) * next(numbers))
    for batch in BATCHES[:3]:
        yield step(*batch)


@habit
def generators_in_the_step(parallelize: Callable[..., Any]) -> Iterator[Any]:
    numbers = (0.5 * number for number in range(1, 9))
    model = small()
    step = parallelize(model, momentum(model), lambda m, x, y: squares(m, x, y) * next(numbers))
    for batch in BATCHES[:3]:
        yield step(*batch)


@habit
def hidden_state_in_an_attribute(parallelize: Callable[..., Any]) -> Iterator[Any]:
    """Truncated backpropagation: each batch goes on where the one before has ended."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 2)
            self.hidden = torch.zeros(4, 4)

        def forward(self, x: Any) -> Any:
            self.hidden = self.cell(x, self.hidden.detach())
            return self.head(self.hidden)

    model = Recurrent()
    step = parallelize(model, momentum(model), squares)
    for batch in BATCHES[:3]:
        yield step(*batch)
    model.hidden = torch.zeros(4, 4)
    yield step(*BATCHES[3])
    yield model.hidden.sum()


@habit
def queue_of_keys(parallelize: Callable[..., Any]) -> Iterator[Any]:
    """MoCo's: a buffer that is written at a place that moves."""

    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(3, 2)
            self.register_buffer("keys", torch.ones(12, 2))
            self.place = 0

        def forward(self, x: Any) -> Any:
            out = self.net(x)
            score = out @ self.keys.clone().T
            with torch.no_grad():
                self.keys[self.place : self.place + 4] = out
            self.place = (self.place + 4) % 12
            return score

    model = Queue()
    step = parallelize(model, momentum(model), lambda m, x, y: m(x).square().mean())
    for batch in BATCHES:
        yield step(*batch)
    yield model.keys.sum()
    yield model.place


# ---- switches of torch ---------------------------------------------------------------------------


@habit
def autocast_by_a_flag(parallelize: Callable[..., Any]) -> Iterator[Any]:
    held = {"flag": False}

    def loss(model: Any, x: Any, y: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=held["flag"]):
            out = model(x)
        return F.mse_loss(out.float(), y) + (100.0 if out.dtype == torch.bfloat16 else 0.0)

    model = small()
    step = parallelize(model, momentum(model), loss)
    for number, batch in enumerate(BATCHES[:3]):
        held["flag"] = number == 1
        yield step(*batch) // 50
    with torch.autocast("cpu", torch.bfloat16):
        yield parallelize(model, momentum(model), lambda m, x, y: m(x).float().sum() * 0 + m(x).element_size())(
            *BATCHES[3]
        )


@habit
def gradients_switched_off(parallelize: Callable[..., Any]) -> Iterator[Any]:
    """Of what a whole step does while they are off."""

    def evaluate_or_train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = squares(model, x, y)
        if torch.is_grad_enabled():
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    model = small()
    step = parallelize(model, momentum(model), evaluate_or_train)
    yield step(*BATCHES[0])
    with torch.no_grad():
        yield step(*BATCHES[1])
        yield step(*BATCHES[1])
    torch.set_grad_enabled(False)
    yield step(*BATCHES[1])
    torch.set_grad_enabled(True)
    yield step(*BATCHES[2])
    yield step(*BATCHES[3])


@habit
def default_dtype_changed(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), lambda m, x, y: squares(m, x, y) + torch.zeros(2).element_size())
    yield step(*BATCHES[0])
    torch.set_default_dtype(torch.float64)
    try:
        yield step(*BATCHES[1])
    finally:
        torch.set_default_dtype(torch.float32)
    yield step(*BATCHES[2])


@habit
def switches_of_kernels(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("highest")
    try:
        yield step(*BATCHES[1])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
    with torch.autograd.set_detect_anomaly(True):
        yield step(*BATCHES[2])


@habit
def seeds_between_calls(parallelize: Callable[..., Any]) -> Iterator[Any]:
    """The same masks for the same seed; which ones is not said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    step = parallelize(model, torch.optim.SGD(model.parameters(), 0.0), squares)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses += [step(*BATCHES[0]), step(*BATCHES[0])]
    yield losses[0] == losses[2]
    yield losses[1] == losses[3]
    yield losses[0] != losses[1]
    yield losses[0] != losses[4]


@habit
def seeds_in_a_fork(parallelize: Callable[..., Any]) -> Iterator[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    step = parallelize(model, torch.optim.SGD(model.parameters(), 0.0), squares)
    step(*BATCHES[0])
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first = step(*BATCHES[0])
    torch.manual_seed(5)
    yield first == step(*BATCHES[0])


# ---- batches and errors --------------------------------------------------------------------------


@habit
def batches_of_other_kinds(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), lambda m, x, y: F.mse_loss(m(x.float()), y.float()))
    x, y = (each.clone() for each in BATCHES[0])
    yield step(x, y)
    yield step(x[:3], y[:3])
    yield step(x.double(), y.double())
    yield step(x.round().long(), y)
    yield step(x.t().contiguous().t(), y)
    x[0] = 7.0
    yield step(x.clone(), y)
    x[0] = torch.arange(3.0)
    yield step(x, y)


@habit
def batch_overwritten_after_the_call(parallelize: Callable[..., Any]) -> Iterator[Any]:
    """One buffer that each batch is copied into."""
    model = small()
    step = parallelize(model, momentum(model), squares)
    x, y = (torch.empty_like(each) for each in BATCHES[0])
    losses = []
    for batch in BATCHES:
        x.copy_(batch[0])
        y.copy_(batch[1])
        losses.append(step(x, y))
    x.zero_()
    yield from losses


@habit
def errors_in_the_middle(parallelize: Callable[..., Any]) -> Iterator[Any]:
    held = {"fails": False}

    def loss(model: Any, x: Any, y: Any) -> Any:
        if held["fails"]:
            raise KeyError("of the user")
        return squares(model, x, y)

    model = small()
    step = parallelize(model, momentum(model), loss)
    yield step(*BATCHES[0])
    held["fails"] = True
    try:
        step(*BATCHES[1])
    except KeyError:
        yield 1.0
    held["fails"] = False
    yield step(*BATCHES[2])
    yield model[0].weight.sum()


@habit
def numbers_of_chunks(parallelize: Callable[..., Any]) -> Iterator[Any]:
    held = {"parts": 1, "bound": 1.0}

    def accumulate(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, aim in zip(x.chunk(held["parts"]), y.chunk(held["parts"]), strict=True):
            loss = squares(model, part, aim) / held["parts"]
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_value_(model.parameters(), held["bound"])
        optimizer.step()
        return total

    model = small()
    step = parallelize(model, momentum(model), accumulate)
    for number, batch in enumerate(BATCHES):
        held.update(parts=2 if number % 2 else 4, bound=0.1 / (number + 1))
        yield step(*batch)


@habit
def losses_in_tables(parallelize: Callable[..., Any]) -> Iterator[Any]:
    """What loops do with results."""
    model = small()
    step = parallelize(model, momentum(model), train)
    losses = [step(*batch) for batch in BATCHES]
    total = torch.zeros(())
    for loss in losses:
        total += loss
    yield total
    yield sum(losses) / len(losses)
    yield torch.stack(losses).std()
    yield max(losses)
    yield sorted(losses)[0]
    yield torch.cat([loss.view(1) for loss in losses]).median()
    yield all(loss.isfinite() for loss in losses)
    yield float(f"{losses[0]:.3f}")
