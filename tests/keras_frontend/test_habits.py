"""What users change in a model between calls, beside plain Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import shardwright as sw
import shardwright.keras as swk

RANDOM = np.random.default_rng(0)
BATCHES = [
    (RANDOM.normal(size=(8, 3)).astype("float32"), RANDOM.normal(size=(8, 2)).astype("float32")) for _ in range(5)
]

#: Yields what has to be as in plain Keras. The model is built and compiled.
Habit = Callable[[Any], Iterator[Any]]


def build() -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((3,)), layers.Dense(4, activation="tanh"), layers.BatchNormalization(), layers.Dense(2)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def train(model: Any, number: int) -> float:
    return float(np.ravel(model.train_on_batch(*BATCHES[number]))[0])


def sums(model: Any) -> list[float]:
    return [float(np.sum(variable.numpy())) for variable in model.variables]


def rates_assigned(model: Any) -> Iterator[Any]:
    yield train(model, 0)
    model.optimizer.learning_rate = 0.01
    yield train(model, 1)
    model.optimizer.learning_rate.assign(0.5)
    yield train(model, 2)
    yield train(model, 3)
    yield from sums(model)


def layers_frozen(model: Any) -> Iterator[Any]:
    yield train(model, 0)
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.1), "mse")
    yield train(model, 1)
    yield train(model, 2)
    yield from sums(model)
    model.trainable = False
    model.layers[-1].trainable = True
    model.compile(keras.optimizers.SGD(0.1), "mse")
    yield train(model, 3)
    model.trainable = True
    model.compile(keras.optimizers.Adam(0.1), "mae")
    yield train(model, 4)
    yield from sums(model)


def weights_set(model: Any) -> Iterator[Any]:
    yield train(model, 0)
    before = model.get_weights()
    yield train(model, 1)
    model.set_weights(before)
    yield train(model, 1)
    model.layers[0].set_weights([np.ones((3, 4)), np.zeros(4)])
    yield train(model, 2)
    model.layers[-1].kernel.assign(np.full((4, 2), 0.5))
    model.layers[-1].bias.assign_add([1.0, 2.0])
    yield train(model, 3)
    yield float(np.sum(model.predict(BATCHES[0][0], verbose=0)))
    yield from sums(model)


def state_of_the_optimizer_set(model: Any) -> Iterator[Any]:
    yield train(model, 0)
    yield train(model, 1)
    for variable in model.optimizer.variables:
        if "momentum" in variable.path:
            variable.assign(variable * -1.0)
    yield train(model, 2)
    yield float(model.optimizer.iterations.numpy())
    model.optimizer.iterations.assign(0)
    yield train(model, 3)
    yield from sums(model)


def numbers_of_the_optimizer(model: Any) -> Iterator[Any]:
    """Plain Keras has compiled them in, until it compiles again."""
    yield train(model, 0)
    model.optimizer.momentum = 0.0
    yield train(model, 1)
    model.optimizer.clipnorm = 0.01
    yield train(model, 2)
    model.compile(model.optimizer, "mse")
    yield train(model, 3)
    yield train(model, 4)
    yield from sums(model)


def numbers_of_layers(model: Any) -> Iterator[Any]:
    yield train(model, 0)
    model.layers[1].momentum = 0.1
    model.layers[0].activation = keras.activations.relu
    yield train(model, 1)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    yield train(model, 2)
    yield train(model, 3)
    yield float(np.sum(model.predict(BATCHES[0][0], verbose=0)))
    yield from sums(model)


def losses_and_metrics_changed(model: Any) -> Iterator[Any]:
    yield train(model, 0)
    model.compile(model.optimizer, "mae", metrics=["mse"])
    yield from np.ravel(model.train_on_batch(*BATCHES[1]))
    yield from np.ravel(model.test_on_batch(*BATCHES[2]))
    model.reset_metrics()
    yield from np.ravel(model.train_on_batch(*BATCHES[3], sample_weight=np.arange(8.0)))
    yield from sums(model)


def weights_loaded(model: Any) -> Iterator[Any]:
    yield train(model, 0)
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    yield train(model, 1)
    yield float(np.sum(copy.predict(BATCHES[0][0], verbose=0)))
    for mine, other in zip(model.variables, copy.variables, strict=True):
        mine.assign(other)
    yield train(model, 2)
    yield from sums(model)


def seeds_and_policies(model: Any) -> Iterator[Any]:
    yield train(model, 0)
    keras.utils.set_random_seed(7)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        yield train(model, 1)
    finally:
        keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    yield train(model, 2)
    yield from sums(model)


def sizes_of_batches(model: Any) -> Iterator[Any]:
    yield train(model, 0)
    x, y = BATCHES[1]
    yield float(np.ravel(model.train_on_batch(x[:4], y[:4]))[0])
    yield train(model, 2)
    yield float(np.ravel(model.test_on_batch(x[:3], y[:3]))[0])
    x[:] = 0.0
    yield train(model, 3)


@pytest.mark.dear
@pytest.mark.parametrize(
    "habit",
    [
        rates_assigned, layers_frozen, weights_set, state_of_the_optimizer_set, numbers_of_the_optimizer,
        numbers_of_layers, losses_and_metrics_changed, weights_loaded, seeds_and_policies, sizes_of_batches,
    ],
)  # fmt: skip
def test_a_habit_counts_as_in_plain_keras(session: sw.Session, habit: Habit) -> None:
    def values_of(model: Any) -> list[float]:
        return [float(value) for value in habit(model)]

    batches = [tuple(part.copy() for part in batch) for batch in BATCHES]
    expected = values_of(build())
    keras.utils.clear_session()
    for batch, copies in zip(BATCHES, batches, strict=True):
        for part, before in zip(batch, copies, strict=True):
            part[:] = before
    assert values_of(swk.distribute(build(), session, effort="fast")) == pytest.approx(expected, rel=1e-4, abs=1e-5)
