"""The launcher behind `shardwright run`: processes on many hosts, started, supervised and ended as one job.

Reading order: hosts (hosts, placement of ranks) → job (processes on hosts) → settings (the user's options) →
supervision (a pure state machine) → launcher (its event loop) → node (one host, by a local child or by ssh) →
node_agent (the agent there) → output (labelled lines) → service (the coordination service of jax.distributed) →
functions (a Python function instead of a command).
"""

from shardwright.launch.functions import run

__all__ = ["run"]
