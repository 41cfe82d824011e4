"""GPT-2's shape as users of Keras and of PyTorch write it: learned positions, a head tied to the embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """dropout: of the weights of attention, and behind the MLP."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    tokens: int
    dropout: float = 0.0


def keras_gpt(sizes: Sizes) -> Any:
    """A functional model from ids [batch, tokens] to logits; not compiled."""
    import keras
    from keras import layers

    ids = keras.Input((sizes.tokens,), dtype="int32")
    embedding = layers.ReversibleEmbedding(sizes.vocabulary, sizes.width, name="wte")
    positions = layers.Embedding(sizes.tokens, sizes.width, name="wpe")(keras.ops.arange(sizes.tokens))
    h = embedding(ids) + positions
    for n in range(sizes.layers):
        a = layers.LayerNormalization(epsilon=1e-5, name=f"h{n}_ln_1")(h)
        attention = layers.MultiHeadAttention(
            sizes.heads, sizes.width // sizes.heads, dropout=sizes.dropout, name=f"h{n}_attention"
        )
        h = h + attention(a, a, use_causal_mask=True)
        up = layers.Dense(4 * sizes.width, activation=_gelu, name=f"h{n}_up")
        down = layers.Dense(sizes.width, name=f"h{n}_down")
        m = down(up(layers.LayerNormalization(epsilon=1e-5, name=f"h{n}_ln_2")(h)))
        h = h + (layers.Dropout(sizes.dropout)(m) if sizes.dropout else m)
    return keras.Model(ids, embedding(layers.LayerNormalization(epsilon=1e-5, name="ln_f")(h), reverse=True))


def _gelu(x: Any) -> Any:
    import keras

    return keras.activations.gelu(x, approximate=True)


def keras_loss() -> Any:
    """Mean cross entropy of logits."""
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def torch_gpt(sizes: Sizes) -> Any:
    """A module from ids [batch, tokens] to logits."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            width = sizes.width
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, tokens, width = x.shape
            parts = self.attn(self.ln_1(x)).split(width, dim=2)
            q, k, v = (part.view(batch, tokens, sizes.heads, -1).transpose(1, 2) for part in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=sizes.dropout)
            x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
            m = self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))
            return x + (F.dropout(m, sizes.dropout) if sizes.dropout else m)

    class GPT(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(sizes.vocabulary, sizes.width)
            self.wpe = nn.Embedding(sizes.tokens, sizes.width)
            self.h = nn.ModuleList(Block() for _ in range(sizes.layers))
            self.ln_f = nn.LayerNorm(sizes.width)
            self.lm_head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
            self.lm_head.weight = self.wte.weight

        def forward(self, ids: Any) -> Any:
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
            for block in self.h:
                x = block(x)
            return self.lm_head(self.ln_f(x))

    return GPT()


def torch_loss(model: Any, x: Any, y: Any) -> Any:
    """Mean cross entropy of logits."""
    from torch.nn import functional as F

    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())
