"""One server that serves two clients: its metrics, its log, its status."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.cli.app import main
from shardwright.proto.v1 import master_pb2
from tests.operators.servers import Scrape, log_of, run_steps
from tests.server.programs import training_step
from tests.server.raw_client import ROOT, RawClient, Server, wait_until
from tests.server.test_processes import free_port

pytestmark = pytest.mark.cluster


def answers(port: int) -> bool:
    """Whether metrics are served at a port."""
    try:
        Scrape(port)
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str, int]]:
    """A server of two devices, its address and its metrics' port."""
    port, metrics = free_port(), free_port()
    path = tmp_path_factory.mktemp("operators") / "cluster.json"
    path.write_text(json.dumps({"master": {"ip": "127.0.0.1", "port": port, "devices": 2}}))
    server = Server(str(path), "0", "--log-format", "json", "--metrics-port", str(metrics))
    wait_until(lambda: answers(metrics), timeout_s=60.0)
    yield server, f"127.0.0.1:{port}", metrics
    server.stop()


@pytest.fixture(scope="module")
def sessions(served: tuple[Server, str, int]) -> Iterator[list[sw.Session]]:
    """Two, which have run 12 and 8 steps."""
    deadline_s = time.monotonic() + 60
    found: list[sw.Session] = []
    while len(found) < 2:
        try:
            found.append(sw.connect(served[1]))
        except sw.ServerUnavailableError:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
    for session, count, factor in zip(found, (12, 8), (2.0, 4.0), strict=True):
        np.testing.assert_array_equal(run_steps(session, count, factor), np.full(4, factor**count, np.float32))
    yield found
    for session in found:
        session.close()


def test_metrics_are_what_was_done(served: tuple[Server, str, int], sessions: list[sw.Session]) -> None:
    wait_until(lambda: Scrape(served[2]).has("device_memory_used_bytes", node="0", device="1"))
    scrape = Scrape(served[2])
    assert scrape("steps_total", kind="step", result="succeeded") == 20
    assert scrape.total("steps_total") == 20
    assert scrape("step_seconds_count") == 20
    assert 0 < scrape("step_seconds_sum") < 60
    assert scrape("sessions") == scrape("sessions_connected") == scrape("sessions_opened_total") == 2
    assert scrape("programs_uploaded_total") == 2
    assert scrape("plans_total", result="succeeded") == 2
    assert scrape("compilations_total", result="succeeded") >= 1
    assert scrape("compilation_seconds_count") == scrape("compilations_total", result="succeeded")
    assert scrape("state", state="ready") == 1
    assert scrape.total("state") == 1
    assert scrape("nodes", state="ready") == scrape("generations_total") == 1
    assert scrape("executor_exits_total", node="0") == 0
    assert scrape("heartbeat_age_seconds", node="0", process="executor") < 30
    assert 0 < scrape("host_memory_available_bytes", node="0") < scrape("host_memory_bytes", node="0")
    assert scrape("executor_resident_bytes", node="0") > 1 << 20
    assert scrape("log_lines_dropped_total", node="0") == 0
    for queue in ("plans", "compilations", "steps"):
        assert scrape(f"{queue}_queued") == scrape(f"{queue}_running") == 0
    assert scrape.types["shardwright_step_seconds"] == "histogram"


def test_bytes_that_move_are_counted(served: tuple[Server, str, int], sessions: list[sw.Session]) -> None:
    before = Scrape(served[2])
    batch = np.ones(1 << 18, np.float32)  # too large to ride along with its step
    step = sessions[0].parallelize(lambda x: x + 1)
    np.testing.assert_array_equal(np.asarray(step(batch)), batch + 1)

    def moved() -> bool:
        now = Scrape(served[2])
        received = now("array_received_bytes_total", node="0") - before("array_received_bytes_total", node="0")
        sent = now("array_sent_bytes_total", node="0") - before("array_sent_bytes_total", node="0")
        return (received, sent) == (batch.nbytes, batch.nbytes)

    wait_until(moved)
    now = Scrape(served[2])
    assert now("uploads_total") - before("uploads_total") == 1
    assert now("upload_bytes_total") - before("upload_bytes_total") == batch.nbytes


def test_no_label_is_of_a_session(served: tuple[Server, str, int], sessions: list[sw.Session]) -> None:
    labels = {name for _, labels in Scrape(served[2]).samples for name, _ in labels if name != "le"}
    assert labels == {
        "device", "implementation", "jax_version", "kind", "major", "minor", "node", "patchlevel", "platform",
        "process", "result", "state", "version",
    }  # fmt: skip


def test_every_metric_is_in_the_table(served: tuple[Server, str, int], sessions: list[sw.Session]) -> None:
    types = {name: kind for name, kind in Scrape(served[2]).types.items() if name.startswith("shardwright_")}
    shown = {f"{name}_total" if kind == "counter" else name for name, kind in types.items()}
    table = (ROOT / "docs" / "operating.md").read_text().partition("\n## Metrics\n")[2].partition("Worth a call")[0]
    assert shown == set(re.findall(r"`(shardwright_\w+)", table))


def test_a_port_that_is_taken_is_said(served: tuple[Server, str, int], sessions: list[sw.Session]) -> None:
    server = Server("--embedded", "1", "--metrics-port", str(served[2]))
    code, errors = server.end()
    assert code == 1
    assert f"metrics cannot be served at 127.0.0.1:{served[2]}" in errors
    assert "--metrics-port" in errors


def test_steps_of_a_session_that_is_closed_are_cancelled(served: tuple[Server, str, int]) -> None:
    before = Scrape(served[2])
    client = RawClient(served[1])
    client.open()
    executable, _ = client.ready_program(training_step())
    steps = client.steps()
    for number in (1, 2):
        steps.send(number, executable, [1, 2, 3], [10 * number, 10 * number + 1])  # arguments that never come
    wait_until(lambda: Scrape(served[2])("steps_queued") == 2)
    client.call("CloseSession", master_pb2.CloseSessionRequest(session_id=client.session_id))
    client.close()
    after, labels = Scrape(served[2]), {"kind": "step", "result": "cancelled"}
    assert after("steps_total", **labels) - before("steps_total", **labels) == 2
    assert after("steps_queued") == 0


def test_snapshots_and_saves_are_counted(served: tuple[Server, str, int], tmp_path: Path) -> None:
    before = Scrape(served[2])
    with sw.connect(served[1], snapshot_every=2) as session:
        step = session.parallelize(lambda w: w + 1, donate_argnums=0)
        w = step.init(lambda: jnp.zeros(1 << 16, jnp.float32))
        while Scrape(served[2])("snapshots_total", result="succeeded") < 2:
            w = step(w)
        session.save({"w": w}, tmp_path, step=4).wait()
        now = Scrape(served[2])
        assert now("saves_total", result="succeeded") == now("steps_total", kind="save", result="succeeded") == 1
        assert now("save_bytes_total") - before("save_bytes_total") == 4 << 16
        assert now("save_seconds_count") == 1
        assert now("snapshot_seconds_count") == now("snapshots_total", result="succeeded")
        assert now("snapshot_bytes_total") >= 2 * (4 << 16)
        wait_until(lambda: Scrape(served[2])("snapshot_memory_bytes", node="0") >= 4 << 16)
        assert 0 < Scrape(served[2])("snapshot_age_seconds") < 600
        (mine,) = [each for each in session.status().sessions if each.snapshot]
        assert 0 < mine.snapshot_age_s < 600
    assert Scrape(served[2])("snapshot_age_seconds") == 0


def test_logs_of_one_session(
    served: tuple[Server, str, int], sessions: list[sw.Session], capsys: pytest.CaptureFixture[str]
) -> None:
    mine = sessions[1].info.session_id
    assert main(["logs", served[1], "--session", mine, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["session"] for line in lines} == {mine[:8]}
    openings = [line["message"] for line in lines if " opened by " in line["message"]]
    assert len(openings) == 1
    assert openings[0].startswith(f"session {mine[:8]}")
    assert [line["process"] for line in lines if line["message"].startswith("planned in")] == ["planner"]
    assert main(["logs", served[1], "--tail", "2", "--level", "info"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["logs", served[1], "--node", "5"]) == 0
    assert capsys.readouterr().out == ""


def test_every_line_of_the_log_is_json(served: tuple[Server, str, int], sessions: list[sw.Session]) -> None:
    ids = {session.info.session_id[:8] for session in sessions}
    for session in sessions:
        session.close()
    served[0].process.terminate()
    lines = log_of(served[0])
    for line in lines:
        assert {"time", "level", "process", "node", "pid", "message"} <= line.keys()
    assert {line["process"] for line in lines} >= {"master", "daemon", "executor", "planner"}
    assert {line["session"] for line in lines if "session" in line} >= ids
    assert any("it has drained" in line["message"] for line in lines)
