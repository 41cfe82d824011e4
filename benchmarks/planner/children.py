"""Plans jobs in processes of their own, with the `child` function of a module."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.planner.suite import Entry, cluster_json

_ROOT = Path(__file__).resolve().parents[2]


def plan_in_child(module: str, entry: Entry, source: Path, **job: Any) -> dict[str, Any]:
    """Run `child` of a module in a process; returns the JSON from its standard output.

    The job on its standard input: the path `source` of the HLO text, the entry's cluster, and `job`.
    """
    job |= {"hlo": str(source), "cluster": cluster_json(entry.devices, entry.machine)}
    command = [sys.executable, "-c", f"from {module} import child; child()"]
    process = subprocess.run(command, cwd=_ROOT, input=json.dumps(job), capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer
