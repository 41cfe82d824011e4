"""HiGHS with the planner's settings: one thread, stopped by CPU time."""

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
    """A solver of one program, run by the calling thread.

    gap: relative gap at which to stop.
    most_cpu_s: CPU seconds: independent of the machine's load, and so are plans.
    time_limit_s: wall-clock seconds, given a deadline.
    below: cutoff: solutions of at least this objective value are useless; branches without a lower one are pruned.
    most_rounds: maximum of linear relaxations and branching rounds: equal on every machine.
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
    """Stops HiGHS after this thread (the one running HiGHS) has spent its CPU time or its rounds."""

    end_s: float
    rounds_left: float

    def __call__(self, kind: Any, message: str, out: Any, request: Any, data: Any) -> None:
        """HiGHS' callback: `request` carries the interrupt request."""
        self.rounds_left -= 1
        request.user_interrupt = self.rounds_left < 0 or thread_time() > self.end_s
