"""Run tests: the quick ones, or all, those that wait for clusters beside those that compute.

    python scripts/run_tests.py quick|all [--workers N] [--only PATH…] [-- pytest's arguments]

Every command of pytest's leaves a report in build/tests, from which scripts/durations.py makes the table of what tests
cost. Tests of servers, limits and clocks may fail because of what runs beside them. What failed is run once more, when
nothing else runs: a fault fails again, and pytest's report of both stays. The output ends on pytest's closing line.

All of them, without one failure and from files that are committed, is written down as a commit in tests/passed.txt:
scripts/select_tests.py leaves out what cannot have changed since then.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "build" / "tests"
PASSED = ROOT / "tests" / "passed.txt"

#: pytest's exit code where nothing was selected: with a part of the tests a mark may have none.
_NONE_SELECTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tests that one command runs. marks: an expression of pytest's; how: of xdist."""

    name: str
    marks: str
    how: tuple[str, ...]

    def command(self, arguments: Sequence[str], how: Sequence[str] = ()) -> list[str]:
        # A cache of its own: beside another command's neither forgets what failed.
        cache = ["-o", f"cache_dir={REPORTS / 'failed' / self.name}"]
        return [sys.executable, "-m", "pytest", *cache, "-m", self.marks, *how, *arguments]

    def start(self, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        how = (*self.how, f"--junit-xml={REPORTS / self.name}.xml")
        with log.open("wb") as file:
            return subprocess.Popen(self.command(arguments, how), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)

    def repeat_failed(self, arguments: Sequence[str]) -> int:
        """Once more, alone."""
        how = ("--last-failed", "--last-failed-no-failures", "none", "--maxfail", "3")
        print(f"what failed ({self.name}), once more, alone:", flush=True)
        return subprocess.run(self.command(arguments, how), cwd=ROOT, check=False).returncode


def groups_of(tier: str, workers: int) -> tuple[Group, ...]:
    """Tests of clusters wait most of the time: twice as many processes take them, and whole files each, since the tests
    of a module share its cluster.
    """
    computing = ("-n", str(workers), "--dist", "worksteal")
    waiting = ("-n", str(2 * workers), "--dist", "loadfile")
    if tier == "quick":
        return (Group(name="quick", marks="not cluster and not dear", how=computing),)
    return (
        Group(name="computing", marks="not cluster", how=computing),
        Group(name="cluster", marks="cluster", how=waiting),
    )


def run_groups(groups: Sequence[Group], arguments: Sequence[str]) -> int:
    """Side by side, the first one's output as it comes, then the others'."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    logs = [REPORTS / f"{group.name}.log" for group in groups]
    running = [group.start(arguments, log) for group, log in zip(groups, logs, strict=True)]
    try:
        for process, log in zip(running, logs, strict=True):
            _show(process, log)
    finally:
        for process in running:
            process.terminate()
            process.wait()
    failed = [group for group, each in zip(groups, running, strict=True) if each.returncode not in (0, _NONE_SELECTED)]
    return max((group.repeat_failed(arguments) for group in failed), default=0)


def _show(process: subprocess.Popen[bytes], log: Path) -> None:
    """What a process writes to its log, until it ends."""
    with log.open("rb") as file:
        is_running = True
        while is_running:
            try:
                process.wait(1.0)
                is_running = False
            except subprocess.TimeoutExpired:
                pass
            sys.stdout.buffer.write(file.read())
            sys.stdout.buffer.flush()


def write_passed() -> None:
    """The commit at which everything passed, where it is one: without changes beside it."""
    if not _git("status", "--porcelain"):
        PASSED.write_text(_git("rev-parse", "HEAD") + "\n")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"git {arguments[0]} failed"


def main(arguments: Sequence[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description="Run tests.")
    parser.add_argument("tier", choices=("quick", "all"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], metavar="PATH")
    options = parser.parse_args(arguments[:end])
    extra = [*arguments[end + 1 :], *options.only]
    code = run_groups(groups_of(options.tier, options.workers), extra)
    if code == 0 and options.tier == "all" and not extra:
        write_passed()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
