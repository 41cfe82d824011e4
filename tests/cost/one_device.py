"""Programs as one device runs them whole."""

from __future__ import annotations

from shardwright.cost import hardware_profile
from shardwright.cost.peak.inline import inlined
from shardwright.cost.peak.lowered import Lowering
from shardwright.cost.peak.program import Program
from shardwright.hlo import Computation, parse
from shardwright.shardings import Mesh


def program_of(source: str | Computation, profile: str = "cpu") -> Program:
    """What the compiler of a profile makes of a computation, or of the entry of a module's text."""
    computation = parse(source).entry if isinstance(source, str) else source
    return Lowering(Mesh(axes=()), {}, hardware_profile(profile)).program(inlined(computation))
