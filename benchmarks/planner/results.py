"""The outcomes of a run in a file, written one by one; the next run continues from it."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.planner.suite import Entry

_ROOT = Path(__file__).resolve().parents[2]

#: (case, budget, mechanism off or "").
Key = tuple[str, float, str]


def find_commit() -> str | None:
    """The commit of the working tree; None if it is dirty or unknown."""
    try:
        process = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=_ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    name = process.stdout.strip()
    return None if name.endswith("-dirty") else name


@dataclass(kw_only=True)
class Results:
    """Outcomes of one commit, with those already in its file.

    path: the file; None: none. commit: None reads nothing. how: options of all plans.
    """

    path: Path | None
    commit: str | None
    how: dict[str, Any] = field(default_factory=dict)
    timings: list[dict[str, Any]] = field(default_factory=list)
    _outcomes: dict[Key, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or self.commit is None or not self.path.exists():
            return
        for outcome in read_outcomes([self.path]):
            if (outcome.get("commit"), outcome.get("how")) == (self.commit, self.how):
                self._outcomes[_key(outcome)] = outcome

    def has(self, entry: Entry, budget: float, off: str = "") -> bool:
        return (entry.name, budget, off) in self._outcomes

    def add(self, outcome: dict[str, Any]) -> None:
        """Keep an outcome, and write the file."""
        self._outcomes[_key(outcome)] = {**outcome, "commit": self.commit, "how": self.how}
        self.write()

    def of(
        self, entries: Iterable[Entry], budgets: Sequence[float], offs: Sequence[str] = ("",)
    ) -> list[dict[str, Any]]:
        """Outcomes of these cases, in their order."""
        keys = [(entry.name, budget, off) for entry in entries for budget in budgets for off in offs]
        return [self._outcomes[key] for key in keys if key in self._outcomes]

    def write(self) -> None:
        if self.path is None:
            return
        report = {"outcomes": list(self._outcomes.values()), "timings": self.timings}
        new_file = self.path.with_name(f"{self.path.name}.new")
        new_file.write_text(json.dumps(report, indent=1) + "\n")
        new_file.replace(self.path)


def read_outcomes(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The outcomes of some files; for the same key the last file's."""
    entries: dict[Key, dict[str, Any]] = {}
    for path in paths:
        entries.update((_key(outcome), outcome) for outcome in json.loads(path.read_text())["outcomes"])
    return list(entries.values())


def budget_text(budget: float) -> str:
    """A budget in text: `50%` of data parallelism's memory, or all of the `device`."""
    return "device" if math.isinf(budget) else f"{budget:.0%}"


def _key(outcome: dict[str, Any]) -> Key:
    return outcome["case"], outcome["budget"], outcome.get("off", "")
