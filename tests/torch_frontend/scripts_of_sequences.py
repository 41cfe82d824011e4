"""Scripts by what they model: sequences: texts, sounds, attention, recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from tests.torch_frontend.scripts import Script, batches, floats, ids, mlp, script


class Language(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.mix, self.head = nn.Embedding(12, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 12)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.mix(self.embed(tokens))[0])


def token_scores(model: Any, tokens: Any) -> Any:
    scores = model(tokens[:, :-1]).log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)


@script
def grpo_with_reference() -> Script:
    reference = Language(1).requires_grad_(False)

    def step(model: Any, tokens: Any, rewards: Any) -> Any:
        scores = token_scores(model, tokens)
        with torch.no_grad():
            aim = token_scores(reference, tokens)
        groups = rewards.view(2, 4)
        gain = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        distance = (aim - scores).exp() - (aim - scores) - 1
        return (-(scores - scores.detach()).exp() * gain + 0.04 * distance).mean()

    make = lambda n: (ids(8, 5, below=12, seed=n), floats(8, seed=n))  # noqa: E731
    return Script(model=Language(), step=step, batches=batches(make))


@script
def dpo_reference_outside() -> Script:
    """The other model's scores are computed before the call."""

    def step(model: Any, better: Any, worse: Any, aims: Any) -> Any:
        margin = token_scores(model, better).sum(-1) - token_scores(model, worse).sum(-1)
        return -F.logsigmoid(0.1 * (margin - aims)).mean()

    make = lambda n: (ids(8, 4, below=12, seed=n), ids(8, 4, below=12, seed=n + 9), floats(8, seed=n))  # noqa: E731
    return Script(model=Language(), step=step, batches=batches(make))


@script
def ctc() -> Script:
    def step(model: Any, x: Any, targets: Any, lengths: Any) -> Any:
        scores = model(x).log_softmax(-1).transpose(0, 1)
        whole = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
        return F.ctc_loss(scores, targets, whole, lengths, zero_infinity=True)

    make = lambda n: (  # noqa: E731
        floats(8, 9, 8, seed=n), ids(8, 3, below=4, seed=n) + 1, torch.tensor([1, 2, 3, 3, 2, 1, 3, 0])
    )  # fmt: skip
    return Script(model=mlp(8, 16, 5), step=step, batches=batches(make))


@script
def ctc_of_joined_targets() -> Script:
    def step(model: Any, x: Any, targets: Any, frames: Any, lengths: Any) -> Any:
        return nn.CTCLoss(blank=4)(model(x).log_softmax(-1), targets, frames, lengths)

    make = lambda n: (  # noqa: E731
        floats(9, 4, 8, seed=n), ids(9, below=4, seed=n), torch.tensor([9, 8, 9, 7]), torch.tensor([2, 1, 3, 3])
    )  # fmt: skip
    return Script(model=mlp(8, 16, 5), step=step, batches=batches(make))


class Packed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.rnn = getattr(nn, kind)(8, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Any, lengths: Any) -> Any:
        packed = rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        out, last = self.rnn(packed)
        out, sizes = rnn.pad_packed_sequence(out, batch_first=True, total_length=tokens.shape[1])
        last = last[0] if isinstance(last, tuple) else last
        return self.head(out.sum(1) / sizes[:, None]) + self.head(torch.cat([last[0], last[1]], -1))


LENGTHS = torch.tensor([4, 2, 1, 4, 3, 2, 4, 1])


@script
def rnn_packed() -> Script:
    return Script(
        model=Packed("LSTM"), step=lambda m, x, lengths, y: F.cross_entropy(m(x, lengths), y),
        batches=batches(lambda n: (ids(8, 4, below=12, seed=n), LENGTHS.roll(n), ids(8, below=3, seed=n))),
    )  # fmt: skip


@script
def rnn_packed_gru() -> Script:
    return Script(
        model=Packed("GRU"), step=lambda m, x, lengths, y: F.cross_entropy(m(x, lengths), y),
        batches=batches(lambda n: (ids(8, 4, below=12, seed=n), LENGTHS.roll(n), ids(8, below=3, seed=n))),
    )  # fmt: skip


@script
def gru_bidirectional_2layer() -> Script:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.GRU(8, 4, num_layers=2, bidirectional=True), nn.Linear(8, 4)])
    return Script(
        model=model, step=lambda m, x, y: F.cross_entropy(m[1](m[0](x)[0][-1]), y),
        batches=batches(lambda n: (floats(3, 8, 8, seed=n), ids(8, below=4, seed=n))),
    )  # fmt: skip


@script
def gru_of_odd_sizes() -> Script:
    """Nothing but the batch divides by the devices."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.GRU(7, 5, batch_first=True), nn.Linear(5, 3)])
    return Script(
        model=model, step=lambda m, x, y: F.cross_entropy(m[1](m[0](x)[0][:, -1]), y),
        batches=batches(lambda n: (floats(8, 3, 7, seed=n), ids(8, below=3, seed=n))),
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self, heads: int = 4, groups: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.groups = heads, groups
        self.q, self.kv, self.out = nn.Linear(8, 4 * heads), nn.Linear(8, 8 * groups), nn.Linear(4 * heads, 8)

    def parts(self, x: Any) -> tuple[Any, Any, Any]:
        k, v = self.kv(x).chunk(2, -1)
        split = lambda z, heads: z.unflatten(-1, (heads, 4)).transpose(1, 2)  # noqa: E731
        return split(self.q(x), self.heads), split(k, self.groups), split(v, self.groups)


TOKENS = batches(lambda n: (floats(4, 8, 8, seed=n), floats(4, 8, 8, seed=n + 9)))


@script
def sdpa_gqa() -> Script:
    def step(model: Any, x: Any, y: Any) -> Any:
        mixed = F.scaled_dot_product_attention(*model.parts(x), is_causal=True, enable_gqa=True)
        return F.mse_loss(model.out(mixed.transpose(1, 2).flatten(2)), y)

    return Script(model=Attention(4, 2), step=step, batches=TOKENS)


@script
def sdpa_bool_mask_scale() -> Script:
    def step(model: Any, x: Any, y: Any) -> Any:
        mask = torch.ones(8, 8, dtype=torch.bool).tril() & (x[:, None, None, :, 0] > -1)
        mask = mask | torch.eye(8, dtype=torch.bool)
        mixed = F.scaled_dot_product_attention(*model.parts(x), attn_mask=mask, scale=0.2)
        return F.mse_loss(model.out(mixed.transpose(1, 2).flatten(2)), y)

    return Script(model=Attention(), step=step, batches=TOKENS)


def attend_here(model: Any, x: Any, y: Any, score: Any, mask: Any) -> tuple[Any, Any]:
    """(loss, sums of scores): eager PyTorch has no gradients of flex_attention on CPUs."""
    q, k, v = model.parts(x)
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    rows, columns = torch.arange(8)[:, None], torch.arange(8)[None]
    scores = score(q @ k.mT / 2, rows, columns).masked_fill(~mask(rows, columns), float("-inf"))
    return F.mse_loss(model.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), y), scores.logsumexp(-1)


@script
def flex_attention() -> Script:
    from torch.nn.attention import flex_attention as flex

    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def step(model: Any, x: Any, y: Any) -> Any:
        near = lambda score, b, h, q, k: score - slopes[h] * (q - k)  # noqa: E731
        causal = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu")
        mixed = flex.flex_attention(*model.parts(x), score_mod=near, block_mask=causal)
        return F.mse_loss(model.out(mixed.transpose(1, 2).flatten(2)), y)

    def here(model: Any, x: Any, y: Any) -> Any:
        score = lambda scores, q, k: scores - slopes[:, None, None] * (q - k)  # noqa: E731
        return attend_here(model, x, y, score, lambda q, k: q >= k)[0]

    return Script(model=Attention(), step=step, batches=TOKENS, here=here)


@script
def flex_attention_compiled_with_groups() -> Script:
    """With a mask made before, a score that reads the batch, and fewer heads of keys."""
    from torch.nn.attention import flex_attention as flex

    window = flex.create_block_mask(lambda b, h, q, k: (q - k).abs() <= 2, None, None, 8, 8, device="cpu")
    compiled = torch.compile(flex.flex_attention)

    def step(model: Any, x: Any, y: Any) -> Any:
        bias = x[..., 0]
        mixed, sums = compiled(
            *model.parts(x), score_mod=lambda score, b, h, q, k: score + bias[b, k], block_mask=window,
            enable_gqa=True, return_lse=True,
        )  # fmt: skip
        return F.mse_loss(model.out(mixed.transpose(1, 2).flatten(2)), y) + 0.01 * sums.mean()

    def here(model: Any, x: Any, y: Any) -> Any:
        score = lambda scores, q, k: scores + x[:, None, None, :, 0]  # noqa: E731
        loss, sums = attend_here(model, x, y, score, lambda q, k: (q - k).abs() <= 2)
        return loss + 0.01 * sums.mean()

    return Script(model=Attention(4, 2), step=step, batches=TOKENS, here=here)


@script
def nn_multihead_transformer() -> Script:
    torch.manual_seed(0)
    model = nn.ModuleList([
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
        nn.MultiheadAttention(8, 2, batch_first=True),
    ])  # fmt: skip

    def step(model: Any, x: Any, y: Any) -> Any:
        causal = nn.Transformer.generate_square_subsequent_mask(8)
        padding = torch.zeros(4, 8).masked_fill(torch.arange(8) > 6, float("-inf"))
        inner = model[0](x, src_mask=causal, src_key_padding_mask=padding, is_causal=True)
        return F.mse_loss(model[1](inner, inner, inner, key_padding_mask=padding, need_weights=False)[0], y)

    return Script(model=model, step=step, batches=TOKENS)


@script
def mamba_scan_loop() -> Script:
    def step(model: Any, x: Any, y: Any) -> Any:
        rate, inputs, outputs = model[0](x).split([4, 4, 4], -1)
        rate, state, results = F.softplus(rate), torch.zeros(x.shape[0], 4), []
        for t in range(x.shape[1]):
            state = torch.exp(-rate[:, t]) * state + rate[:, t] * inputs[:, t]
            results.append(state * outputs[:, t])
        return F.mse_loss(model[1](torch.stack(results, 1)), y)

    return Script(model=nn.ModuleList([mlp(8, 12), mlp(4, 8)]), step=step, batches=TOKENS)
