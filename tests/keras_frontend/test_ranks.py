"""Keras between ranks, in real processes: optimizers and callbacks against one process on the whole batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.ranks.elastic_keras import check_killed_rank
from tests.ranks.processes import assert_passed, run_ranks


@pytest.mark.cluster
def test_two_ranks_equal_one_process_on_the_whole_batch() -> None:
    assert_passed(run_ranks("tests.ranks.check_keras_training", 2, timeout_s=900, KERAS_BACKEND="jax"))


@pytest.mark.cluster
@pytest.mark.parametrize("victim", [0, 2])
def test_an_elastic_fit_goes_on_where_it_was(victim: int) -> None:
    check_killed_rank(victim)


def test_a_model_s_state_is_copied_and_put_back() -> None:
    from shardwright.ranks import host_copies
    from tests.ranks.elastic_keras import GLOBAL_BATCH, data_of, final_weights, model_of

    model, other = model_of(0), model_of(1)
    for each in (model, other):
        each.compile(keras.optimizers.Adam(0.02), "mse")
    x, y = (array.reshape(-1, array.shape[-1]) for array in data_of(0))
    model.fit(x, y, batch_size=GLOBAL_BATCH, verbose=0)
    saved = host_copies.copy_to_host(model)
    again = host_copies.unpack(host_copies.pack(saved, "model"), host_copies.copy_to_host(other), "model")
    assert host_copies.restore(again, other) is other
    for each in (model, other):
        each.fit(x, y, batch_size=GLOBAL_BATCH, shuffle=False, verbose=0)
    np.testing.assert_array_equal(final_weights(model), final_weights(other))


def test_a_model_that_is_not_built_says_so() -> None:
    from shardwright.errors import OptionError
    from shardwright.ranks import host_copies
    from tests.ranks.elastic_keras import model_of

    model, saved = keras.Sequential([keras.layers.Dense(1)]), host_copies.copy_to_host(model_of(0))
    with pytest.raises(OptionError, match="variables of model") as caught:
        host_copies.restore(saved, model)
    assert "build the model" in caught.value.remedy


def test_a_compressor_of_one_s_own_is_refused_where_gradients_are_only_cast() -> None:
    import shardwright.horovod.keras as hvd

    class Halved:
        @staticmethod
        def compress(tensor):
            return tensor / 2, 2

        @staticmethod
        def decompress(tensor, context):
            return tensor * context

    with pytest.raises(ValueError, match="compression"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=Halved)
