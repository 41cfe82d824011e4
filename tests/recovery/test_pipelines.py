"""Pipelines survive losses like one program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shardwright as sw
from tests.client.clusters import running_nodes
from tests.client.pipeline_training import SGD
from tests.planner.pipeline import cases
from tests.server.raw_client import Server

pytestmark = pytest.mark.cluster

FUNCTION, ARGUMENTS, DONATED = cases.mlp(optimizer=SGD)


def losses(session: sw.Session, steps: int, after_call: Callable[[int], Any], **options: Any) -> list[float]:
    step = session.parallelize(FUNCTION, donate_argnums=DONATED, stages=2, micro_batches=4, **options)
    params, state, *batch = ARGUMENTS
    found = []
    for number in range(1, steps + 1):
        params, state, loss = step(params, state, *batch)
        found.append(loss)
        after_call(number)
    return [float(np.asarray(loss)) for loss in found]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Server], sw.Session]]:
    with running_nodes(tmp_path_factory.mktemp("pipelines"), [2, 2]) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def expected(cluster: tuple[list[Server], sw.Session]) -> list[float]:
    """Of a run that nothing disturbs."""
    with connect(cluster) as session:
        return losses(session, 20, lambda number: None)


def connect(cluster: tuple[list[Server], sw.Session]) -> sw.Session:
    return sw.connect(cluster[1]._state.master.address)


@pytest.mark.parametrize("node", [0, 1])
def test_each_stage_may_be_lost(cluster: tuple[list[Server], sw.Session], expected: list[float], node: int) -> None:
    def disturb(number: int) -> None:
        if number in (6, 17):
            for executor in cluster[0][node].executors():
                executor.kill()

    with connect(cluster) as session:
        assert losses(session, 20, disturb, snapshot_every=4) == expected
        assert 1 <= len(session.recoveries) <= 2
