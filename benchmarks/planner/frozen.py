"""What the experts' programs count to, kept in JSON.

`python -m benchmarks.planner.frozen` counts every case that is not there yet, `--again gpt2` those whose name begins
so, `--list` prints the best of them for each budget.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.planner.counter import Counted, count
from benchmarks.planner.every_model import EVERY_MODEL
from benchmarks.planner.judge import MACHINES, judge
from benchmarks.planner.partition import DOES_NOT_APPLY, Partitioned, PartitionError, partition
from benchmarks.planner.suite import BUDGETS, Entry, entries

FOLDER = Path(__file__).parent / "experts" / "frozen"


class NotFrozen(Exception):
    """A case has no frozen experts, or those of another slice of the model."""


def path_of(entry: Entry) -> Path:
    return FOLDER / f"{entry.name}.json"


def read(entry: Entry) -> dict[str, Any]:
    """Frozen experts of a case: name → figures, as `figures` gives them. NotFrozen where none are."""
    path = path_of(entry)
    if not path.exists():
        raise NotFrozen(f"no frozen experts of {entry.name}: python -m benchmarks.planner.frozen")
    data = json.loads(path.read_text())
    if data["changes"] != json.loads(json.dumps(entry.changes)):
        raise NotFrozen(f"{path} is of {data['changes']}: python -m benchmarks.planner.frozen --again {entry.name}")
    experts: dict[str, Any] = data["experts"]
    return experts


def best_that_fits(experts: dict[str, Any], limit_bytes: float, machine: str) -> str | None:
    """The fastest expert on `machine` that takes no more than `limit_bytes` on a device."""
    fitting = [name for name, figures in experts.items() if figures["memory_bytes"] <= limit_bytes]
    return min(fitting, key=lambda name: step_s(experts[name], machine), default=None)


def step_s(figures: dict[str, Any], machine: str) -> float:
    """Judged seconds of a step."""
    return float(figures["judged"][machine]["step_s"])


def figures(partitioned: Partitioned, counted: Counted) -> dict[str, Any]:
    """What is kept of one program, per device and step."""
    collectives: Counter[tuple[str, tuple[int, ...]]] = Counter()
    sent: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for collective in counted.collectives:
        key = collective.kind, collective.groups[0]
        collectives[key] += collective.count
        sent[key] += round(collective.wire_bytes * collective.count)
    return {
        "wire_bytes": round(counted.wire_bytes),
        "product_flops": round(counted.product_flops),
        "traffic_bytes": round(counted.memory_bytes),
        "memory_bytes": partitioned.memory_bytes,
        "judged": {
            name: {"compute_s": judged.compute_s, "communication_s": judged.communication_s, "step_s": judged.step_s}
            for name, machine in MACHINES.items()
            for judged in [judge(counted, machine)]
        },
        "collectives": [
            {"kind": kind, "first_group": _short(group), "runs": runs, "wire_bytes": sent[kind, group]}
            for (kind, group), runs in sorted(collectives.items())
        ],
    }


def _short(group: tuple[int, ...]) -> str:
    """`0:64:8` for 0, 8, …, 56; else the devices."""
    steps = {after - before for before, after in itertools.pairwise(group)}
    if len(group) > 2 and len(steps) == 1:
        return f"{group[0]}:{group[-1] + 1}:{steps.pop()}"
    return ",".join(map(str, group))


def counted(entry: Entry) -> tuple[dict[str, Any], dict[str, str]]:
    """Partition and count every expert of a case: name → figures, and why the others are left out."""
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in EVERY_MODEL[entry.model].experts(entry.devices):
        job = {
            "model": entry.model, "size": entry.size, "devices": entry.devices, "changes": dict(entry.changes),
            "expert": name,
        }  # fmt: skip
        try:
            partitioned = partition(job, entry.devices)
        except PartitionError as error:
            left_out[name] = str(error).removeprefix(DOES_NOT_APPLY)
            continue
        found[name] = figures(partitioned, count(partitioned.hlo_text, entry.devices))
        print(f"{entry.name} {name}: {found[name]['wire_bytes'] / 1e6:.0f} MB on the wire", flush=True)
    return found, left_out


def freeze(entry: Entry) -> None:
    """Count every expert of a case, and write its file."""
    found, left_out = counted(entry)
    FOLDER.mkdir(parents=True, exist_ok=True)
    made_by = {"command": "python -m benchmarks.planner.frozen", "jaxlib": importlib.metadata.version("jaxlib")}
    data = {"case": entry.name, "changes": dict(entry.changes), **made_by, "experts": found, "left_out": left_out}
    path_of(entry).write_text(json.dumps(data, indent=1) + "\n")


def _listed(experts: dict[str, Any], budget: float, entry: Entry) -> str:
    best = best_that_fits(experts, budget * experts["data"]["memory_bytes"], entry.machine)
    if best is None:
        return f"{budget:4.0%} none fits"
    wire = experts[best]["wire_bytes"] / 1e6
    return f"{budget:4.0%} {best} {step_s(experts[best], entry.machine) * 1e3:.2f} ms {wire:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", metavar="NAME", help="cases whose name begins so, though they are there")
    parser.add_argument("--list", action="store_true", help="print the best frozen experts and freeze nothing")
    arguments = parser.parse_args()
    if arguments.list:
        for entry in entries():
            if path_of(entry).exists():
                print(f"{entry.name:16}", "  ".join(_listed(read(entry), budget, entry) for budget in BUDGETS))
        return
    for entry in entries():
        chosen = entry.name.startswith(arguments.again) if arguments.again else not path_of(entry).exists()
        if chosen:
            freeze(entry)


if __name__ == "__main__":
    main()
