"""The launcher behind `shardwright run`: processes on many hosts, started, watched and ended as one.

Reading order: hosts (which hosts, which rank where) → job (what runs where) → settings (what the user asked for) →
supervision (a pure state machine) → launcher (the shell around it) → node (one host, by a local child or by ssh) →
node_agent (what runs there) → output (what the user reads) → service (the coordination service of jax.distributed) →
functions (a Python function instead of a command).
"""

from shardwright.launch.functions import run

__all__ = ["run"]
