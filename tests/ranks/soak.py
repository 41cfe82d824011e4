"""Elastic ranks under seeded schedules of kills, hangs and hosts that come and go: the losses stay what they were.

    python -m tests.ranks.soak --schedules 200 --seed 0 [--jobs 2]

Each schedule is one job of two to four ranks, one of which at least keeps the state, and nobody is harmed from the last
step but one on: a rank that is lost while another has ended fails the job. It must end with 0, and the losses of every
rank must equal those of one undisturbed process within 1e-5. A schedule that fails is printed with its job's last
lines, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.ranks.elastic_jobs import ElasticJob, Line, hosts_file
from tests.ranks.elastic_training import curve

STEPS = 24
TOLERANCE = 1e-5


class Schedule:
    """What is done to one job: a random action after a random number of lines, sometimes right after another."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.slots = 3
        self.harmed: set[int] = set()
        self.generation: dict[int, int] = {}
        self.step = 0
        self.actions: list[str] = []

    def run(self) -> None:
        jit = ("--jit",) if self.random.random() < 0.5 else ()
        hosts = str(hosts_file(self.folder, self.slots))
        options = ("--min-np", "1", "--max-np", "4", "--hosts-file", hosts, "--hang-timeout", "4")
        limits = ("--host-failures", "1000", "--elastic-timeout", "60")
        with ElasticJob(*options, *limits, program=(str(STEPS), "0.1", *jit)) as job:
            patience = self.random.randint(3, 20)
            while (line := job.next(90)) is not None:
                self.note(line)
                patience -= 1
                if patience <= 0 and self.generation and self.step < STEPS - 1 and len(self.actions) < 6:
                    self.act()
                    patience = self.random.choice([1, 2, 10, 20, 30])
            self.check(job)

    def note(self, line: Line) -> None:
        if line.kind in ("up", "step", "reset"):
            self.generation[line.pid] = int(line.words[0])
        if line.kind in ("up", "step"):
            self.step = max(self.step, int(line.words[3]))

    def act(self) -> None:
        """Kill or hang a rank, where another of its generation keeps the state; or change the hosts file."""
        newest = max(self.generation.values())
        there = [pid for pid, number in self.generation.items() if number == newest and pid not in self.harmed]
        kind = self.random.choice(["kill", "kill", "kill", "hang", "hosts"])
        if kind == "hosts":
            self.slots = self.random.choice([slots for slots in (2, 3, 4) if slots != self.slots])
            hosts_file(self.folder, self.slots)
            self.actions.append(f"{self.slots} slots")
        elif len(there) > 1:
            victim = self.random.choice(there)
            self.harmed.add(victim)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            self.actions.append(f"{kind} in {newest}")

    def check(self, job: ElasticJob) -> None:
        code = job.process.wait(20)
        expected = compute_undisturbed_losses()
        worst = max((float(np.abs(np.array(one) - expected).max()) for one in job.losses()), default=float("inf"))
        if code != 0 or not worst <= TOLERANCE:
            raise AssertionError(f"exit code {code}, difference {worst:g}\n" + "\n".join(job.log[-80:]))


@functools.cache
def compute_undisturbed_losses() -> np.ndarray:
    """The losses of one process."""
    return np.array(curve(STEPS))


def run_schedule(seed: int) -> bool:
    """Run one schedule, print what became of it, and return whether it passed."""
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(seed, Path(folder))
        failure = ""
        try:
            schedule.run()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            failure = f", FAILED: {error}"
    actions = ", ".join(schedule.actions)
    print(f"seed {seed}: {time.monotonic() - start_s:.0f} s, {actions}{failure}", flush=True)
    return not failure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--schedules", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed (0)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at the same time (1)")
    arguments = parser.parse_args()
    compute_undisturbed_losses()
    seeds = range(arguments.seed, arguments.seed + arguments.schedules)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        passed = sum(pool.map(run_schedule, seeds))
    print(f"{passed} of {len(seeds)} passed", flush=True)
    if passed < len(seeds):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
