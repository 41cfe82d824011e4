"""Train a convolutional network of Keras on scikit-learn's handwritten digits.

    python examples/keras/cnn.py
    python examples/keras/cnn.py --epochs 10 --save digits.keras

With SERVER_IP and SERVER_PORT set, steps run on that server; else an embedded server with CPU devices is started. Only
the numbered lines know about Shardwright.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a script finds examples/common

import keras
from keras import layers

import shardwright as sw
import shardwright.keras as swk
from examples.common.digits import digits
from examples.common.options import number_parser, run_example


def make_model() -> keras.Model:
    """Two blocks of convolution and batch normalization, a dense head for ten classes."""
    model = keras.Sequential([keras.Input((8, 8, 1))], name="digits")
    for block, channels in enumerate((32, 64)):
        model.add(layers.Conv2D(channels, 3, padding="same", use_bias=False, name=f"conv_{block}"))
        model.add(layers.BatchNormalization(momentum=0.9, name=f"norm_{block}"))
        model.add(layers.ReLU(name=f"relu_{block}"))
        model.add(layers.MaxPooling2D(2, name=f"pool_{block}"))
    model.add(layers.Flatten(name="flatten"))
    model.add(layers.Dropout(0.3, name="dropout"))
    model.add(layers.Dense(10, name="head"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def main() -> None:
    parser = number_parser(__doc__, epochs=5, batch=64)
    parser.add_argument("--save", metavar="FILE", help="the trained model, ending with .keras")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    (images, labels), held_out = digits(held_out=325)  # 23 batches of 64
    with sw.connect(devices=arguments.devices) as session:  # Shardwright 1: a server
        model = swk.distribute(make_model(), session)  # 2: the same model, its weights on the servers
        model.fit(
            images[..., None], labels, batch_size=arguments.batch, epochs=arguments.epochs,
            validation_data=(held_out[0][..., None], held_out[1]), verbose=2,
        )  # fmt: skip
        if arguments.save:
            model.save(arguments.save)  # plain Keras loads it
        print(swk.step(model).plan.explain())


if __name__ == "__main__":
    run_example(main)
