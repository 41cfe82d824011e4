"""A dataset function that ends its process, again and again: it is stopped, and others keep what they have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import shardwright as sw
from tests.client.clusters import running_nodes
from tests.datasets import sources
from tests.datasets.training import MODULE
from tests.recovery.training import assert_same, run
from tests.server.raw_client import Server

pytestmark = pytest.mark.cluster

FUNCTION = f"{MODULE}:ends_its_process"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Server], sw.Session]]:
    with running_nodes(tmp_path_factory.mktemp("ended"), [1], "--dataset-modules", MODULE) as nodes:
        yield nodes


@pytest.mark.parametrize("how", ["exit", "SIGSEGV"])
def test_at_the_first_batch(cluster: tuple[list[Server], sw.Session], how: str) -> None:
    _, session = cluster
    address = session._state.master.address
    with sw.connect(address) as alone:
        expected = run(alone, 12)
    before = session.status().nodes[0].generation
    with sw.connect(address) as killer, sw.connect(address) as protected:

        def disturb(number: int) -> None:
            if number == 6:
                with pytest.raises(sw.RepeatedLossError) as caught:
                    killer.dataset(FUNCTION, batch=4, at=0, how=how)
                assert f"batch 0 of the dataset {FUNCTION}" in caught.value.message
                assert killer._state.info.session_id[:8] in caught.value.message

        assert_same(run(protected, 12, snapshot_every=4, after_call=disturb), expected)
        assert protected.recoveries
        assert session.status().nodes[0].generation == before + 5
        with pytest.raises(sw.RepeatedLossError):
            killer.dataset(FUNCTION, batch=8, at=0, how=how)
        assert killer.parallelize(lambda x: x + 1)(np.ones(4))[0] == 2, "its session goes on"
        data = killer.dataset(f"{MODULE}:batches", batch=4)
        np.testing.assert_array_equal(next(data)["x"], sources.whole_batch(0, 4, 0)["x"])
    assert session.status().nodes[0].generation == before + 5, "executors stop being killed"


def test_amid_a_training_that_restores_snapshots(cluster: tuple[list[Server], sw.Session]) -> None:
    _, session = cluster
    before = session.status().nodes[0].generation
    with sw.connect(session._state.master.address, snapshot_every=2) as killer:
        step = killer.parallelize(lambda total, x: total + x.sum())

        def train() -> None:
            total = np.zeros((), np.float32)
            for batch in killer.dataset(FUNCTION, batch=4, at=5, how="SIGKILL"):
                total = step(total, batch["x"])

        with pytest.raises(sw.RepeatedLossError, match=f"batch 5 of the dataset {FUNCTION}"):
            train()
        # Each of the first deaths may come one batch later, as the readers read ahead.
        assert before + 5 <= session.status().nodes[0].generation <= before + 9
        assert session.parallelize(lambda x: x + 1)(np.ones(4))[0] == 2
