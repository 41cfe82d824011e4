"""Optimizer state in the host's memory: which arguments that is, and the program that keeps them there."""

from shardwright.planner.offload.notes import note_offload
from shardwright.planner.offload.optimizer_state import find_optimizer_state
from shardwright.planner.offload.placements import keep_on_host

__all__ = ["find_optimizer_state", "keep_on_host", "note_offload"]
