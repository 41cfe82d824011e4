"""The `shardwright` command: plan, lower, serve, explain, doctor."""

from shardwright.cli.app import main

__all__ = ["main"]
