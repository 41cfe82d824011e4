"""Train a byte-level GPT of Keras on the sources of Python's standard library.

    python examples/keras/gpt.py
    python examples/keras/gpt.py --width 768 --layers 12 --heads 12 --context 256 --batch 16

The model is built under types only: its weights are born on the servers, in the layouts of the plan, and need no memory
here. With SERVER_IP and SERVER_PORT set, steps run on that server; else an embedded server with CPU devices is started.
Only the numbered lines know about Shardwright.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a script finds examples/common

import keras
import numpy as np
from keras import layers

import shardwright as sw
import shardwright.keras as swk
from examples.common.options import number_parser, run_example
from examples.common.text import batches, split, standard_library_text

_BYTES = 256
_VALIDATION_BATCHES = 4


@keras.saving.register_keras_serializable("examples")
class Positions(layers.Layer):
    """Adds a learned vector for each position; [batch, context, width]."""

    def build(self, shape: tuple[int | None, int, int]) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal", name="table")

    def call(self, x: Any) -> Any:
        return x + self.table


def make_model(context: int, width: int, heads: int, depth: int, dropout: float) -> keras.Model:
    """Pre-norm blocks of attention and a multilayer perceptron, by functional Keras."""
    tokens = keras.Input((context,), dtype="int32", name="tokens")
    x = Positions(name="wpe")(layers.Embedding(_BYTES, width, name="wte")(tokens))
    for block in range(depth):
        y = layers.LayerNormalization(epsilon=1e-5, name=f"block_{block}_norm_1")(x)
        attention = layers.MultiHeadAttention(heads, width // heads, dropout=dropout, name=f"block_{block}_attention")
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(epsilon=1e-5, name=f"block_{block}_norm_2")(x)
        y = layers.Dense(4 * width, activation="gelu", name=f"block_{block}_up")(y)
        x = x + layers.Dropout(dropout)(layers.Dense(width, name=f"block_{block}_down")(y))
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    return keras.Model(tokens, layers.Dense(_BYTES, use_bias=False, name="head")(x), name="gpt")


def crops(values: np.ndarray, batch: int, context: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless batches of tokens and the tokens after each of them, int32 [batch, context]."""
    for (text,) in batches(values, batch, context, seed):
        yield text[:, :-1], text[:, 1:]


def main() -> None:
    parser = number_parser(__doc__, epochs=3, steps=50, batch=16, context=64, width=64, heads=4, layers=2)
    parser.add_argument("--dropout", type=float, metavar="P", default=0.1, help="default: 0.1")
    given = parser.parse_args()

    keras.utils.set_random_seed(0)
    training, validation = split(standard_library_text())
    with sw.connect(devices=given.devices) as session:  # Shardwright 1: a server
        with swk.scope(session):  # 2: weights are born on it
            model = make_model(given.context, given.width, given.heads, given.layers, given.dropout)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.AdamW(2e-3, clipnorm=1.0), loss, metrics=["accuracy"])
        model.fit(
            crops(training, given.batch, given.context, seed=0), epochs=given.epochs, steps_per_epoch=given.steps,
            validation_data=crops(validation, given.batch, given.context, seed=1),
            validation_steps=_VALIDATION_BATCHES, verbose=2,
        )  # fmt: skip
        print(swk.step(model).plan.explain())


if __name__ == "__main__":
    run_example(main)
