"""Ranks that miss a collective of the others: named in a warning, and ended after a limit.

Each rank tells the coordination service, now and then, its number of begun collectives of each set of ranks, and the
latest call. A rank in a long wait reads the others': a smaller number names a missing rank, and where there is none,
another call one that has gone another way (calls outside of jitted functions compare themselves before).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from shardwright.errors import OptionError, RankLostError
from shardwright.ranks import lifeline, watch
from shardwright.ranks.tuning import STALL_END_S
from shardwright.ranks.watch import Position, name_call
from shardwright.xla import private

_KEYS = "shardwright/collectives/"
#: Exit code of a rank that waited for too long.
_EXIT_CODE = 1

_log = logging.getLogger("shardwright.ranks")


def read_seconds(value: float | None, variable: str, default: float, environment: Mapping[str, str]) -> float:
    """Seconds that a caller gave, else a variable, else the default. Raises OptionError."""
    text = environment.get(variable, "")
    if value is None and not text:
        return default
    try:
        seconds = float(text) if value is None else float(value)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        where = variable if value is None else variable.removeprefix("SHARDWRIGHT_").lower()
        raise OptionError(f"{text if value is None else value!r} is no time", where=where, remedy="seconds from 0")
    return seconds


#: By set of ranks, the number of collectives begun, and the latest call.
_Begun = dict[tuple[int, ...], tuple[int, str]]


class StallInspector:
    """Watches the collectives of one rank, in one generation, on a thread.

    rank: its number. warning_s: how long a collective may wait until those that it waits for are named, again and
    again; 0: forever. shutdown_s: how long until they are ended (elastic ranks), or this process ends with an error;
    0: forever.
    """

    def __init__(self, rank: int, warning_s: float, shutdown_s: float) -> None:
        self._rank = rank
        self._warning_s = warning_s
        self._shutdown_s = shutdown_s
        self._client = private.coordination_client()
        self._watch = watch.current()
        self._told: _Begun = {}
        self._warned_s = 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        limits = [limit for limit in (warning_s, shutdown_s) if limit > 0]
        if limits and self._client is not None:
            self._interval_s = min(5.0, max(0.1, min(limits) / 4))
            self._thread = threading.Thread(target=self._run, name="stall-inspector", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(STALL_END_S)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            with contextlib.suppress(RuntimeError, ValueError):  # the service is gone, and this generation with it
                self._tell()
                self._inspect()

    def _tell(self) -> None:
        begun = self._watch.begun()
        if begun != self._told:
            text = json.dumps([[list(ranks), count, call] for ranks, (count, call) in begun.items()])
            self._client.key_value_set(f"{_KEYS}{self._rank}", text, True)
            self._told = begun

    def _inspect(self) -> None:
        here, now_s = self._watch.position(), time.monotonic()
        if here is None:
            return
        waited_s = now_s - here.since_s
        is_late = 0 < self._warning_s <= waited_s and now_s >= self._warned_s + self._warning_s
        is_over = 0 < self._shutdown_s <= waited_s
        if not (is_late or is_over):
            return
        missing = find_missing(here, self._rank, self._begun_of_all())
        waiting = [rank for rank in here.ranks if rank not in missing]
        if not missing or self._rank in missing:
            return
        self._watch.stall = describe_stall(here, missing, waiting, waited_s)
        if is_late and self._rank == waiting[0]:
            self._warned_s = now_s
            _log.warning(self._watch.stall)
        if is_over:
            self._end(here, missing, waited_s)

    def _begun_of_all(self) -> dict[int, _Begun]:
        entries = self._client.key_value_dir_get(_KEYS)
        return {
            int(key.rpartition("/")[2]): {tuple(ranks): (count, call) for ranks, count, call in json.loads(text)}
            for key, text in entries
        }

    def _end(self, here: Position, missing: list[int], waited_s: float) -> None:
        """Have an elastic job's launcher end the missing ranks; in another job end this process."""
        line = lifeline.current()
        if line is not None:
            line.report_stall(missing, here.call, waited_s)
            self._closed.wait(self._shutdown_s)
            return
        error = RankLostError(
            f"{name_ranks(missing)} did not call {name_call(here.call)} within {waited_s:.0f} s",
            where="stall shutdown",
            remedy="every rank must call the same collectives; allow more with --stall-shutdown",
        )
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os.write(2, f"error: {error}\n".encode())
        os._exit(_EXIT_CODE)


def find_missing(here: Position, rank: int, progress: Mapping[int, _Begun]) -> list[int]:
    """The ranks that rank `rank` waits for in `here`: those that have begun less, else those in another call."""
    of_set = {other: progress.get(other, {}).get(here.ranks, (0, "")) for other in here.ranks if other != rank}
    missing = [other for other, (count, _) in of_set.items() if count < here.count]
    if missing:
        return missing
    own = name_call(here.call)
    any_call = (own, watch.UNNAMED, watch.JOINED)
    elsewhere = [other for other, (count, call) in of_set.items() if count == here.count and call not in any_call]
    return [] if own in any_call[1:] else elsewhere


def describe_stall(here: Position, missing: list[int], waiting: list[int], waited_s: float) -> str:
    """`rank 2 has not called allreduce sum 'loss' float32[] (number 17), in which ranks 0, 1 have waited for 60 s`."""
    return describe_wait(f"{name_call(here.call)} (number {here.count})", missing, waiting, waited_s)


def describe_wait(call: str, missing: Sequence[int], waiting: Sequence[int], waited_s: float) -> str:
    """`ranks 1, 2 have not called sw.ranks.init, in which rank 0 has waited for 60 s`."""
    return (
        f"{name_ranks(missing)} {_have(missing)} not called {call}, "
        f"in which {name_ranks(waiting)} {_have(waiting)} waited for {waited_s:.0f} s"
    )


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def name_ranks(ranks: Sequence[int]) -> str:
    """`ranks 1, 2`, the first sixteen."""
    shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
