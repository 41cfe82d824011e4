"""The coordination service of jax.distributed in the launcher: ranks meet there, and rank 0 is like any other."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwright.errors import LaunchError
from shardwright.launch import service
from shardwright.launch.service import CoordinationService
from shardwright.xla import private
from tests.launch.jobs import launched, run_job

#: Joins the job as rank: no rank starts a service, which is in the launcher.
JOIN = """
import os, signal, sys, time
from unittest import mock
import jax, jax.numpy as jnp, numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

rank, size = int(os.environ["SHARDWRIGHT_RANK"]), int(os.environ["SHARDWRIGHT_SIZE"])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
with mock.patch.object(distributed._jax, "get_distributed_runtime_service"):
    jax.distributed.initialize(os.environ["SHARDWRIGHT_COORDINATOR"], size, rank)
mesh = Mesh(np.array(jax.devices()), "ranks")
part = np.full((1,), rank + 1.0, np.float32)
whole = jax.make_array_from_single_device_arrays(
    (size,), NamedSharding(mesh, P("ranks")), [jax.device_put(part, jax.local_devices()[0])])
total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(whole)
print("sum", float(total.addressable_data(0)), flush=True)
"""

#: Rank 0 dies once the other has joined; the other still asks the service, then waits to be ended.
LOSE_RANK_0 = (
    JOIN
    + """
client = distributed.global_state.client
if rank == 0:
    client.wait_at_barrier("both", 20_000)
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), os._exit(0)))
client.wait_at_barrier("both", 20_000)
time.sleep(0.2)
client.key_value_set("alive", "yes")
print("service says", client.blocking_key_value_get("alive", 5_000), flush=True)
while True:
    time.sleep(0.05)
"""
)

ONE_DEVICE = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}


@pytest.mark.slow
def test_two_ranks_sum(tmp_path: Path) -> None:
    (tmp_path / "join.py").write_text(JOIN)
    code, out, err = run_job("-np", "2", "python", "join.py", folder=tmp_path, environment=ONE_DEVICE)
    assert code == 0, err
    sums = [line for line in out.splitlines() if "sum" in line]  # Gloo writes lines of its own
    assert sorted(sums) == ["[0]<stdout>:sum 3.0", "[1]<stdout>:sum 3.0"]


@pytest.mark.slow
def test_losing_rank_0_is_like_losing_any_other(tmp_path: Path) -> None:
    (tmp_path / "lose.py").write_text(LOSE_RANK_0)
    with launched("-np", "2", "python", "lose.py", folder=tmp_path, environment=ONE_DEVICE) as job:
        job.wait_for_line("sum")
        job.wait_for_line("sum")
        start = time.monotonic()
        code, _, err = job.result()
        assert time.monotonic() - start < 5.0
        assert job.processes() == []
    assert code == 137
    assert "rank 0 ended with SIGKILL" in err


@pytest.mark.slow
def test_the_service_outlives_rank_0(tmp_path: Path) -> None:
    """Without a launcher that ends the others, the survivor goes on."""
    (tmp_path / "lose.py").write_text(LOSE_RANK_0)
    with CoordinationService("127.0.0.1", 2) as running:
        ranks = [
            subprocess.Popen(
                [sys.executable, "lose.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                env={**os.environ, **ONE_DEVICE, "SHARDWRIGHT_COORDINATOR": running.address,
                     "SHARDWRIGHT_SIZE": "2", "SHARDWRIGHT_RANK": str(rank)},
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            assert ranks[0].wait(60) == -9
            assert ranks[1].stdout is not None
            assert next(line for line in ranks[1].stdout if "service" in line) == "service says yes\n"
            assert ranks[1].poll() is None
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()


def test_a_port_cannot_be_lost_between_its_choice_and_its_use() -> None:
    with service.reserve_port("127.0.0.1") as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        running = private.start_coordination_service(f"127.0.0.1:{port}", 1)
        for _ in range(20):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        running.shutdown()


def test_services_side_by_side_have_ports_of_their_own() -> None:
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(CoordinationService("127.0.0.1", 1)).address for _ in range(10)]
    assert len(set(addresses)) == 10


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(LaunchError, match="cannot listen") as raised:
        CoordinationService("198.51.100.7", 1)
    assert raised.value.where == "198.51.100.7"
    assert "--coordinator-address" in raised.value.remedy


def test_after_the_end_nothing_listens() -> None:
    with CoordinationService("127.0.0.1", 1) as running:
        port = int(running.address.rpartition(":")[2])
    with pytest.raises(OSError, match=r"[Rr]efused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)
