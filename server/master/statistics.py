"""What the master counts: steps, snapshots, saves by the state machine; plans, compilations, uploads by the shell.

Plain numbers, whoever reads them: `server/metrics.py` exports them, Status shows some.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, get_args

from shardwright.errors import ShardwrightError, StepCancelledError
from shardwright.server.tuning import RATE_S

Result = Literal["succeeded", "failed", "cancelled"]
RESULTS: tuple[Result, ...] = get_args(Result)

#: Upper bounds of histograms, in seconds: of steps, and of what takes longer.
STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
WORK_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


def result_of(error: ShardwrightError | None) -> Result:
    if error is None:
        return "succeeded"
    return "cancelled" if isinstance(error, StepCancelledError) else "failed"


@dataclass(slots=True)
class Histogram:
    """How many values lie below each bound, the last one infinite; `counts` are not cumulative."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(slots=True)
class Rate:
    """Events per second, those of long ago counting less: each by exp(-age / 10 s)."""

    since_s: float
    weight: float = 0.0
    _last_s: float = 0.0

    def add(self, now_s: float) -> None:
        self.weight = self._decayed(now_s) + 1.0
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        """Of a time that is shorter than the window, the mean."""
        covered_s = RATE_S * -math.expm1(-max(now_s - self.since_s, 1.0) / RATE_S)
        return self._decayed(now_s) / covered_s

    def _decayed(self, now_s: float) -> float:
        return self.weight * math.exp((self._last_s - now_s) / RATE_S)


@dataclass(slots=True)
class Work:
    """Things that take a while, by their end; `bytes` of those that succeeded."""

    results: Counter[Result] = field(default_factory=Counter)
    seconds: Histogram = field(default_factory=lambda: Histogram(WORK_BOUNDS_S))
    bytes: int = 0

    def end(self, result: Result, seconds: float, size_bytes: int = 0) -> None:
        self.results[result] += 1
        if result == "succeeded":
            self.seconds.observe(seconds)
            self.bytes += size_bytes

    @contextmanager
    def timed(self) -> Iterator[None]:
        """One that is carried out within; an exception that is none of ours, as at its cancellation, cancels it."""
        began_s = monotonic()
        try:
            yield
        except ShardwrightError as error:
            self.end(result_of(error), 0.0)
            raise
        except BaseException:
            self.end("cancelled", 0.0)
            raise
        self.end("succeeded", monotonic() - began_s)


@dataclass(slots=True)
class Statistics:
    """now_s: of the state machine. steps: by kind and result. step_s: what workers took for steps that succeeded."""

    now_s: float = 0.0
    steps: Counter[tuple[str, Result]] = field(default_factory=Counter)
    step_s: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    rates: dict[str, Rate] = field(default_factory=dict)
    snapshots: Work = field(default_factory=Work)
    saves: Work = field(default_factory=Work)
    plans: Work = field(default_factory=Work)
    compilations: Work = field(default_factory=Work)
    sessions: int = 0
    uploads: int = 0
    upload_bytes: int = 0
    programs: int = 0
    program_bytes: int = 0
    executor_exits: Counter[int] = field(default_factory=Counter)

    def step_ended(self, session_id: str, kind: str, error: ShardwrightError | None, run_s: float) -> None:
        result = result_of(error)
        self.steps[kind, result] += 1
        rate = self.rates.setdefault(session_id, Rate(self.now_s))
        if kind == "step" and result == "succeeded":
            self.step_s.observe(run_s)
            rate.add(self.now_s)

    def steps_per_s(self, session_id: str) -> float:
        rate = self.rates.get(session_id)
        return 0.0 if rate is None else rate.per_s(self.now_s)

    def session_ended(self, session_id: str, kinds: Iterable[str]) -> None:
        """kinds: of its steps that wait or run: whatever becomes of them, nobody hears of it."""
        self.rates.pop(session_id, None)
        self.steps.update((kind, "cancelled") for kind in kinds)
