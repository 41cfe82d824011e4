"""Horovod's own tests of PyTorch, unchanged, on ranks of this machine: which pass, and why the others do not.

    python -m benchmarks.peers.horovod_suite -np 2 [--source URL_OR_GIT_DIRECTORY] [--python PYTHON] [-k NAMES]

The tests are fetched for the run and thrown away. They run in one job until one fails at a rank: that ends the job, for
the ranks are out of step then, and the next test begins a new one. A test passes where it does at every rank.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TAG = "v0.28.1"
FILES = ("test/parallel/test_torch.py", "test/utils/common.py")

#: Seconds that a rank waits for others in a collective before the job is ended, and that one test may take.
STALL_S, LIMIT_S = 20, 60

_ORDER = "one rank calls a barrier ahead of a call in the background, the other after it: ranks call in one order here"
_MUON = "asks every optimizer of torch.optim for one-dimensional parameters: Muon (torch 2.9 on) takes matrices alone"
_SHORT = "with three ranks or more: compares a sum of float16 with an exact product, which float16 cannot hold"

#: Tests that are known to fail, and why.
KNOWN = {
    "test_horovod_allreduce_duplicate_name_error": _ORDER,
    "test_horovod_allgather_duplicate_name_error": _ORDER,
    "test_horovod_broadcast_duplicate_name_error": _ORDER,
    "test_horovod_reducescatter_duplicate_name_error": _ORDER,
    "test_horovod_join_allgather": "expects an error where a rank has joined: allgather goes on here",
    "test_broadcast_state": _MUON,
    "test_broadcast_state_options": _MUON,
    "test_force_allreduce": _MUON,
    "test_horovod_allreduce_prescale": _SHORT,
    "test_horovod_reducescatter_prescale": _SHORT,
    "test_horovod_grouped_reducescatter_prescale": _SHORT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A test's outcome over all ranks: `passed`, `failed`, `skipped`, or `ended` with its job; its longest time."""

    test: str
    outcome: str
    seconds: float
    text: str


def main() -> int:
    """Run the suite, print what does not pass and a count; 1 where a test that is not named fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-np", type=int, default=2)
    parser.add_argument("--source", default="https://github.com/horovod/horovod")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("-k", default="", help="tests whose name holds this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="horovod-suite-") as folder:
        tests = [name for name in _fetch(arguments.source, Path(folder)) if arguments.k in name]
        runner = _Runner(Path(folder), arguments.np, arguments.python)
        outcomes = runner.run_all(tests)
    return _report(outcomes)


def _fetch(source: str, folder: Path) -> list[str]:
    """Write the tests into a folder; their names, in order."""
    directory = source
    if not Path(source).is_dir():
        directory = str(folder / "source.git")
        subprocess.run(["git", "clone", "-q", "--bare", "--depth=1", "-b", TAG, source, directory], check=True)
    for name in FILES:
        text = subprocess.run(["git", "-C", directory, "show", f"{TAG}:{name}"], check=True, capture_output=True).stdout
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text)
    tree = ast.parse((folder / FILES[0]).read_text())
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


class _Runner:
    """Runs tests in jobs, one after the other."""

    def __init__(self, folder: Path, size: int, python: str) -> None:
        self._folder, self._size, self._python = folder, size, python
        self._jobs = 0

    def run_all(self, tests: list[str]) -> list[Outcome]:
        """The outcomes of tests, in one job as long as none ends it."""
        outcomes: list[Outcome] = []
        while tests:
            found = self._run_job(tests)
            outcomes += found
            tests = tests[len(found) :]
        return outcomes

    def _run_job(self, tests: list[str]) -> list[Outcome]:
        reports = self._folder / f"job-{self._jobs}"
        reports.mkdir()
        self._jobs += 1
        names = [f"{self._folder / FILES[0]}::TorchTests::{name}" for name in tests]
        plugins = ["-p", "benchmarks.peers.horovod_names", "-p", "benchmarks.peers.rank_report"]
        pytest = [
            self._python,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(self._folder),
            *plugins,
        ]
        waits = ["--stall-warning", "10", "--stall-shutdown", str(STALL_S)]
        command = [sys.executable, "-m", "shardwright", "run", "-np", str(self._size), *waits, "--", *pytest, *names]
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "RANK_REPORT": str(reports), "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        log = (reports / "log").open("wb")
        job = subprocess.Popen(command, cwd=self._folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            job.wait(LIMIT_S + 10 * len(tests))
        except subprocess.TimeoutExpired:
            job.terminate()
            job.wait()
        records = [self._read(reports / f"{rank}.jsonl") for rank in range(self._size)]
        return self._combine(tests, records)

    @staticmethod
    def _read(report: Path) -> dict[str, list[dict[str, object]]]:
        found: dict[str, list[dict[str, object]]] = {}
        for line in report.read_text().splitlines() if report.exists() else ():
            record = json.loads(line)
            found.setdefault(record["test"], []).append(record)
        return found

    def _combine(self, tests: list[str], ranks: list[dict[str, list[dict[str, object]]]]) -> list[Outcome]:
        """The outcomes up to the first test that did not come to its end at every rank, that one too."""
        outcomes = []
        for name in tests:
            parts = [record for rank in ranks for record in rank.get(name, ()) if record["outcome"] != "begun"]
            ended = sum(any(record["outcome"] != "begun" for record in rank.get(name, ())) for rank in ranks)
            kinds = {str(record["outcome"]) for record in parts}
            text = next((str(record["text"]) for record in parts if record["outcome"] == "failed"), "")
            kind = next((kind for kind in ("failed", "skipped") if kind in kinds), "passed")
            seconds = max((float(str(record["seconds"])) for record in parts), default=0.0)
            is_cut = ended < self._size
            kind = "ended" if is_cut and kind == "passed" else kind
            outcomes.append(Outcome(test=name, outcome=kind, seconds=seconds, text=text))
            if is_cut or kind == "failed":
                break
        return outcomes


def _report(outcomes: list[Outcome]) -> int:
    apply = [outcome for outcome in outcomes if outcome.outcome != "skipped"]
    passed = [outcome for outcome in apply if outcome.outcome == "passed"]
    unnamed = 0
    for outcome in apply:
        if outcome.outcome == "passed":
            continue
        unnamed += outcome.test not in KNOWN
        last = KNOWN.get(outcome.test) or " | ".join(outcome.text.splitlines()[-4:])
        print(f"{outcome.outcome} {outcome.test}: {last}")
    slow = [f"{outcome.test} {outcome.seconds:.0f} s" for outcome in outcomes if outcome.seconds > LIMIT_S]
    print(f"over {LIMIT_S} s: {', '.join(slow) or 'none'}")
    print(f"{len(passed)} of {len(apply)} pass, {len(outcomes) - len(apply)} skip themselves")
    return min(unnamed, 1)


if __name__ == "__main__":
    sys.exit(main())
