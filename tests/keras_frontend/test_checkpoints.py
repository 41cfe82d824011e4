"""Keras' files and distributed checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import shardwright as sw
import shardwright.keras as swk
from shardwright.errors import CheckpointError
from tests.keras_frontend import models
from tests.keras_frontend.comparison import assert_equal_metrics, assert_equal_state, fit, state_of


def adam() -> Any:
    return keras.optimizers.Adam(1e-2)


class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends a run after its second epoch, as a crash would."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise InterruptedError


def distributed(session: sw.Session, dropout: float = 0.3) -> Any:
    keras.utils.clear_session()
    return swk.distribute(models.mlp(adam(), dropout), session, effort="fast")


def test_a_saved_model_is_a_file_of_keras(session: sw.Session, tmp_path: Path) -> None:
    x, y = models.rows()
    model = distributed(session, dropout=0)  # files of Keras do not hold the seeds of dropout
    fit(model, x[:32], y[:32], callbacks=[keras.callbacks.ModelCheckpoint(tmp_path / "m.keras")])
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert_equal_state(loaded, model, 1e-12)
    wanted = fit(loaded, x[:32], y[:32])
    assert_equal_metrics(fit(model, x[:32], y[:32]), wanted)


def test_weights_come_back_from_a_file(session: sw.Session, tmp_path: Path) -> None:
    x, y = models.rows()
    model = distributed(session, dropout=0)
    fit(model, x[:32], y[:32], epochs=1)
    model.save_weights(tmp_path / "m.weights.h5")
    kept = state_of(model)
    wanted = fit(model, x[:32], y[:32], epochs=1)
    model.load_weights(tmp_path / "m.weights.h5")
    for one, other in zip(state_of(model), kept, strict=True):
        np.testing.assert_array_equal(one, other)
    model.set_weights(model.get_weights())
    assert_equal_metrics(fit(model, x[:32], y[:32], epochs=1), wanted)


@pytest.mark.parametrize(("kind", "dropout"), [(keras.callbacks.BackupAndRestore, 0), (swk.BackupAndRestore, 0.3)])
def test_an_interrupted_run_goes_on(session: sw.Session, tmp_path: Path, kind: Any, dropout: float) -> None:
    x, y = models.rows()
    plain = models.mlp(adam(), dropout)
    wanted = fit(plain, x[:32], y[:32], epochs=4)
    with pytest.raises(InterruptedError):
        fit(distributed(session, dropout), x[:32], y[:32], epochs=4, callbacks=[kind(tmp_path / "backup"), Interrupt()])
    model = distributed(session, dropout)
    found = fit(model, x[:32], y[:32], epochs=4, callbacks=[kind(tmp_path / "backup")])
    start = 4 - len(found["loss"])
    assert start in (1, 2)  # the order of callbacks decides whether the second epoch counts
    assert_equal_metrics(found, {name: values[start:] for name, values in wanted.items()})
    assert_equal_state(model, plain, 1e-4)
    assert not (tmp_path / "backup").exists()


def test_distributed_checkpoints_of_every_epoch(session: sw.Session, tmp_path: Path) -> None:
    x, y = models.rows()
    model = distributed(session)
    directory = tmp_path / "run"
    fit(model, x[:32], y[:32], epochs=3, callbacks=[swk.ModelCheckpoint(directory, max_to_keep=2)])
    assert session.checkpoints(directory) == (4, 6)  # training steps done
    other = distributed(session)
    swk.restore(other, directory)
    assert_equal_state(other, model, 1e-12)  # the seeds of dropout among it
    assert_equal_metrics(fit(other, x[:32], y[:32]), fit(model, x[:32], y[:32]))


def test_only_the_best(session: sw.Session, tmp_path: Path) -> None:
    x, y = models.rows()
    model = distributed(session)
    keep = swk.ModelCheckpoint(tmp_path / "best", monitor="loss", mode="max", save_best_only=True)
    history = fit(model, x[:32], y[:32], epochs=3, callbacks=[keep])["loss"]
    best = [2 * (n + 1) for n, loss in enumerate(history) if all(loss > before for before in history[:n])]
    assert session.checkpoints(tmp_path / "best") == tuple(best)


def test_a_checkpoint_of_another_model_is_refused(session: sw.Session, tmp_path: Path) -> None:
    model = distributed(session)
    swk.save(model, tmp_path / "run", step=1).wait()
    other = swk.distribute(models.cnn("sgd"), session)
    with pytest.raises(CheckpointError, match="no array") as raised:
        swk.restore(other, tmp_path / "run")
    assert "name=" in raised.value.remedy
