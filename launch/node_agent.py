"""One host's part of a job: starts processes, forwards their output, and kills all of their descendants at the end.

The launcher sends this file's text to a Python interpreter on each host: it imports the standard library alone and
runs on Python 3.8. Standard input brings one JSON object a line:

    {"do": "start", "number": 3, "command": [...], "environment": {...}, "directory": "/home/me"}
    {"do": "signal", "numbers": [3], "signal": 15, "group": true}

Standard output carries one JSON object a line; `output` is followed by that many bytes:

    {"event": "output", "number": 3, "stream": "stdout", "bytes": 12}
    {"event": "ended", "number": 3, "code": -9, "reason": ""}

The end of standard input is the end of the launcher: the agent ends the running processes. Each process leads a process
group of its own. On Linux the agent adopts orphans (PR_SET_CHILD_SUBREAPER) and kills them, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

#: First word of the agent's first line; a shell's startup files may write lines before.
GREETING = "shardwright-node-agent"

#: Seconds from SIGTERM to SIGKILL at the end of the launcher.
_GRACE_S = 1.0
#: Seconds of output after the end of a process, with its pipes held open by others.
_DRAIN_S = 0.3
#: Maximum bytes waiting for the launcher, before processes have to wait.
_MAX_WAITING_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 16

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_agent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A started process: its group has its number, `code` is None while it runs."""

    def __init__(self, number: int, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        assert popen.stderr is not None
        self.number = number
        self.pid = popen.pid
        self.popen = popen
        self.code: int | None = None
        self.ended_at = 0.0
        self.streams = {popen.stdout.fileno(): "stdout", popen.stderr.fileno(): "stderr"}

    def close(self) -> None:
        for pipe in (self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                pipe.close()

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class Agent:
    """The loop: reads requests, starts and signals processes, writes events."""

    def __init__(self) -> None:
        self._processes: dict[int, Process] = {}
        self._input = b""
        self._output = bytearray()
        self._input_open = True
        self._output_open = True
        self._ending_since: float | None = None
        self._wakeup, wakeup_writer = os.pipe()
        for descriptor in (self._wakeup, wakeup_writer, 0, 1):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._end())

    def run(self) -> None:
        while self._input_open or self._processes or self._output:
            self._wait()
            self._reap()
            self._report_ended()
            if not self._output_open:
                self._end()
            if self._ending_since is not None:
                self._escalate(self._ending_since)
        _kill_descendants()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if self._input_open:
            poll.register(0, select.POLLIN)
        if self._output and self._output_open:
            poll.register(1, select.POLLOUT)
        sources: dict[int, Process] = {}
        if len(self._output) < _MAX_WAITING_BYTES:
            sources = {fd: process for process in self._processes.values() for fd in process.streams}
            for descriptor in sources:
                poll.register(descriptor, select.POLLIN)
        busy = self._ending_since is not None or any(p.code is not None for p in self._processes.values())
        for descriptor, _ in poll.poll(50 if busy else None):
            if descriptor == self._wakeup:
                os.read(self._wakeup, 4096)
            elif descriptor == 0:
                self._read_requests()
            elif descriptor == 1:
                self._write()
            elif descriptor in sources:
                self._forward_output(sources[descriptor], descriptor)

    # ---- requests and events ----
    def _read_requests(self) -> None:
        try:
            data = os.read(0, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end()
            return
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["do"] == "start":
                self._start(request)
            else:
                self._signal(request)

    def _signal(self, request: dict[str, Any]) -> None:
        for number in request["numbers"]:
            process = self._processes.get(number)
            if process is not None and process.code is None:
                if request["group"]:
                    process.signal_group(request["signal"])
                else:
                    os.kill(process.pid, request["signal"])

    def _write(self) -> None:
        try:
            del self._output[: os.write(1, memoryview(self._output)[:_CHUNK_BYTES].tobytes())]
        except BlockingIOError:
            pass
        except OSError:
            self._output_open = False
            self._output.clear()

    def _send(self, payload: bytes = b"", **event: Any) -> None:
        if self._output_open:
            self._output += json.dumps(event).encode() + b"\n" + payload

    # ---- processes ----
    def _start(self, request: dict[str, Any]) -> None:
        number, command = request["number"], request["command"]
        environment = dict(os.environ)
        environment.update(request["environment"])
        try:
            popen = subprocess.Popen(
                command, env=environment, cwd=request["directory"], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                preexec_fn=_die_with_agent,  # noqa: PLW1509 - the agent has no threads
            )  # fmt: skip
        except (OSError, ValueError) as error:
            refused = getattr(error, "errno", None) == errno.EACCES
            self._send(event="ended", number=number, code=126 if refused else 127, reason=str(error))
            return
        self._processes[number] = Process(number, popen)

    def _forward_output(self, process: Process, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            del process.streams[descriptor]
            return
        stream = process.streams[descriptor]
        self._send(data, event="output", number=process.number, stream=stream, bytes=len(data))

    def _reap(self) -> None:
        by_pid = {process.pid: process for process in self._processes.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in by_pid:
                process = by_pid[pid]
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                process.code = process.popen.returncode = code
                process.ended_at = time.monotonic()
                process.signal_group(signal.SIGKILL)

    def _report_ended(self) -> None:
        """Report ended processes in order of their ends, each behind the whole of its output.

        Other holders of a process's pipes are not waited for.
        """
        ended = [process for process in self._processes.values() if process.code is not None]
        for process in sorted(ended, key=lambda process: process.ended_at):
            drained = not process.streams or time.monotonic() >= process.ended_at + _DRAIN_S
            if not drained or len(self._output) >= _MAX_WAITING_BYTES:
                return
            for descriptor in list(process.streams):
                os.set_blocking(descriptor, False)
                while descriptor in process.streams:
                    self._forward_output(process, descriptor)
            process.close()
            del self._processes[process.number]
            self._send(event="ended", number=process.number, code=process.code, reason="")

    # ---- the end ----
    def _end(self) -> None:
        self._input_open = False
        if self._ending_since is None:
            self._ending_since = time.monotonic()
            for process in self._processes.values():
                process.signal_group(signal.SIGTERM)

    def _escalate(self, since_s: float) -> None:
        waited_s = time.monotonic() - since_s
        if waited_s > _GRACE_S:
            for process in self._processes.values():
                process.signal_group(signal.SIGKILL)
        if waited_s > 2 * _GRACE_S:  # nobody reads what is left
            self._output.clear()


def _list_children() -> list[int]:
    """Process ids of this process's children, from /proc; none without /proc."""
    children = []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdigit():
            try:
                with open("/proc/" + name + "/stat") as stat:
                    parent = int(stat.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == os.getpid():
                children.append(int(name))
    return children


def _kill_descendants() -> None:
    """Kill leftover descendants; the agent adopts the children of a killed one and kills them next."""
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        children = _list_children()
        if not children:
            return
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def main() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    version = ".".join(str(part) for part in sys.version_info[:3])
    sys.stdout.write(GREETING + " " + json.dumps({"pid": os.getpid(), "python": version}) + "\n")
    sys.stdout.flush()
    Agent().run()


if __name__ == "__main__":
    main()
