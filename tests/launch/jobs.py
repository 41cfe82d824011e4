"""Starts `shardwright run` as users do, and finds every process that a job left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

MARK = "SHARDWRIGHT_TEST_JOB"

#: Ends only when it is killed, and starts a child that does so, too.
STUBBORN = "trap '' TERM INT HUP; sleep 300 & while :; do sleep 0.1; done"


class LaunchedJob:
    """A running command that starts ranks; its processes carry a mark in their environment."""

    def __init__(self, command: Sequence[str], folder: Path | None, environment: dict[str, str] | None) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
            env={**os.environ, **(environment or {}), MARK: self.mark},
        )  # fmt: skip

    def result(self, timeout_s: float = 60.0) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        """Everything with this job's mark but the launcher: agents, ssh clients, ranks and what those started."""
        return list(self.environments())

    def environments(self) -> dict[psutil.Process, dict[str, str]]:
        """`processes`, each with its environment variables; what ends while it is looked at is left out."""
        environments = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                variables = process.environ()
                is_ours = process.pid != self.process.pid and variables.get(MARK) == self.mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    environments[process] = variables
        return environments

    def wait_for_line(self, text: str) -> str:
        """The first line of standard output that holds a text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return line
        raise AssertionError(f"no line with {text!r}; {self.result()}")

    def wait_for_processes(self, count: int, timeout_s: float = 30.0) -> None:
        """Wait until at least so many run: what a shell starts in the background comes after its next line."""
        end_s = time.monotonic() + timeout_s
        while len(running := self.processes()) < count:
            assert time.monotonic() < end_s, running
            time.sleep(0.05)

    def gone_after_s(self, most_s: float) -> float:
        """Seconds until nothing of the job runs."""
        start = time.monotonic()
        while left := self.processes():
            assert time.monotonic() < start + most_s, left
            time.sleep(0.1)
        return time.monotonic() - start

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def launched_program(
    *command: str, folder: Path | None = None, environment: dict[str, str] | None = None
) -> Iterator[LaunchedJob]:
    job = LaunchedJob(command, folder, environment)
    try:
        yield job
    finally:
        job.close()


def launched(
    *arguments: str, folder: Path | None = None, environment: dict[str, str] | None = None
) -> contextlib.AbstractContextManager[LaunchedJob]:
    """`shardwright run` with these arguments."""
    command = (sys.executable, "-m", "shardwright", "run", *arguments)
    return launched_program(*command, folder=folder, environment=environment)


def run_job(
    *arguments: str, folder: Path | None = None, environment: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Run to the end: exit code, standard output, standard error. Nothing of it may be left."""
    with launched(*arguments, folder=folder, environment=environment) as job:
        result = job.result()
        assert job.processes() == []
        return result
