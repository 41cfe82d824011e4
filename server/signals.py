"""What asks a server process to end: signals, and a notice that its machine is about to go away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable

from shardwright.server.tuning import PREEMPTION_ANSWER_BYTES, PREEMPTION_LOOK_S, PREEMPTION_POLL_S

EXIT_INTERRUPTED = 130

#: Answers of a URL that mean "no" although their status is 200.
_NO = frozenset({"", "false", "0", "no", "none", "null"})

_log = logging.getLogger("shardwright.server")


class Stops:
    """SIGTERM drains, a second one ends at once; Ctrl-C ends at once. Both are calls on the event loop.

    drain: gets the reason, in words. stop: gets the exit code.
    """

    def __init__(self, drain: Callable[[str], object], stop: Callable[[int], object]) -> None:
        self._drain = drain
        self._stop = stop
        self._was_terminated = False
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(signal.SIGINT, stop, EXIT_INTERRUPTED)
            loop.add_signal_handler(signal.SIGTERM, self._terminate)

    def _terminate(self) -> None:
        if self._was_terminated:
            _log.warning("a second SIGTERM: ending at once")
            self._stop(0)
            return
        self._was_terminated = True
        self._drain("SIGTERM")


async def watch_notice(notice: str, drain: Callable[[str], object]) -> None:
    """Call `drain` once the file `notice` is there, or the URL `notice` answers 200 and not "false"."""
    is_failing = False
    while True:
        try:
            if await asyncio.to_thread(_is_there, notice):
                drain(f"preemption notice {notice}")
                return
            is_failing = False
        except OSError as error:
            if not is_failing:
                _log.warning("the preemption notice %s cannot be looked at: %s", notice, error)
            is_failing = True
        await asyncio.sleep(PREEMPTION_POLL_S)


def _is_there(notice: str) -> bool:
    """Blocking. Raises OSError where nobody can tell."""
    if "://" not in notice:
        return os.path.exists(notice)
    request = urllib.request.Request(notice, headers={"Metadata-Flavor": "Google"})  # which only Google's asks for
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the notice is of this machine
    try:
        with opener.open(request, timeout=PREEMPTION_LOOK_S) as reply:
            answer = reply.read(PREEMPTION_ANSWER_BYTES).decode(errors="replace").strip().lower()
            return reply.status == 200 and answer not in _NO
    except urllib.error.HTTPError:
        return False  # 404: no notice yet
