"""What `shardwright status` shows of a reply, and live on a terminal of a real server."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from shardwright.cli import status_view
from shardwright.cli.app import main
from shardwright.proto.v1 import master_pb2, operators_pb2
from tests.server.raw_client import ROOT, RawClient, Server, embedded, wait_until
from tests.server.test_processes import free_port

GIB = 1 << 30


def reply() -> master_pb2.StatusReply:
    """Of a cluster that hangs: a healthy node and a silent one, a session at work and one without a client."""
    host = operators_pb2.HostFigures(memory_bytes=64 * GIB, available_bytes=16 * GIB, snapshot_bytes=2 * GIB)
    device = operators_pb2.DeviceFigures(position=3, used_bytes=60 * GIB, limit_bytes=80 * GIB, peak_bytes=70 * GIB)
    return master_pb2.StatusReply(
        state="stalled",
        waiting_for="step 7 of session 1a2b3c4d, 12 s so far",
        cluster_name="prod",
        platform="cuda",
        server_version="9.9",
        uptime_s=7200,
        planning=master_pb2.QueueStatus(running=2, waiting=5),
        nodes=[
            master_pb2.NodeStatus(
                node=master_pb2.Node(index=0, device_count=1), state="ready", generation=4, host=host, executor_exits=3,
                executor=operators_pb2.ExecutorFigures(devices=[device]), executor_pid=4242,
            ),
            master_pb2.NodeStatus(
                node=master_pb2.Node(index=1, device_count=1), state="ready", generation=4, executor_silent_s=8.0
            ),
        ],
        sessions=[
            master_pb2.SessionStatus(
                session_id="1a2b3c4d", last_step=7, array_count=9, array_bytes=3 * GIB, executable_count=2,
                running_steps=1, queued_steps=4, steps_per_s=12.5, is_connected=True, snapshot=6,
                snapshot_bytes=6 * GIB, snapshot_age_s=200,
            ),
            master_pb2.SessionStatus(session_id="ffffffff", idle_s=42),
        ],
    )  # fmt: skip


def test_lines_say_what_an_operator_asks() -> None:
    first, waiting, queues, node, silent, session, other = status_view.as_lines(reply())
    assert first == "prod: stalled (server 9.9, cuda)"
    assert waiting == "waiting for: step 7 of session 1a2b3c4d, 12 s so far"
    assert queues == "plans: 2 running, 5 waiting"
    assert node.startswith(
        "node 0: ready, 1 devices, 60.0 GiB (75 %) on devices, 16.0 GiB of 64.0 GiB of the host free"
    )
    assert node.endswith("3 executors ended")
    assert silent == "node 1: ready, 1 devices"
    assert session == (
        "session 1a2b3c4d: step 7, 9 arrays, 3.00 GiB, 2 programs; 1 steps running, 4 waiting; 12.5 steps/s; "
        "snapshot of step 6, 6.00 GiB in host memory, 3 min old"
    )
    assert other.endswith("no client, idle for 42 s")


def test_a_session_that_a_loss_would_take_is_named() -> None:
    shown = reply()
    shown.sessions[0].protection.is_wanted = True
    assert "not protected: until its next snapshot is complete" in status_view.as_lines(shown)[-2]
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(status_view.as_tables(shown))
    assert "not protected" in console.export_text()
    assert [each["protected"] for each in status_view.as_dict(shown)["sessions"]] == [False, None]
    shown.sessions[0].protection.is_ready = True
    assert "not protected" not in "\n".join(status_view.as_lines(shown))
    assert status_view.as_dict(shown)["sessions"][0]["protected"]


def test_tables_have_it_too() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(status_view.as_tables(reply()))
    shown = console.export_text()
    for text in (
        "prod  stalled", "up 2.0 h", "waiting for: step 7", "2 running, 5 waiting", "60.0 GiB (75 %)",
        "16.0 GiB of 64.0 GiB", "node 1: silent for 8 s", "1a2b3c4d", "12.5", "3 min", "1+4", "away 42 s",
    ):  # fmt: skip
        assert text in shown


def test_json_keeps_its_names() -> None:
    shown = json.loads(json.dumps(status_view.as_dict(reply())))
    assert shown.keys() >= {"state", "waiting_for", "server_version", "cluster", "nodes", "sessions"}
    assert shown["nodes"][0].keys() >= {"index", "state", "generation", "devices", "detail"}
    assert shown["sessions"][0].keys() >= {
        "session", "last_step", "arrays", "array_bytes", "programs", "snapshot", "snapshot_bytes",
    }  # fmt: skip
    assert shown["nodes"][0]["device_memory"] == [
        {"device": 3, "used_bytes": 60 * GIB, "limit_bytes": 80 * GIB, "peak_bytes": 70 * GIB}
    ]
    assert shown["sessions"][0]["queued_steps"] == 4
    assert shown["planning"] == {"running": 2, "waiting": 5}


# ---- a real server -----------------------------------------------------------------
@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    path = tmp_path_factory.mktemp("status") / "cluster.json"
    path.write_text(json.dumps({"name": "live", "master": {"ip": "127.0.0.1", "port": port, "devices": 1}}))
    server = Server(str(path), "0")
    client = RawClient(f"127.0.0.1:{port}")
    client.open_soon()
    yield client.channel_address
    client.close()
    server.stop()


@pytest.mark.cluster
def test_watching_on_a_terminal_and_without(address: str) -> None:
    command = [sys.executable, "-m", "shardwright.cli", "status", address, "--watch", "--interval", "0.2"]
    terminal, other = pty.openpty()
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=other, stdout=other, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    )
    os.close(other)
    shown = b""

    def has_shown() -> bool:
        nonlocal shown
        if select.select([terminal], [], [], 0)[0]:
            shown += os.read(terminal, 1 << 16)
        return shown.count(b"Ctrl-C ends this") >= 3 and b"live" in shown and b"away " in shown

    wait_until(has_shown)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    os.close(terminal)
    piped = subprocess.Popen([*command, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert piped.stdout is not None
    looks = [json.loads(piped.stdout.readline()) for _ in range(2)]
    piped.send_signal(signal.SIGINT)
    assert piped.wait(20) == 0
    assert [look["state"] for look in looks] == ["ready", "ready"]
    assert looks[1]["uptime_s"] > looks[0]["uptime_s"]


@pytest.mark.cluster
def test_once(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", address]) == 0
    first, node, session, person = capsys.readouterr().out.splitlines()
    assert first.startswith("live: ready")
    assert node.startswith("node 0: ready, 1 devices")
    assert session.startswith("session ")
    assert ": 1 of 48 sessions, 0 B in arrays, 0 B of 3.00 GiB in programs" in person
    deadline_s = time.monotonic() + 30
    while True:
        assert main(["status", address, "--json"]) == 0
        (shown,) = json.loads(capsys.readouterr().out)["nodes"]
        if shown["device_memory"] and shown["memory_bytes"]:
            break
        assert time.monotonic() < deadline_s
    assert shown["executor_pid"] > 0


def test_the_wrong_port(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["status"], ["status", "--watch"], ["logs"]):
        assert main([*command, f"127.0.0.1:{free_port()}"]) == 1
        assert "error: 127.0.0.1:" in capsys.readouterr().err


@pytest.mark.cluster
def test_logs_ask_for_the_token(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for _, client in embedded(1):
        assert main(["logs", client.channel_address]) == 1
        assert "carries no valid token" in capsys.readouterr().err
        monkeypatch.setenv("SHARDWRIGHT_TOKEN", str(client.token))
        assert main(["logs", client.channel_address]) == 0
        assert "master listening on" in capsys.readouterr().out
