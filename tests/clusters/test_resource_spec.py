"""AutoDist's resource_spec.yml, and cluster files in YAML: what is read, and where errors point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.cost import Topology, hardware_profile

TWO_NODES = """\
nodes:
  - address: 10.20.41.12
    gpus: [0, 1, 2, 3]
    ssh_config: conf
    network_bandwidth: 25
  - address: 10.20.41.11
    cpus: [0]
    gpus: [0, 2]
    chief: true
    network_bandwidth: 100
ssh:
  conf:
    username: 'trainer'
    key_file: '~/.ssh/id_rsa'
    port: 12345
    python_venv: 'source /opt/venv/bin/activate'
    shared_envs:
      LD_LIBRARY_PATH: '$LD_LIBRARY_PATH:/usr/local/cuda/lib64'
"""


def spec(folder: Path, text: str, **options: Any) -> sw.Cluster:
    path = folder / "resource_spec.yml"
    path.write_text(text)
    return sw.resource_spec(path, **options)


def test_two_nodes_with_gpus(tmp_path: Path) -> None:
    cluster = spec(tmp_path, TWO_NODES, hardware="v100")
    assert (cluster.platform, cluster.hardware, cluster.name) == ("cuda", "v100", "resource_spec")
    assert [node.address for node in cluster.nodes] == ["10.20.41.11:2222", "10.20.41.12:2222"]
    assert [node.gpu_ids for node in cluster.nodes] == [(0, 2), (0, 1, 2, 3)]
    link = Topology.of(cluster, hardware_profile("v100")).inter_node
    assert link.bandwidth_bytes_per_s == pytest.approx(25e9 / 8 / 4)
    assert link.latency_s == hardware_profile("v100").inter_node.latency_s


def test_one_node_is_the_chief(tmp_path: Path) -> None:
    cluster = spec(tmp_path, "nodes:\n  - address: localhost\n    cpus: [0, 1, 2, 3]\n")
    assert (cluster.platform, cluster.device_count, cluster.master.ip) == ("cpu", 4, "localhost")
    assert cluster.inter_node is None


def test_a_chief_without_gpus_only_coordinates(tmp_path: Path) -> None:
    text = "nodes: [{address: 10.0.0.1, chief: true}, {address: 10.0.0.2, gpus: [0, 1], ssh_config: a}]\nssh: {a: {}}\n"
    cluster = spec(tmp_path, text, port=4000)
    assert [node.device_count for node in cluster.nodes] == [0, 2]
    assert [node.port for node in cluster.workers] == [4000]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("    chief: true\n", "", 1, "no node is the chief"),
        ("    ssh_config: conf\n", "    chief: true\n", 9, "two nodes are the chief"),
        ("    ssh_config: conf\n", "    ssh_config: cnf\n", 4, "did you mean 'conf'?"),
        ("10.20.41.11", "10.20.41.12", 6, "stands in line 2 already"),
        ("10.20.41.11", "127.0.0.1", 6, "cannot be reached"),
        ("10.20.41.11", "10.20.41", 6, "neither an IP address nor a host name"),
        ("gpus: [0, 2]", "gpus: 2", 8, "gpus is 2"),
        ("gpus: [0, 2]", "gpus: [0, 0]", 8, "twice"),
        ("gpus: [0, 1, 2, 3]", "cpus: [0]", 2, "has no gpus"),
        ("network_bandwidth: 25", "network_bandwith: 25", 5, "did you mean 'network_bandwidth'?"),
        ("network_bandwidth: 25", "network_bandwidth: fast", 5, "Gbit/s"),
        ("    port: 12345", "    prt: 12345", 15, "did you mean 'port'?"),
        ("    cpus: [0]\n", "    cpus: [0]\n    cpus: [1]\n", 8, "appears twice"),
        ("    cpus: [0]\n", "    cpus: [0\n", 8, "not valid YAML"),
        ("  - address: 10.20.41.12\n    gpus", "  - gpus", 2, "without an address"),
    ],
)
def test_errors_name_the_line(old: str, new: str, line: int, message: str, tmp_path: Path) -> None:
    assert TWO_NODES.count(old) == 1
    with pytest.raises(sw.ClusterConfigError) as refusal:
        spec(tmp_path, TWO_NODES.replace(old, new))
    assert message in str(refusal.value)
    assert f"resource_spec.yml:{line}" in refusal.value.where


@pytest.mark.parametrize(
    "text", ["", "nodes:\n", "nodes: 3\n", "- a\n", "nodes: [3]\n", "ssh: {}\n", "nodes: &a [*a]\n"]
)
def test_what_is_no_spec_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(sw.ClusterConfigError):
        spec(tmp_path, text)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(sw.ClusterConfigError, match="does not exist"):
        sw.resource_spec("no/such/resource_spec.yml")


# ---- cluster files in YAML ---------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".yml", ".yaml"])
@pytest.mark.parametrize("name", ["a100_2x8.json", "two_workers_cpu.json", "tpu_v5e_2x4.json"])
def test_a_cluster_file_in_yaml_means_the_same(name: str, suffix: str, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    path = Path(__file__).resolve().parents[2] / "cluster_configs" / name
    copy = tmp_path / f"{path.stem}{suffix}"
    copy.write_text(yaml.safe_dump(json.loads(path.read_text())))
    assert sw.Cluster.load(copy) == sw.Cluster.load(path)


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("master: {ip: 127.0.0.1, port: 1\n", "cluster.yml:2:1", "not valid YAML"),
        ("master: {ip: 127.0.0.1, port: 1}\nmaster: {}\n", "cluster.yml:2:1", "appears twice"),
        ("master: {ip: 127.0.0.1, port: 1}\nmemory_gib: .nan\n", "cluster.yml:2:13", "no finite number"),
        ("master: {ip: 127.0.0.1, port: 1}\nname: 2026-01-01\n", "cluster.yml:2:7", "write it in quotes"),
        ("master: {ip: 127.0.0.1, port: 1}\n3: a\n", "cluster.yml:2:1", "no text"),
        ("- a\n", "cluster.yml", "expected a YAML object"),
        ("master: {ip: 127.0.0.1, prt: 1}\n", "cluster.yml: master", "port"),
    ],
)
def test_wrong_yaml_is_refused_with_its_place(text: str, where: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text(text)
    with pytest.raises(sw.ClusterConfigError) as refusal:
        sw.Cluster.load(path)
    assert where in refusal.value.where
    assert message in str(refusal.value)


def test_anchors_that_multiply_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    path = tmp_path / "cluster.yml"
    path.write_text("\n".join(lines))
    with pytest.raises(sw.ClusterConfigError, match="too many values"):
        sw.Cluster.load(path)
