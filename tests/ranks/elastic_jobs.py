"""An elastic job under the real launcher: what its ranks print, and who is killed, hung or let in meanwhile."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.light_compilation import LIGHT_COMPILATION
from tests.ranks.processes import ROOT

KINDS = ("begin", "up", "reset", "step", "done")


@dataclass(frozen=True)
class Line:
    """One line of a rank. words: between its kind, and the time and process number."""

    kind: str
    words: list[str]
    at_s: float
    pid: int


class ElasticJob:
    """`shardwright run` with a module; `log` is everything that was printed. variables: of the environment."""

    def __init__(
        self, *options: str, program: tuple[str, ...] = (), module: str = "tests.ranks.elastic_training",
        **variables: str,
    ) -> None:  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"} | variables
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardwright", "run", *options, "python", "-m", module, *program],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, errors="replace",
            env={
                **environment, "PYTHONPATH": str(ROOT),
                "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {LIGHT_COMPILATION}",
            },
        )  # fmt: skip
        self.log: list[str] = []
        self.lines: list[Line] = []
        self._queue: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.log.append(text.rstrip())
            kind, *words = text.partition(">:")[2].split() or [""]
            if (
                kind in ("begin", "up", "reset", "step", "done") and len(words) > 1 and "." in words[-2]
            ):  # else it was killed
                self._queue.put(Line(kind, words[:-2], float(words[-2]), int(words[-1])))
        self._queue.put(None)

    def next(self, timeout_s: float) -> Line | None:
        """The next line; None at the end of the job."""
        try:
            line = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError("no line in time\n" + "\n".join(self.log[-60:])) from None
        if line is not None:
            self.lines.append(line)
        return line

    def wait_for(self, kind: str, *words: str, timeout_s: float = 60) -> Line:
        """The next line of a kind whose words begin so."""
        until_s = time.monotonic() + timeout_s
        while (line := self.next(max(0.1, until_s - time.monotonic()))) is not None:
            if line.kind == kind and line.words[: len(words)] == list(words):
                return line
        raise AssertionError("the job ended\n" + "\n".join(self.log[-60:]))

    def finish(self, timeout_s: float = 90) -> tuple[int, list[list[float]]]:
        """The exit code, and the losses that each rank printed at the end."""
        until_s = time.monotonic() + timeout_s
        while self.next(max(0.1, until_s - time.monotonic())) is not None:
            pass
        return self.process.wait(10), self.losses()

    def losses(self) -> list[list[float]]:
        """The losses that each rank printed at the end."""
        return [json.loads(" ".join(line.words)) for line in self.lines if line.kind == "done"]

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def hosts_file(folder: Path, slots: int) -> Path:
    """A hosts file that may be edited while a job runs."""
    path = folder / "hosts"
    partial = folder / "hosts.partial"
    partial.write_text(f"localhost slots={slots}\n")
    partial.rename(path)
    return path
