"""Sizes that depend on values in bounded forms, beside eager PyTorch: unsplit, and split over the batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwright as sw
import shardwright.torch as swt
from tests.torch_frontend.comparison import distance, relative, train_eagerly
from tests.torch_frontend.models import floats, ids

X, Y, Z = floats(16, 8), ids(16, below=4), floats(16, 4, seed=1)
SEQUENCE = floats(8, 6, 8), ids(8, 6, below=4)


def small() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def own_mask(model: Any, x: Any, y: Any) -> Any:
    mask = y > 1
    return F.cross_entropy(model(x)[mask], y[mask])


def set_and_add(model: Any, x: Any, z: Any) -> Any:
    y = model(x).clone()
    mask = y > 0
    y[mask] = y[mask] * 2 + 1
    return F.mse_loss(y, z)


def counted(model: Any, x: Any, y: Any) -> Any:
    share = torch.bincount(y, minlength=4).float() / y.numel()
    return (model(x).softmax(-1).mean(0) * share).sum()


def counted_with_weights(model: Any, x: Any, y: Any) -> Any:
    return (model(x).mean(0) * torch.bincount(y, weights=x[:, 0], minlength=4)).sum()


def padded_tokens(model: Any, x: Any, y: Any) -> Any:
    y = y.masked_fill(x[..., 0] > 0.5, -1)
    return F.cross_entropy(model(x)[y != -1], y[y != -1], label_smoothing=0.1)


def attention(mask: str) -> Any:
    def loss(model: Any, x: Any) -> Any:
        q = k = v = model(x).unflatten(-1, (2, 2)).transpose(1, 2)
        length = x.shape[1]
        lower = torch.ones(length, length, dtype=torch.bool).tril()
        masks = {
            "none": {},
            "causal": {"is_causal": True},
            "bool": {"attn_mask": lower},
            "bool and scale": {"attn_mask": lower, "scale": 0.3},
            "padding": {"attn_mask": (torch.arange(length) < 4)[None, None, None, :]},
            "batch": {"attn_mask": (x[..., 0] > -5)[:, None, None, :] & lower},
            "float": {"attn_mask": torch.zeros(length, length).masked_fill(~lower, float("-inf"))},
            "learned": {"attn_mask": q.mean(-1, keepdim=True) + torch.zeros(length)},
        }
        return F.scaled_dot_product_attention(q, k, v, **masks[mask]).square().mean()

    return loss


def own_kernel(model: Any, x: Any) -> Any:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return attention("causal")(model, x)


CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mean": (lambda m, x, z: ((m(x) - z) ** 2)[z > 0].mean(), (X, Z)),
    "sum": (lambda m, x, z: (m(x) - z)[z > 0].square().sum() / 16, (X, Z)),
    "rows": (lambda m, x, y: m(x)[y > 1].square().sum(-1).mean(), (X, Y)),
    "mean of rows": (lambda m, x, y: m(x)[y > 1].mean(0).square().sum(), (X, Y)),
    "largest": (lambda m, x, y: m(x)[y > 1].max(), (X, Y)),
    "logarithm": (lambda m, x, z: (m(x) - z)[m(x) > z].log().mean(), (X, Z)),
    "none selected": (lambda m, x, z: m(x).mean() + m(x)[z > 99].sum(), (X, Z)),
    "cross_entropy": (own_mask, (X, Y)),
    "cross_entropy of a module": (lambda m, x, y: nn.CrossEntropyLoss()(m(x)[y > 1], y[y > 1]), (X, Y)),
    "sum of cross_entropy": (lambda m, x, y: F.cross_entropy(m(x)[y > 1], y[y > 1], reduction="sum"), (X, Y)),
    "cross_entropy of rows": (
        lambda m, x, y: (F.cross_entropy(m(x)[y > 0], y[y > 0], reduction="none") * 2).mean(), (X, Y)
    ),
    "before the model": (lambda m, x, y: F.cross_entropy(m(x[y > 1]), y[y > 1]), (X, Y)),
    "tokens": (padded_tokens, SEQUENCE),
    "mse_loss": (lambda m, x, z: F.mse_loss(m(x)[z > 0], z[z > 0]), (X, Z)),
    "smooth_l1_loss": (lambda m, x, y, z: F.smooth_l1_loss(m(x)[y > 0], z[y > 0], reduction="sum"), (X, Y, Z)),
    "logits": (
        lambda m, x, z: F.binary_cross_entropy_with_logits(m(x)[z > 0], (z[z > 0] > 0.5).float()), (X, Z)
    ),
    "masked_select": (lambda m, x, z: torch.masked_select(m(x), z > 0).square().mean(), (X, Z)),
    "column": (lambda m, x, y: m(x)[y > 1, 2].square().mean(), (X, Y)),
    "columns after": (lambda m, x, y: m(x)[y > 1][:, 1:].square().mean(), (X, Y)),
    "assignment": (set_and_add, (X, Z)),
    "bincount": (counted, (X, Y)),
    "bincount with weights": (counted_with_weights, (X, Y)),
    "cuda": (lambda m, x: (m(x.cuda()) * torch.ones(4, device="cuda")).to("cuda:0").square().mean(), (X,)),
    "own kernel": (own_kernel, SEQUENCE[:1]),
} | {
    f"attention, {mask}": (attention(mask), SEQUENCE[:1])
    for mask in ("none", "causal", "bool", "bool and scale", "padding", "batch", "float", "learned")
}  # fmt: skip


def without_cuda(name: str, loss: Any) -> Any:
    return (lambda m, x: m(x).square().mean()) if name == "cuda" else loss


#: Of which the quick tests are.
QUICK = ("mean", "cross_entropy", "bincount", "attention, bool and scale")


@pytest.mark.parametrize("force", [None, "data"])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.dear) for name in CASES]
)
def test_as_eager(name: str, force: Any, session: sw.Session) -> None:
    loss, batch = CASES[name]
    model = small()
    eager = copy.deepcopy(model)
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    expected = train_eagerly(eager, make(eager), without_cuda(name, loss), [batch] * 3)
    options = {"force": force} if force else {}
    step = swt.parallelize(session, model, make(model), loss, effort="fast", **options)
    actual = [step(*batch).item() for _ in range(3)]
    assert relative(actual, expected) < 1e-5
    assert distance(step.state_dict()["model"], eager.state_dict()) < 1e-5


def decide(model: Any, x: Any, y: Any) -> Any:
    loss = F.cross_entropy(model(x), y)
    if loss > 3:
        loss = loss * 2
    return loss


def loop(model: Any, x: Any, y: Any) -> Any:
    total = model(x).sum()
    for _ in range(y[0]):
        total = total + 1
    return total


def endless(model: Any, x: Any, y: Any) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    with torch.no_grad():
        (total,) = while_loop(lambda total: total < 9, lambda total: (total + 1,), (x.sum(),))
    return model(x).sum() * total


REFUSALS = {
    "decision": (decide, "torch.where"),
    "loop": (loop, "largest number"),
    "item": (lambda m, x, y: m(x).sum() * len([0] * int(y[0])), "return it to read it after the call"),
    "loop over places": (lambda m, x, y: sum(m(x)[n].sum() for n in (y > 1).nonzero()), "mask.sum()"),
    "places of two masks": (lambda m, x, y: m(x)[torch.where(y > 1)[0], torch.where(y > 2)[0]].sum(), "mask.sum()"),
    "while_loop": (endless, "largest number"),
    "unique": (lambda m, x, y: m(x).sum() + y.unique(dim=0).sum(), "data loader"),
    "bincount": (lambda m, x, y: m(x).sum() + y.bincount().sum(), "minlength=n"),
    "repeats": (lambda m, x, y: m(x).repeat_interleave(y, 0).sum(), "output_size=n"),
    "size of a selection": (lambda m, x, y: m(x)[y > 1].sum() / x[y > 1].shape[0], r"mask.sum()"),
    "rows of a selection": (lambda m, x, y: m(x)[y > 1].sort(0).values.sum(), "mask.sum()"),
    "other masks": (lambda m, x, y: (m(x)[y > 1] * x[y > 2][:, :4]).sum(), "torch.where"),
    "a selection of another rank": (lambda m, x, y: (m(x)[y > 1] * y[y > 1]).sum(), "torch.where"),
    "a tensor beside a selection": (lambda m, x, y: (m(x)[y > 1] * x[:5, :4]).sum(), "torch.where"),
    "a selection as result": (lambda m, x, y: (m(x).sum(), x[y > 1]), "mask.sum()"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_its_line_and_its_remedy(name: str, session: sw.Session) -> None:
    loss, remedy = REFUSALS[name]
    model = small()
    step = swt.parallelize(session, model, torch.optim.SGD(model.parameters(), lr=0.1), loss, effort="fast")
    with pytest.raises(sw.UnsupportedProgramError) as caught:
        step(X, Y)
    assert remedy in caught.value.remedy
    assert f"{__file__}:" in caught.value.where or name == "a selection as result"
