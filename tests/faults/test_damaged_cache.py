"""Servers whose plan cache was damaged while they did not run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwright.plans.plan import Plan
from tests.server.programs import inputs, layouts, reference, training_step
from tests.server.raw_client import RawClient, Server, inline

pytestmark = pytest.mark.cluster


def flip(data: bytes) -> bytes:
    """With wrong bits in the middle."""
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 0x55
    return bytes(damaged)


def overwrite(data: bytes) -> bytes:
    return np.random.default_rng(0).bytes(len(data))


def plan_and_train(cache: Path) -> Plan:
    """A new server plans the step, and computes it."""
    server = Server("--embedded", "2", environment={"SHARDWRIGHT_CACHE": str(cache)})
    try:
        ready = server.ready_line()
        client = RawClient(ready["address"], ready["token"])
        client.open()
        executable, plan = client.ready_program(training_step())
        given = [
            inline(at, array, layout)
            for at, (array, layout) in enumerate(zip(inputs(), layouts(plan)[0], strict=True), start=1)
        ]
        steps = client.steps()
        steps.send(1, executable, [1, 2, 3], [10, 11], read_back=[11], inline=given)
        np.testing.assert_allclose(steps.value(), reference(*inputs())[1], rtol=1e-5)
        client.close()
        server.hang_up()
        code, errors = server.end()
        assert code == 0
        assert "Traceback" not in errors
    finally:
        server.stop()
    return plan


def test_a_server_plans_anew_where_its_cache_is_damaged(tmp_path: Path) -> None:
    plan = plan_and_train(tmp_path)
    for damage in (overwrite, flip):
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files, "the server keeps its plans"
        for path in files:
            path.write_bytes(damage(path.read_bytes()))
        again = plan_and_train(tmp_path)
        assert again.parameters == plan.parameters
        assert again.outputs == plan.outputs
