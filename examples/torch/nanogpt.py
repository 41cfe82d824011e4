"""Train a small GPT of PyTorch, in nanoGPT's form, on the sources of Python's standard library.

    python examples/torch/nanogpt.py
    python examples/torch/nanogpt.py --width 768 --layers 12 --heads 12 --context 256 --bfloat16

Tied weights, two groups of parameters, clipped gradients and a schedule of the learning rate stay as they are. With
SERVER_IP and SERVER_PORT set, steps run on that server; else an embedded server with CPU devices is started. Only the
numbered lines know about Shardwright.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a script finds examples/common

import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
import shardwright.torch as swt
from examples.common.options import number_parser, run_example
from examples.common.progress import TrainingProgress
from examples.common.text import batches, split, standard_library_text

_BYTES = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.attention(self.ln_1(x)).chunk(3, dim=2))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=dropout).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.projection(mixed), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln_2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Logits [batch, context, 256] of int64 tokens [batch, context]; the head is tied to the embedding."""

    def __init__(self, context: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(_BYTES, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, _BYTES, bias=False)
        self.apply(_initialize)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def main() -> None:
    parser = number_parser(__doc__, steps=200, batch=16, context=64, width=64, heads=4, layers=2)
    parser.add_argument("--dropout", type=float, metavar="P", default=0.1, help="default: 0.1")
    parser.add_argument("--learning-rate", type=float, metavar="R", default=2e-3, help="default: 0.002")
    parser.add_argument("--bfloat16", action="store_true", help="autocast the forward pass")
    parser.add_argument("--save", metavar="FILE", help="model and optimizer, for torch.load")
    given = parser.parse_args()

    torch.manual_seed(0)
    model = GPT(given.context, given.width, given.heads, given.layers, given.dropout)
    optimizer = make_optimizer(model, given.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=given.steps)

    def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=given.bfloat16):
            logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    training, validation = split(standard_library_text())
    data = batches(training, given.batch, given.context)
    with (
        sw.connect(devices=given.devices) as session,  # Shardwright 1: a server
        TrainingProgress(given.steps, given.batch * given.context, "tokens") as progress,
    ):
        step = swt.parallelize(session, model, optimizer, train)  # 2: forward, backward and optimizer, one program
        validate = swt.parallelize(session, model, None, loss_of)  # 3: on the same state
        for (text,) in islice(data, given.steps):
            progress.step(step(torch.from_numpy(text).long()))
            scheduler.step()
        model.eval()
        (text,) = next(batches(validation, given.batch, given.context, seed=1))
        held_out = validate(torch.from_numpy(text).long()).item()
        if given.save:
            torch.save(step.state_dict(), given.save)
        plan = step.plan
    print(f"loss on held-out text: {held_out:.3f}")
    print(plan.explain())


if __name__ == "__main__":
    run_example(main)
