"""Pins by variable path, and layouts of keras.distribution."""

from __future__ import annotations

from typing import Any

import jax
import keras
import pytest

import shardwright as sw
import shardwright.keras as swk
from shardwright.errors import OptionError
from tests.keras_frontend import models
from tests.keras_frontend.comparison import fit


def mesh() -> Any:
    return keras.distribution.DeviceMesh((2, 2), ["batch", "model"], [f"cpu:{n}" for n in range(4)])


def layout_map() -> Any:
    layouts = keras.distribution.LayoutMap(mesh())
    layouts["hidden/kernel"] = (None, "model")
    layouts[".*bias"] = (None,)
    return layouts


def momentum() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def layout_of(variable: Any) -> str:
    return str(variable.value.sharding)


def test_a_layout_map_is_followed(session: sw.Session) -> None:
    x, y = models.rows()
    model = swk.distribute(models.mlp(momentum()), session, layouts=layout_map())
    fit(model, x[:32], y[:32], epochs=1)
    hidden = model.get_layer("hidden")
    assert layout_of(hidden.kernel) == "[-, model] on batch=2 × model=2"
    assert layout_of(hidden.bias) == "[-] on batch=2 × model=2"
    (kept,) = [each for each in model.optimizer.variables if each.path.endswith("/hidden_kernel_momentum")]
    assert layout_of(kept) == "[-, model] on batch=2 × model=2"


def test_model_and_data_parallel_split_the_batch(session: sw.Session) -> None:
    x, y = models.rows()
    both = keras.distribution.ModelParallel(layout_map=layout_map(), batch_dim_name="batch")
    model = swk.distribute(models.mlp(), session, layouts=both)
    fit(model, x[:32], y[:32], epochs=1, validation_data=(x[:32], y[:32]))
    assert layout_of(model.get_layer("hidden").kernel).startswith("[-, model]")
    arguments, _ = swk.step(model).plan.shardings()
    for batch in jax.tree.leaves(arguments)[-2:]:  # x and y
        assert "batch" in str(batch.spec[0])


def test_pins_by_path(session: sw.Session) -> None:
    x, y = models.rows()
    model = swk.distribute(models.mlp(), session, mesh={"model": 4}, force={"*/kernel": {0: "model", 1: None}})
    for _ in range(2):  # the second call evaluates around the state of the first
        fit(model, x[:32], y[:32], epochs=1, validation_data=(x[:32], y[:32]))
    assert layout_of(model.get_layer("head").kernel).startswith("[model, -]")


def test_a_pin_on_nothing_is_named(session: sw.Session) -> None:
    model = swk.distribute(models.mlp(), session, force={"hiden/kernel": {0: None}})
    with pytest.raises(OptionError, match="hiden/kernel") as raised:
        fit(model, *models.rows())
    assert "hidden/kernel" in raised.value.remedy


def test_a_layout_of_another_rank_is_named(session: sw.Session) -> None:
    layouts = keras.distribution.LayoutMap(mesh())
    layouts["hidden/kernel"] = ("model",)
    with pytest.raises(OptionError, match=r"hidden/kernel of shape \[6, 16\]"):
        fit(swk.distribute(models.mlp(), session, layouts=layouts), *models.rows())


def test_a_strategy_lays_out_the_optimizers_state(session: sw.Session) -> None:
    x, y = models.rows()
    model = swk.distribute(models.mlp(momentum()), session, force=sw.strategies.PS())
    fit(model, x[:32], y[:32], epochs=1, validation_data=(x[:32], y[:32]))
    plan = swk.step(model).plan
    strategy = plan.strategies["hidden/kernel"]
    assert strategy.split is not None  # the slots
    assert strategy.local_copy  # of whole weights


def test_a_strategy_and_layouts_exclude_each_other(session: sw.Session) -> None:
    model = swk.distribute(models.mlp(), session, force=sw.strategies.PS(), layouts=layout_map())
    with pytest.raises(OptionError, match="PS"):
        fit(model, *models.rows())
