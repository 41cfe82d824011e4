"""An executor that gets no more memory: what asked for it fails by name, and the executor goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import shardwright as sw
from tests.client.clusters import start_nodes

pytestmark = pytest.mark.cluster

#: Bytes that the executor may still take, and floats of an array that it cannot hold.
LEFT_BYTES, TOO_MANY = 512 << 20, 1 << 28


@pytest.fixture(scope="module")
def short_of_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, sw.Session]]:
    """The executor of a server, and a client that has run a step before the limit came."""
    (server,), session = start_nodes(tmp_path_factory.mktemp("memory"), [1])
    small_step(session)
    (executor,) = server.executors()
    limit = executor.memory_info().vms + LEFT_BYTES
    executor.rlimit(psutil.RLIMIT_AS, (limit, limit))
    yield executor, session
    session._state.close_quietly()
    server.stop()


def small_step(session: sw.Session) -> None:
    np.testing.assert_array_equal(session.parallelize(lambda x: x * 2)(np.arange(4.0)), [0, 2, 4, 6])


@pytest.fixture(autouse=True)
def _the_executor_goes_on(short_of_memory: tuple[psutil.Process, sw.Session]) -> Iterator[None]:
    executor, session = short_of_memory
    yield
    small_step(session)
    assert executor.is_running()
    assert session.status().nodes[0].state == "ready"


def test_a_step_whose_result_does_not_fit(short_of_memory: tuple[psutil.Process, sw.Session]) -> None:
    def spread(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (TOO_MANY,)) + 1

    with pytest.raises(sw.ExecutionError, match="Out of memory") as failure:
        short_of_memory[1].parallelize(spread)(np.float32(1)).block_until_ready()
    assert failure.value.where.startswith("step ")
    assert "batch smaller" in failure.value.remedy


def test_a_step_whose_results_do_not_fit_besides_those_it_takes_over(
    short_of_memory: tuple[psutil.Process, sw.Session],
) -> None:
    def train(n: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return n + 1, jnp.broadcast_to(x, (TOO_MANY,)) * 3

    n = short_of_memory[1].parallelize(lambda x: x * 2)(np.ones(4, np.float32))
    step = short_of_memory[1].parallelize(train, donate_argnums=0)
    with pytest.raises(sw.ExecutionError, match="Out of memory"):
        step(n, np.float32(1))[0].block_until_ready()


def test_a_save_that_cannot_be_copied(short_of_memory: tuple[psutil.Process, sw.Session], tmp_path: Path) -> None:
    session = short_of_memory[1]
    half = session.parallelize(lambda x: jnp.broadcast_to(x, (LEFT_BYTES * 2 // 3 // 4,)) + 1)(np.float32(1))
    half.block_until_ready()
    with pytest.raises(sw.ExecutionError, match="Out of memory") as failure:
        session.save({"w": half}, tmp_path / "run", step=1).wait()
    assert "drop arrays" in failure.value.remedy
    assert session.checkpoints(tmp_path / "run") == ()
    assert not any((tmp_path / "run").iterdir())
    np.testing.assert_array_equal(session.parallelize(lambda x: x[:4])(half), 2)


def test_an_upload_that_does_not_fit(short_of_memory: tuple[psutil.Process, sw.Session]) -> None:
    with pytest.raises(sw.ResourceLimitError, match="out of memory") as refusal:
        short_of_memory[1].parallelize(lambda x: x[0])(np.ones(TOO_MANY, np.float32)).block_until_ready()
    assert "hand over less" in refusal.value.remedy
