"""Pipelines survive losses like one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardwright as sw
from tests.client.pipeline_training import SGD
from tests.planner.pipeline import cases
from tests.two_nodes import Running, TwoNodes

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
def expected(two_nodes: TwoNodes) -> list[float]:
    """Of a run that nothing disturbs."""
    with two_nodes.connect() as session:
        return losses(session, 20, lambda number: None)


@pytest.mark.parametrize("node", [0, 1])
def test_each_stage_may_be_lost(healed: Running, expected: list[float], node: int) -> None:
    servers, session = healed

    def disturb(number: int) -> None:
        if number in (6, 17):
            for executor in servers[node].executors():
                executor.kill()

    assert losses(session, 20, disturb, snapshot_every=4) == expected
    assert 1 <= len(session.recoveries) <= 2
