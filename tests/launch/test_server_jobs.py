"""`shardwright run --servers`: one command instead of one terminal a node."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import shardwright as sw
from shardwright.cli import main
from shardwright.server.security import free_port
from tests.launch.jobs import LaunchedJob, launched, run_job
from tests.recovery.training import run


def cluster_file(folder: Path) -> tuple[Path, str]:
    """Two nodes of one CPU device, on loopback; the file and the master's address."""
    nodes = [{"ip": "127.0.0.1", "port": free_port("127.0.0.1"), "devices": 1} for _ in range(2)]
    path = folder / "cluster.json"
    path.write_text(json.dumps({"master": nodes[0], "workers": nodes[1:]}))
    return path, f"127.0.0.1:{nodes[0]['port']}"


def wait_until_ready(address: str) -> None:
    until = time.monotonic() + 60
    host, _, port = address.rpartition(":")
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.1)


@pytest.mark.cluster
def test_the_servers_of_a_cluster_take_steps_until_they_are_stopped(tmp_path: Path) -> None:
    path, address = cluster_file(tmp_path)
    with launched("--servers", str(path), "--output-dir", str(tmp_path / "logs")) as job:
        wait_until_ready(address)
        with sw.connect(address) as session:
            step = session.parallelize(lambda x: x * 2.0 + 1.0)
            np.testing.assert_array_equal(np.asarray(step(np.arange(8, dtype=np.float32))), np.arange(8) * 2.0 + 1.0)
        job.process.send_signal(signal.SIGINT)
        code, _, err = job.result()
        job.gone_after_s(1.0)
    assert code == 130
    assert f"[0 {address}]<stderr>:" in err
    assert (tmp_path / "logs" / "task.1.stderr").exists()


@pytest.mark.cluster
def test_killed_servers_are_started_again_and_training_goes_on(tmp_path: Path) -> None:
    path, address = cluster_file(tmp_path)
    options = ("--", "--state-dir", str(tmp_path / "state"))
    with launched("--servers", str(path), *options) as job:
        wait_until_ready(address)
        with sw.connect(address) as alone:
            undisturbed = run(alone, 16)

        def disturb(number: int) -> None:
            if number in (5, 11):
                server_of(job, path, task=1 if number == 5 else 0).kill()

        with sw.connect(address, snapshot_every=4) as protected:
            outcome = run(protected, 16, after_call=disturb)
            assert protected.recoveries  # of the worker; executors outlive the master
        job.process.send_signal(signal.SIGINT)
        code, _, err = job.result()
        job.gone_after_s(3.0)
    assert outcome.losses == undisturbed.losses  # bit for bit
    assert outcome.count == undisturbed.count
    assert code == 130
    for task in (0, 1):
        assert f"shardwright run: task {task} on 127.0.0.1 ended with SIGKILL; it is started again in 1 s" in err


def server_of(job: LaunchedJob, path: Path, *, task: int) -> psutil.Process:
    """The server that the launcher has started; a durable master's node has a process of its own below it."""
    words = ["shardwright.server", str(path), str(task)]
    servers = [process for process in job.processes() if process.cmdline()[2:5] == words]
    (server,) = [process for process in servers if process.parent() not in servers]
    return server


@pytest.mark.cluster
def test_a_server_that_cannot_start_ends_the_others(tmp_path: Path) -> None:
    path, _ = cluster_file(tmp_path)
    path.write_text(path.read_text().replace("{", '{"security": {"token_file": "none"}, ', 1))
    code, _, err = run_job("--servers", str(path))
    assert code == 1
    assert "token" in err
    assert "error: 127.0.0.1: task " in err


def test_a_bad_cluster_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--servers", str(tmp_path / "none.json")]) == 1
    assert "none.json: the file does not exist" in capsys.readouterr().err


def test_a_dry_run_shows_a_server_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = cluster_file(tmp_path)
    assert main(["run", "--servers", str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    for task in (0, 1):
        assert f"-m shardwright.server {path} {task}\n" in out
    assert main(["run", "--servers", str(path), "--dry-run", "--", "--drain-timeout", "7", "--grace", "9"]) == 0
    assert f"-m shardwright.server {path} 1 --drain-timeout 7 --grace 9\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--servers", "c.json", "-np", "2"), "--servers takes its hosts from the cluster file"),
        (("--servers", "c.json", "true"), "take no command"),
        (("--check", "--servers", "c.json"), "two different things"),
        (
            ("--servers", "c.json", "--", "--drain-timeout", "soon"),
            "--drain-timeout: 'soon' is not a number of seconds",
        ),
        (("--servers", "c.json", "--", "--preemption-notice", "ftp://x/y"), "neither the path of a file nor"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["run", *arguments])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
