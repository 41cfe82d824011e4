"""Where an elastic job's hosts come from: a fixed list, a file that is edited, or a script that prints them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from shardwright.errors import OptionError
from shardwright.launch.hosts import Host, parse_host_lines, read_hosts_file
from shardwright.launch.tuning import INTERVAL_S, SCRIPT_TIMEOUT_S
from shardwright.program_output import ProgramFailure, read_output


class Discovery:
    """Looks for hosts again and again.

    source: returns the hosts. on_hosts: called from a thread with hosts that differ from the last. on_problem: with
    what went wrong at a look, once; the hosts stay as they were. interval_s: from one look to the next.
    """

    def __init__(
        self,
        source: Callable[[], tuple[Host, ...]],
        on_hosts: Callable[[tuple[Host, ...]], None],
        on_problem: Callable[[str], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._source = source
        self._interval_s = interval_s
        self._on_hosts = on_hosts
        self._on_problem = on_problem
        self._last: tuple[Host, ...] | None = None
        self._problem = ""
        self._closed = threading.Event()

    def start(self) -> None:
        """Look for the first time, here, then on a thread. Raises OptionError where the first look fails."""
        self._last = self._source()
        self._on_hosts(self._last)
        threading.Thread(target=self._look_again, name="host-discovery", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _look_again(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                hosts = self._source()
            except OptionError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    self._on_problem(f"{error.where}: {error.message}; the hosts stay as they are")
                continue
            self._problem = ""
            if hosts != self._last:
                self._last = hosts
                self._on_hosts(hosts)


def script_source(command: Path, slots: int = 1) -> Callable[[], tuple[Host, ...]]:
    """Hosts that a script prints, `host:slots` or `host slots=2` a line; none is allowed. Raises OptionError.

    slots: of a host without a number.
    """
    path = str(command) if os.sep in str(command) else f".{os.sep}{command}"

    def look() -> tuple[Host, ...]:
        where = "--host-discovery-script"
        try:
            output = read_output(path, SCRIPT_TIMEOUT_S)
        except ProgramFailure as failure:
            remedy = "name a program that may be run (chmod +x)"
            if failure.is_started:
                remedy = "it has to print `host:slots` lines and end with 0"
            raise OptionError(f"{command} {failure}", where=where, remedy=remedy) from None
        return parse_host_lines(output.splitlines(), str(command), slots)

    return look


def file_source(path: Path, slots: int = 1) -> Callable[[], tuple[Host, ...]]:
    """Hosts of a file that may be edited while the job runs. slots: of a host without a number. Raises OptionError."""
    return lambda: read_hosts_file(path, "--hosts-file", slots)


def fixed_source(hosts: tuple[Host, ...]) -> Callable[[], tuple[Host, ...]]:
    """Always the same hosts."""
    return lambda: hosts
