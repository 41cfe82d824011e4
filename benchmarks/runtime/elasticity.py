"""What it takes to go on with one node less, and with one more.

Four nodes of one CPU device train the quickstart's GPT-2, with a snapshot every ten steps. One node is killed for good,
with a grace of one second; then it is started again. Each time the seconds until the first step on the other nodes are
taken, and what of them went into planning and compiling for those; the rest is held against the limit.

    python -m benchmarks.runtime.elasticity --json build/elasticity.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from benchmarks.runtime.recovery import Training
from shardwright.client.connection import team_of
from shardwright.server.security import free_port

NODES = 4
EVERY = 10
GRACE_S = 1.0
#: Seconds to shrink, and to grow, besides planning and compiling.
LIMIT_S = 15.0


class Nodes:
    """Servers of an elastic cluster."""

    def __init__(self, folder: Path, count: int) -> None:
        entries = [{"ip": "127.0.0.1", "port": free_port("127.0.0.1"), "devices": 1} for _ in range(count)]
        self._path = folder / "cluster.json"
        self._path.write_text(json.dumps({"master": entries[0], "workers": entries[1:], "min_nodes": 1}))
        self.address = f"127.0.0.1:{entries[0]['port']}"
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        for task in range(count):
            self.start(task)

    def start(self, task: int) -> None:
        command = [sys.executable, "-m", "shardwright.server", str(self._path), str(task)]
        options = ["--rejoin-grace", str(GRACE_S)]
        self._servers[task] = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)

    def kill(self, task: int) -> None:
        server = self._servers.pop(task)
        server.kill()
        server.wait()

    def stop(self) -> None:
        for server in self._servers.values():
            server.terminate()
        for server in self._servers.values():
            server.wait(timeout=60)


@contextmanager
def elastic_cluster(count: int) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory() as folder:
        nodes = Nodes(Path(folder), count)
        try:
            yield nodes
        finally:
            nodes.stop()


class PlanningTime(logging.Handler):
    """Seconds from the request of a program to its being ready, as the client's log has them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seconds = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r": ready after ([\d.]+) s", record.getMessage())
        self.seconds += float(found[1]) if found else 0.0


def time_change(training: Training, count: int, change: Callable[[], None], planning: PlanningTime) -> dict[str, Any]:
    """Seconds from a change of the nodes until a step has run on `count` of them."""
    planning.seconds, known, began_s = 0.0, len(training.session.recoveries), time.perf_counter()
    change()
    while len(training.session.recoveries) == known or training.session.info.device_count != count:
        training.run(1)
    total_s = time.perf_counter() - began_s
    report = training.session.recoveries[-1]
    return {"total_s": total_s, "planning_s": planning.seconds, "lost_s": report.lost_s, "report": str(report)}


def measure(count: int) -> dict[str, Any]:
    planning = PlanningTime()
    log = logging.getLogger("shardwright")
    log.addHandler(planning)
    log.setLevel(logging.INFO)
    log.propagate = False
    with elastic_cluster(count) as nodes:
        training = Training(nodes.address, EVERY)
        training.run(3 * EVERY)
        print(f"{count} nodes train", flush=True)
        shrunk = time_change(training, count - 1, lambda: nodes.kill(count - 1), planning)
        print(f"{count - 1} nodes train: {shrunk['report']}", flush=True)
        training.run(3 * EVERY)
        grown = time_change(training, count, lambda: nodes.start(count - 1), planning)
        print(f"{count} nodes train: {grown['report']}", flush=True)
        assert len(team_of(training.session.status())) == count
        training.session.close()
    return {"nodes": count, "shrink": shrunk, "grow": grown}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--nodes", type=int, default=NODES)
    arguments = parser.parse_args()
    figures = measure(arguments.nodes)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    is_good = True
    for kind, what in (("shrink", "kill to the next step"), ("grow", "start of the node to the next step with it")):
        total_s, planning_s = figures[kind]["total_s"], figures[kind]["planning_s"]
        is_good &= total_s - planning_s <= LIMIT_S
        print(
            f"{kind}: {what} {total_s:.1f} s, of which planning and compiling {planning_s:.1f} s: "
            f"{total_s - planning_s:.1f} s besides (limit {LIMIT_S:.0f} s); "
            f"training stood still for {figures[kind]['lost_s']:.1f} s"
        )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
