"""Pipelines survive losses like one program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwright as sw
from tests.client.clusters import start_nodes
from tests.client.pipeline_training import SGD
from tests.planner.pipeline import cases
from tests.server.raw_client import Server

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("node", [0, 1])
def test_each_stage_may_be_lost(tmp_path: Path, node: int) -> None:
    servers, session = start_nodes(tmp_path, [2, 2])

    def disturb(number: int) -> None:
        if number in (6, 17):
            for executor in servers[node].executors():
                executor.kill()

    try:
        expected = losses(session, 20, lambda number: None)
        assert losses(session, 20, disturb, snapshot_every=4) == expected
        assert 1 <= len(session.recoveries) <= 2
    finally:
        stop(servers, session)


def stop(servers: list[Server], session: sw.Session) -> None:
    session._state.close_quietly()
    for server in servers:
        server.stop()
