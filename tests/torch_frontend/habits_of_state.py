"""What users do to modules, parameters and optimizers between the calls of a step: one function a habit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from tests.torch_frontend.models import floats

BATCHES = [(floats(4, 3, seed=n), floats(4, 2, seed=n + 9)) for n in range(5)]

#: Yields what has to be as eagerly. parallelize(model, optimizer, step): a step; of a function whose second parameter
#: is `optimizer`, that whole step.
Habit = Callable[[Callable[..., Any]], Iterator[Any]]
HABITS: dict[str, Habit] = {}


def habit(function: Habit) -> Habit:
    HABITS[function.__name__] = function
    return function


def small() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def normalized() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def squares(model: Any, x: Any, y: Any) -> Any:
    return F.mse_loss(model(x), y)


def momentum(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = squares(model, x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


# ---- modes and flags -----------------------------------------------------------------------------


@habit
def average_of_weights(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), squares)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for batch in BATCHES[:3]:
        yield step(*batch)
        with torch.no_grad():
            for mine, its in zip(average, model.parameters(), strict=True):
                mine.mul_(0.9).add_(its, alpha=0.1)
    yield from (each.sum() for each in average)


@habit
def modes_that_flip(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = normalized()
    step = parallelize(model, momentum(model), squares)
    for number, batch in enumerate(BATCHES):
        model.train(number % 2 == 0)
        yield step(*batch)
    yield model[1].running_var.sum()


@habit
def normalization_frozen(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = normalized()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    model[1].eval().requires_grad_(False)
    yield step(*BATCHES[1])
    model[1].train()
    yield step(*BATCHES[2])
    model[1].momentum = 0.5
    model[1].reset_running_stats()
    yield step(*BATCHES[3])
    model[1].track_running_stats = False
    yield step(*BATCHES[4])
    yield model[1].running_mean.sum()
    yield model[1].num_batches_tracked


@habit
def frozen_in_the_middle(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    model[0].requires_grad_(False)
    yield step(*BATCHES[1])
    model[0].weight.requires_grad = True
    yield step(*BATCHES[2])
    yield step(*BATCHES[3])
    yield model[0].weight.sum()
    yield model[0].bias.sum()


# ---- modules -------------------------------------------------------------------------------------


@habit
def layer_replaced_without_parameters(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    model[1] = nn.ReLU()
    yield step(*BATCHES[1])
    model[1] = nn.Sequential(nn.Identity(), nn.Tanh())
    yield step(*BATCHES[2])


@habit
def layer_replaced_with_parameters(parallelize: Callable[..., Any]) -> Iterator[Any]:
    """The optimizer has the old ones, until it is given the new ones."""
    model = small()
    optimizer = momentum(model)
    step = parallelize(model, optimizer, squares)
    yield step(*BATCHES[0])
    model[2] = nn.Linear(4, 2)
    nn.init.constant_(model[2].weight, 0.3)
    nn.init.zeros_(model[2].bias)
    yield step(*BATCHES[1])
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    yield step(*BATCHES[2])
    yield step(*BATCHES[3])
    yield model[2].weight.sum()


@habit
def layers_dropped_and_turned(parallelize: Callable[..., Any]) -> Iterator[Any]:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)])

    def loss(model: Any, x: Any, y: Any) -> Any:
        for layer in model:
            x = layer(x)
        return F.mse_loss(x, y)

    step = parallelize(model, momentum(model), loss)
    yield step(*BATCHES[0])
    model[0], model[1] = model[1], model[0]
    yield step(*BATCHES[1])
    del model[0]
    yield step(*BATCHES[2])
    yield step(*BATCHES[3])
    yield sum(parameter.sum() for parameter in model.parameters())


@habit
def tied_later(parallelize: Callable[..., Any]) -> Iterator[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    model[2].weight = model[0].weight
    yield step(*BATCHES[1])
    yield step(*BATCHES[2])
    model[2].weight = nn.Parameter(model[0].weight.detach().clone())
    yield step(*BATCHES[3])
    yield step(*BATCHES[4])
    yield model[0].weight.sum()
    yield model[2].weight.sum()


class Scaled(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)
        self.act = torch.tanh
        self.mask = torch.ones(2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Any) -> Any:
        y = self.act(self.net(x)) * self.scale * self.mask * self.factor
        return y + self.shift if hasattr(self, "shift") else y


@habit
def attributes_replaced(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = Scaled()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    model.act = F.softplus
    yield step(*BATCHES[1])
    model.mask = torch.tensor([1.0, 0.0])
    yield step(*BATCHES[2])
    model.mask[1] = 2.0
    model.factor = 0.5
    yield step(*BATCHES[3])
    del model.factor
    yield step(*BATCHES[4])


@habit
def buffers_swapped(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = Scaled()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    model.scale.data = torch.tensor([2.0, 3.0])
    yield step(*BATCHES[1])
    model.scale = torch.tensor([0.5, 0.1])
    yield step(*BATCHES[2])
    model.scale.copy_(torch.tensor([1.0, 2.0]))
    yield step(*BATCHES[3])
    model.register_buffer("shift", torch.tensor([1.0, -1.0]), persistent=False)
    yield step(*BATCHES[4])


@habit
def attributes_of_a_class(parallelize: Callable[..., Any]) -> Iterator[Any]:
    class Net(Scaled):
        power = 1

    model = Net()
    step = parallelize(model, momentum(model), lambda m, x, y: F.mse_loss(m(x) ** m.power, y))
    yield step(*BATCHES[0])
    Net.factor = 3.0
    yield step(*BATCHES[1])
    Net.power = 2
    yield step(*BATCHES[2])
    Net.forward = lambda self, x: self.net(x).sigmoid()
    yield step(*BATCHES[3])


@habit
def forward_replaced(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    before = model[1].forward
    model[1].forward = lambda x: before(x) * 2
    yield step(*BATCHES[1])
    del model[1].forward
    yield step(*BATCHES[2])


# ---- hooks ---------------------------------------------------------------------------------------


@habit
def hooks_of_modules_later(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    handles = [
        model[0].register_forward_hook(lambda module, arguments, result: result * 2),
        model[2].register_forward_pre_hook(lambda module, arguments: (arguments[0] + 1,)),
    ]
    yield step(*BATCHES[1])
    handles.pop().remove()
    yield step(*BATCHES[2])
    model[2].register_full_backward_hook(lambda module, gradients, _: (gradients[0] * 3,))
    handles.pop().remove()
    yield step(*BATCHES[3])
    yield step(*BATCHES[4])


@habit
def hooks_of_parameters_later(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    handle = model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    yield step(*BATCHES[1])
    yield step(*BATCHES[2])
    handle.remove()
    yield step(*BATCHES[3])
    yield step(*BATCHES[4])


@habit
def hooks_of_optimizers_later(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    optimizer = momentum(model)

    def halve(optimizer: Any, arguments: Any, named: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    step = parallelize(model, optimizer, squares)
    yield step(*BATCHES[0])
    handle = optimizer.register_step_pre_hook(halve)
    yield step(*BATCHES[1])
    yield step(*BATCHES[2])
    handle.remove()
    yield step(*BATCHES[3])
    yield step(*BATCHES[4])


# ---- weights as others make them -----------------------------------------------------------------


@habit
def pruned(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    prune.l1_unstructured(model[0], "weight", 0.5)
    yield step(*BATCHES[1])
    yield step(*BATCHES[2])
    prune.remove(model[0], "weight")
    yield step(*BATCHES[3])
    yield model[0].weight.sum()


class Symmetric(nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight.abs()


@habit
def parametrized_later(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    yield step(*BATCHES[1])
    yield step(*BATCHES[2])
    parametrize.remove_parametrizations(model[0], "weight")
    yield step(*BATCHES[3])
    yield model[0].weight.sum()


@habit
def weights_drawn_anew(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    torch.manual_seed(3)
    model.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
    yield step(*BATCHES[1])
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    yield step(*BATCHES[2])
    model[0].weight = nn.Parameter(torch.ones(4, 3))
    yield step(*BATCHES[3])
    yield step(*BATCHES[4])
    yield model[0].weight.sum()


@habit
def loaded_in_the_loop(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    optimizer = momentum(model)
    step = parallelize(model, optimizer, squares)
    yield step(*BATCHES[0])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    yield step(*BATCHES[1])
    file.seek(0)
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    yield step(*BATCHES[2])
    model.load_state_dict({"2.bias": torch.ones(2)}, strict=False)
    yield step(*BATCHES[3])
    yield step(*BATCHES[4])


@habit
def loaded_by_assignment(parallelize: Callable[..., Any]) -> Iterator[Any]:
    """The module's parameters are others then than the optimizer's."""
    model = small()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    values = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    yield step(*BATCHES[1])
    yield step(*BATCHES[1])


@habit
def best_kept_and_copied(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), squares)
    best, copies = float("inf"), []
    for batch in BATCHES:
        loss = step(*batch)
        if loss < best:
            best = loss.item()
            copies.append(copy.deepcopy(model))
        copies.append(pickle.loads(pickle.dumps(model)))
    yield best
    yield from (squares(each, *BATCHES[0]) for each in copies)
    model.load_state_dict(copies[0].state_dict())
    yield step(*BATCHES[0])


@habit
def another_precision(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), lambda m, x, y: F.mse_loss(m(x.to(m[0].weight.dtype)).float(), y))
    yield step(*BATCHES[0])
    model.double()
    yield step(*BATCHES[1])
    yield step(*BATCHES[2])
    yield model[0].weight.dtype == torch.float64


# ---- optimizers ----------------------------------------------------------------------------------


@habit
def settings_of_groups(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = parallelize(model, optimizer, squares)
    for number, batch in enumerate(BATCHES):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 1)
            group["weight_decay"] = 0.1 * number
            group["betas"] = (0.9 - 0.1 * number, 0.999)
            group["maximize"] = number == 2
            group["amsgrad"] = False
        yield step(*batch)


@habit
def schedulers(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    optimizer = momentum(model)
    step = parallelize(model, optimizer, squares)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (epoch + 1))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    for batch in BATCHES:
        loss = step(*batch)
        yield loss
        warm.step()
        plateau.step(loss)
    yield optimizer.param_groups[0]["lr"]


@habit
def groups_changed(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.1}])
    step = parallelize(model, optimizer, squares)
    yield step(*BATCHES[0])
    removed = optimizer.param_groups.pop()
    yield step(*BATCHES[1])
    optimizer.param_groups.append(removed)
    yield step(*BATCHES[2])
    optimizer.param_groups[0]["params"].pop()
    yield step(*BATCHES[3])
    yield from (parameter.sum() for parameter in model.parameters())


@habit
def state_of_the_optimizer_read(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    step = parallelize(model, optimizer, squares)
    for batch in BATCHES[:3]:
        yield step(*batch)
        state = optimizer.state_dict()["state"]
        yield state[0]["step"]
        yield from (entries["exp_avg_sq"].sum() for entries in state.values())
    yield len(optimizer.state)


@habit
def another_step_of_another_optimizer(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    step = parallelize(model, momentum(model), squares)
    yield step(*BATCHES[0])
    other = torch.optim.Adam(model.parameters(), 0.01)
    fine = parallelize(model, other, squares)
    yield fine(*BATCHES[1])
    yield step(*BATCHES[2])
    yield fine(*BATCHES[3])
    yield model[0].weight.sum()


@habit
def gradients_kept_zero(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    optimizer = momentum(model)

    def backward(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = squares(model, x, y) / 2
        loss.backward()
        return loss.detach()

    def update(model: Any, optimizer: Any) -> Any:
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        return model[0].weight.sum().detach()

    first, second = parallelize(model, optimizer, backward), parallelize(model, optimizer, update)
    for number in range(0, 4, 2):
        yield first(*BATCHES[number])
        yield first(*BATCHES[number + 1])
        yield model[0].weight.grad.norm()
        yield second()
        optimizer.zero_grad(set_to_none=False)
        yield model[0].weight.grad.norm()


@habit
def gradients_written(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    optimizer = momentum(model)

    def accumulate(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = squares(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = parallelize(model, optimizer, accumulate)
    yield step(*BATCHES[0])
    model[0].weight.grad.mul_(0.5)
    yield step(*BATCHES[1])
    model[2].weight.grad = None
    yield step(*BATCHES[2])
    model[2].bias.grad = torch.ones(2)
    yield step(*BATCHES[3])
    model.zero_grad()
    yield step(*BATCHES[4])
    yield model[0].weight.grad.norm()


@habit
def two_optimizers(parallelize: Callable[..., Any]) -> Iterator[Any]:
    model = small()
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[2].parameters(), 0.1)]

    def step_both(model: Any, optimizers: Any, x: Any, y: Any) -> Any:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = squares(model, x, y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    step = parallelize(model, optimizers, step_both)
    yield step(*BATCHES[0])
    optimizers[1].param_groups[0]["lr"] = 0.01
    yield step(*BATCHES[1])
    optimizers[0].param_groups[0]["momentum"] = 0.5
    yield step(*BATCHES[2])
    yield step(*BATCHES[3])
    yield from (parameter.sum() for parameter in model.parameters())
