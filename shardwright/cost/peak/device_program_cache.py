"""Per-device programs of a module's computations, with loop invariants hoisted."""

from __future__ import annotations

from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.inline import inline_calls
from shardwright.cost.peak.loop_invariant_code_motion import Loop, hoist_invariants, loop_of
from shardwright.cost.peak.lowering import Lowering
from shardwright.hlo import Computation


class DeviceProgramCache:
    """Builds each program once. lowering: builds them without hoisting."""

    def __init__(self, lowering: Lowering) -> None:
        self._lowering = lowering
        self._whole: dict[Computation, DeviceProgram] = {}
        self._loops: dict[Computation, Loop] = {}

    def of(self, computation: Computation, *, is_loop: bool = False) -> DeviceProgram:
        """The program of a computation; is_loop: a loop's body, without its invariants."""
        if is_loop:
            return self.loop(computation).rest
        if computation not in self._whole:
            self._whole[computation] = hoist_invariants(self._lowering.program(inline_calls(computation)), self.loop)
        return self._whole[computation]

    def loop(self, body: Computation) -> Loop:
        """A loop's body and its hoisted nodes."""
        if body not in self._loops:
            what = self._lowering.profile.compiler.hoists_loop_invariants
            self._loops[body] = loop_of(self.of(body), what)
        return self._loops[body]
