"""Scripts by how they train: loops, averages, precisions, hooks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils

from tests.torch_frontend.scripts import Script, batches, floats, ids, mlp, script
from tests.torch_frontend.scripts_of_optimizers import CLASSES, VALUES, of_classes, with_optimizer


@script
def hf_trainer_like() -> Script:
    """Batches of dicts, parts of a batch, clipping, a scheduler, groups with and without decay."""

    @dataclass
    class Output:
        loss: Any
        logits: Any

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.norm, self.head = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 4)

        def forward(self, input_ids: Any, labels: Any) -> Output:
            logits = self.head(self.norm(self.embed(input_ids)))
            return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits)

    def groups(model: Any) -> Any:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}], 1e-2
        )

    def step(model: Any, optimizer: Any, inputs: Any) -> Any:
        total = 0.0
        for part in range(2):
            out = model(**{name: value[part::2] for name, value in inputs.items()})
            (out.loss / 2).backward()
            total = total + out.loss.detach() / 2
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total}

    def batch(n: int) -> tuple[Any, ...]:
        labels = ids(8, 4, below=4, seed=n).masked_fill(ids(8, 4, below=3, seed=n + 1) == 0, -100)
        return ({"input_ids": ids(8, 4, below=12, seed=n), "labels": labels},)

    schedulers: dict[Any, Any] = {}

    def schedule(_: Any, optimizer: Any) -> None:
        if optimizer not in schedulers:
            schedulers[optimizer] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / 10)
        schedulers[optimizer].step()

    return Script(model=Tagger(), step=step, batches=batches(batch), optimizer=groups, between=schedule)


@script
def gan_two_optimizers() -> Script:
    def step(model: Any, optimizers: Any, real: Any, noise: Any) -> Any:
        of_generator, of_critic = optimizers
        fake = model[0](noise)
        of_critic.zero_grad()
        ones = torch.ones(len(real), 1)
        scores = F.binary_cross_entropy_with_logits(model[1](real), ones)
        scores = scores + F.binary_cross_entropy_with_logits(model[1](fake.detach()), ones * 0)
        scores.backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model[1](fake), ones)
        loss.backward()
        of_generator.step()
        return loss + scores

    adam = lambda part: torch.optim.Adam(part.parameters(), 1e-3, betas=(0.5, 0.9), eps=1e-4)  # noqa: E731
    return Script(
        model=nn.ModuleList([mlp(3, 8, 6), mlp(6, 8, 1)]), step=step, optimizer=lambda m: [adam(m[0]), adam(m[1])],
        batches=batches(lambda n: (floats(8, 6, seed=n), floats(8, 3, seed=n + 9))),
    )  # fmt: skip


@script
def gan_gradient_penalty() -> Script:
    def step(model: Any, real: Any, fake: Any, share: Any) -> Any:
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (slopes,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        return model(fake).mean() - model(real).mean() + 10 * (slopes.norm(2, dim=1) - 1).square().mean()

    make = lambda n: (floats(8, 8, seed=n), floats(8, 8, seed=n + 9), floats(8, 1, seed=n).sigmoid())  # noqa: E731
    return Script(model=mlp(8, 16, 1), step=step, batches=batches(make))


@script
def ema_swa_averaged() -> Script:
    """An average of the weights that the step keeps up, and looks at."""
    model = nn.ModuleDict({"fast": mlp(8, 16, 4), "slow": mlp(8, 16, 4).requires_grad_(False)})

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        with torch.no_grad():
            aim = model["slow"](x).softmax(-1)
        loss = of_classes(model["fast"], x, y) + F.kl_div(model["fast"](x).log_softmax(-1), aim, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(model["slow"].parameters(), model["fast"].parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return loss

    return with_optimizer(lambda m: torch.optim.SGD(m["fast"].parameters(), 0.1), step, model)


@script
def swa_averagedmodel_after() -> Script:
    """Averaged between the calls, by torch's own."""
    model = mlp(8, 16, 4)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))

    def step(m: Any, x: Any, y: Any) -> Any:
        with torch.no_grad():
            aim = average(x)
        return of_classes(m, x, y) + F.mse_loss(m(x), aim)

    return Script(model=model, step=step, batches=CLASSES, between=lambda m, _: average.update_parameters(m))


@script
def weight_norm_parametrize() -> Script:
    model = mlp(8, 16, 4)
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.orthogonal(model[2], orthogonal_map="cayley")
    return Script(model=model, step=of_classes, batches=CLASSES)


@script
def weight_norm_by_hook() -> Script:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.weight_norm(nn.Conv1d(2, 6, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    return Script(model=model, step=lambda m, x, y: of_classes(m, x.view(8, 2, 4), y), batches=CLASSES)


@script
def spectral_norm() -> Script:
    model = mlp(8, 16, 4)
    nn.utils.parametrizations.spectral_norm(model[0])
    nn.utils.spectral_norm(model[2])
    return Script(model=model, step=of_classes, batches=CLASSES)


@script
def func_functional_call() -> Script:
    """One step of an inner loop, through which the outer one learns."""

    def step(model: Any, x: Any, y: Any) -> Any:
        weights = dict(model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(model, weights, (x[:4],)), y[:4])
        slopes = torch.autograd.grad(inner, tuple(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, moved, (x[4:],)), y[4:])

    return Script(model=mlp(8, 16, 4), step=step, batches=CLASSES)


@script
def func_vmap_grad() -> Script:
    """Gradients of each sample, clipped."""

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def of_one(weights: Any, x: Any, y: Any) -> Any:
            return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

        slopes, losses = torch.func.vmap(torch.func.grad_and_value(of_one), in_dims=(None, 0, 0))(weights, x, y)
        norms = torch.stack([s.flatten(1).norm(dim=1) for s in slopes.values()]).norm(dim=0)
        share = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in model.named_parameters():
            p.grad = torch.einsum("n,n...->...", share, slopes[name]) / len(x)
        optimizer.step()
        return losses.mean()

    return Script(model=mlp(8, 16, 4), step=step, batches=CLASSES)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, scale: float) -> Any:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.sign()

    @staticmethod
    def backward(ctx: Any, slope: Any) -> Any:
        (x,) = ctx.saved_tensors
        return slope * (x.abs() < 1) * ctx.scale, None


@script
def custom_autograd_function() -> Script:
    return Script(
        model=mlp(8, 16, 16, 4), batches=CLASSES,
        step=lambda m, x, y: F.cross_entropy(m[4](Straight.apply(m[:4](x), 0.5)), y),
    )  # fmt: skip


def checkpointed(use_reentrant: bool) -> Script:
    def step(model: Any, x: Any, y: Any) -> Any:
        inner = torch.utils.checkpoint.checkpoint(model[:2], x.requires_grad_(), use_reentrant=use_reentrant)
        return F.cross_entropy(torch.utils.checkpoint.checkpoint(model[2:], inner, use_reentrant=use_reentrant), y)

    return Script(model=mlp(8, 16, 16, 4), step=step, batches=CLASSES)


@script
def checkpoint_nonreentrant() -> Script:
    return checkpointed(False)


@script
def checkpoint_reentrant() -> Script:
    return checkpointed(True)


@script
def double_precision() -> Script:
    data = [(x.double(), y) for x, y in CLASSES]
    return with_optimizer(lambda m: torch.optim.Adam(m.parameters(), 1e-2), model=mlp(8, 16, 4).double(), data=data)


@script
def bf16_params() -> Script:
    """Weights in bfloat16 with float32 masters, in products that bfloat16 holds exactly."""

    def make(model: Any) -> Any:
        return torch.optim.SGD([model.master], lr=0.125)

    class Master(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.master = nn.Parameter(floats(4, 8).round() / 2)

        def forward(self, x: Any) -> Any:
            return F.linear(x.bfloat16().round(), self.master.bfloat16()).float()

    return with_optimizer(make, lambda m, x, y: (m(x) * y.sign()).mean(), Master(), VALUES)


@script
def lightning_module() -> Script:
    """A class that has the step, the metrics and the optimizer."""

    class Lit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.logged = mlp(8, 16, 4), {}

        def log(self, name: str, value: Any) -> None:
            self.logged[name] = value.detach()

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss)
            return {"loss": loss, "accuracy": (self.net(x).argmax(-1) == y).float().mean()}

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    return Script(
        model=Lit(), step=lambda m, batch: m.training_step(batch), batches=[((x, y),) for x, y in CLASSES],
        optimizer=lambda m: m.configure_optimizers(),
    )  # fmt: skip


@script
def forward_hooks_and_aux() -> Script:
    """Inner results by hooks, which the loss takes."""
    model = mlp(8, 16, 4)
    held: dict[str, Any] = {}
    model[0].register_forward_hook(lambda module, args, out: held.__setitem__("first", out))
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))

    def step(m: Any, x: Any, y: Any) -> Any:
        loss = of_classes(m, x, y)
        return loss + 0.1 * held["first"].square().mean()

    return Script(model=model, step=step, batches=CLASSES)


@script
def tensor_hooks_grad() -> Script:
    model = mlp(8, 16, 4)
    model[0].weight.register_hook(lambda slope: slope.clamp(-0.01, 0.01))

    def step(m: Any, x: Any, y: Any) -> Any:
        inner = m[:2](x)
        inner.register_hook(lambda slope: slope * 2)
        return F.cross_entropy(m[2](inner), y)

    return Script(model=model, step=step, batches=CLASSES)


@script
def dict_batch_and_metrics() -> Script:
    def step(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        loss = F.cross_entropy(out, batch["y"], weight=torch.tensor([1.0, 2.0, 0.5, 1.0]), label_smoothing=0.1)
        return {"loss": loss, "hits": (out.argmax(1) == batch["y"]).sum(), "top": out.topk(2).indices, "n": len(out)}

    return Script(model=mlp(8, 16, 4), step=step, batches=[({"x": x, "y": y, "name": "a"},) for x, y in CLASSES])


@script
def generator_arguments() -> Script:
    """Draws by a generator of the script's, of which so little comes that every generator gives the same."""
    generator = torch.Generator().manual_seed(3)

    def step(m: Any, x: Any, y: Any) -> Any:
        noise = torch.randn(x.shape, generator=generator) + torch.rand(8, 8, generator=generator)
        order = torch.randperm(8, generator=generator)
        out = torch.empty_like(x).normal_(generator=generator) * 1e-9
        return F.cross_entropy(m(x + 1e-9 * noise + out)[order], y[order])

    return Script(model=mlp(8, 16, 4), step=step, batches=CLASSES)


@script
def target_network() -> Script:
    """Learns values by a copy that follows between the calls."""
    model = mlp(8, 16, 4)
    target = copy.deepcopy(model).requires_grad_(False)

    def step(m: Any, x: Any, y: Any) -> Any:
        with torch.inference_mode():
            aim = target(x).max(-1).values
        return F.smooth_l1_loss(m(x).gather(1, y[:, None]).squeeze(1), 0.9 * aim.clone())

    return Script(model=model, step=step, batches=CLASSES, between=lambda m, _: target.load_state_dict(m.state_dict()))
