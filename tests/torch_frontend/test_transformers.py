"""Hugging Face models from small configurations, beside eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwright as sw
from tests.torch_frontend.comparison import compare, sgd
from tests.torch_frontend.models import ids

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.dear


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=16, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def mixtral() -> Any:
    """Experts by `torch.nn.functional.grouped_mm`."""
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.0,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("make", [gpt2, llama, bert, t5, mixtral])
def test_language_model(session: sw.Session, make: Any) -> None:
    torch.manual_seed(0)
    batches = [(ids(8, 16, seed=n), ids(8, 16, seed=n + 9)) for n in range(5)]
    compare(session, make(), sgd, lambda model, x, y: model(input_ids=x, labels=y).loss, batches)
