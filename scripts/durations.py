"""The table of what tests cost, tests/durations.json, from the reports that test runs leave in build/tests.

    python scripts/durations.py build/tests/*.xml

A report replaces the rows of the files and marks that it ran; rows of files that are gone are left out. Of a file and
a mark the table has CPU seconds, seconds by the clock, and the functions that cost a second or more, all their items
together. tests/test_durations.py holds marks against it.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "durations.json"

#: Functions below it are not named.
NAMED_S = 1.0

#: Of a file: mark → {"cpu_s", "wall_s", "functions": name → CPU seconds}.
Row = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An item of a run."""

    file: str
    function: str
    mark: str
    cpu_s: float
    wall_s: float


def read_cases(report: Path) -> Iterator[Case]:
    """What a report of pytest's --junit-xml says of items that ran; skipped ones are no measure."""
    for element in ET.parse(report).iter("testcase"):
        properties = {each.get("name"): each.get("value") or "" for each in element.iter("property")}
        if "cpu_s" in properties and element.find("skipped") is None:
            yield Case(
                file=_file_of(element.get("classname", "")),
                function=element.get("name", "").partition("[")[0],
                mark=properties["mark"],
                cpu_s=float(properties["cpu_s"]),
                wall_s=float(element.get("time", "0")),
            )


def _file_of(classname: str) -> str:
    """Of a dotted module, behind which a class may stand."""
    parts = classname.split(".")
    while len(parts) > 1 and parts[-1][:1].isupper():
        parts.pop()
    return "/".join(parts) + ".py"


def sum_cases(cases: Sequence[Case]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for file, mark in sorted({(case.file, case.mark) for case in cases}):
        members = [case for case in cases if (case.file, case.mark) == (file, mark)]
        cpu_s: dict[str, float] = {}
        for case in members:
            cpu_s[case.function] = cpu_s.get(case.function, 0.0) + case.cpu_s
        rows.setdefault(file, {})[mark] = {
            "cpu_s": round(sum(cpu_s.values()), 1),
            "wall_s": round(sum(case.wall_s for case in members), 1),
            "functions": {name: round(spent_s, 1) for name, spent_s in sorted(cpu_s.items()) if spent_s >= NAMED_S},
        }
    return rows


def list_test_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def merge_rows(old: dict[str, Row], new: dict[str, Row], files: Sequence[str]) -> dict[str, Row]:
    return {file: old.get(file, {}) | new.get(file, {}) for file in files}


def write_table(rows: dict[str, Row], path: Path = TABLE) -> None:
    """One line a file: what a run changes shows in a diff."""
    lines = [f"{json.dumps(file)}: {json.dumps(row, sort_keys=True)}" for file, row in sorted(rows.items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        sys.exit("usage: python scripts/durations.py REPORT.xml…")
    cases = [case for report in arguments for case in read_cases(Path(report))]
    old = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    rows = merge_rows(old, sum_cases(cases), list_test_files())
    write_table(rows)
    marks = {mark for row in rows.values() for mark in row}
    for mark in sorted(marks):
        cells = [row[mark] for row in rows.values() if mark in row]
        cpu_s, wall_s = (sum(cell[name] for cell in cells) for name in ("cpu_s", "wall_s"))
        print(f"{mark}: {len(cells)} files, {cpu_s:.0f} CPU seconds, {wall_s:.0f} s by the clock")


if __name__ == "__main__":
    main(sys.argv[1:])
