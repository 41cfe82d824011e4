"""Server processes from start to end: two nodes, every start that fails, Ctrl-C, expiry."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from shardwright.errors import ServerUnavailableError, SessionError, ShardwrightError
from shardwright.options.plan_options import PlanOptions
from shardwright.proto.v1 import master_pb2
from tests.server.programs import inputs, layouts, reference, training_step
from tests.server.raw_client import ROOT, RawClient, Server, all_gone, embedded, wait_until

Start = Callable[..., Server]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts server processes that end with the test."""
    with ExitStack() as stack:

        def run(*arguments: object, **more: dict[str, str]) -> Server:
            server = Server(*map(str, arguments), **more)
            stack.callback(server.stop)
            return server

        yield run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cluster_file(folder: Path, name: str = "cluster.json", **more: object) -> Path:
    """Two nodes of two CPU devices on free ports."""
    nodes = [{"ip": "127.0.0.1", "port": free_port(), "devices": 2} for _ in range(2)]
    path = folder / name
    path.write_text(json.dumps({"master": nodes[0], "workers": nodes[1:]} | more))
    return path


def connect(path: Path) -> RawClient:
    """A client with an open session, once the master listens."""
    master = json.loads(path.read_text())["master"]
    client = RawClient(f"{master['ip']}:{master['port']}")
    client.open_soon()
    return client


# ---- two nodes -------------------------------------------------------------------
@pytest.mark.cluster
@pytest.mark.parametrize("first", [0, 1])
def test_two_nodes_train_as_one_mesh_and_end_together(tmp_path: Path, start: Start, first: int) -> None:
    path = cluster_file(tmp_path)
    servers = {first: start(path, first)}
    time.sleep(0.3)
    servers[1 - first] = start(path, 1 - first)
    client = connect(path)
    assert [node.first_device for node in client.session.nodes] == [0, 2]
    options = PlanOptions(mesh={"data": 4}, argument_axes={0: (("data",), ())})
    executable, plan = client.ready_program(training_step(), options)
    arguments, outputs = layouts(plan)
    w, x, y = inputs()
    for array_id, (array, layout) in enumerate(zip((w, x, y), arguments, strict=True), start=1):
        client.put(array_id, array, layout)
    steps = client.steps()
    for number, before in ((1, 1), (2, 10)):
        steps.send(number, executable, [before, 2, 3], [10 * number, 10 * number + 1], read_back=[10 * number + 1])
        w, loss = reference(w, x, y)
        np.testing.assert_allclose(steps.value(), loss, rtol=1e-5)
    np.testing.assert_allclose(client.fetch(20, outputs[0]), w, rtol=1e-4, atol=1e-6)

    family = servers[0].family() + servers[1].family()
    servers[0].interrupt()
    assert servers[0].end()[0] == 130
    assert servers[1].end()[0] == 0, "the master's end is the cluster's"
    wait_until(lambda: all_gone(family))


@pytest.mark.cluster
def test_a_worker_outlives_its_master_and_joins_the_next(tmp_path: Path, start: Start) -> None:
    path = cluster_file(tmp_path)
    master, worker = start(path, 0), start(path, 1)
    connect(path).close()
    family = master.family()
    master.process.kill()
    wait_until(lambda: all_gone(family))
    wait_until(lambda: not worker.executors())
    start(path, 0)
    client = connect(path)
    assert client.call("Status", master_pb2.StatusRequest()).state == "ready"
    worker.interrupt()
    assert worker.end()[0] == 130
    wait_until(lambda: client.call("Status", master_pb2.StatusRequest()).state == "degraded")


# ---- starts that fail: one line, exit code not 0 -----------------------------------
def one_line(server: Server, exit_code: int = 1) -> str:
    """The error of a server that ends by itself; log lines start with the time."""
    code, errors = server.end()
    assert code == exit_code, errors
    lines = [line for line in errors.splitlines() if not line[:2].isdigit()]
    assert len(lines) == 1, errors
    return lines[0]


@pytest.mark.cluster
def test_a_missing_cluster_file(start: Start) -> None:
    assert "no_such.json: the file does not exist" in one_line(start("no_such.json", 0))


@pytest.mark.cluster
def test_a_malformed_cluster_file(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"master": ')
    assert "not valid JSON" in one_line(start(path, 0))


@pytest.mark.cluster
def test_an_open_address_without_security(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"master": {"ip": "10.1.2.3", "port": 2222}}))
    assert "reachable from other machines" in one_line(start(path, 0))


@pytest.mark.cluster
@pytest.mark.parametrize("task", [2, -1])
def test_a_task_that_the_file_does_not_have(tmp_path: Path, start: Start, task: int) -> None:
    assert f"there is no task {task} (the file has tasks 0 to 1)" in one_line(start(cluster_file(tmp_path), task))


@pytest.mark.cluster
def test_a_port_in_use(tmp_path: Path, start: Start) -> None:
    path = cluster_file(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", json.loads(path.read_text())["master"]["port"]))
        taken.listen()
        assert "is in use" in one_line(start(path, 0))


@pytest.mark.cluster
def test_an_address_of_another_machine(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"master": {"ip": "192.0.2.1", "port": 2222}, "insecure": True}))
    assert "cannot be opened" in one_line(start(path, 0))


@pytest.mark.cluster
def test_a_worker_that_never_comes(tmp_path: Path, start: Start) -> None:
    assert "worker 1 (127.0.0.1:" in one_line(start(cluster_file(tmp_path), 0, "--wait", 1), 75)


@pytest.mark.cluster
def test_a_worker_whose_master_gives_up_may_be_started_again(tmp_path: Path, start: Start) -> None:
    nodes = [{"ip": "127.0.0.1", "port": free_port(), "devices": 1} for _ in range(3)]
    path = tmp_path / "three.json"
    path.write_text(json.dumps({"master": nodes[0], "workers": nodes[1:]}))
    worker = start(path, 1)
    assert "worker 2 (127.0.0.1:" in one_line(start(path, 0, "--wait", 2), 75)
    assert worker.end()[0] == 75


@pytest.mark.cluster
def test_a_master_that_never_comes(tmp_path: Path, start: Start) -> None:
    assert "the master at 127.0.0.1:" in one_line(start(cluster_file(tmp_path), 1, "--wait", 1), 75)


@pytest.mark.cluster
def test_files_that_differ(tmp_path: Path, start: Start) -> None:
    path = cluster_file(tmp_path)
    other = tmp_path / "other.json"
    data = json.loads(path.read_text())
    data["workers"][0]["devices"] = 3
    other.write_text(json.dumps(data))
    master = start(path, 0)
    assert "cluster files of the master and of node 1 differ" in one_line(start(other, 1))
    assert master.process.poll() is None, "the master waits for the right one"


@pytest.mark.cluster
def test_the_same_task_twice(tmp_path: Path, start: Start) -> None:
    path = cluster_file(tmp_path)
    start(path, 0)
    start(path, 1)
    client = RawClient(f"127.0.0.1:{json.loads(path.read_text())['master']['port']}")

    def has_joined() -> bool:
        try:
            return client.call("Status", master_pb2.StatusRequest()).nodes[1].state in ("starting", "ready")
        except ServerUnavailableError:
            return False

    wait_until(has_joined)
    assert "task 1 is running already" in one_line(start(path, 1))


@pytest.mark.cluster
def test_devices_that_are_not_there(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"master": {"ip": "127.0.0.1", "port": free_port(), "gpu_ids": [0]}}))
    assert "the executor of node 0 does not start" in one_line(start(path, 0))


@pytest.mark.parametrize("arguments", [[], ["cluster.json"], ["cluster.json", "one"], ["cluster.json", "-1"]])
def test_launch_worker_refuses_wrong_arguments(arguments: list[str]) -> None:
    done = subprocess.run(
        [ROOT / "launch_worker.sh", *arguments], capture_output=True, check=False, text=True, timeout=20
    )
    assert done.returncode == 2
    assert "usage: launch_worker.sh CLUSTER_JSON TASK_INDEX" in done.stderr


@pytest.mark.cluster
def test_launch_worker_starts_a_server(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "launch_worker.sh", cluster_file(tmp_path), "0", "--wait", "0.5"],
        capture_output=True, check=False, text=True, timeout=20, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 75
    assert "worker 1" in done.stderr


# ---- ends ----------------------------------------------------------------------------
@pytest.mark.cluster
def test_an_interrupt_while_the_server_still_loads_leaves_no_traceback(
    tmp_path: Path,
) -> None:
    """It reads its cluster file from a pipe that nobody writes to: there the signal finds it."""
    script = (
        "import signal, sys\nfrom shardwright.server.__main__ import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test's own process does\n"
        "sys.exit(main([sys.argv[1], '0']))\n"
    )
    config = tmp_path / "cluster.json"
    os.mkfifo(config)
    command = [sys.executable, "-c", script, str(config)]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
        config.open("w"),  # once the server has opened it
    ):
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=30)
    assert (server.returncode, errors) == (130, "")


@pytest.mark.cluster
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signals_leave_nothing_running(number: signal.Signals, exit_code: int) -> None:
    for server, client in embedded(1):  # one device is a cluster, too
        client.ready_program(training_step())
        family = server.family()
        assert len(family) >= 4, "server, executor, planner, compiler"
        server.process.send_signal(number)
        assert server.end()[0] == exit_code
        wait_until(lambda family=family: all_gone(family))
        with pytest.raises(ShardwrightError):
            client.call("Status", master_pb2.StatusRequest())


@pytest.mark.cluster
def test_an_embedded_server_ends_with_its_client_even_when_killed() -> None:
    for server, client in embedded(2):
        client.ready_program(training_step())
        family = server.family()
        server.hang_up()
        wait_until(lambda family=family: all_gone(family))
    for server, _ in embedded(2):
        wait_until(lambda server=server: server.planners())
        family, (planner,) = server.family(), server.planners()
        planner.suspend()  # like one that is planning: it does not look whether anybody is left
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda family=family: all_gone(family))


@pytest.mark.cluster
def test_a_client_that_went_away_frees_its_session() -> None:
    for _, client in embedded(2, "--grace", "4"):
        stream = client.steps()
        time.sleep(5.0)
        assert len(client.call("Status", master_pb2.StatusRequest()).sessions) == 1, "an open stream keeps it"
        stream.end()
        wait_until(lambda client=client: not client.call("Status", master_pb2.StatusRequest()).sessions)
        with pytest.raises(SessionError, match="expired"):
            client.upload(training_step())
