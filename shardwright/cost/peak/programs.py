"""The programs that one device runs of a module's computations, each with what its loops hoist ahead of them."""

from __future__ import annotations

from shardwright.cost.peak.hoisting import Loop, loop_of, with_hoisted
from shardwright.cost.peak.inline import inlined
from shardwright.cost.peak.lowered import Lowering
from shardwright.cost.peak.program import Program
from shardwright.hlo import Computation


class Programs:
    """Makes each program once. lowering: makes them without what loops hoist."""

    def __init__(self, lowering: Lowering) -> None:
        self._lowering = lowering
        self._whole: dict[Computation, Program] = {}
        self._loops: dict[Computation, Loop] = {}

    def of(self, computation: Computation, *, is_loop: bool = False) -> Program:
        """What runs of a computation; is_loop: again and again, so that what is the same each time is left out."""
        if is_loop:
            return self.loop(computation).rest
        if computation not in self._whole:
            self._whole[computation] = with_hoisted(self._lowering.program(inlined(computation)), self.loop)
        return self._whole[computation]

    def loop(self, body: Computation) -> Loop:
        """A loop's body, and what of it is hoisted."""
        if body not in self._loops:
            what = self._lowering.profile.compiler.hoists_loop_invariants
            self._loops[body] = loop_of(self.of(body), what)
        return self._loops[body]
