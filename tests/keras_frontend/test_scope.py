"""Models built as types, born on the servers, and lowered without values."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import shardwright as sw
import shardwright.keras as swk
from tests.keras_frontend import models
from tests.keras_frontend.comparison import assert_equal_metrics, assert_equal_state, fit, state_of


@pytest.mark.dear
def test_weights_are_those_of_plain_keras(session: sw.Session) -> None:
    wanted = models.gpt("adam").get_weights()
    keras.utils.clear_session()
    with swk.scope(session):
        model = models.gpt("adam")
    assert all(isinstance(variable._value, sw.RemoteArray) for variable in model.trainable_variables)
    for one, other in zip(model.get_weights(), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_a_model_made_in_a_scope_trains_there(session: sw.Session) -> None:
    plain = models.mlp(keras.optimizers.Adam(1e-2))
    wanted = fit(plain, *models.rows())
    keras.utils.clear_session()
    with swk.scope(session, effort="fast"):
        model = models.mlp(keras.optimizers.Adam(1e-2))
    assert_equal_metrics(fit(model, *models.rows()), wanted)
    assert_equal_state(model, plain, 1e-4)


def test_seed_generators_values_and_functions_as_initializers(session: sw.Session) -> None:
    def build() -> Any:
        keras.utils.set_random_seed(7)
        seeds = keras.random.SeedGenerator(1)
        model = keras.Sequential([keras.Input((4,))])
        model.add(layers.Dense(4, kernel_initializer=keras.initializers.RandomNormal(seed=seeds)))
        model.add(layers.Dense(4, kernel_initializer=keras.initializers.RandomNormal(seed=seeds)))
        model.add(layers.Dense(4, kernel_initializer=lambda shape, dtype: np.full(shape, 0.5, dtype)))
        model.layers[0].set_weights([np.ones((4, 4)), np.zeros(4)])
        model.compile("sgd", "mse")
        return model

    wanted = build().get_weights()
    with swk.scope(session):
        found = build().get_weights()
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.dear
def test_types_alone_are_enough_to_lower(session: sw.Session) -> None:
    with swk.scope():
        model = models.gpt(keras.optimizers.AdamW(1e-3))
    x = y = jax.ShapeDtypeStruct((16, 8), "int32")
    program = swk.lower(model, x, y)
    assert {"wte/embeddings", "attention/query/kernel", "x", "y"} <= set(program.argument_names)
    assert len(program.aliases) == len(program.arguments) - 2
    assert all(variable._value is None for variable in model.trainable_variables if variable.shape)
    plan = sw.plan(program.hlo_text, 4, names=program.argument_names, effort="fast")
    assert "wte/embeddings" in plan.explain()
    keras.utils.clear_session()
    plain = models.gpt(keras.optimizers.AdamW(1e-3))
    assert swk.lower(plain, *models.tokens()).argument_names == program.argument_names
    swk.distribute(model, session)  # types become values only now
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_evaluating_steps_lower_with_nothing_but_metrics_in_place() -> None:
    model = models.cnn("sgd")
    x, y = models.images()
    program = swk.lower(model, x, y, kind="test")
    names = program.argument_names
    assert {names[number] for number in program.aliases.values()} == {
        variable.path for variable in model.metrics_variables
    }
    assert not swk.lower(model, x, kind="predict").aliases


@pytest.mark.dear
def test_large_models_take_no_memory_here() -> None:
    """A model of 64 GB: as values it would not fit this machine."""
    with swk.scope():
        x = keras.Input((1 << 16,))
        model = keras.Model(
            x, layers.Dense(1 << 16, use_bias=False, name="wide")(layers.Dense(1 << 16, name="first")(x))
        )
        model.compile("adam", "mse")
    rows = jax.ShapeDtypeStruct((8, 1 << 16), "float32")
    program = swk.lower(model, rows, rows)
    shapes = {kind.name: kind.shape for kind in program.arguments}
    assert shapes["wide/kernel"] == (1 << 16, 1 << 16)
    assert shapes["adam/wide_kernel_momentum"] == (1 << 16, 1 << 16)


def test_optimizers_are_born_on_the_servers(session: sw.Session) -> None:
    model = swk.distribute(models.mlp("adam"), session, effort="fast")
    x, y = models.rows()
    model._symbolic_build(data_batch=(x, y))
    kept = [variable for variable in model.optimizer.variables if variable.shape]
    assert kept
    assert all(isinstance(variable._value, sw.RemoteArray) for variable in kept)
    assert all(not value.any() for value in state_of(model)[-len(kept) :] if value.shape)
