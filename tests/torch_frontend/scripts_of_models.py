"""Scripts by what they model: images, pairs, graphs, experts, policies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import distributions, nn
from torch.nn import functional as F

from tests.torch_frontend.scripts import Script, batches, floats, ids, mlp, script


@script
def vae() -> Script:
    def step(model: Any, x: Any, noise: Any) -> Any:
        mean, scale = model[0](x).chunk(2, -1)
        latent = distributions.Normal(mean, F.softplus(scale) + 1e-3)
        divergence = distributions.kl_divergence(latent, distributions.Normal(0.0, 1.0)).sum(-1).mean()
        return F.mse_loss(model[1](latent.mean + latent.stddev * noise), x) + 0.1 * divergence

    model = nn.ModuleList([mlp(8, 12, 6), mlp(3, 12, 8)])
    return Script(model=model, step=step, batches=batches(lambda n: (floats(8, 8, seed=n), floats(8, 3, seed=n + 9))))


@script
def vae_rsample() -> Script:
    """Draws so little that every generator gives the same."""

    def step(model: Any, x: Any) -> Any:
        mean = model[0](x)
        latent = distributions.Independent(distributions.Normal(mean, torch.full_like(mean, 1e-9)), 1)
        return F.mse_loss(model[1](latent.rsample()), x)

    model = nn.ModuleList([mlp(8, 12, 3), mlp(3, 12, 8)])
    return Script(model=model, step=step, batches=batches(lambda n: (floats(8, 8, seed=n),)))


@script
def gumbel_softmax_multinomial() -> Script:
    """Of one class that has all of the probability."""

    def step(model: Any, x: Any) -> Any:
        sharp = F.one_hot(x[:, :4].argmax(-1), 4) * 1e4
        hard = F.gumbel_softmax(model(x) + sharp, hard=True)
        drawn = torch.multinomial(sharp.softmax(-1), 1)
        return (model(x) * hard).square().mean() + (model(x).gather(1, drawn)).mean()

    return Script(model=mlp(8, 12, 4), step=step, batches=batches(lambda n: (floats(8, 8, seed=n),)))


@script
def detection_boolean_index() -> Script:
    def step(model: Any, x: Any, boxes: Any, labels: Any) -> Any:
        out = model(x)
        positive = labels > 0
        of_boxes = F.smooth_l1_loss(out[..., :4][positive], boxes[positive], reduction="sum")
        of_classes = F.cross_entropy(out[..., 4:].flatten(0, 1), labels.flatten())
        return of_classes + of_boxes / positive.sum().clamp(min=1)

    make = lambda n: (floats(8, 5, 8, seed=n), floats(8, 5, 4, seed=n + 9), ids(8, 5, below=3, seed=n))  # noqa: E731
    return Script(model=mlp(8, 16, 7), step=step, batches=batches(make))


@script
def detection_masked_loss() -> Script:
    def step(model: Any, x: Any, boxes: Any, labels: Any) -> Any:
        positive = (labels > 0).float()
        error = F.smooth_l1_loss(model(x), boxes, reduction="none").sum(-1)
        return (error * positive).sum() / positive.sum().clamp(min=1)

    make = lambda n: (floats(8, 5, 8, seed=n), floats(8, 5, 4, seed=n + 9), ids(8, 5, below=3, seed=n))  # noqa: E731
    return Script(model=mlp(8, 16, 4), step=step, batches=batches(make))


@script
def hf_detr_loss_nonzero() -> Script:
    def step(model: Any, x: Any, labels: Any) -> Any:
        out = model(x)
        places = (labels >= 2).nonzero(as_tuple=True)[0]
        other = torch.nonzero(labels < 2).squeeze(1)
        return F.cross_entropy(out[places], labels[places]) + out[other].square().sum() / labels.numel()

    return Script(
        model=mlp(8, 16, 4), step=step, batches=batches(lambda n: (floats(16, 8, seed=n), ids(16, below=4, seed=n)))
    )


class LowRank(nn.Module):
    def __init__(self, inner: Any, rank: int) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(floats(rank, inner.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Any) -> Any:
        return self.inner(x) + F.linear(F.linear(x, self.down), self.up) * 2.0


@script
def peft_lora() -> Script:
    model = mlp(8, 16, 4)
    model[0], model[2] = LowRank(model[0], 2), LowRank(model[2], 2)
    trained = lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)  # noqa: E731
    return Script(
        model=model, step=lambda m, x, y: F.cross_entropy(m(x), y), optimizer=trained,
        batches=batches(lambda n: (floats(8, 8, seed=n), ids(8, below=4, seed=n))),
    )  # fmt: skip


class Denoiser(nn.Module):
    """A U-Net of one level with the time in its middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.time = nn.GroupNorm(4, 16), nn.Linear(8, 16)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Any, t: Any) -> Any:
        rates = torch.exp(-math.log(1e4) * torch.arange(4) / 4)
        angles = t[:, None].float() * rates[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        first = F.silu(self.first(x))
        middle = F.silu(self.norm(self.down(first)) + time[:, :, None, None])
        return self.last(torch.cat([first, self.up(middle)], 1))


@script
def diffusers_unet() -> Script:
    kept = torch.linspace(0.99, 0.1, 20)

    def step(model: Any, x: Any, noise: Any, t: Any) -> Any:
        share = kept[t][:, None, None, None]
        return F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)

    make = lambda n: (floats(4, 3, 8, 8, seed=n), floats(4, 3, 8, 8, seed=n + 9), ids(4, below=20, seed=n))  # noqa: E731
    return Script(model=Denoiser(), step=step, batches=batches(make))


class Modulated(nn.Module):
    """A block of a diffusion transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.labels = nn.Conv2d(3, 16, 2, 2), nn.Embedding(5, 16)
        self.norm, self.shift = nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 48)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 12)

    def forward(self, x: Any, label: Any) -> Any:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        shift, scale, gate = self.shift(F.silu(self.labels(label)))[:, None].chunk(3, -1)
        inner = self.norm(tokens) * (1 + scale) + shift
        q, k, v = self.qkv(inner).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.fold(self.head(tokens + gate * self.out(mixed)).transpose(1, 2), (8, 8), 2, stride=2)


@script
def diffusers_dit() -> Script:
    return Script(
        model=Modulated(), step=lambda m, x, y, noise: F.mse_loss(m(x + noise, y), noise),
        batches=batches(lambda n: (floats(4, 3, 8, 8, seed=n), ids(4, below=5, seed=n), floats(4, 3, 8, 8, seed=9))),
    )  # fmt: skip


@script
def unet_segmentation() -> Script:
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "down": nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        "side": nn.Conv2d(3, 8, 1), "head": nn.Conv2d(16, 3, 1),
    })  # fmt: skip

    def step(model: Any, x: Any, y: Any) -> Any:
        up = F.interpolate(model["down"](x), scale_factor=2, mode="bilinear", align_corners=False)
        out = model["head"](torch.cat([up, model["side"](x)], 1))
        share, whole = out.softmax(1), F.one_hot(y, 3).permute(0, 3, 1, 2).float()
        dice = 1 - (2 * (share * whole).sum((0, 2, 3)) / (share + whole).sum((0, 2, 3))).mean()
        return F.cross_entropy(out, y) + dice

    return Script(
        model=model, step=step, batches=batches(lambda n: (floats(4, 3, 8, 8, seed=n), ids(4, 8, 8, below=3, seed=n)))
    )


@script
def ppo_step() -> Script:
    def step(model: Any, states: Any, actions: Any, before: Any, gain: Any) -> Any:
        logits, value = model(states).split([4, 1], -1)
        policy = distributions.Categorical(logits=logits)
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        ratio = (policy.log_prob(actions) - before).exp()
        clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return F.mse_loss(value[:, 0], gain) * 0.5 - clipped - 0.01 * policy.entropy().mean()

    make = lambda n: (  # noqa: E731
        floats(16, 8, seed=n), ids(16, below=4, seed=n), -floats(16, seed=n + 9).abs(), floats(16, seed=n + 5)
    )  # fmt: skip
    return Script(model=mlp(8, 16, 5), step=step, batches=batches(make))


@script
def ppo_continuous() -> Script:
    """A squashed normal policy with a learned deviation, as SAC's."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.deviation = mlp(8, 16, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x: Any) -> Any:
            inner = distributions.Normal(self.mean(x), self.deviation.exp().expand(x.shape[0], 2))
            return distributions.TransformedDistribution(
                distributions.Independent(inner, 1), [distributions.transforms.TanhTransform(cache_size=1)]
            )

    def step(model: Any, x: Any, action: Any) -> Any:
        return -model(x).log_prob(action).mean()

    make = lambda n: (floats(16, 8, seed=n), floats(16, 2, seed=n + 9).tanh())  # noqa: E731
    return Script(model=Policy(), step=step, batches=batches(make))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp(8, 16, 6), mlp(5, 16, 6)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Any, text: Any) -> Any:
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)


def contrast(model: Any, image: Any, text: Any) -> Any:
    logits = model.scale.exp().clamp(max=100) * image @ text.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


PAIRS = batches(lambda n: (floats(8, 8, seed=n), floats(8, 5, seed=n + 9)))


@script
def clip_contrastive() -> Script:
    return Script(model=Pair(), step=lambda m, x, y: contrast(m, *m(x, y)), batches=PAIRS)


@script
def clip_all_gather_dist() -> Script:
    """Of a script that runs by itself as well as in a group."""

    def gather(x: Any) -> Any:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return x
        parts = [torch.zeros_like(x) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, x)
        return torch.cat(parts)

    return Script(model=Pair(), step=lambda m, x, y: contrast(m, *map(gather, m(x, y))), batches=PAIRS)


@script
def gnn_index_add() -> Script:
    def step(model: Any, x: Any, edges: Any, y: Any) -> Any:
        messages = model[0](torch.cat([x[edges[0]], x[edges[1]]], -1)).relu()
        total = torch.zeros(x.shape[0], 16).index_add(0, edges[1], messages)
        degree = torch.zeros(x.shape[0]).scatter_add(0, edges[1], torch.ones(edges.shape[1]))
        return F.cross_entropy(model[1](total / degree.clamp(min=1)[:, None]), y)

    model = nn.ModuleList([mlp(16, 16), mlp(16, 3)])
    make = lambda n: (floats(8, 8, seed=n), ids(2, 24, below=8, seed=n), ids(8, below=3, seed=n))  # noqa: E731
    return Script(model=model, step=step, batches=batches(make))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = mlp(8, 4)
        self.experts = nn.ModuleList(mlp(8, 8, 8, seed=n) for n in range(4))


@script
def moe_dynamic() -> Script:
    """Each expert takes the tokens that chose it."""

    def step(model: Any, x: Any, y: Any) -> Any:
        weights, choices = model.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(model.experts):
            rows, place = torch.where(choices == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return F.mse_loss(out, y)

    return Script(
        model=Experts(), step=step, batches=batches(lambda n: (floats(8, 8, seed=n), floats(8, 8, seed=n + 9)))
    )


@script
def moe_masks() -> Script:
    """Each expert's tokens by a mask, and written back by it."""

    def step(model: Any, x: Any, y: Any) -> Any:
        weights, choices = model.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(model.experts):
            mask = choices == number
            out[mask] = expert(x[mask]) * weights[mask].unsqueeze(-1)
        return F.mse_loss(out, y)

    return Script(
        model=Experts(), step=step, batches=batches(lambda n: (floats(8, 8, seed=n), floats(8, 8, seed=n + 9)))
    )


@script
def moe_static_capacity() -> Script:
    def step(model: Any, x: Any, y: Any) -> Any:
        weights, choice = model.gate(x).softmax(-1).max(-1)
        chosen = F.one_hot(choice, 4)
        place = (chosen.cumsum(0) - 1) * chosen
        slots = F.one_hot(place.sum(-1), 5) * (place.sum(-1) < 5)[:, None]
        send = (chosen[:, :, None] * slots[:, None]).float()
        inputs = torch.einsum("tes,td->esd", send, x)
        outputs = torch.stack([expert(part) for expert, part in zip(model.experts, inputs, strict=True)])
        return F.mse_loss(torch.einsum("tes,esd->td", send, outputs) * weights[:, None], y)

    return Script(
        model=Experts(), step=step, batches=batches(lambda n: (floats(8, 8, seed=n), floats(8, 8, seed=n + 9)))
    )


@script
def moe_sort_bincount() -> Script:
    """Tokens in the order of their experts, whose counts balance the load."""

    def step(model: Any, x: Any, y: Any) -> Any:
        scores = model.gate(x).softmax(-1)
        weight, choice = scores.max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=4)
        owner = torch.repeat_interleave(torch.arange(4), counts, output_size=len(x))
        outputs = torch.stack([expert(x[order]) for expert in model.experts])
        chosen = outputs[owner, torch.arange(len(x))] * weight[order, None]
        out = torch.empty_like(x).index_copy(0, order, chosen)
        return F.mse_loss(out, y) + 0.1 * 4 * (counts / len(x) * scores.mean(0)).sum()

    return Script(
        model=Experts(), step=step, batches=batches(lambda n: (floats(8, 8, seed=n), floats(8, 8, seed=n + 9)))
    )


@script
def complex_fft() -> Script:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.out = nn.Parameter(floats(5, 2) / 4), mlp(8, 4)

        def forward(self, x: Any) -> Any:
            return self.out(torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.weight), n=8))

    return Script(
        model=Filter(), step=lambda m, x, y: F.cross_entropy(m(x), y),
        batches=batches(lambda n: (floats(8, 8, seed=n), ids(8, below=4, seed=n))),
    )  # fmt: skip


@script
def complex_s4_like() -> Script:
    class Spaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate, self.wave = nn.Parameter(floats(4, 3)), nn.Parameter(floats(4, 3, seed=2))
            self.out = nn.Parameter(torch.complex(floats(4, 3, seed=3), floats(4, 3, seed=4)))

        def forward(self, x: Any) -> Any:
            poles = torch.complex(-F.softplus(self.rate), self.wave)
            kernel = 2 * torch.einsum("cn,cnl->cl", self.out, (poles[..., None] * torch.arange(8)).exp()).real
            return torch.fft.irfft(torch.fft.rfft(x, 16) * torch.fft.rfft(kernel, 16), 16)[..., :8]

    return Script(
        model=Spaces(), step=lambda m, x, y: F.mse_loss(m(x), y),
        batches=batches(lambda n: (floats(8, 4, 8, seed=n), floats(8, 4, 8, seed=n + 9))),
    )  # fmt: skip


@script
def grid_sample_roi() -> Script:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), mlp(4 * 9, 3)])

    def step(model: Any, x: Any, boxes: Any, y: Any) -> Any:
        steps = torch.linspace(0, 1, 3)
        low, high = boxes[:, None, :2], boxes[:, None, 2:]
        across, down = (low + steps[None, :, None] * (high - low)).unbind(-1)
        grid = torch.stack([across[:, None].expand(-1, 3, 3), down[:, :, None].expand(-1, 3, 3)], -1) * 2 - 1
        parts = F.grid_sample(model[0](x), grid, align_corners=False)
        return F.cross_entropy(model[1](parts.flatten(1)), y)

    def make(n: int) -> tuple[Any, ...]:
        low = floats(4, 2, seed=n).sigmoid() / 2
        return floats(4, 3, 8, 8, seed=n), torch.cat([low, low + 0.4], -1), ids(4, below=3, seed=n)

    return Script(model=model, step=step, batches=batches(make))


@script
def conv1d_3d_misc() -> Script:
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "line": nn.Sequential(nn.Conv1d(3, 8, 3, padding="same", dilation=2), nn.PReLU(), nn.Conv1d(8, 8, 3, groups=8)),
        "space": nn.Sequential(nn.Conv3d(1, 2, 2), nn.InstanceNorm3d(2, affine=True), nn.Hardswish()),
        "head": nn.LazyLinear(3),
    })  # fmt: skip

    def step(model: Any, line: Any, space: Any, y: Any) -> Any:
        of_line = F.adaptive_max_pool1d(model["line"](line), 2).flatten(1)
        return F.cross_entropy(
            model["head"](torch.cat([of_line, F.avg_pool3d(model["space"](space), 2).flatten(1)], 1)), y
        )

    make = lambda n: (floats(4, 3, 10, seed=n), floats(4, 1, 5, 5, 5, seed=n), ids(4, below=3, seed=n))  # noqa: E731
    made = batches(make)
    with torch.no_grad():
        step(model, *made[0])
    return Script(model=model, step=step, batches=made)
