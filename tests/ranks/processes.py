"""Real ranks: the coordination service here, one process a rank, as the launcher starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwright.launch.hosts import Host, place_ranks
from shardwright.launch.job import rank_variables
from shardwright.launch.meeting import MeetingPoint
from shardwright.launch.service import LOOPBACK, CoordinationService
from tests.light_compilation import LIGHT_COMPILATION

ROOT = Path(__file__).parents[2]


def run_ranks(
    module: str, size: int, *arguments: str, timeout_s: float = 150, grace_s: float = 5, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run `python -m module` in `size` ranks, each with one CPU device; what became of each. No process is left.

    grace_s: once a rank has failed, the others get this long before they are killed. variables: of the environment.
    """
    placements = place_ranks((Host(name="localhost", slots=size),), size)
    with (
        CoordinationService(LOOPBACK, size) as service,
        MeetingPoint(LOOPBACK, size, first=service) as meeting,
    ):
        environments = [
            {**rank_variables(place, size, service.address, meeting=meeting.address), **variables}
            for place in placements
        ]
        return run_processes(module, environments, *arguments, timeout_s=timeout_s, grace_s=grace_s)


def run_processes(
    module: str,
    environments: Sequence[Mapping[str, str]],
    *arguments: str,
    timeout_s: float = 150,
    grace_s: float = 5,
    delays_s: Sequence[float] = (),
) -> list[subprocess.CompletedProcess[str]]:
    """The same for processes with variables of their own. delays_s: from the start of each to the next."""
    environment = {**os.environ, "XLA_FLAGS": LIGHT_COMPILATION, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"rank.{rank}") for rank in range(len(environments))]
        children: list[subprocess.Popen[bytes]] = []
        try:
            for place, (own, output) in enumerate(zip(environments, outputs, strict=True)):
                with output.open("wb") as sink:
                    children.append(
                        subprocess.Popen(command, env={**environment, **own}, cwd=ROOT, stdout=sink, stderr=sink)
                    )
                time.sleep(delays_s[place] if place < len(delays_s) else 0)
            _wait(children, timeout_s, grace_s)
        finally:
            for child in children:
                child.kill()
                child.wait()
        return [
            subprocess.CompletedProcess(command, child.returncode, output.read_text(errors="replace"))
            for child, output in zip(children, outputs, strict=True)
        ]


def assert_passed(done: list[subprocess.CompletedProcess[str]]) -> None:
    """Every rank ended with 0; else with what each printed."""
    report = "\n".join(f"rank {rank}: {child.returncode}\n{child.stdout}" for rank, child in enumerate(done))
    assert [child.returncode for child in done] == [0] * len(done), report


def _wait(children: list[subprocess.Popen[bytes]], timeout_s: float, grace_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if any(child.poll() for child in children):
            deadline = min(deadline, time.monotonic() + grace_s)
            grace_s = float("inf")
        time.sleep(0.05)
