"""Train a Hugging Face model, made from its configuration, on the sources of Python's standard library.

    pip install transformers
    python examples/torch/hugging_face.py
    python examples/torch/hugging_face.py --model gpt2

Nothing is downloaded: the weights are new, the tokens are bytes. With SERVER_IP and SERVER_PORT set, steps run on that
server; else an embedded server with CPU devices is started. Only the numbered lines know about Shardwright.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a script finds examples/common

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import shardwright as sw
import shardwright.torch as swt
from examples.common.options import number_parser, run_example
from examples.common.progress import TrainingProgress
from examples.common.text import batches, split, standard_library_text

#: Sizes in the words of each configuration; what is left out is the model's default.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "mistral": {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}  # fmt: skip


def make_model(kind: str) -> Any:
    config = AutoConfig.for_model(kind, vocab_size=256, bos_token_id=0, eos_token_id=0, use_cache=False, **SIZES[kind])
    return AutoModelForCausalLM.from_config(config)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The model's own: of each token after those before it."""
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def main() -> None:
    parser = number_parser(__doc__, steps=100, batch=16, context=64)
    parser.add_argument("--model", choices=SIZES, default="llama", help="default: llama")
    parser.add_argument("--export", metavar="FILE", help="weights, ending with .safetensors")
    given = parser.parse_args()

    torch.manual_seed(0)
    model = make_model(given.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    training, _ = split(standard_library_text())
    data = batches(training, given.batch, given.context)
    with (
        sw.connect(devices=given.devices) as session,  # Shardwright 1: a server
        TrainingProgress(given.steps, given.batch * given.context, "tokens") as progress,
    ):
        step = swt.parallelize(session, model, optimizer, loss_of)  # 2: forward, backward and optimizer, one program
        for (text,) in islice(data, given.steps):
            progress.step(step(torch.from_numpy(text).long()))
        if given.export:
            step.export(given.export)
        plan = step.plan
    print(plan.explain())


if __name__ == "__main__":
    run_example(main)
