"""Small models of the kinds that users bring, and data for them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

SAMPLES = 40  # in batches of 16: the last one is smaller
CLASSES = 5


def cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@keras.saving.register_keras_serializable("tests")
class Positions(layers.Layer):  # type: ignore[misc]
    def __init__(self, length: int, width: int, **rest: Any) -> None:
        super().__init__(**rest)
        self.length, self.width = length, width

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(self.length, self.width), initializer="random_normal", name="table")

    def call(self, x: Any) -> Any:
        return self.table[: x.shape[1]]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "length": self.length, "width": self.width}


def gpt(optimizer: Any) -> Any:
    """One block, with dropout."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input((8,), dtype="int32")
    h = layers.Embedding(32, 16, name="wte")(tokens) + Positions(8, 16, name="wpe")(tokens)
    h = layers.Dropout(0.1)(h)
    a = layers.LayerNormalization(name="ln_1")(h)
    h = h + layers.MultiHeadAttention(2, 8, dropout=0.1, name="attention")(a, a, use_causal_mask=True)
    m = layers.Dense(32, activation="gelu", name="up")(layers.LayerNormalization(name="ln_2")(h))
    h = h + layers.Dropout(0.1)(layers.Dense(16, name="down")(m))
    model = keras.Model(tokens, layers.Dense(32, use_bias=False, name="head")(h))
    model.compile(optimizer, cross_entropy(), metrics=["accuracy"])
    return model


def tokens() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 32, (SAMPLES, 8)).astype("int32"), random.integers(0, 32, (SAMPLES, 8))


def cnn(optimizer: Any) -> Any:
    """Convolutions with batch normalization, and dropout."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, padding="same", use_bias=False, name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.MaxPooling2D(2),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.2),
            layers.Dense(CLASSES, name="head"),
        ]
    )
    model.compile(optimizer, cross_entropy(), metrics=["accuracy"])
    return model


def images() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(SAMPLES, 8, 8, 3)).astype("float32"), random.integers(0, CLASSES, SAMPLES)


def mlp(optimizer: Any = "sgd", dropout: float = 0.3, **compile_options: Any) -> Any:
    """Two dense layers with dropout between."""
    keras.utils.set_random_seed(3)
    x = keras.Input((6,))
    h = layers.Dropout(dropout)(layers.Dense(16, activation="relu", name="hidden")(x))
    model = keras.Model(x, layers.Dense(CLASSES, dtype="float32", name="head")(h))
    model.compile(optimizer, cross_entropy(), metrics=["accuracy"], **compile_options)
    return model


def rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(SAMPLES, 6)).astype("float32"), random.integers(0, CLASSES, SAMPLES)


def two_heads(optimizer: Any) -> Any:
    """Two inputs and two outputs, by name."""
    keras.utils.set_random_seed(4)
    left, right = keras.Input((6,), name="left"), keras.Input((4,), name="right")
    h = layers.Concatenate()([layers.Dense(8, name="of_left")(left), layers.Dense(8, name="of_right")(right)])
    outputs = {"label": layers.Dense(CLASSES, name="label")(h), "value": layers.Dense(1, name="value")(h)}
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        optimizer,
        {"label": cross_entropy(), "value": "mse"},
        loss_weights={"label": 1.0, "value": 0.5},
        metrics={"label": "accuracy", "value": "mae"},
    )
    return model


def pairs() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    x = {"left": random.normal(size=(SAMPLES, 6)), "right": random.normal(size=(SAMPLES, 4))}
    y = {"label": random.integers(0, CLASSES, SAMPLES), "value": random.normal(size=(SAMPLES, 1))}
    return x, y


class Contrast(keras.Model):  # type: ignore[misc]
    """A subclass, built by its first batch, with a step of its own: a loss between two views, and one metric."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = layers.Dense(8, activation="tanh", name="encoder")
        self.noise = layers.GaussianNoise(0.1)
        self.distance = keras.metrics.Mean(name="distance")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.encoder(self.noise(x, training=training))

    def train_step(self, state: Any, data: Any) -> Any:
        import jax

        trainable, non_trainable, optimizer, metrics = state
        x, _ = data

        def loss_of(trainable: Any, non_trainable: Any) -> Any:
            one, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
            other, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
            return keras.ops.mean(keras.ops.square(one - other)) + 0.01 * keras.ops.mean(one), non_trainable

        (loss, non_trainable), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, non_trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        count = len(self.distance.variables)
        metrics = [*metrics[:-count], *self.distance.stateless_update_state(metrics[-count:], loss)]
        return {"distance": self.distance.stateless_result(metrics[-count:])}, (
            trainable,
            non_trainable,
            optimizer,
            metrics,
        )


def contrast(optimizer: Any) -> Any:
    keras.utils.set_random_seed(5)
    model = Contrast()
    model.compile(optimizer)
    return model
