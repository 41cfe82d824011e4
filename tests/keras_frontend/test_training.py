"""`fit`, `evaluate` and `predict` through a server, against plain Keras on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np
import pytest

import shardwright as sw
import shardwright.keras as swk
from tests.keras_frontend import models
from tests.keras_frontend.comparison import (
    assert_equal_metrics,
    assert_equal_state,
    compare,
    fit,
)


def sgd(**rest: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, **rest)


def cosine() -> Any:
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 6), momentum=0.9, nesterov=True)


@pytest.mark.dear
def test_gpt_with_dropout(session: sw.Session) -> None:
    x, y = models.tokens()
    model, plain = compare(session, lambda: models.gpt(sgd()), (x, y), validation_data=(x[:20], y[:20]))
    np.testing.assert_allclose(
        model.evaluate(x, y, batch_size=16, verbose=0), plain.evaluate(x, y, batch_size=16, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        model.predict(x, batch_size=16, verbose=0), plain.predict(x, batch_size=16, verbose=0), atol=1e-5
    )
    assert all(isinstance(variable.value, sw.RemoteArray) for variable in model.trainable_variables)
    text = swk.step(model).plan.explain()
    assert "wte/embeddings" in text
    assert "attention/query/kernel" in text or "attention/" in text


@pytest.mark.dear
def test_gpt_under_adamw(session: sw.Session) -> None:
    compare(
        session,
        lambda: models.gpt(keras.optimizers.AdamW(1e-3, weight_decay=0.01, clipnorm=1.0)),
        models.tokens(),
        state_bound=1e-4,
    )


@pytest.mark.dear
def test_cnn_with_batch_normalization_and_schedule(session: sw.Session) -> None:
    model, plain = compare(session, lambda: models.cnn(cosine()), models.images())
    x, _ = models.images()
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5)


@pytest.mark.dear
def test_two_inputs_and_outputs_with_weights(session: sw.Session) -> None:
    x, y = models.pairs()
    weights = {name: np.linspace(0.5, 2, models.SAMPLES) for name in y}
    compare(session, lambda: models.two_heads(sgd()), (x, y), sample_weight=weights)


@pytest.mark.dear
def test_subclass_with_a_step_of_its_own(session: sw.Session) -> None:
    compare(session, lambda: models.contrast(sgd()), models.rows())


@pytest.mark.dear
def test_class_weights_and_several_steps_per_execution(session: sw.Session) -> None:
    x, y = models.rows()
    weights = {number: 1 + number / 2 for number in range(models.CLASSES)}
    model, plain = compare(session, partial(models.mlp, steps_per_execution=2), (x, y), class_weight=weights)
    np.testing.assert_allclose(
        model.predict(x, batch_size=16, verbose=0), plain.predict(x, batch_size=16, verbose=0), atol=1e-5
    )


@pytest.mark.dear
def test_rates_set_by_callbacks(session: sw.Session) -> None:
    def callbacks() -> Any:
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=10),
            keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True),
        ]

    model, plain = compare(session, models.mlp, models.rows(), callbacks=callbacks, epochs=4)
    assert float(model.optimizer.learning_rate) == pytest.approx(float(plain.optimizer.learning_rate))


def test_callbacks_read_and_assign_in_the_middle_of_an_epoch(session: sw.Session) -> None:
    x, y = models.rows()
    seen: list[float] = []

    class Zero(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del logs
            seen.append(float(np.abs(self.model.get_layer("head").kernel.numpy()).max()))
            if batch == 0:
                self.model.optimizer.learning_rate = 0.0
            if batch == 1:
                self.model.get_layer("head").kernel.assign(np.zeros((16, models.CLASSES)))

    model = swk.distribute(models.mlp(), session, effort="fast")
    fit(model, x[:32], y[:32], callbacks=[Zero()], batch_size=8, epochs=1)
    assert seen[0] == seen[1] > 0
    assert seen[2] == seen[3] == 0


def test_a_variable_assigned_from_another_is_updated_by_itself(session: sw.Session) -> None:
    def build() -> Any:
        keras.utils.set_random_seed(6)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    plain, model = build(), swk.distribute(build(), session, effort="fast")
    for each in (plain, model):
        fit(each, x, x, epochs=1)
        other = each.layers[1].kernel
        each.layers[0].kernel.assign(
            other if each is model else other.numpy()
        )  # plain Keras would donate one array twice
    assert_equal_metrics(fit(model, x, x), fit(plain, x, x))
    assert_equal_state(model, plain)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.dear
def test_mixed_precision(session: sw.Session, policy: str) -> None:
    keras.mixed_precision.set_global_policy(policy)
    try:
        plain, model = models.mlp(), swk.distribute(models.mlp(), session)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert_equal_metrics(fit(model, *models.rows()), fit(plain, *models.rows()), 1e-3)


@pytest.mark.dear
def test_averages_of_weights(session: sw.Session) -> None:
    def callbacks() -> Any:
        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]

    def build() -> Any:
        return models.mlp(sgd(use_ema=True, ema_momentum=0.5))

    model, _ = compare(session, build, models.rows(), callbacks=callbacks)
    fit(model, *models.rows())  # plain Keras fails here: it donates an array that two variables share


class Rows(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of five."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Any:
        x, y = models.rows()
        return x[5 * number : 5 * number + 5], y[5 * number : 5 * number + 5]


def _generate() -> Any:
    for _ in range(2):
        for number in range(8):
            yield Rows()[number]


def test_other_sources_of_batches(session: sw.Session) -> None:
    plain = fit(models.mlp(), Rows())
    assert_equal_metrics(fit(swk.distribute(models.mlp(), session, effort="fast"), Rows()), plain)
    model = swk.distribute(models.mlp(), session, effort="fast")
    assert_equal_metrics(fit(model, _generate(), steps_per_epoch=8), plain)


def test_batches_of_torch(session: sw.Session) -> None:
    torch = pytest.importorskip("torch")
    x, y = map(torch.as_tensor, models.rows())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)
    assert_equal_metrics(fit(swk.distribute(models.mlp(), session, effort="fast"), loader), fit(models.mlp(), Rows()))


def test_single_batches(session: sw.Session) -> None:
    x, y = models.rows()
    plain, model = models.mlp(sgd()), swk.distribute(models.mlp(sgd()), session, effort="fast")
    np.testing.assert_allclose(model.predict_on_batch(x), plain.predict_on_batch(x), atol=1e-6)
    for _ in range(3):
        np.testing.assert_allclose(model.train_on_batch(x, y), plain.train_on_batch(x, y), rtol=1e-5)
    np.testing.assert_allclose(model.test_on_batch(x, y), plain.test_on_batch(x, y), rtol=1e-5)
    assert_equal_state(model, plain)


def test_frozen_layers_after_training(session: sw.Session) -> None:
    x, y = models.rows()
    plain, model = models.mlp(), swk.distribute(models.mlp(), session, effort="fast")
    for each in (plain, model):
        fit(each, x[:32], y[:32], epochs=1)
        each.get_layer("hidden").trainable = False
        each.compile(sgd(), models.cross_entropy(), metrics=["accuracy"])
    frozen = model.get_layer("hidden").kernel.numpy()
    assert_equal_metrics(fit(model, x[:32], y[:32]), fit(plain, x[:32], y[:32]))
    np.testing.assert_array_equal(model.get_layer("hidden").kernel.numpy(), frozen)
    assert_equal_state(model, plain)


def test_evaluation_before_training_leaves_the_layouts_to_training(session: sw.Session) -> None:
    x, y = models.rows()
    alone = models.mlp()
    model = swk.distribute(models.mlp(), session, mesh={"model": 4}, force={"hidden/kernel": {1: "model"}})
    np.testing.assert_allclose(
        model.evaluate(x[:16], y[:16], verbose=0), alone.evaluate(x[:16], y[:16], verbose=0), rtol=1e-5
    )
    assert_equal_metrics(fit(model, x[:32], y[:32]), fit(alone, x[:32], y[:32]))
    assert "[-, model]" in model.get_layer("hidden").kernel.value.sharding


def test_a_model_gathered_is_plain_keras(session: sw.Session) -> None:
    x, y = models.rows()
    model = swk.distribute(models.mlp(), session, effort="fast")
    fit(model, x[:32], y[:32], epochs=1)
    wanted = model.evaluate(x, y, verbose=0)
    assert swk.gather(model) is model
    assert not any(isinstance(variable.value, sw.RemoteArray) for variable in model.variables)
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), wanted, rtol=1e-5)
    fit(model, x, y)
