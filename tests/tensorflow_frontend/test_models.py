"""Keras models on TensorFlow's backend: training on servers beside plain Keras on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import shardwright as sw
import shardwright.tensorflow as swt
from shardwright.errors import OptionError, PlanError
from tests.keras_frontend import models

MODELS = {"cnn": (models.cnn, models.images), "gpt": (models.gpt, models.tokens)}


def fit(model: Any, *data: Any, **options: Any) -> dict[str, list[float]]:
    settings: dict[str, Any] = {"epochs": 2, "verbose": 0, "shuffle": False, "batch_size": 16} | options
    return model.fit(*data, **settings).history  # type: ignore[no-any-return]


def assert_equal_histories(history: Any, expected: Any) -> None:
    assert history.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def relative_difference(model: Any, plain: Any) -> float:
    """‖model − plain‖ / ‖plain‖ over all floating variables together."""
    difference = size = 0.0
    pairs = zip([*model.variables, *model.optimizer.variables], [*plain.variables, *plain.optimizer.variables])  # noqa: B905
    for one, other in ((mine.numpy(), theirs.numpy()) for mine, theirs in pairs):
        if other.dtype.kind == "f":
            difference += float(np.square(one.astype("f8") - other).sum())
            size += float(np.square(other.astype("f8")).sum())
        else:
            np.testing.assert_array_equal(one, other)
    return (difference / size) ** 0.5


def compare(session: sw.Session, build: Callable[[], Any], data: tuple[Any, ...], **options: Any) -> Any:
    """The distributed model, after the same training as a plain one."""
    plain = plain_model(build)
    expected = fit(plain, *data, **options)
    keras.utils.clear_session()
    model = swt.distribute(build(), session)
    assert_equal_histories(fit(model, *data, **options), expected)
    assert relative_difference(model, plain) < 5e-5
    return model


def plain_model(build: Callable[[], Any]) -> Any:
    """A model that XLA compiles here, too: random numbers of TensorFlow's own kernels are others."""
    model = build()
    model.jit_compile = True
    return model


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


@pytest.mark.parametrize("name", MODELS)
def test_two_epochs(session: sw.Session, name: str) -> None:
    build, data = MODELS[name]
    compare(session, lambda: build(sgd()), data())


def test_validation_prediction_and_reading(session: sw.Session) -> None:
    x, y = models.rows()
    model = compare(session, lambda: models.mlp(sgd()), (x, y), validation_data=(x, y))
    plain = models.mlp(sgd())
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), rtol=1e-5)
    assert "hidden/kernel" in swt.step(model).plan.explain()


def test_inputs_and_outputs_by_name_from_a_dataset(session: sw.Session) -> None:
    x, y = models.pairs()
    # In batches of one size: Keras weights losses of outputs by it only where the size is known.
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
    compare(session, lambda: models.two_heads(sgd()), (dataset,), batch_size=None)


def test_weights_of_samples_and_many_steps_an_execution(session: sw.Session) -> None:
    x, y = models.rows()
    weights = np.linspace(0.5, 1.5, len(x)).astype("float32")
    build = lambda: models.mlp(sgd(), steps_per_execution=2)  # noqa: E731
    compare(session, build, (x, y), sample_weight=weights)


def test_a_callback_sets_the_rate_and_reads_weights(session: sw.Session) -> None:
    x, y = models.rows()
    norms: list[float] = []

    def callbacks() -> list[Any]:
        schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
        read = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: norms.append(0.0))
        return [schedule, read]

    plain = plain_model(lambda: models.mlp(sgd()))
    expected = fit(plain, x, y, callbacks=callbacks(), epochs=3)
    model = swt.distribute(models.mlp(sgd()), session)
    assert_equal_histories(fit(model, x, y, callbacks=callbacks(), epochs=3), expected)


def test_assigned_weights_are_sent(session: sw.Session) -> None:
    x, y = models.rows()
    plain, model = plain_model(lambda: models.mlp(sgd())), swt.distribute(models.mlp(sgd()), session)
    for each in (plain, model):
        fit(each, x, y, epochs=1)
        kernel = each.get_layer("hidden").kernel
        kernel.assign(0.5 * kernel)
        each.get_layer("head").kernel.value.assign_add(tf.ones_like(each.get_layer("head").kernel.value))
    assert_equal_histories(fit(model, x, y, epochs=1), fit(plain, x, y, epochs=1))


def test_save_and_gather(session: sw.Session, tmp_path: Path) -> None:
    x, y = models.rows()
    model = compare(session, lambda: models.mlp(sgd(), dropout=0.0), (x, y))
    model.save(tmp_path / "model.keras")
    again = plain_model(lambda: keras.models.load_model(tmp_path / "model.keras"))
    np.testing.assert_allclose(again.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
    plain = plain_model(lambda: swt.gather(model))
    assert_equal_histories(fit(plain, x, y, epochs=1), fit(again, x, y, epochs=1))
    with pytest.raises(OptionError, match="not distributed"):
        swt.step(plain)


def test_an_export_holds_the_trained_values(session: sw.Session, tmp_path: Path) -> None:
    """Of a model whose values are on the servers; it trains on."""
    x, y = models.rows()
    model = swt.distribute(models.mlp(sgd(), dropout=0.0), session)
    for epoch in range(2):
        fit(model, x, y, epochs=1)
        model.export(tmp_path / str(epoch), verbose=False)
        exported = tf.saved_model.load(tmp_path / str(epoch))
        np.testing.assert_allclose(exported.serve(x), model.predict(x, verbose=0), rtol=1e-4, atol=1e-5)


def test_a_step_as_a_function(session: sw.Session) -> None:
    x, y = models.images()
    plain, model = plain_model(lambda: models.cnn(sgd())), models.cnn(sgd())
    step = swt.parallelize(session, lambda x, y: model.train_step((x, y)))
    for n in range(2):
        logs = step(x[n * 16 : n * 16 + 16], y[n * 16 : n * 16 + 16])
        plain.reset_metrics()
        expected = plain.train_on_batch(x[n * 16 : n * 16 + 16], y[n * 16 : n * 16 + 16], return_dict=True)
        if n == 0:
            np.testing.assert_allclose(float(logs["loss"]), expected["loss"], rtol=1e-5)
    assert any(name.endswith("conv/kernel") for name in step.variables)


def test_errors(session: sw.Session) -> None:
    with pytest.raises(OptionError, match=r"keras\.Model"):
        swt.distribute(object(), session)
    model = swt.distribute(models.mlp(sgd()), session)
    with pytest.raises(PlanError, match="no train step"):
        swt.step(model)
    eager = models.mlp(sgd(), run_eagerly=True)
    with pytest.raises(OptionError, match="run_eagerly"):
        fit(swt.distribute(eager, session), *models.rows())
