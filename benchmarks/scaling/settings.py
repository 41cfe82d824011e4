"""What is assumed of the cluster and the program, and the cluster that follows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import shardwright as sw
from benchmarks.scaling.published import NODE_DEVICES

PROFILE = "p100"

#: All of the gradients' communication can run beside compute (`links.overlap`); predictions say what does.
OVERLAP = 1.0

_EFFICIENCY = re.compile(r"^matmul_efficiency = .*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a prediction assumes.

    network: kind of link between nodes, one port a node.
    is_local: whether each device has batch statistics of its own; else they are the whole batch's.
    is_calibrated: whether one device attains the published images a second; else `matmul_efficiency` is the profile's.
    sends_inputs: whether a client sends the images with every step; else they are on the devices, as synthetic ones.
    """

    network: str = "roce-25g"
    is_local: bool = True
    is_calibrated: bool = True
    sends_inputs: bool = False


#: The setting of the headline.
HEADLINE = "headline"
SETTINGS = {
    HEADLINE: Setting(),
    "latency of TCP, 30 µs": Setting(network="ethernet-25g"),
    "statistics of the whole batch": Setting(is_local=False),
    "images sent by a client": Setting(sends_inputs=True),
    "0.6 of the peak": Setting(is_calibrated=False),
}


def write_profile(directory: Path, efficiency: float) -> Path:
    """The P100's profile with another part of the peak that products attain, as a file in `directory`."""
    text = (resources.files("shardwright.cost") / "data" / f"{PROFILE}.toml").read_text(encoding="utf-8")
    number = f'matmul_efficiency = {{ value = {efficiency!r}, source = "one device attains the published rate" }}'
    text, count = _EFFICIENCY.subn(number, text)
    assert count == 1, "the profile says matmul_efficiency once, in one line"
    path = directory / f"{PROFILE}-{efficiency:.6f}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def build_cluster(devices: int, setting: Setting, hardware: str) -> sw.Cluster:
    """P100s, four a node and one port of the network; fewer than four are one node."""
    count = max(1, devices // NODE_DEVICES)
    if devices != count * min(devices, NODE_DEVICES):
        raise SystemExit(f"--devices {devices}: a number below {NODE_DEVICES}, or a multiple of it")
    gpus = list(range(devices // count))
    nodes = [
        {"ip": f"10.0.{number // 250}.{number % 250 + 1}", "port": 2222, "gpu_ids": gpus} for number in range(count)
    ]
    links = {"intra_node": "pcie-3", "inter_node": {"kind": setting.network, "ports": 1}, "overlap": OVERLAP}
    described = {
        "name": f"p100_{count}x{len(gpus)}",
        "hardware": hardware,
        "insecure": True,
        "links": links,
        "master": nodes[0],
        "workers": nodes[1:],
    }
    return sw.Cluster.from_json(json.dumps(described), for_planning=True)
