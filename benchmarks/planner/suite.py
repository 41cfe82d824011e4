"""The cases of the benchmark, and their clusters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_targets import TARGETS
from benchmarks.planner.judge import MACHINES

DEVICES = (8, 16, 64)
BUDGETS = (1.0, 0.5, 0.25)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model at one size on one number of devices.

    changes: arguments of the model's build: a slice of equal layers of a deep model, or another batch. variant: suffix
        of the name of such a case. machine: of `judge.MACHINES`; its own compiler judges.
    """

    model: str
    size: str
    devices: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    machine: str = "a100"
    variant: str = ""

    @property
    def name(self) -> str:
        machine = "" if self.machine == "a100" else self.machine
        return "-".join(filter(None, (self.model, self.size, str(self.devices), self.variant, machine)))


#: (model, size) → the judged slice: a few of many equal layers, to compile in seconds. Models with a scan over their
#: layers are judged whole, and so is GPT-2 124M on 8 devices.
JUDGED: dict[tuple[str, str], dict[str, Any]] = {
    ("gpt2", "124M"): {"layers": 4},
    ("gpt2", "1.5B"): {"layers": 4},
    ("gpt2", "175B"): {"layers": 2},
    ("llama", "1B"): {},
    ("llama", "7B"): {},
    ("moe", "8e"): {"layers": 4},
    ("moe", "64e"): {"layers": 4},
    ("bert", "large"): {"layers": 4},
    ("vit", "L16"): {"layers": 4},
    ("resnet", "250M"): {"blocks": (1, 2, 2, 1)},
    ("resnet", "1B"): {"blocks": (1, 2, 2, 1)},
    ("unet", "128"): {"blocks": 1},
    ("t5", "base"): {"layers": 3},
    ("lstm", "1024"): {},
    ("dlrm", "1M"): {},
}

#: GPT-2 124M with other batches on 8 devices than 16 sequences: name → sequences of a device.
BATCHES = {"b8": 1, "b32": 4, "b128": 16}

#: Cases of `make bench-planner-quick`: every model once.
QUICK = (
    "gpt2-124M-8", "gpt2-1.5B-16", "llama-1B-8", "moe-8e-8", "bert-large-8", "vit-L16-8", "resnet-250M-8", "unet-128-8",
    "t5-base-8", "lstm-1024-8", "dlrm-1M-8",
)  # fmt: skip


def entries() -> Iterator[Entry]:
    """All cases: 8 A100 first, then 8 H100, then more A100, then 8 CPUs."""
    yield from _list_on(8, "a100")
    for name, batch in BATCHES.items():
        yield Entry(model="gpt2", size="124M", devices=8, changes={"batch_per_device": batch}, variant=name)
    yield from _list_on(8, "h100")
    for devices in DEVICES[1:]:
        yield from _list_on(devices, "a100")
    yield from (entry for entry in _list_on(8, "cpu") if entry.name.removesuffix("-cpu") in QUICK)


def _list_on(devices: int, machine: str) -> Iterator[Entry]:
    """Every model and size; GPT-2 124M is judged whole on 8 devices."""
    for (model, size), layers in JUDGED.items():
        whole = (model, size, devices) == ("gpt2", "124M", 8)
        yield Entry(model=model, size=size, devices=devices, changes={} if whole else layers, machine=machine)


def matches_name(entry: Entry, name: str) -> bool:
    """Whether a name selects this case: its own name, or a prefix of it (unless some case has this very name)."""
    names = {case.name for case in (*entries(), *UNSEEN)}
    return entry.name == name if name in names else entry.name.startswith(name)


#: Cases of `--unseen`: held-out models. Their experts are counted on the fly, not frozen.
UNSEEN = (
    Entry(model="mixtral", size="base", devices=8), Entry(model="mamba", size="base", devices=8),
    Entry(model="tied-llama", size="lion", devices=8), Entry(model="tied-llama", size="adafactor", devices=16),
    Entry(model="tied-llama", size="accumulated", devices=8), Entry(model="lora", size="base", devices=8),
    Entry(model="decode", size="base", devices=8), Entry(model="preference", size="base", devices=6),
    Entry(model="dit", size="base", devices=8), Entry(model="convnext", size="base", devices=4),
    Entry(model="clip", size="base", devices=16), Entry(model="gnn", size="base", devices=8),
    Entry(model="wide-deep", size="base", devices=8),
)  # fmt: skip


def cluster_json(devices: int, machine: str) -> str:
    """A cluster file of the machine's nodes, with the judge's links.

    A file gives one device's share of its node's ports.
    """
    reference = MACHINES[machine]
    per_node = min(devices, reference.devices_per_node)
    kind = "cuda" if machine in TARGETS else "cpu"
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
