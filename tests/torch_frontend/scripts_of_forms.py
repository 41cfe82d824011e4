"""Scripts by the functions of PyTorch that they use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.torch_frontend.scripts import Script, batches, floats, ids, mlp, script

CLASSES = batches(lambda n: (floats(8, 8, seed=n), ids(8, below=4, seed=n)))
VALUES = batches(lambda n: (floats(8, 8, seed=n), floats(8, 4, seed=n + 9)))


def of_values(step: Any, model: Any = None, data: Any = VALUES) -> Script:
    return Script(model=mlp(8, 16, 4) if model is None else model, step=step, batches=data)


@script
def compiled_inner() -> Script:
    """A block that is compiled, and a function."""
    model = mlp(8, 16, 4)
    model[0].compile()

    @torch.compile
    def squares(x: Any, y: Any) -> Any:
        return ((x - y) ** 2).mean()

    return of_values(lambda m, x, y: squares(m(x), y), model)


@script
def compiled_loss_module() -> Script:
    loss = torch.compile(nn.CrossEntropyLoss(label_smoothing=0.1))
    return of_values(lambda m, x, y: loss(m(x), y), data=CLASSES)


@script
def jit_script_inner() -> Script:
    @torch.jit.script
    def squares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x - y) * (x - y)).mean()

    return of_values(lambda m, x, y: squares(m(x), y))


@script
def print_and_item_inside() -> Script:
    def step(m: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(m(x), y)
        print("loss", loss.shape)
        return loss * 2 + loss.item() * 0

    return of_values(step)


@script
def variable_lengths() -> Script:
    def step(m: Any, x: Any, lengths: Any, y: Any) -> Any:
        mask = torch.arange(x.shape[1])[None] < lengths[:, None]
        pooled = (m(x) * mask[..., None]).sum(1) / lengths[:, None]
        return F.mse_loss(pooled, y)

    make = lambda n: (floats(8, 4 + n % 2, 8, seed=n), ids(8, below=4, seed=n) + 1, floats(8, 4, seed=n))  # noqa: E731
    return of_values(step, data=batches(make))


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        return (x / scale).round().clamp(-8, 7) * scale

    @staticmethod
    def backward(ctx: Any, slope: Any) -> Any:
        return slope, None


@script
def int4_qat() -> Script:
    """Weights rounded to 16 values, with a scale of each row."""

    def step(m: Any, x: Any, y: Any) -> Any:
        weights = {}
        for name, weight in m.named_parameters():
            if weight.dim() == 2:
                weight = Rounded.apply(weight, weight.detach().abs().amax(1, keepdim=True) / 7.5 + 1e-3)  # noqa: PLW2901
            weights[name] = weight
        return F.mse_loss(torch.func.functional_call(m, weights, (x,)), y)

    return of_values(step)


@script
def fake_quantize_of_torch() -> Script:
    def step(m: Any, x: Any, y: Any) -> Any:
        inner = torch.fake_quantize_per_tensor_affine(m[:2](x), 0.031, 3, -128, 127)
        weight = torch.fake_quantize_per_channel_affine(
            m[2].weight, torch.full((4,), 0.011), torch.zeros(4, dtype=torch.int32), 0, -128, 127
        )
        return F.mse_loss(F.linear(inner, weight, m[2].bias), y)

    return of_values(step)


@script
def float8_products() -> Script:
    """Factors in float8, each with its scale, and their product in float32."""

    def cast(x: Any) -> Any:
        scale = 448.0 / x.detach().abs().max()
        return (x * scale).to(torch.float8_e4m3fn).float() / scale

    def step(m: Any, x: Any, y: Any) -> Any:
        hidden = x
        for layer in (m[0], m[2]):
            exact = F.linear(hidden, layer.weight, layer.bias)
            hidden = exact + (F.linear(cast(hidden), cast(layer.weight), layer.bias) - exact).detach()
        return F.mse_loss(hidden, y)

    return of_values(step)


@script
def own_fp8_cast() -> Script:
    return of_values(
        lambda m, x, y: F.mse_loss(m(x.to(torch.float8_e5m2).to(torch.float32)), y.to(torch.float8_e4m3fn).float())
    )


@script
def int8_products() -> Script:
    """Integer products of quantized activations and weights that are buffers."""

    class Linear8(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            scale = inner.weight.detach().abs().amax(1) / 127
            self.register_buffer("scale", scale)
            self.register_buffer("codes", (inner.weight.detach() / scale[:, None]).round().to(torch.int8))
            self.bias = inner.bias

        def forward(self, x: Any) -> Any:
            scale = x.detach().abs().amax(1, keepdim=True) / 127
            codes = (x / scale).round().to(torch.int8)
            return torch._int_mm(codes, self.codes.T).float() * scale * self.scale + self.bias

    model = mlp(8, 16, 8)
    model[2] = Linear8(model[2])
    data = batches(lambda n: (floats(24, 8, seed=n), floats(24, 8, seed=n + 9)))
    return of_values(lambda m, x, y: F.mse_loss(m[2](m[:2](x)) + m[:2](x)[:, :8], y), model, data)


@script
def linalg_losses() -> Script:
    def step(m: Any, x: Any, y: Any) -> Any:
        factor = m(x).view(2, 4, 4)
        whole = factor @ factor.mT + torch.eye(4)
        fit = torch.linalg.solve(whole, y.view(2, 4, 4))
        return torch.linalg.slogdet(whole)[1].mean() + fit.square().mean() + torch.linalg.matrix_norm(factor).mean()

    return of_values(step)


@script
def svd_eigh() -> Script:
    def step(m: Any, x: Any, y: Any) -> Any:
        out = m(x)
        values = torch.linalg.eigvalsh(out.T @ out + torch.diag(torch.arange(4.0)))
        return torch.linalg.svdvals(out - y).sum() + values.log().sum() + torch.linalg.qr(out)[1].diagonal().abs().sum()

    return of_values(step)


@script
def losses_of_every_kind() -> Script:
    """Those that look at their arguments among them."""

    def step(m: Any, x: Any, y: Any) -> Any:
        out = m(x)
        near = F.one_hot(y, 4).float()
        return (
            F.gaussian_nll_loss(out, near, F.softplus(out) + 0.1) + F.poisson_nll_loss(out, near)
            + F.triplet_margin_loss(out, near, out.flip(0)) + F.cosine_embedding_loss(out, near, near[:, 0] * 2 - 1)
            + F.multilabel_soft_margin_loss(out, near) + F.hinge_embedding_loss(out, near * 2 - 1)
            + F.multi_margin_loss(out, y) + F.margin_ranking_loss(out[:, 0], out[:, 1], near[:, 2] * 2 - 1)
            + F.kl_div(out.log_softmax(-1), near.softmax(-1), reduction="batchmean")
            + F.binary_cross_entropy(out.sigmoid(), near) + nn.AdaptiveLogSoftmaxWithLoss.__name__.count("A") * 0
        )  # fmt: skip

    return of_values(step, data=CLASSES)


@script
def adaptive_softmax() -> Script:
    torch.manual_seed(0)
    model = nn.ModuleList([mlp(8, 16), nn.AdaptiveLogSoftmaxWithLoss(16, 12, [4, 8], div_value=2)])
    data = batches(lambda n: (floats(8, 8, seed=n), (torch.arange(8) * 5 + n) % 12))
    return of_values(lambda m, x, y: m[1](m[0](x), y).loss, model, data)


@script
def cumulative_scan_ops() -> Script:
    def step(m: Any, x: Any, y: Any) -> Any:
        out = m(x)
        total = out.cumsum(0) + out.sigmoid().cumprod(1) + out.logcumsumexp(0) + out.cummax(1).values
        ranks = torch.searchsorted(y[:, 0].sort().values, y[:, 1].contiguous()).float()
        return F.mse_loss(total, y) + (out.unfold(0, 3, 1).mean(-1)[:, 0] * ranks[:6]).mean()

    return of_values(step)


@script
def nested_jagged() -> Script:
    """Sequences of different lengths in one tensor."""

    def step(m: Any, x: Any, y: Any) -> Any:
        parts = torch.nested.nested_tensor_from_jagged(x, offsets=torch.tensor([0, 3, 4, 8]))
        return F.mse_loss(torch.nested.to_padded_tensor(m(parts), 0.0).sum(1), y[:3])

    return of_values(step)


@script
def nested_of_a_list() -> Script:
    def step(m: Any, x: Any, y: Any) -> Any:
        parts = torch.nested.as_nested_tensor([x[:3], x[3:4], x[4:]], layout=torch.jagged)
        return F.mse_loss(torch.stack([part.mean(0) for part in m(parts).unbind()]), y[:3])

    return of_values(step)


@script
def unique_with_a_size() -> Script:
    """Rows with the same label share a mean: distinct labels, of which there are four at most."""

    def step(m: Any, x: Any, y: Any) -> Any:
        labels, places, counts = torch.unique(y, return_inverse=True, return_counts=True)
        sums = torch.zeros(4, 4).index_add(0, places, m(x))
        means = sums[places] / counts[places, None]
        return F.mse_loss(m(x), means) + (labels[places] - y).abs().sum()

    return of_values(step, data=CLASSES)


@script
def nonzero_with_a_bound() -> Script:
    def step(m: Any, x: Any, y: Any) -> Any:
        places = torch.nonzero_static(y > 1, size=8, fill_value=0)[:, 0]
        return m(x)[places].square().mean() + F.cross_entropy(m(x), y)

    return of_values(step, data=CLASSES)


@script
def numpy_inside() -> Script:
    import numpy as np

    def step(m: Any, x: Any, y: Any) -> Any:
        rates = np.exp(-np.arange(4) / 4).astype(np.float32)
        return ((m(x) - y).square() * torch.from_numpy(rates)).mean() * np.float32(0.5)

    return of_values(step)


@script
def cuda_calls() -> Script:
    def place(tensor: Any) -> Any:
        return tensor.cuda() if torch.cuda.is_available() else tensor

    def step(m: Any, x: Any, y: Any) -> Any:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with torch.autocast(device.type, enabled=False):
            return F.mse_loss(m(place(x)) + torch.zeros(4, device=device), y.to(device, non_blocking=True))

    return of_values(step)


@script
def higher_order_cond_scan() -> Script:
    from torch._higher_order_ops.scan import scan

    def step(m: Any, x: Any, y: Any) -> Any:
        out = torch.cond(x.sum() > 0, lambda z: m(z).sin(), lambda z: m(z).cos(), (x,))
        last, steps = scan(lambda carry, part: (carry * 0.5 + part, carry * part), torch.zeros(4), out)
        return F.mse_loss(steps, y) + last.square().mean()

    return of_values(step)


@script
def while_loop_of_torch() -> Script:
    from torch._higher_order_ops.while_loop import while_loop

    def step(m: Any, x: Any, y: Any) -> Any:
        with torch.no_grad():
            count, root = while_loop(
                lambda n, z: n < 5, lambda n, z: (n + 1, (z + y.abs() / z) / 2), (torch.tensor(0), torch.ones(8, 4))
            )
        return F.mse_loss(m(x), root) * count

    return of_values(step)


@script
def map_and_associative_scan() -> Script:
    from torch._higher_order_ops.associative_scan import associative_scan
    from torch._higher_order_ops.map import map as map_rows

    def step(m: Any, x: Any, y: Any) -> Any:
        out = map_rows(lambda row, weight: F.linear(row, weight).tanh(), x, m[0].weight)
        sums = associative_scan(lambda a, b: a + b, out, 0, combine_mode="generic")
        return F.mse_loss(sums[:, :4], y)

    return of_values(step)


@script
def vmap_over_models() -> Script:
    """An ensemble by stacked weights."""

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(floats(3, 4, 8) / 3), nn.Parameter(torch.zeros(3, 4))

        def forward(self, x: Any) -> Any:
            return torch.vmap(F.linear, in_dims=(None, 0, 0))(x, self.weight, self.bias)

    return of_values(lambda m, x, y: F.mse_loss(m(x).mean(0), y) + m(x).var(0).mean(), Ensemble())
