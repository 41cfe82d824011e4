"""Combinations of legal factors that XLA is known to compute wrongly."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import Factor
from shardwright.plans import Mesh


def denied(instruction: Instruction, assignment: Mapping[str, Factor | None], mesh: Mesh) -> str | None:
    """Why XLA computes `instruction` wrongly with `assignment` (mesh axis → factor) on `mesh`; None if it does not."""
    return None
