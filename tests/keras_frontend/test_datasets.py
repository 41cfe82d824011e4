"""`fit` on batches that the workers read themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import shardwright as sw
import shardwright.keras as swk
from tests.datasets import sources
from tests.datasets.training import BATCH, BATCHES, MODULE
from tests.keras_frontend.comparison import assert_equal_metrics, assert_equal_state

STEPS = 5
EPOCHS = 2


@pytest.fixture(scope="module")
def reading_session() -> Iterator[sw.Session]:
    with sw.connect(devices=4, dataset_modules=MODULE) as session:
        yield session


def build() -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((sources.WIDTH,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss="mse", metrics=["mae"])
    return model


def test_a_generator_of_handles_is_a_fit_on_the_workers(reading_session: sw.Session, tmp_path: Path) -> None:
    whole = [sources.whole_batch(number, BATCH, seed=0) for number in range(STEPS * EPOCHS)]
    plain = build()
    wanted = plain.fit(
        ((batch["x"], batch["y"]) for batch in whole), steps_per_epoch=STEPS, epochs=EPOCHS, verbose=0
    ).history
    keras.utils.clear_session()
    model = swk.distribute(build(), reading_session, force="data")
    data = reading_session.dataset(BATCHES, batch=BATCH, log=str(tmp_path))
    batches = ((batch["x"], batch["y"]) for batch in data)
    assert_equal_metrics(model.fit(batches, steps_per_epoch=STEPS, epochs=EPOCHS, verbose=0).history, wanted)
    assert_equal_state(model, plain)
    ((_, read),) = sources.events(tmp_path, "read").items()
    assert {len(line["rows"]) for line in read} <= {1, BATCH}  # the first row alone tells structure and types
    np.testing.assert_allclose(
        model.evaluate(((batch["x"], batch["y"]) for batch in data), steps=2, verbose=0),
        plain.evaluate(*rows_of(data.position - 2, data.position), batch_size=BATCH, verbose=0),
        rtol=1e-5,
    )  # fmt: skip


def rows_of(first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    whole = [sources.whole_batch(number, BATCH, seed=0) for number in range(first, end)]
    return np.concatenate([batch["x"] for batch in whole]), np.concatenate([batch["y"] for batch in whole])
