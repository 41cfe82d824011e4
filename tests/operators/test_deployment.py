"""What lies in deploy/ names options that the servers have, and waits longer than they drain; no Docker, no cluster."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.cli.app import build_parser
from shardwright.clusters.cluster import Cluster
from shardwright.server.options import LOG_FORMAT_VARIABLE, limits_of, ports_of
from tests.operators.servers import health
from tests.server.raw_client import ROOT, wait_until
from tests.server.test_processes import free_port

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "shardwright@.service"
#: Seconds that ending takes after a drain: executors, connections.
MARGIN_S = 15
#: Variables that the servers, Python and the shell know.
KNOWN_VARIABLES = {LOG_FORMAT_VARIABLE, "SHARDWRIGHT_CACHE", "PATH", "PYTHONUNBUFFERED"}


def serve_options(words: list[str]) -> argparse.Namespace:
    """The options of `shardwright serve …`; ends the test where one does not exist."""
    return build_parser().parse_args(["serve", *words])


# ---- systemd ---------------------------------------------------------------------
def unit_values() -> dict[str, list[str]]:
    """Values by key, in order, continued lines joined."""
    values: dict[str, list[str]] = {}
    for line in UNIT.read_text().replace("\\\n", " ").splitlines():
        key, is_value, value = line.partition("=")
        if is_value and not line.startswith("#"):
            values.setdefault(key, []).append(value.strip())
    return values


def test_the_unit_runs_what_there_is_and_waits_for_its_drain() -> None:
    values = unit_values()
    (command,) = values["ExecStart"]
    program, subcommand, *words = shlex.split(command.replace("%i", "3"))
    assert (Path(program).name, subcommand) == ("shardwright", "serve")
    options = serve_options(words)
    assert options.index == "3"
    assert int(values["TimeoutStopSec"][0]) >= limits_of(options).drain_s + MARGIN_S
    assert ports_of(options).metrics.startswith("127.0.0.1:")
    assert {entry.partition("=")[0] for entry in values["Environment"]} <= KNOWN_VARIABLES
    assert values["KillSignal"] == ["SIGTERM"]
    assert values["User"] == ["shardwright"]


def test_the_unit_restarts_by_the_documented_exit_codes() -> None:
    values, options = unit_values(), (ROOT / "docs" / "options.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", options, re.MULTILINE))
    hopeless = {code for code, meaning in rows.items() if "has to mend" in meaning or "wrong arguments" in meaning}
    assert set(values["RestartPreventExitStatus"][0].split()) == hopeless == {"1", "2"}
    assert values["Restart"] == ["always"]
    assert values["StartLimitIntervalSec"] == ["0"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/shardwright/bin/shardwright", sys.executable)
    text = re.sub(r"^(User|Group)=.*$", "", text, flags=re.MULTILINE)  # which this machine does not have
    unit = tmp_path / "shardwright@1.service"
    unit.write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    complaints = [line for line in done.stderr.splitlines() if "shardwright" in line]
    assert complaints == []


# ---- containers ------------------------------------------------------------------
def docker_steps() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def docker_values(word: str) -> list[str]:
    return [rest for step, rest in docker_steps() if step == word]


def test_the_image_runs_the_server_as_nobody_special() -> None:
    (entrypoint,), (command,) = docker_values("ENTRYPOINT"), docker_values("CMD")
    program, subcommand, *first = json.loads(entrypoint)
    assert (program, subcommand) == ("shardwright", "serve")
    serve_options([*first, *json.loads(command)])
    (user,) = docker_values("USER")
    assert user.split(":")[0] not in ("0", "root")
    assert docker_values("STOPSIGNAL") == ["SIGTERM"]
    variables = {entry.partition("=")[0] for value in docker_values("ENV") for entry in value.split()}
    assert variables <= KNOWN_VARIABLES
    python = docker_values("FROM")[-1].split()[0].removeprefix("python:").removesuffix("-slim")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert needed == f">={python}"
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert not {"shardwright", "server", "planner", "client", "launch", "ranks", "builders"} & set(ignored)


@pytest.mark.cluster
def test_what_the_image_installs_serves(tmp_path: Path) -> None:
    (install,) = [step for step in docker_values("RUN") if "pip install" in step]
    assert shlex.split(install)[1:3] == ["install", "--no-cache-dir"]
    source, target = tmp_path / "source", tmp_path / "installed"
    top = shutil.ignore_patterns(*(DEPLOY / "Dockerfile.dockerignore").read_text().split())
    shutil.copytree(ROOT, source, symlinks=True, ignore=lambda at, names: top(at, names) if at == str(ROOT) else [])
    pip = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--quiet", "--target", str(target), str(source)], check=True, timeout=300)
    port, health_port = free_port(), free_port()
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"master": {"ip": "127.0.0.1", "port": port, "devices": 1}}))
    program, subcommand = json.loads(docker_values("ENTRYPOINT")[0])
    words = [str(cluster), *json.loads(docker_values("CMD")[0])[1:], "--health-port", str(health_port)]
    environment = {**os.environ, "PYTHONPATH": str(target), LOG_FORMAT_VARIABLE: "json"}
    process = subprocess.Popen(
        [sys.executable, str(target / "bin" / program), subcommand, *words],
        cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: health(health_port) == "SERVING", 90)
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert {json.loads(line)["process"] for line in errors.splitlines()} == {"master", "executor", "daemon"}
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict[str, Any]]:
    """Its documents by kind."""
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert all(
        {
            "apiVersion",
            "kind",
            "metadata",
        }
        <= each.keys()
        for each in documents
    )
    return {each["kind"]: each for each in documents}


def pod_of(manifest: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any], argparse.Namespace]:
    """(pod, container, options of the server in it)."""
    pod = manifest["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = [word.replace("$(TASK_INDEX)", "1") for word in container["args"]]
    return pod, container, serve_options(words)


def test_pods_have_time_to_drain_and_probes_that_answer(manifest: dict[str, dict[str, Any]]) -> None:
    pod, container, options = pod_of(manifest)
    assert options.index == "1"
    assert pod["terminationGracePeriodSeconds"] >= limits_of(options).drain_s + MARGIN_S
    health = int(str(ports_of(options).health).rpartition(":")[2])
    probes = {name: container[f"{name}Probe"]["grpc"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {health}
    assert (probes["startup"]["service"], probes["liveness"]["service"]) == ("live", "live")
    assert "service" not in probes["readiness"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["health"] == health
    annotations = manifest["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
    assert f"0.0.0.0:{annotations['prometheus.io/port']}" == ports_of(options).metrics
    assert {entry["name"] for entry in container["env"]} == {"TASK_INDEX"}


def test_the_cluster_file_names_the_pods(manifest: dict[str, dict[str, Any]]) -> None:
    pod, container, options = pod_of(manifest)
    (name,) = manifest["ConfigMap"]["data"]
    assert Path(options.cluster).name == name
    text = manifest["ConfigMap"]["data"][name]
    cluster = Cluster.from_json(text, for_planning=True)
    pods, service = manifest["StatefulSet"], manifest["Service"]
    assert pods["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"] is True, "else nodes wait for each other for ever"
    assert pods["spec"]["podManagementPolicy"] == "Parallel"
    names = [f"{pods['metadata']['name']}-{number}.{service['metadata']['name']}" for number in range(2)]
    assert pods["spec"]["replicas"] == len(cluster.nodes) == 2
    assert [node.ip for node in cluster.nodes] == names
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {(node.port, node.data_port) for node in cluster.nodes} == {(ports["master"], ports["arrays"])}
    token = Path(json.loads(text)["security"]["token_file"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(token.parent) == mounts["token"]
    assert str(Path(options.cluster).parent) == mounts["cluster"]
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}


def test_pods_run_as_the_images_user(manifest: dict[str, dict[str, Any]]) -> None:
    pod, container, _ = pod_of(manifest)
    (user,) = docker_values("USER")
    assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == user
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert {"/tmp", "/var/cache/shardwright", "/var/lib/shardwright"} <= written
