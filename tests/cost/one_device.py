"""Programs as one device runs them whole."""

from __future__ import annotations

from shardwright.cost import hardware_profile
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.inline import inline_calls
from shardwright.cost.peak.lowering import Lowering
from shardwright.hlo import Computation, parse
from shardwright.plans.shardings import Mesh


def program_of(source: str | Computation, profile: str = "cpu") -> DeviceProgram:
    """What the compiler of a profile makes of a computation, or of the entry of a module's text."""
    computation = parse(source).entry if isinstance(source, str) else source
    return Lowering(Mesh(axes=()), {}, hardware_profile(profile)).program(inline_calls(computation))
