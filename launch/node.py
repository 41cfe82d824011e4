"""The launcher's side of one host: an agent at the end of a pipe or of ssh (`node_agent.py`)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwright.errors import LaunchError
from shardwright.launch import node_agent
from shardwright.launch.hosts import Host
from shardwright.launch.job import Job
from shardwright.launch.output import JobOutput
from shardwright.launch.ssh import SshOptions, ssh_command
from shardwright.launch.supervision import FORWARDED_SIGNALS, Event, NodeLost, NodeReady, ProcessEnded
from shardwright.launch.tuning import LAST_OUTPUT_S
from shardwright.processes import describe_exit

#: Number of a host's last lines in errors.
_LAST_LINES = 10

_AGENT_SOURCE = Path(node_agent.__file__).read_bytes()


def agent_command() -> list[str]:
    """The agent's command; it reads its own source first from standard input, without installation on the host."""
    program = f"exec(compile(open(0, 'rb', closefd=False).read({len(_AGENT_SOURCE)}), 'node_agent', 'exec'))"
    return [sys.executable, "-I", "-S", "-c", program]


def node_command(host: Host, ssh: SshOptions | None, connect_timeout_s: float) -> list[str]:
    """The command of a host's agent. ssh: None for this machine."""
    words = agent_command()
    return words if ssh is None else ssh_command(host, words, ssh, connect_timeout_s)


class Node:
    """One host of a job.

    report: called from the host's threads with NodeReady, ProcessEnded and NodeLost; the output goes to `output`.
    """

    def __init__(self, host: Host, command: Sequence[str], output: JobOutput, report: Callable[[Event], None]) -> None:
        self.host = host
        self.closing = False
        self._output = output
        self._report = report
        self._ready = False
        self._last_lines: list[str] = []
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except FileNotFoundError:
            raise LaunchError(
                f"{command[0]} is not installed here", where=host.name, remedy="install an ssh client, or run locally"
            ) from None
        self._threads = [
            threading.Thread(target=target, name=f"{target.__name__}-{host.name}", daemon=True)
            for target in (self._read_errors, self._read_events)  # who reads events waits for the errors at the end
        ]
        for thread in self._threads:
            thread.start()
        self._write(_AGENT_SOURCE)

    # ---- requests ----
    def start(self, job: Job, numbers: Sequence[int], *, local: bool) -> None:
        """Start this host's processes of the job, of the given numbers."""
        for process in job.processes:
            if process.number in numbers and process.host.name == self.host.name:
                self._request(
                    do="start",
                    number=process.number,
                    command=process.command,
                    environment=job.variables(process, local=local),
                    directory=job.directory,
                )

    def send_signal(self, signal: int, numbers: Sequence[int]) -> None:
        """Signal the process groups; `FORWARDED_SIGNALS` only the processes: their children may not handle them."""
        self._request(do="signal", numbers=list(numbers), signal=int(signal), group=signal not in FORWARDED_SIGNALS)

    def begin_close(self) -> None:
        """Let the agent end its processes and itself. An ssh without a connection is killed."""
        self.closing = True
        if not self._ready:
            self._process.kill()
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def finish_close(self, until_s: float) -> None:
        """Wait for the agent, at most until a time of `time.monotonic`, and for the rest of its output."""
        try:
            self._process.wait(max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(LAST_OUTPUT_S)

    def _request(self, **request: Any) -> None:
        self._write(json.dumps(request).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        """Write to the agent. A lost host is reported at the end of its output, not here."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    # ---- events ----
    def _read_events(self) -> None:
        assert self._process.stdout is not None
        stream = self._process.stdout
        try:
            for line in stream:  # a shell's startup files may write ahead of the agent
                if line.startswith(node_agent.GREETING.encode()):
                    self._ready = True
                    self._report(NodeReady(self.host.name))
                    break
                self._remember(line)
            for line in stream:
                event = json.loads(line)
                number = event["number"]
                if event["event"] == "output":
                    self._output.write(number, event["stream"], stream.read(event["bytes"]))
                else:
                    self._output.end(number)
                    self._report(ProcessEnded(number, event["code"], event["reason"]))
        except OSError as error:  # standard output of the launcher is gone, or a log cannot be written
            self._report(NodeLost(self.host.name, f"its output cannot be written ({error.strerror})"))
        except (ValueError, KeyError) as error:
            self._report(NodeLost(self.host.name, f"its agent speaks another language ({error})"))
        if not self.closing:
            code = self._process.wait()
            self._threads[0].join(LAST_OUTPUT_S)
            self._report(NodeLost(self.host.name, self._describe_end(code)))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._remember(line)
            if self._ready and not self.closing:
                with contextlib.suppress(OSError):
                    self._output.note(self.host.name, line.decode(errors="replace").rstrip())

    def _remember(self, line: bytes) -> None:
        self._last_lines = [*self._last_lines[1 - _LAST_LINES :], line.decode(errors="replace").rstrip()]

    def _describe_end(self, code: int) -> str:
        words = "\n".join(self._last_lines)
        program = Path(str(self._process.args[0])).name if isinstance(self._process.args, list) else "its agent"
        return f"{program} ended with {describe_exit(code)}" + (f": {words}" if words else "")
