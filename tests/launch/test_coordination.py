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
from shardwright.launch.hosts import Host, place_ranks
from shardwright.launch.job import rank_variables
from shardwright.launch.service import CoordinationService
from shardwright.xla import private
from tests.launch.jobs import launched, run_job
from tests.launch.programs import JOIN, LOSE_RANK_0, ONE_DEVICE


@pytest.mark.cluster
def test_two_ranks_sum(tmp_path: Path) -> None:
    (tmp_path / "join.py").write_text(JOIN)
    code, out, err = run_job("-np", "2", "python", "join.py", folder=tmp_path, environment=ONE_DEVICE)
    assert code == 0, err
    sums = [line for line in out.splitlines() if "sum" in line]  # Gloo writes lines of its own
    assert sorted(sums) == ["[0]<stdout>:sum 3.0", "[1]<stdout>:sum 3.0"]


@pytest.mark.cluster
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


@pytest.mark.cluster
def test_the_service_outlives_rank_0(tmp_path: Path) -> None:
    """Without a launcher that ends the others, the survivor goes on."""
    (tmp_path / "lose.py").write_text(LOSE_RANK_0)
    with CoordinationService("127.0.0.1", 2) as running:
        ranks = [
            subprocess.Popen(
                [sys.executable, "lose.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                env={**os.environ, **ONE_DEVICE, **rank_variables(place, 2, running.address)},
            )
            for place in place_ranks((Host(name="localhost", slots=2),), 2)
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


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match="Address already in use"):
            CoordinationService("127.0.0.1", 1, port)
    with CoordinationService("127.0.0.1", 1, port) as running:
        assert running.address == f"127.0.0.1:{port}"


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
