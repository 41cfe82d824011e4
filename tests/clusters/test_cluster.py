"""Cluster files: every shipped one loads; every mistake names file, field and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.clusters.cluster import DEFAULT_HARDWARE, MAX_CLUSTER_DEVICES, PLATFORMS, Cluster, is_loopback
from shardwright.clusters.links import Link, link_kinds
from shardwright.cost import hardware_profile
from shardwright.errors import ClusterConfigError

CONFIGS = Path(__file__).parents[2] / "cluster_configs"
LOCAL: dict[str, Any] = {"ip": "127.0.0.1", "port": 2222}


def load(data: Any, directory: Path | None = None) -> Cluster:
    return Cluster.from_json(json.dumps(data), source="c.json", directory=directory)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_files_are_valid(path: Path, tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "token").write_text("secret\n")
    (tmp_path / "secrets" / "token").chmod(0o600)
    cluster = Cluster.from_json(path.read_text(), source=str(path), directory=tmp_path)
    assert cluster.name == path.stem
    assert cluster.device_count >= 8
    assert hardware_profile(cluster.hardware).name == cluster.hardware


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_files_can_be_planned_for_without_their_secrets(path: Path) -> None:
    cluster = Cluster.load(path, for_planning=True)
    assert cluster.device_count >= 8
    assert cluster.token is None


@pytest.mark.parametrize("platform", PLATFORMS)
def test_default_hardware_has_a_profile(platform: str) -> None:
    assert hardware_profile(DEFAULT_HARDWARE[platform])


def test_known_shape_runs_the_master_as_a_worker() -> None:
    cluster = load(
        {"master": {**LOCAL, "gpu_ids": [0, 3]}, "workers": [{"ip": "127.0.0.1", "port": 3, "gpu_ids": [1]}]}
    )
    assert cluster.platform == "cuda"
    assert [node.gpu_ids for node in cluster.workers] == [(0, 3), (1,)]
    assert [node.device_count for node in cluster.nodes] == [2, 1]
    assert cluster.master.address == "127.0.0.1:2222"


def test_node_without_platform_and_gpus_runs_cpu_devices() -> None:
    cluster = load({"master": {**LOCAL, "gpu_ids": []}, "workers": [{"ip": "localhost", "port": 3, "devices": 5}]})
    assert (cluster.platform, cluster.hardware) == ("cpu", "cpu")
    assert [node.device_count for node in cluster.nodes] == [1, 5]


def test_coordinator_contributes_no_device() -> None:
    cluster = load(
        {"coordinator_only": True, "master": LOCAL, "workers": [{"ip": "127.0.0.1", "port": 3, "gpu_ids": [0]}]}
    )
    assert cluster.master.device_count == 0
    assert [node.index for node in cluster.workers] == [1]
    assert cluster.platform == "cuda"


def test_units_become_si() -> None:
    links = {"intra_node": {"bandwidth_gb_per_s": 300, "latency_us": 3}, "inter_node": {"bandwidth_gb_per_s": 25}}
    cluster = load({"master": LOCAL, "memory_gib": 1.5, "links": links | {"overlap": 0.25}})
    assert cluster.overlap == 0.25
    assert load({"master": LOCAL, "links": {"overlap": 1.0}}).overlap == 1
    assert cluster.content_hash != load({"master": LOCAL, "memory_gib": 1.5, "links": links}).content_hash
    assert cluster.memory_bytes_per_device == 1536 * 2**20
    assert cluster.intra_node == Link(bandwidth_bytes_per_s=3e11, latency_s=pytest.approx(3e-6))
    assert cluster.inter_node == Link(bandwidth_bytes_per_s=2.5e10)


def test_nodes_may_be_of_different_hardware() -> None:
    node = {"ip": "127.0.0.1", "gpu_ids": [0, 1]}
    workers = [{**node, "port": 3, "hardware": "h100", "memory_gib": 94}, {**node, "port": 4}]
    cluster = load({"master": {**node, "port": 2}, "workers": workers, "hardware": "a100", "memory_gib": 40})
    assert cluster.hardware == "a100+h100"
    assert [node.hardware for node in cluster.nodes] == ["a100", "h100", "a100"]
    assert cluster.memory_bytes_per_device == 40 * 2**30
    alone = cluster.part(2, 2)
    assert (alone.hardware, alone.memory_bytes_per_device) == ("h100", 94 * 2**30)
    assert cluster.part(1, 2).hardware == "a100+h100"
    assert cluster.content_hash != load({"master": {**node, "port": 2}, "workers": [{**node, "port": 3}]}).content_hash
    slower, fast, slow = (hardware_profile(name) for name in ("a100+h100", "h100", "a100"))
    assert slower.matmul_flops_per_s("bf16") == slow.matmul_flops_per_s("bf16") < fast.matmul_flops_per_s("bf16")
    assert slower.memory_bytes == min(slow.memory_bytes, fast.memory_bytes)
    with pytest.raises(ClusterConfigError, match="other nodes say what memory"):
        load({"master": {**node, "port": 2}, "workers": workers[:1]})


def test_links_by_name() -> None:
    workers = [{"ip": "127.0.0.1", "port": 2223, "devices": 4}]
    nodes = {"master": {**LOCAL, "devices": 8}, "workers": workers}
    cluster = load({**nodes, "links": {"intra_node": "nvlink-3", "inter_node": "ethernet-100g"}})
    assert cluster.intra_node == Link(bandwidth_bytes_per_s=300e9, latency_s=3e-6)
    assert cluster.inter_node == Link(bandwidth_bytes_per_s=12.5e9 / 8, latency_s=3e-5)  # one port for eight devices
    rails = {"kind": "infiniband-hdr", "ports": 8, "latency_us": 5}
    assert load({**nodes, "links": {"inter_node": rails}}).inter_node == Link(
        bandwidth_bytes_per_s=25e9, latency_s=pytest.approx(5e-6)
    )


def test_every_kind_of_link_has_sources() -> None:
    for kind in link_kinds().values():
        assert kind.bandwidth_bytes_per_s > kind.latency_s > 0
        assert all(kind.sources), kind.name


def test_local_cluster() -> None:
    cluster = Cluster.local(3)
    assert (cluster.device_count, cluster.platform, cluster.master.port) == (3, "cpu", 0)
    with pytest.raises(ClusterConfigError, match="at least one device"):
        Cluster.local(0)
    with pytest.raises(ClusterConfigError, match="at most 4096 devices, not 100000"):
        Cluster.local(100_000)


def test_a_local_cluster_has_as_many_devices_as_a_node_of_a_file_may() -> None:
    with pytest.raises(ClusterConfigError, match=str(MAX_CLUSTER_DEVICES)):
        load({"master": {**LOCAL, "devices": MAX_CLUSTER_DEVICES + 1}})
    assert Cluster.local(MAX_CLUSTER_DEVICES).device_count == MAX_CLUSTER_DEVICES


def test_hash_is_of_the_meaning(tmp_path: Path) -> None:
    plain = load({"master": LOCAL, "memory_gib": 1})
    assert load({"memory_bytes": 2**30, "name": "other", "master": LOCAL}).content_hash == plain.content_hash
    assert load({"master": LOCAL, "memory_gib": 2}).content_hash != plain.content_hash
    assert load({"master": LOCAL, "memory_gib": 1, "security": {"token": "a"}}).content_hash != plain.content_hash
    (tmp_path / "t").write_text("a\n")
    (tmp_path / "t").chmod(0o600)
    by_file = load({"master": LOCAL, "security": {"token_file": "t"}}, tmp_path)
    assert by_file.token == "a"
    assert by_file.content_hash == load({"master": LOCAL, "security": {"token": "a"}}).content_hash


def test_no_secret_is_described() -> None:
    cluster = load({"master": LOCAL, "security": {"token": "swordfish"}})
    assert "swordfish" not in json.dumps(cluster.describe())


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("host", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


OPEN = {"ip": "10.0.0.1", "port": 2222}
TLS = {"certificate": "c.pem", "key": "k.pem"}


@pytest.mark.parametrize(
    ("data", "where", "message", "remedy"),
    [
        ({"masters": LOCAL}, "c.json", "unknown key 'masters'", "did you mean 'master'?"),
        ({"master": {"ip": "127.0.0.1"}}, "c.json: master.port", "the key is missing", 'add "port"'),
        ({}, "c.json: master", "the key is missing", 'add "master"'),
        ({"master": {**LOCAL, "prot": 1}}, "c.json: master", "unknown key 'prot'", "did you mean 'port'?"),
        ({"master": {**LOCAL, "token": "x"}}, "c.json: master", "unknown key 'token' here", "move it into security"),
        ({"master": LOCAL, "links": {"overlap": 1.01}}, "c.json: links.overlap", "out of range", "between 0 and 1"),
        ({"master": {**LOCAL, "port": 70000}}, "c.json: master.port", "out of range", "between 1 and 65535"),
        ({"master": {**LOCAL, "port": "22x2"}}, "c.json: master.port", 'expected an integer, found "22x2"', "change"),
        ({"master": {**LOCAL, "port": "70000"}}, "c.json: master.port", "70000 is out of range", "between 1 and 65535"),
        ({"master": {**LOCAL, "gpu_ids": "all"}}, "c.json: master.gpu_ids", "'all' is no number of a GPU", '"0,1"'),
        ({"master": {**LOCAL, "gpu_ids": "1,1"}}, "c.json: master.gpu_ids", "[1, 1] names a device twice", "once"),
        ({"master": {**LOCAL, "port": True}}, "c.json: master.port", "expected an integer, found true", "change"),
        ({"master": LOCAL, "platform": "cdua"}, "c.json: platform", '"cdua" is not one of', 'use "cuda"'),
        ({"master": {**LOCAL, "gpu_ids": [0, 0]}}, "c.json: master.gpu_ids", "twice", "once"),
        ({"master": {**LOCAL, "gpu_ids": [0], "platform": "cpu"}}, "master.gpu_ids", "platform cpu", "drop gpu_ids"),
        ({"master": {**LOCAL, "platform": "cuda"}}, "master.gpu_ids", "needs its GPUs", '"gpu_ids"'),
        ({"master": {**LOCAL, "gpu_ids": [0], "devices": 2}}, "master.devices", "gpu_ids names 1", "drop devices"),
        ({"master": {**LOCAL, "platform": "tpu"}}, "master.devices", "chip count", '"devices"'),
        ({"master": LOCAL, "coordinator_only": True}, "coordinator_only", "no node contributes", "add workers"),
        ({"master": LOCAL, "workers": [LOCAL]}, "workers[0].port", "already taken by master.port", "its own port"),
        ({"master": {**LOCAL, "data_port": 2222}}, "master.data_port", "already taken by master.port", "its own port"),
        (
            {"master": LOCAL, "workers": [{"ip": "localhost", "port": 2222}]},
            "workers[0].port",
            "already taken",
            "its own port",
        ),
        (
            {"master": {**LOCAL, "gpu_ids": [0]}, "workers": [{"ip": "127.0.0.1", "port": 3}]},
            "c.json",
            "different platforms (cuda at master, cpu at workers[0])",
            "one platform",
        ),
        ({"master": {**LOCAL, "ip": "127.0.0.1:80"}}, "master.ip", "neither an IP address", "its own key"),
        ({"master": {**LOCAL, "ip": "300.1.1.1"}}, "master.ip", "neither an IP address", "address only"),
        ({"master": {**LOCAL, "ip": "0.0.0.0"}, "insecure": True}, "master.ip", "can dial", "reach this machine"),
        ({"master": LOCAL, "insecure": True, "workers": [OPEN]}, "workers[0].ip", "cannot reach", "same network"),
        ({"master": OPEN}, "master.ip", "reachable from other machines", '"insecure": true'),
        ({"master": OPEN, "security": {"token": "x"}}, "master.ip", "no security.certificate", "security"),
        ({"master": OPEN, "security": TLS}, "master.ip", "no security.token", "security"),
        ({"master": LOCAL, "security": {"key": "k"}}, "security.certificate", "belong together", "certificate"),
        ({"master": LOCAL, "security": {"ca": "k"}}, "security.ca", "without certificate", "drop ca"),
        ({"master": LOCAL, "security": {"token_file": "none"}}, "security.token_file", "cannot be read", "every node"),
        (
            {"master": LOCAL, "security": {"token": "x", "token_file": "y"}},
            "security",
            "both token and token_file",
            "one of them",
        ),
        ({"master": LOCAL, "memory_gib": 1, "memory_bytes": 1}, "memory_gib", "both", "one of them"),
        ({"master": LOCAL, "links": {"intra_node": {}}}, "links.intra_node", "neither kind nor", "add one"),
        ({"master": LOCAL, "links": {"inter_node": 25}}, "links.inter_node", "expected an object or string", "change"),
        (
            {"master": LOCAL, "links": {"inter_node": "infiniband-hdx"}},
            "links.inter_node",
            "no kind of link is called 'infiniband-hdx'",
            "infiniband-hdr",
        ),
        (
            {"master": LOCAL, "links": {"inter_node": {"kind": "ethernet-25g", "bandwidth_gb_per_s": 3}}},
            "links.inter_node",
            "both kind and",
            "one of them",
        ),
        (
            {"master": LOCAL, "links": {"intra_node": {"kind": "nvlink-3", "ports": 2}}},
            "links.intra_node",
            "every device has for itself",
            "drop ports",
        ),
        (
            {"master": LOCAL, "links": {"inter_node": {"bandwidth_gb_per_s": 3, "ports": 2}}},
            "links.inter_node",
            "ports without kind",
            "multiply",
        ),
        ({"master": LOCAL, "links": {"intra_node": "ethernet-25g"}}, "links.intra_node", "joins nodes", "inter_node"),
        ([], "c.json", "expected a JSON object, found list", '"master"'),
    ],
)
def test_mistakes_name_field_and_remedy(data: Any, where: str, message: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterConfigError) as caught:
        load(data, tmp_path)
    assert where in caught.value.where
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert "\n" not in caught.value.message + caught.value.where + caught.value.remedy


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ('{"master": }', "c.json:1:12", "not valid JSON"),
        ("", "c.json:1:1", "not valid JSON"),
        ('{"master": {"ip": "::1", "ip": "::1", "port": 1}}', "c.json", "'ip' appears twice"),
        ("[" * 100_000, "c.json", "not valid JSON"),
    ],
)
def test_malformed_json(text: str, where: str, message: str) -> None:
    with pytest.raises(ClusterConfigError, match=message) as caught:
        Cluster.from_json(text, source="c.json")
    assert caught.value.where == where


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ClusterConfigError, match="does not exist"):
        Cluster.load(tmp_path / "none.json")
    with pytest.raises(ClusterConfigError, match="cannot be read"):
        Cluster.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterConfigError, match="not UTF-8"):
        Cluster.load(tmp_path / "binary")


def test_open_addresses_with_tls_and_token_or_by_word() -> None:
    secured = load({"master": OPEN, "security": {"token": "x", **TLS}}, Path("/etc/sw"))
    assert secured.security is not None
    assert secured.security.certificate == Path("/etc/sw/c.pem")
    assert load({"master": OPEN, "insecure": True}).insecure


# The form of TePDist's README and templates (github.com/alibaba/TePDist): every number of a node is a text.
TEPDIST = {
    "one_node": ({"master": {"ip": "localhost", "port": "2222", "gpu_ids": "1,2"}}, [(1, 2)]),
    "two nodes": (
        {
            "master": {"ip": "127.0.0.1", "port": "2222", "gpu_ids": "0, 1"},
            "workers": [{"ip": "127.0.0.1", "port": "2223", "gpu_ids": "2"}],
        },
        [(0, 1), (2,)],
    ),
    "a list of texts": ({"master": {"ip": "localhost", "port": "2222", "gpu_ids": ["1", "2"]}}, [(1, 2)]),
    "no GPUs": ({"master": {"ip": "localhost", "port": "2222", "gpu_ids": ""}}, [()]),
}


@pytest.mark.parametrize(("data", "gpus"), TEPDIST.values(), ids=TEPDIST)
def test_tepdist_files_load_as_they_stand(data: Any, gpus: list[tuple[int, ...]], tmp_path: Path) -> None:
    path = tmp_path / "one_node.json"
    path.write_text(json.dumps(data))
    cluster = Cluster.load(path)
    assert [node.gpu_ids for node in cluster.nodes] == gpus
    assert [node.port for node in cluster.nodes] == [2222, 2223][: len(gpus)]
    assert cluster.platform == ("cuda" if gpus[0] else "cpu")
