"""Seconds of a counted program on reference machines: rooflines and ring collectives.

Deliberately simple, and the same for both sides. Compute and communication add up: nothing overlaps.
Kernels: max(arithmetic, memory, launch) (Williams, Waterman, Patterson, 2009).
Collectives: ring algorithms (Thakur, Rabenseifner, Gropp, 2005), seconds = steps · latency + bytes of one device /
bandwidth of the slowest link. A ring enters and leaves each node once, through the node's ports, shared by all groups
there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.planner.counted import Collective, Kernel, ProgramCounts


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal nodes of equal devices. Bandwidths in bytes a second, one way; efficiencies as part of the peak.

    product_flops_per_s: by element type of the operands. node_ports: bandwidth out of one whole node.
    """

    devices_per_node: int
    product_flops_per_s: Mapping[str, float]
    product_efficiency: float
    memory_bandwidth: float
    memory_efficiency: float
    launch_s: float
    inside: float
    inside_latency_s: float
    node_ports: float
    ports_latency_s: float
    link_efficiency: float


MACHINES = {
    # NVIDIA A100 SXM4 80 GB datasheet (June 2021): TF32 156, BF16 312 Tflop/s, 2039 GB/s, NVLink 300 GB/s one way.
    # One 200 Gbit/s InfiniBand port a node. Efficiencies and latencies are round figures of what NCCL and cuBLAS reach.
    "a100": Machine(
        devices_per_node=8,
        product_flops_per_s={"f32": 156e12, "bf16": 312e12, "f16": 312e12},
        product_efficiency=0.6,
        memory_bandwidth=2039e9,
        memory_efficiency=0.85,
        launch_s=3e-6,
        inside=300e9,
        inside_latency_s=3e-6,
        node_ports=25e9,
        ports_latency_s=8e-6,
        link_efficiency=0.8,
    ),
    # NVIDIA H100 SXM5 80 GB datasheet (2023), without sparsity: TF32 495, BF16 989, FP8 1979 Tflop/s, 3352 GB/s, NVLink
    # 450 GB/s one way. A DGX H100 has eight 400 Gbit/s InfiniBand ports, one a device.
    "h100": Machine(
        devices_per_node=8,
        product_flops_per_s={"f32": 495e12, "bf16": 989e12, "f16": 989e12, "f8e4m3fn": 1979e12, "f8e5m2": 1979e12},
        product_efficiency=0.6,
        memory_bandwidth=3352e9,
        memory_efficiency=0.85,
        launch_s=3e-6,
        inside=450e9,
        inside_latency_s=3e-6,
        node_ports=400e9,
        ports_latency_s=8e-6,
        link_efficiency=0.8,
    ),
    # Server CPUs, one device a socket: 2 Tflop/s single precision, 200 GB/s, 20 GB/s between them, 10 Gbit/s Ethernet.
    "cpu": Machine(
        devices_per_node=8,
        product_flops_per_s={"f32": 2e12, "bf16": 2e12},
        product_efficiency=0.6,
        memory_bandwidth=200e9,
        memory_efficiency=0.8,
        launch_s=2e-6,
        inside=20e9,
        inside_latency_s=5e-6,
        node_ports=1.25e9,
        ports_latency_s=30e-6,
        link_efficiency=0.8,
    ),
}


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step: kernels with products or convolutions, all other kernels, collectives."""

    product_s: float
    memory_s: float
    communication_s: float

    @property
    def compute_s(self) -> float:
        return self.product_s + self.memory_s

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s


def judge(counts: ProgramCounts, machine: Machine) -> StepTime:
    """Judge a step on `machine`, devices numbered node by node."""
    products = [kernel for kernel in counts.kernels if kernel.product_type]
    others = [kernel for kernel in counts.kernels if not kernel.product_type]
    return StepTime(
        product_s=sum(kernel.count * kernel_s(kernel, machine) for kernel in products),
        memory_s=sum(kernel.count * kernel_s(kernel, machine) for kernel in others),
        communication_s=sum(collective.count * collective_s(collective, machine) for collective in counts.collectives),
    )


def kernel_s(kernel: Kernel, machine: Machine) -> float:
    """Seconds of one run of a kernel."""
    rates = machine.product_flops_per_s
    rate = rates.get(kernel.product_type or "f32", rates["f32"]) * machine.product_efficiency
    memory_s = kernel.bytes / (machine.memory_bandwidth * machine.memory_efficiency)
    return max(kernel.flops / rate, memory_s, machine.launch_s)


def collective_s(collective: Collective, machine: Machine) -> float:
    """Seconds of one run of a collective, all its groups side by side."""
    n = collective.group_size
    rounds = 2 if collective.kind == "all-reduce" else 1
    steps = 1 if collective.kind == "collective-permute" else rounds * (n - 1)
    crosses = any(len(_nodes_of(group, machine)) > 1 for group in collective.groups)
    latency_s = machine.ports_latency_s if crosses else machine.inside_latency_s
    seconds = collective.wire_bytes / (machine.inside * machine.link_efficiency)
    if crosses:
        ports = machine.node_ports * machine.link_efficiency
        seconds = max(seconds, _max_egress_bytes(collective, machine) / ports)
    return steps * latency_s + seconds


def _nodes_of(group: tuple[int, ...], machine: Machine) -> set[int]:
    return {device // machine.devices_per_node for device in group}


def _max_egress_bytes(collective: Collective, machine: Machine) -> float:
    """Bytes out of the busiest node in one run."""
    egress_bytes: defaultdict[int, float] = defaultdict(float)
    sent = collective.wire_bytes
    for group in collective.groups:
        members = Counter(device // machine.devices_per_node for device in group)
        if len(members) == 1:
            continue
        if collective.kind == "collective-permute":
            egress_bytes[group[0] // machine.devices_per_node] += sent
        elif collective.kind == "all-to-all":  # every device sends a part to each other one
            others = len(group) - 1
            for node, count in members.items():
                egress_bytes[node] += sent * count * (len(group) - count) / others
        else:  # a ring leaves each node once, with one device's bytes
            for node in members:
                egress_bytes[node] += sent
    return max(egress_bytes.values(), default=0.0)
