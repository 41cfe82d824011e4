"""Jobs that are planned in a process of their own, by the `child` of a module."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.planner.suite import Entry, cluster_json

_ROOT = Path(__file__).resolve().parents[2]


def plan_in_child(module: str, entry: Entry, source: Path, **job: Any) -> dict[str, Any]:
    """What `child` of a module prints as JSON, given the text in `source`, the entry's cluster and the rest of the job
    on its standard input."""
    job |= {"hlo": str(source), "cluster": cluster_json(entry.devices, entry.machine)}
    command = [sys.executable, "-c", f"from {module} import child; child()"]
    done = subprocess.run(command, cwd=_ROOT, input=json.dumps(job), capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
