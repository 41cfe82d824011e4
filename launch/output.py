"""Output of a job: whole lines with the label of their process, and a file for each stream."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from shardwright.errors import OptionError
from shardwright.launch.job import ProcessSpec
from shardwright.launch.tuning import MAX_LINE_BYTES

#: A line ends at a line feed, a carriage return (progress bars) or both.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\n|\Z)")

STREAMS = ("stdout", "stderr")

#: Takes bytes for standard output or standard error.
Sink = Callable[[bytes], None]


def descriptor_sink(descriptor: int) -> Sink:
    """A sink to a file descriptor, unbuffered: a stalled reader does not delay the interpreter's exit."""

    def write(data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    return write


class LineSplitter:
    """Cuts a stream of bytes into whole lines, without their ends."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self._partial + data
        lines, start = [], 0
        for end in _LINE_END.finditer(data):
            if end.start() > start or end[0] != b"\r":  # a progress bar begins with one
                lines.append(data[start : end.start()])
            start = end.end()
        self._partial = data[start:]
        if len(self._partial) >= MAX_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        return lines

    def finish(self) -> list[bytes]:
        """The rest behind the last line's end."""
        rest, self._partial = self._partial.rstrip(b"\r"), b""
        return [rest] if rest else []


class JobOutput:
    """The output of all processes of a job; called from one thread a host.

    sinks: targets of `stdout` and `stderr`. directory: of the files `rank.N.stdout` and `rank.N.stderr`, with the raw
    bytes. timestamps: prefix each line by the time of day. on_broken_pipe: called at a sink's BrokenPipeError; later
    lines go to the files alone.
    """

    def __init__(
        self,
        processes: Sequence[ProcessSpec],
        sinks: Mapping[str, Sink],
        *,
        directory: Path | None = None,
        timestamps: bool = False,
        on_broken_pipe: Callable[[], None] = lambda: None,
    ) -> None:
        self._labels: dict[int, str] = {}
        self._sinks = dict(sinks)
        self._on_broken_pipe = on_broken_pipe
        self._timestamps = timestamps
        self._directory = directory
        self._splitters: dict[tuple[int, str], LineSplitter] = {}
        self._files: dict[tuple[int, str], BinaryIO] = {}
        self._lock = threading.Lock()
        self.add(processes)

    def add(self, processes: Sequence[ProcessSpec]) -> None:
        """Processes that write from now on. Raises OptionError where their files cannot be written."""
        if self._directory and processes:
            self._files.update(_open_logs(self._directory, processes))
        self._splitters.update({(process.number, name): LineSplitter() for process in processes for name in STREAMS})
        self._labels.update({process.number: process.label for process in processes})

    def relabel(self, number: int, label: str) -> None:
        """What stands before a process's lines from now on."""
        self._labels[number] = label

    def write(self, number: int, stream: str, data: bytes) -> None:
        """Write a piece of a process's stream."""
        if file := self._files.get((number, stream)):
            file.write(data)
            file.flush()
        self._write_lines(self._labels[number], stream, self._splitters[number, stream].feed(data))

    def end(self, number: int) -> None:
        """Write a process's last lines without ends."""
        for stream in STREAMS:
            self._write_lines(self._labels[number], stream, self._splitters[number, stream].finish())

    def note(self, label: str, text: str) -> None:
        """Write the launcher's own text to standard error."""
        self._write_lines(label, "stderr", text.encode().splitlines())

    def close(self) -> None:
        for number in self._labels:
            self.end(number)
        for file in self._files.values():
            file.close()

    def _write_lines(self, label: str, stream: str, lines: list[bytes]) -> None:
        if not lines:
            return
        prefix = f"{_time_of_day()} " if self._timestamps else ""
        head = f"{prefix}[{label}]<{stream}>:".encode()
        with self._lock:
            try:
                self._sinks[stream](b"".join(b"%b%b\n" % (head, line) for line in lines))
            except BrokenPipeError:
                self._sinks[stream] = lambda data: None
                self._on_broken_pipe()


def _time_of_day() -> str:
    now_s = time.time()
    return f"{time.strftime('%H:%M:%S', time.localtime(now_s))}.{int(now_s * 1000) % 1000:03d}"


def _open_logs(directory: Path, processes: Sequence[ProcessSpec]) -> dict[tuple[int, str], BinaryIO]:
    width = len(str(max(process.number for process in processes)))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return {
            (process.number, stream): (directory / f"{process.kind}.{process.number:0{width}d}.{stream}").open("wb")
            for process in processes
            for stream in STREAMS
        }
    except OSError as error:
        raise OptionError(
            f"{directory} cannot be written ({error.strerror})", where="--output-dir", remedy="name another folder"
        ) from None
