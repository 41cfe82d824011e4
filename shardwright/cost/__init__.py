"""What a plan costs: seconds of compute and communication, bytes of memory, from hardware data."""

from shardwright.cost.compute import compute_time_s, flops, is_free, memory_traffic_bytes
from shardwright.cost.moves.collectives import Topology, collective_time_s, group_time_s, latency_share, wire_bytes
from shardwright.cost.moves.paths import Move
from shardwright.cost.moves.reshard import reshard, reshard_time_s
from shardwright.cost.peak.liveness import Liveness, liveness
from shardwright.cost.peak.memory import memory, memory_and_peak, required_bytes
from shardwright.cost.profiles import HardwareProfile, Link, hardware_profile, known_profiles

__all__ = [
    "HardwareProfile",
    "Link",
    "Liveness",
    "Move",
    "Topology",
    "collective_time_s",
    "compute_time_s",
    "flops",
    "group_time_s",
    "hardware_profile",
    "is_free",
    "known_profiles",
    "latency_share",
    "liveness",
    "memory",
    "memory_and_peak",
    "memory_traffic_bytes",
    "required_bytes",
    "reshard",
    "reshard_time_s",
    "wire_bytes",
]
