"""How long a command may take: a step's time limit, and what is usual for its program."""

from __future__ import annotations

from shardwright.server.limits import Limits
from shardwright.server.master import events as ev
from shardwright.server.master.session_records import Executable
from shardwright.server.tuning import LONGEST_LIMIT_S, MEASURED_FACTOR, PREDICTED_FACTOR, SHORTEST_LIMIT_S


def step_limit_s(limits: Limits, step: ev.StepRequested, executable: Executable | None) -> float:
    """Seconds that a step may take: the user's limit (1 or more), else a generous one, never below `limits.step_s`."""
    if step.files is not None or step.snapshot is not None:
        return limits.save_s
    if step.timeout_s > 0:
        return max(step.timeout_s, SHORTEST_LIMIT_S)
    if executable is None or executable.program is None:
        return limits.step_s
    predicted_s = PREDICTED_FACTOR * executable.program.predicted_s
    return min(max(limits.step_s, predicted_s, MEASURED_FACTOR * executable.longest_run_s), LONGEST_LIMIT_S)


def usual_s(executable: Executable | None) -> float:
    """What its steps took at most so far; never less than predicted."""
    if executable is None or executable.program is None:
        return 0.0
    return max(executable.program.predicted_s, executable.longest_run_s)
