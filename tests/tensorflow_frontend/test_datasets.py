"""Functions of TensorFlow on batches that the workers read themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import shardwright as sw
import shardwright.tensorflow as swtf
from tests.datasets import sources
from tests.datasets.training import BATCH, BATCHES, MODULE

STEPS = 5


@pytest.fixture(scope="module")
def reading_session() -> Iterator[sw.Session]:
    with sw.connect(devices=4, dataset_modules=MODULE) as session:
        yield session


def make_step(weight: Any) -> Any:
    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ weight) - y) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return train


def test_handles_are_the_arguments_of_a_step(reading_session: sw.Session) -> None:
    start = np.linspace(-0.5, 0.5, sources.WIDTH, dtype=np.float32)[:, None]
    plain = make_step(tf.Variable(start))
    whole = [sources.whole_batch(number, BATCH, seed=0) for number in range(STEPS)]
    wanted = [float(plain(tf.constant(batch["x"]), tf.constant(batch["y"]))) for batch in whole]

    step = swtf.parallelize(reading_session, make_step(tf.Variable(start)), force="data")
    data = reading_session.dataset(BATCHES, batch=BATCH)
    found = []
    for _ in range(STEPS):
        batch = next(data)
        found.append(step(batch["x"], batch["y"]))
    np.testing.assert_allclose([float(loss) for loss in found], wanted, rtol=1e-5)
