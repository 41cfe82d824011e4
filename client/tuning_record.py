"""What was measured of a step's plans, kept for its next run on the same cluster: CSV in the user's cache folder."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from shardwright.builders.choices import PlanChoice
from shardwright.client.programs import choice_key
from shardwright.clusters.cluster import Cluster
from shardwright.options.cache_folder import cache_folder

_FIELDS = ("plan", "changes", "predicted_ms", "measured_ms", "kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRow:
    """A plan that was measured.

    plan: in a word. changes: of the step's options that lead to it, see `RunnerUp`; empty: the plan without trials.
    predicted_s, measured_s: seconds a step. is_kept: whether it was the fastest.
    """

    plan: str
    changes: Mapping[str, Any]
    predicted_s: float
    measured_s: float
    is_kept: bool


def record_path(name: str, identity: str, choices: Sequence[PlanChoice], cluster: Cluster) -> Path | None:
    """The file of a function's program on a cluster; None where nothing is to be kept.

    identity: the program's. choices: the ways to plan it. Another program, other options or other nodes have another.
    """
    folder = cache_folder("tuned")
    if folder is None:
        return None
    nodes = [[node.ip, node.device_count, node.hardware, node.memory_bytes] for node in cluster.nodes]
    contents = [identity, [choice_key(choice) for choice in choices], cluster.platform, cluster.hardware, nodes]
    return folder / f"{name}-{sha256(json.dumps(contents).encode()).hexdigest()[:16]}.csv"


def write_record(path: Path, rows: Sequence[TuningRow]) -> None:
    """Writes the file, or leaves it where the folder cannot be written: it can be measured again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(_FIELDS)
            for row in rows:
                times = (f"{row.predicted_s * 1e3:.6g}", f"{row.measured_s * 1e3:.6g}")
                writer.writerow([row.plan, json.dumps(dict(row.changes)), *times, int(row.is_kept)])
        os.replace(partial, path)


def read_record(path: Path | None) -> tuple[TuningRow, ...]:
    """The rows, of which one is kept; none where there is no such file, or none that can be read."""
    if path is None:
        return ()
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = tuple(map(_read_row, csv.DictReader(file)))
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return rows if sum(row.is_kept for row in rows) == 1 else ()


def _read_row(row: Mapping[str, str]) -> TuningRow:
    changes = json.loads(row["changes"])
    if not isinstance(changes, dict):
        raise TypeError("changes are no object")
    return TuningRow(
        plan=row["plan"],
        changes=changes,
        predicted_s=float(row["predicted_ms"]) / 1e3,
        measured_s=float(row["measured_ms"]) / 1e3,
        is_kept=row["kept"] == "1",
    )
