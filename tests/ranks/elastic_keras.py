"""Elastic training of a Keras model with `fit`, as a user writes it: a fixed global batch, a line a batch.

    KERAS_BACKEND=jax python -m tests.ranks.elastic_keras

Prints as `elastic_training` does; at the end the final weights as JSON.

`check_killed_rank` is the test of it, on Keras' backend of the process that calls it.
"""

from __future__ import annotations

import json
import os
import signal
import time

import keras
import numpy as np

import shardwright.horovod.keras as hvd
from shardwright import ranks
from tests.ranks.elastic_jobs import ElasticJob
from tests.ranks.elastic_training import say

GLOBAL_BATCH, BATCHES, EPOCHS = 12, 6, 4


def model_of(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])


def data_of(epoch: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(epoch)
    return (
        draw.normal(size=(BATCHES, GLOBAL_BATCH, 6)).astype("f"),
        draw.normal(size=(BATCHES, GLOBAL_BATCH, 1)).astype("f"),
    )


def final_weights(model: keras.Model) -> list[float]:
    return np.concatenate([weight.numpy().ravel() for weight in model.weights]).tolist()


def train_alone() -> list[float]:
    """What one process computes, with no ranks at all."""
    model = model_of(0)
    model.compile(keras.optimizers.Adam(0.02), "mse")
    for epoch in range(EPOCHS):
        x, y = (array.reshape(BATCHES * GLOBAL_BATCH, -1) for array in data_of(epoch))
        model.fit(x, y, batch_size=GLOBAL_BATCH, shuffle=False, verbose=0)
    return final_weights(model)


def check_killed_rank(victim: int) -> None:
    """Within an epoch: a rank is killed, the others go back to their last commit, and another one joins them."""
    expected = train_alone()
    options = ("--min-np", "2", "--max-np", "3", "--host-failures", "9", "--start-timeout", "150")
    with ElasticJob(*options, module="tests.ranks.elastic_keras", KERAS_BACKEND=keras.backend.backend()) as job:
        doomed = job.wait_for("step", "0", str(victim), "3", "8", timeout_s=200)
        os.kill(doomed.pid, signal.SIGKILL)
        up = job.wait_for("up", "1")
        assert int(up.words[3]) >= 7, "nothing but the last batch was lost"
        code, weights = job.finish(180)
        assert code == 0, "\n".join(job.log[-40:])
        assert len(weights) >= 2
        for each in weights:
            np.testing.assert_allclose(each, expected, atol=1e-5)


class Report(keras.callbacks.Callback):
    def __init__(self, state):
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch, logs=None):
        step = self.state.epoch * BATCHES + self.state.batch
        say("step", ranks.generation(), hvd.rank(), hvd.size(), step)
        time.sleep(0.1)


def main() -> None:
    say("begin")
    hvd.init()
    model = model_of(hvd.rank())  # the state makes them rank 0's
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), "mse")
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state), Report(state), hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state),
    ]  # fmt: skip

    @hvd.elastic.run
    def train(state):
        say("up", ranks.generation(), hvd.rank(), hvd.size(), state.epoch * BATCHES + state.batch)
        share = GLOBAL_BATCH // hvd.size()
        mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
        while state.epoch < EPOCHS:
            x, y = (array[state.batch :, mine] for array in data_of(state.epoch))
            model.fit(
                x.reshape(-1, 6), y.reshape(-1, 1), batch_size=share, shuffle=False, verbose=0,
                initial_epoch=state.epoch, epochs=state.epoch + 1, callbacks=callbacks,
            )  # fmt: skip

    train(state)
    say("done", json.dumps(final_weights(model)))


if __name__ == "__main__":
    main()
