"""Cost of a plan: seconds of compute and communication, bytes of memory, from hardware data.

Called, the module is `shardwright.cost(flops=…)` of users (`given.py`).
"""

import sys

from shardwright.cost.compute import compute_time_s, flops, is_free, memory_traffic_bytes
from shardwright.cost.given import CallableModule
from shardwright.cost.moves.collectives import Topology, collective_time_s, group_time_s, latency_share, wire_bytes
from shardwright.cost.moves.reshard import reshard, reshard_time_s
from shardwright.cost.moves.reshard_cache import Move
from shardwright.cost.peak.liveness import Liveness, liveness
from shardwright.cost.peak.memory import bytes_with_margin, predict_memory, predict_memory_and_peak
from shardwright.cost.profiles import HardwareProfile, Link, hardware_profile, list_profiles, platform_of_profile

__all__ = [
    "HardwareProfile",
    "Link",
    "Liveness",
    "Move",
    "Topology",
    "bytes_with_margin",
    "collective_time_s",
    "compute_time_s",
    "flops",
    "group_time_s",
    "hardware_profile",
    "is_free",
    "latency_share",
    "list_profiles",
    "liveness",
    "memory_traffic_bytes",
    "platform_of_profile",
    "predict_memory",
    "predict_memory_and_peak",
    "reshard",
    "reshard_time_s",
    "wire_bytes",
]

sys.modules[__name__].__class__ = CallableModule
