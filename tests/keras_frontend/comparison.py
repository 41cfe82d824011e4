"""Training on servers beside plain Keras on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import shardwright as sw
import shardwright.keras as swk


def fit(model: Any, *data: Any, callbacks: Any = (), **options: Any) -> dict[str, list[float]]:
    """Metrics of two epochs, unless told otherwise, by epoch."""
    settings: dict[str, Any] = {"epochs": 2, "verbose": 0, "shuffle": False} | options
    if data and len(data) == 2 and "batch_size" not in settings:
        settings["batch_size"] = 16
    return model.fit(*data, callbacks=list(callbacks), **settings).history  # type: ignore[no-any-return]


def assert_equal_metrics(actual: Any, expected: Any, bound: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=bound, atol=bound / 10, err_msg=name)


def state_of(model: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]


def assert_equal_state(actual: Any, expected: Any, bound: float = 1e-5) -> None:
    """‖actual − expected‖ / ‖expected‖ over all floating variables together; others, seeds among them, are equal."""
    difference = size = 0.0
    for one, other in zip(state_of(actual), state_of(expected), strict=True):
        if other.dtype.kind in "iu":
            np.testing.assert_array_equal(one, other)
        else:
            difference += float(np.square(one.astype("f8") - other).sum())
            size += float(np.square(other.astype("f8")).sum())
    assert (difference / size) ** 0.5 < bound


def compare(
    session: sw.Session,
    build: Callable[[], Any],
    data: tuple[Any, ...],
    *,
    state_bound: float = 1e-5,
    callbacks: Callable[[], Any] = tuple,
    **options: Any,
) -> tuple[Any, Any]:
    """(distributed model, plain model) after the same training, compared."""
    plain = build()
    wanted = fit(plain, *data, callbacks=callbacks(), **options)
    keras.utils.clear_session()
    model = swk.distribute(build(), session, effort="fast")
    found = fit(model, *data, callbacks=callbacks(), **options)
    assert_equal_metrics(found, wanted)
    assert_equal_state(model, plain, state_bound)
    return model, plain
