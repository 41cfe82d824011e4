"""The cases of the benchmark, and the clusters they run on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.planner.judge import MACHINES

DEVICES = (8, 16, 64)
BUDGETS = (1.0, 0.5, 0.25)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model at one size on one number of devices.

    changes: what is judged instead of the whole model where that is deep: a slice of its equal layers.
    """

    model: str
    size: str
    devices: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    machine: str = "a100"

    @property
    def name(self) -> str:
        return f"{self.model}-{self.size}-{self.devices}"


#: (model, size) → the slice that is judged. GPT-2 124M is judged whole: its wire bytes are a bar of their own.
JUDGED: dict[tuple[str, str], dict[str, Any]] = {
    ("gpt2", "124M"): {},
    ("gpt2", "1.5B"): {"layers": 4},
    ("gpt2", "175B"): {"layers": 4},
}

#: What `make bench-planner-quick` runs: every model once, on the number of devices that says most for its time.
QUICK = ("gpt2-124M-8",)


def entries() -> Iterator[Entry]:
    """All cases."""
    for (model, size), changes in JUDGED.items():
        for devices in DEVICES:
            yield Entry(model=model, size=size, devices=devices, changes=changes)


def cluster_json(devices: int, machine: str) -> str:
    """A cluster file of the machine's nodes, with the links that the judge assumes.

    A file gives one device's share of its node's ports.
    """
    reference = MACHINES[machine]
    per_node = min(devices, reference.devices_per_node)
    kind = "cuda" if machine == "a100" else "cpu"
    node = {"port": 2222, **({"gpu_ids": list(range(per_node))} if kind == "cuda" else {"devices": per_node})}
    nodes = [{"ip": f"10.0.0.{number + 1}", **node} for number in range(devices // per_node)]
    links = {
        "intra_node": {"bandwidth_gb_per_s": reference.inside / 1e9, "latency_us": reference.inside_latency_s * 1e6},
        "inter_node": {
            "bandwidth_gb_per_s": reference.node_ports / reference.devices_per_node / 1e9,
            "latency_us": reference.ports_latency_s * 1e6,
        },
    }
    return json.dumps({
        "name": f"{machine}_{devices}", "platform": kind, "hardware": machine, "insecure": True,
        "master": nodes[0], "workers": nodes[1:], "links": links,
    })  # fmt: skip
