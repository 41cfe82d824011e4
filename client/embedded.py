"""An embedded server: a child process with the lifetime of its session."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO

from shardwright.client.limits import START_TIMEOUT_S, STOP_TIMEOUT_S
from shardwright.errors import OptionError, ServerUnavailableError


class EmbeddedServer:
    """`python -m shardwright.server --embedded N`, started and stopped by the client.

    The child prints one JSON line, `{"address": "127.0.0.1:port", "token": "…"}`,
    when it is ready. It ends when its standard input closes: it never outlives this process.
    dataset_modules: names of modules whose functions sessions may read batches from.
    """

    def __init__(self, devices: int, dataset_modules: Sequence[str] = ()) -> None:
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise OptionError(f"devices={devices!r}", where="devices", remedy="a number from 1")
        self._log: IO[bytes] = tempfile.TemporaryFile(prefix="shardwright-server-")  # noqa: SIM115 - closed in close()
        command = [sys.executable, "-m", "shardwright.server", "--embedded", str(devices)]
        environment = {name: value for name, value in os.environ.items() if name != "SHARDWRIGHT_TOKEN"}
        if dataset_modules:  # which the child finds where this program does
            command += ["--dataset-modules", ",".join(dataset_modules)]
            environment |= {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True,
            env=environment,
        )  # fmt: skip
        try:
            self.address, self.token = self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether the child is gone; it does not come back."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Ends the child and waits for it; may be called twice."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._log.close()

    def _wait_until_ready(self) -> tuple[str, str | None]:
        assert self._process.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        try:
            ready = json.loads(line)
            return ready["address"], ready.get("token") or None
        except (ValueError, KeyError, TypeError):
            self._process.kill()
            code = self._process.wait()
            raise ServerUnavailableError(
                f"the embedded server did not start (exit code {code})\n{self._last_lines()}",
                remedy="run `shardwright doctor`",
            ) from None

    def _last_lines(self, limit_bytes: int = 4000) -> str:
        size = self._log.seek(0, 2)
        self._log.seek(max(0, size - limit_bytes))
        return self._log.read().decode(errors="replace").strip()
