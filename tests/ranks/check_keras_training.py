"""Run as every rank: Keras on the ranks' shares equals Keras in one process on the whole batch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import shardwright.horovod.keras as hvd
from shardwright.errors import OptionError

SHARE, BATCHES, EPOCHS = 4, 6, 3


def model_of(seed: int, policy: str = "float32") -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, activation="tanh", dtype=policy),
            keras.layers.LayerNormalization(dtype=policy),
            keras.layers.Dense(1, dtype=policy),
        ]
    )


def data():
    draw = np.random.default_rng(1)
    rows = SHARE * hvd.size() * BATCHES
    return draw.normal(size=(rows, 6)).astype("f"), draw.normal(size=(rows, 1)).astype("f")


def mine(array):
    """This rank's rows of each batch."""
    return array.reshape(BATCHES, hvd.size(), SHARE, -1)[:, hvd.rank()].reshape(BATCHES * SHARE, -1)


def fit(model, part, share: int, **options):
    x, y = (part(array) for array in data())
    return model.fit(x, y, batch_size=share, epochs=EPOCHS, shuffle=False, verbose=0, **options).history


def check(make, *, alone=None, run_eagerly: bool = False, tolerance: float = 1e-5, **options) -> None:
    model, single = model_of(seed=hvd.rank()), model_of(seed=0)
    optimizer = make()
    assert hvd.DistributedOptimizer(optimizer, **options) is optimizer
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], run_eagerly=run_eagerly)
    single.compile(optimizer=(alone or make)(), loss="mse", metrics=["mae"])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = fit(model, mine, SHARE, callbacks=callbacks)
    expected = fit(single, lambda array: array, SHARE * hvd.size())
    for ours, theirs in zip(model.weights, single.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=tolerance, err_msg=ours.path)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=max(1e-5, tolerance), err_msg=name)
    everyone = hvd.allgather_object([weight.numpy() for weight in model.weights])
    assert all(np.array_equal(one, other) for rank in everyone for one, other in zip(rank, everyone[0], strict=True))


def momentum(rate: float = 0.02, **options):
    return keras.optimizers.SGD(rate, momentum=0.9, **options)


def check_embedding() -> None:
    """Rows of a table, which TensorFlow's gradients are; in a step that is to be compiled."""
    draw = np.random.default_rng(2)
    ids = draw.integers(0, 10, (SHARE * hvd.size(), 3)).astype("int32")
    y = draw.normal(size=(SHARE * hvd.size(), 1)).astype("f")
    models = []
    for is_distributed in (True, False):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.layers.Input((3,), dtype="int32"), keras.layers.Embedding(10, 4), keras.layers.Flatten()]
        )
        model.add(keras.layers.Dense(1))
        optimizer = hvd.DistributedOptimizer(momentum()) if is_distributed else momentum()
        model.compile(
            optimizer=optimizer, loss="mse", jit_compile=is_distributed and keras.backend.backend() != "torch"
        )
        rows = slice(hvd.rank() * SHARE, (hvd.rank() + 1) * SHARE) if is_distributed else slice(None)
        for _ in range(3):
            model.train_on_batch(ids[rows], y[rows])
        models.append(model)
    for ours, theirs in zip(models[0].weights, models[1].weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-5, err_msg=ours.path)


def check_half_precision() -> None:
    """One rank's overflow is everyone's: all skip the step, and halve the scale."""
    model = model_of(0, "mixed_float16")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=256.0))
    model.compile(optimizer=optimizer, loss="mse")
    model.train_on_batch(*(mine(array)[:SHARE] for array in data()))
    weights = [weight.numpy() for weight in model.weights]
    everyone = hvd.allgather_object(weights)
    assert all(np.array_equal(one, other) for rank in everyone for one, other in zip(rank, everyone[0], strict=True))
    overflow = np.full((SHARE, 6), 1.0 if hvd.rank() else np.inf, np.float32)
    model.train_on_batch(overflow, np.ones((SHARE, 1), np.float32))
    assert float(optimizer.dynamic_scale.numpy()) == 128.0
    assert all(np.array_equal(weight.numpy(), before) for weight, before in zip(model.weights, weights, strict=True))
    around = model_of(0)
    around.compile(optimizer=keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(momentum())), loss="mse")
    with pytest.raises(OptionError, match="loss scale around"):
        around.train_on_batch(np.ones((2, 6), np.float32), np.ones((2, 1), np.float32))


class Rates(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_begin(self, batch, logs=None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))


def check_learning_rates() -> None:
    model, size, rates = model_of(0), hvd.size(), Rates()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), loss="mse")
    full = 0.1 * size
    callbacks = [
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=full, warmup_epochs=2, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(initial_lr=full, multiplier=0.5, start_epoch=2),
        rates,
    ]
    history = fit(model, mine, SHARE, callbacks=callbacks)
    steps = 2 * BATCHES
    expected = [full / size * (1 + (step + 1) / steps * (size - 1)) for step in range(steps)] + [full / 2] * BATCHES
    np.testing.assert_allclose(rates.rates, expected, rtol=1e-6)
    np.testing.assert_allclose(history["lr"], [expected[BATCHES - 1], full, full / 2], rtol=1e-6)


def check_saved_models() -> None:
    model = model_of(0)
    model.compile(optimizer=hvd.DistributedOptimizer(momentum()), loss="mse")
    fit(model, mine, SHARE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        plain, distributed = keras.saving.load_model(path), hvd.load_model(path)
    for loaded in (plain, distributed):
        assert isinstance(loaded.optimizer, keras.optimizers.SGD)
        assert all(
            np.array_equal(ours.numpy(), theirs.numpy())
            for ours, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True)
        )
    fit(model, mine, SHARE)
    fit(distributed, mine, SHARE)
    assert all(
        np.array_equal(ours.numpy(), theirs.numpy())
        for ours, theirs in zip(distributed.weights, model.weights, strict=True)
    )
    assert type(plain.optimizer) is type(momentum())


def check_own_loop() -> None:
    """`apply_gradients` outside of `fit`."""
    model, optimizer = model_of(0), hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    grads = [keras.ops.full(weight.shape, hvd.rank() + 1.0) for weight in model.trainable_variables]
    before = [weight.numpy() for weight in model.trainable_variables]
    optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    mean = (hvd.size() + 1) / 2
    for weight, old in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_allclose(weight.numpy(), old - mean, rtol=1e-6)


def check_refusals() -> None:
    for options, where in [
        ({"op": "max"}, "op"),
        ({"compression": hvd.Compression.top_k(0.1)}, "compression"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"gradient_predivide_factor": 2.0, "op": "sum"}, "gradient_predivide_factor"),
    ]:
        with pytest.raises(OptionError) as caught:
            hvd.DistributedOptimizer(momentum(), **options)
        assert caught.value.where == where
    for optimizer in ("sgd", hvd.DistributedOptimizer(momentum())):
        with pytest.raises(OptionError) as caught:
            hvd.DistributedOptimizer(optimizer)
        assert caught.value.where == "optimizer"
    with pytest.raises(OptionError, match="momentum"):
        hvd.callbacks.LearningRateWarmupCallback(0.1, momentum_correction=True)
    untouched = model_of(0)
    untouched.compile(optimizer=momentum(), loss="mse")
    untouched.fit(*data(), verbose=0)  # Keras' own step, at each rank for itself


def main() -> None:
    hvd.init()
    assert jax.process_count() == hvd.size()
    check(momentum)
    check(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1), gradient_predivide_factor=2.0)
    check(lambda: keras.optimizers.SGD(0.01), compression=hvd.Compression.bf16, tolerance=5e-3)
    check(momentum, op="sum", alone=lambda: momentum(0.02 * hvd.size()))
    accumulating = {"backward_passes_per_step": 2}
    check(
        momentum,
        alone=lambda: momentum(gradient_accumulation_steps=2),
        average_aggregated_gradients=True,
        **accumulating,
    )
    check(
        momentum,
        alone=lambda: momentum(0.04, gradient_accumulation_steps=2),
        run_eagerly=True,
        **accumulating,
    )
    check_embedding()
    check_half_precision()
    check_learning_rates()
    check_saved_models()
    check_own_loop()
    check_refusals()
    hvd.shutdown()


if __name__ == "__main__":
    main()
