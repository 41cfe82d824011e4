"""HiGHS as every integer program of the planner has it: one thread, and an end by the CPU time that it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import thread_time
from typing import Any

import highspy
import pulp


def highs(
    *,
    gap: float,
    most_cpu_s: float,
    time_limit_s: float = math.inf,
    below: float = math.inf,
    most_rounds: float = math.inf,
) -> pulp.HiGHS:
    """A solver for one program, solved by the thread that asks for it.

    gap: relative distance from the bound at which to stop. most_cpu_s: CPU seconds, which do not hang on how busy the
    machine is, as a plan must not. time_limit_s: seconds on the wall, for those who have a deadline. below: solutions
    of this objective value and more are no use, and what cannot be below it is left out. most_rounds: of solving a
    linear relaxation and looking further, at most: the same on every machine.
    """
    cutoff = {"objective_bound": below} if math.isfinite(below) else {}
    return pulp.HiGHS(
        msg=False,
        timeLimit=time_limit_s if math.isfinite(time_limit_s) else None,
        threads=1,
        gapRel=gap,
        callbackTuple=(_Limit(thread_time() + most_cpu_s, most_rounds), None),
        callbacksToActivate=[highspy.cb.HighsCallbackType.kCallbackMipInterrupt],
        **cutoff,
    )


@dataclass(slots=True)
class _Limit:
    """Ends HiGHS once this thread, the one that HiGHS runs in, has taken so much CPU time, or so many rounds."""

    end_s: float
    rounds_left: float

    def __call__(self, kind: Any, message: str, out: Any, said: Any, data: Any) -> None:
        """What HiGHS calls as it goes on: `said` tells it whether to."""
        self.rounds_left -= 1
        said.user_interrupt = self.rounds_left < 0 or thread_time() > self.end_s
