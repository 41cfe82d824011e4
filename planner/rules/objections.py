"""What speaks against a combination of factors that its rule allows each by itself."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import Factor
from shardwright.planner.rules.declared_rules import find_missing_part
from shardwright.planner.rules.xla_bugs import find_xla_bug
from shardwright.plans.shardings import Mesh


def find_objection(instruction: Instruction, assignment: Mapping[str, Factor | None], mesh: Mesh) -> str | None:
    """A bug of XLA's, or a part of a kernel that there is no program for; None where nothing does.

    assignment: mesh axis → factor; a missing axis is idle, like one with None.
    """
    return find_xla_bug(instruction, assignment, mesh) or find_missing_part(instruction, assignment, mesh)
