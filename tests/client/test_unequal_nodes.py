"""A pipeline on two workers that have different numbers of devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.clusters import start_nodes
from tests.client.pipeline_training import BAR, MODELS, train

pytestmark = pytest.mark.cluster


def test_stages_on_nodes_of_four_and_two_devices(tmp_path: Path) -> None:
    """Each node is a stage, on a mesh of its own; every step is that of one device."""
    servers, session = start_nodes(tmp_path, (4, 2))
    try:
        step, loss, tensor = train(session, MODELS["gpt2, tied"](3), stages=2, micro_batches=4, schedule="1f1b")
        assert [stage.mesh.device_count for stage in step.plan.stages] == [4, 2]
        assert [stage.first_device for stage in step.plan.stages] == [0, 4]
        assert loss <= BAR
        assert tensor <= BAR
    finally:
        session.close()
        for server in servers:
            server.stop()
