"""Scripts by their optimizers, own ones first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.torch_frontend.scripts import Script, batches, floats, ids, mlp, script

CLASSES = batches(lambda n: (floats(8, 8, seed=n), ids(8, below=4, seed=n)))
VALUES = batches(lambda n: (floats(8, 8, seed=n), floats(8, 4, seed=n + 9)))


def of_classes(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y)


def with_optimizer(make: Any, step: Any = of_classes, model: Any = None, data: Any = CLASSES) -> Script:
    return Script(model=mlp(8, 16, 4) if model is None else model, step=step, batches=data, optimizer=make)


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(state["mean"] * first + p.grad * (1 - first)), alpha=-group["lr"])
                state["mean"].lerp_(p.grad, 1 - second)


@script
def opt_lion() -> Script:
    return with_optimizer(lambda m: Lion(m.parameters(), 1e-3))


class Muon(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                x = p.grad.add(buffer, alpha=group["momentum"])
                if x.ndim == 2:
                    x = x / (x.norm() + 1e-7)
                    for _ in range(3):
                        square = x @ x.T
                        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
                p.add_(x, alpha=-group["lr"] * max(1, p.shape[0] / p.numel() * p.shape[0]) ** 0.5)


@script
def opt_muon_own() -> Script:
    return with_optimizer(lambda m: Muon(m.parameters(), 1e-2))


@script
def opt_muon_torch() -> Script:
    def make(model: Any) -> Any:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        return [
            torch.optim.Muon(matrices, 1e-5), torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], 1e-3)
        ]  # fmt: skip

    def step(model: Any, optimizers: Any, x: Any, y: Any) -> Any:
        loss = of_classes(model, x, y.float())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    # At a small rate: matrices are orthogonalized in bfloat16, where each order of sums rounds differently.
    return with_optimizer(make, step, model=mlp(8, 4), data=VALUES)


class CountingAdam(torch.optim.Optimizer):
    """Adam as people write it: a Python number counts the steps."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["exp_avg"].mul_(first).add_(p.grad, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                size = group["lr"] * (1 - second ** state["step"]) ** 0.5 / (1 - first ** state["step"])
                p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-size)


@script
def opt_python_step_counter() -> Script:
    return with_optimizer(lambda m: CountingAdam(m.parameters(), 1e-2))


class EightBits(torch.optim.Optimizer):
    """Adam whose moments are 8-bit codes with a scale for each block, the first steps in float32."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "eps": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "step" not in state:
                    state["step"] = 0
                    for name in ("first", "second"):
                        state[name] = torch.zeros(
                            p.numel() // 4, 4, dtype=torch.uint8 if name == "second" else torch.int8
                        )
                        state[f"{name}_scale"] = torch.zeros(p.numel() // 4, 1)
                state["step"] += 1
                first = state["first"].float() * state["first_scale"] * 0.9 + p.grad.view(-1, 4) * 0.1
                second = state["second"].float() * state["second_scale"] * 0.99 + p.grad.view(-1, 4).square() * 0.01
                step = state["step"]
                change = first / (1 - 0.9**step) / ((second / (1 - 0.99**step)).sqrt() + group["eps"])
                p.sub_(change.view_as(p), alpha=group["lr"])
                for name, value, most in (("first", first, 127), ("second", second, 255)):
                    scale = value.abs().amax(1, keepdim=True) / most
                    state[name].copy_((value / scale.clamp(min=1e-12)).round())
                    state[f"{name}_scale"].copy_(scale)


@script
def opt_adam8bit_bnb() -> Script:
    return with_optimizer(lambda m: EightBits(m.parameters(), 1e-3))


class ScheduleFree(torch.optim.Optimizer):
    """Counts in its groups, and keeps two points there."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "lr_max": -1.0, "warmup": 2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            share = min(1.0, (group["k"] + 1) / group["warmup"])
            rate = group["scheduled_lr"] = group["lr"] * share
            group["lr_max"] = max(rate, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            mix = weight / group["weight_sum"]
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = torch.clone(p, memory_format=torch.preserve_format)
                p.lerp_(state["z"], mix)
                p.add_(p.grad, alpha=rate * (0.9 * (1 - mix) - 1))
                state["z"].sub_(p.grad, alpha=rate)
            group["k"] += 1


@script
def opt_schedulefree_like() -> Script:
    return with_optimizer(lambda m: ScheduleFree(m.parameters(), 0.1))


class Sharpness(torch.optim.Optimizer):
    """SAM around SGD."""

    def __init__(self, params: Iterable[Any], base: Any, rho: float) -> None:
        super().__init__(params, {"lr": 0.05, "rho": rho})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        members = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in members]).norm() + 1e-12
        moves = [p.grad * 0.05 / norm for p in members]
        for p, move in zip(members, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            self.zero_grad()
            closure()
        for p, move in zip(members, moves, strict=True):
            p.sub_(move)
        self.base.step()
        self.zero_grad()
        return loss


@script
def opt_sgd_closure_sam() -> Script:
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        def closure() -> Any:
            loss = of_classes(model, x, y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    make = lambda m: Sharpness(m.parameters(), lambda groups: torch.optim.SGD(groups, 0.1), 0.05)  # noqa: E731
    return with_optimizer(make, step)


@script
def opt_adafactor_torch() -> Script:
    return with_optimizer(lambda m: torch.optim.Adafactor(m.parameters(), 1e-2))


@script
def opt_adafactor_of_transformers() -> Script:
    from transformers.optimization import Adafactor

    return with_optimizer(lambda m: Adafactor(m.parameters(), scale_parameter=True, relative_step=True, lr=None))


@script
def opt_foreach_fused() -> Script:
    return with_optimizer(
        lambda m: [
            torch.optim.Adam(m[0].parameters(), 1e-2, foreach=True),
            torch.optim.AdamW(m[2].parameters(), 1e-2, fused=True),
        ],
        model=mlp(8, 16, 4),
        step=lambda m, optimizers, x, y: _step_all(optimizers, of_classes(m, x, y)),
    )


def _step_all(optimizers: Any, loss: Any) -> Any:
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss


@script
def opt_sparse_embedding() -> Script:
    """Gradients that are sparse in eager PyTorch; sums of them are those of dense ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8, sparse=True), nn.Flatten(), nn.Linear(16, 4))
    data = batches(lambda n: (ids(8, 2, below=12, seed=n), ids(8, below=4, seed=n)))
    return with_optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1), model=model, data=data)


@script
def sparse_adam() -> Script:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8, sparse=True), nn.Flatten(), nn.Linear(16, 4))
    data = batches(lambda n: (ids(8, 2, below=12, seed=n), ids(8, below=4, seed=n)))

    def step(m: Any, optimizers: Any, x: Any, y: Any) -> Any:
        return _step_all(optimizers, of_classes(m, x, y))

    make = lambda m: [  # noqa: E731
        torch.optim.SparseAdam(m[0].parameters(), 1e-2), torch.optim.SGD(m[2].parameters(), 0.1)
    ]  # fmt: skip
    return with_optimizer(make, step, model, data)
