"""What users change between calls of a step, beside TensorFlow on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import shardwright as sw
import shardwright.tensorflow as swt

RANDOM = np.random.default_rng(0)
BATCHES = [
    (RANDOM.normal(size=(8, 3)).astype("float32"), RANDOM.normal(size=(8, 2)).astype("float32")) for _ in range(5)
]


def build() -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((3,)), layers.Dense(4, activation="tanh"), layers.BatchNormalization(), layers.Dense(2)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=True)
    return model


def train(model: Any, number: int) -> float:
    return float(np.ravel(model.train_on_batch(*BATCHES[number]))[0])


def sums(model: Any) -> list[float]:
    return [float(np.sum(variable.numpy())) for variable in model.variables]


def rates_and_state(model: Any) -> Iterator[Any]:
    yield train(model, 0)
    model.optimizer.learning_rate = 0.01
    yield train(model, 1)
    for variable in model.optimizer.variables:
        if "momentum" in variable.path:
            variable.assign(variable * -1.0)
    yield train(model, 2)
    yield float(model.optimizer.iterations.numpy())
    yield from sums(model)


def weights_set(model: Any) -> Iterator[Any]:
    yield train(model, 0)
    before = model.get_weights()
    yield train(model, 1)
    model.set_weights(before)
    yield train(model, 1)
    model.layers[-1].kernel.assign(np.full((4, 2), 0.5))
    model.layers[-1].bias.assign_add([1.0, 2.0])
    yield train(model, 2)
    yield float(np.sum(model.predict(BATCHES[0][0], verbose=0)))
    yield from sums(model)


def layers_frozen(model: Any) -> Iterator[Any]:
    yield train(model, 0)
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    yield train(model, 1)
    model.trainable = True
    model.compile(keras.optimizers.Adam(0.1), "mae", jit_compile=True)
    yield train(model, 2)
    yield from sums(model)


def numbers_of_layers(model: Any) -> Iterator[Any]:
    """Compiled in, until the model is compiled again."""
    yield train(model, 0)
    model.layers[0].activation = keras.activations.relu
    model.optimizer.momentum = 0.0
    yield train(model, 1)
    model.compile(model.optimizer, "mse", jit_compile=True)
    yield train(model, 2)
    yield from sums(model)


@pytest.mark.dear
@pytest.mark.parametrize("habit", [rates_and_state, weights_set, layers_frozen, numbers_of_layers])
def test_a_model_s_habit_counts_as_in_plain_keras(session: sw.Session, habit: Callable[[Any], Iterator[Any]]) -> None:
    expected = [float(value) for value in habit(build())]
    keras.utils.clear_session()
    values = [float(value) for value in habit(swt.distribute(build(), session))]
    assert values == pytest.approx(expected, rel=1e-4, abs=1e-5)


class Scaled(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="scaled")
        self.weight = tf.Variable(tf.ones((3, 2)), name="weight")
        self.rate = tf.Variable(0.1, trainable=False, name="rate")
        self.factor = 1.0

    def train(self, x: Any, y: Any, power: int = 1) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ self.weight - y) ** 2) * self.factor * power
        self.weight.assign_sub(self.rate * tape.gradient(loss, self.weight))
        return loss


def test_a_function_s_numbers_count_as_in_a_tf_function(session: sw.Session) -> None:
    """Python numbers that a traced function read stay; arguments and variables count."""

    def run(make: Callable[[Any], Any]) -> list[float]:
        model = Scaled()
        step = make(tf.function(model.train))
        losses = [step(*BATCHES[0])]
        model.factor = 5.0
        losses.append(step(*BATCHES[1]))
        losses.append(step(*BATCHES[2], power=2))
        model.rate.assign(0.01)
        losses.append(step(*BATCHES[3]))
        model.weight.assign(tf.zeros((3, 2)))
        losses.append(step(*BATCHES[4]))
        return [float(loss) for loss in losses]

    expected = run(lambda function: function)
    assert run(lambda function: swt.parallelize(session, function)) == pytest.approx(expected, rel=1e-5)
