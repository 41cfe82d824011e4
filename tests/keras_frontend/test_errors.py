"""What cannot run is refused, with what to do about it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import keras
import pytest

import shardwright as sw
import shardwright.keras as swk
from shardwright.errors import OptionError, PlanError, SessionError
from tests.keras_frontend import models
from tests.keras_frontend.comparison import fit


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "numpy"])
def test_another_backend(backend: str) -> None:
    code = "import shardwright.keras"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"KERAS_BACKEND": backend}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode
    assert f"OptionError: KERAS_BACKEND: Keras runs on '{backend}'" in done.stderr
    assert "export KERAS_BACKEND=jax" in done.stderr
    assert "ModuleNotFoundError" not in done.stderr


def test_eager_models(session: sw.Session) -> None:
    with pytest.raises(OptionError, match="run_eagerly"):
        fit(swk.distribute(models.mlp(run_eagerly=True), session), *models.rows())


@pytest.mark.parametrize("model", [None, keras.layers.Dense(3), "model"])
def test_no_model(session: sw.Session, model: Any) -> None:
    with pytest.raises(OptionError, match=r"keras\.Model"):
        swk.distribute(model, session)
    with pytest.raises(OptionError, match="not distributed"):
        swk.step(model)


def test_no_session() -> None:
    with pytest.raises(OptionError, match=r"shardwright\.connect"):
        swk.distribute(models.mlp(), "localhost:2222")  # type: ignore[arg-type]


def test_unknown_options_and_layouts(session: sw.Session) -> None:
    with pytest.raises(TypeError, match="mesh"):
        swk.distribute(models.mlp(), session, mash=4)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="LayoutMap"):
        swk.distribute(models.mlp(), session, layouts={"kernel": ("model",)})


def test_a_distribution_of_keras_in_force(session: sw.Session) -> None:
    model = models.mlp()
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        with pytest.raises(OptionError, match="set_distribution"):
            swk.distribute(model, session)
    finally:
        keras.distribution.set_distribution(None)


def test_no_step_yet(session: sw.Session) -> None:
    with pytest.raises(PlanError, match="call fit"):
        swk.step(swk.distribute(models.mlp(), session))


def test_not_compiled(session: sw.Session) -> None:
    x = keras.Input((6,))
    model = swk.distribute(keras.Model(x, keras.layers.Dense(2)(x)), session)
    with pytest.raises(ValueError, match="compile"):  # Keras' own words
        fit(model, *models.rows())
    with pytest.raises(OptionError, match="not compiled"):
        swk.lower(model, *models.rows())


def test_shapes_of_a_batch_are_kerass_to_refuse(session: sw.Session) -> None:
    x, y = models.rows()
    with pytest.raises(ValueError, match="incompatible"):
        fit(swk.distribute(models.mlp(), session), x[:, :3], y)


def test_a_closed_session() -> None:
    x, y = models.rows()
    with sw.connect(devices=2) as own:
        model = swk.distribute(models.mlp(), own, effort="fast")
        fit(model, x[:32], y[:32], epochs=1)
    with pytest.raises(SessionError, match="closed"):
        model.get_weights()
    with pytest.raises(SessionError, match="closed"):
        swk.distribute(models.mlp(), own)


@pytest.mark.dear
def test_a_model_moves_to_another_session(session: sw.Session) -> None:
    x, y = models.rows()
    with sw.connect(devices=2) as own:
        model = swk.distribute(models.mlp(), own, effort="fast")
        fit(model, x[:32], y[:32], epochs=1)
        wanted = model.evaluate(x[:32], y[:32], verbose=0)
        swk.distribute(model, session, effort="fast")
    assert model.evaluate(x[:32], y[:32], verbose=0) == pytest.approx(wanted, rel=1e-5)
