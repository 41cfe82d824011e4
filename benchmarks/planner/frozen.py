"""What the experts' programs count to, kept as JSON, one compressed file a machine.

`python -m benchmarks.planner.frozen` compiles and counts every case that is not there yet, `--again gpt2` those whose
name begins so, `--list` prints the best of them for each budget, `--show gpt2-124M-8` what is kept of a case. Cases on
GPUs want `--gpu-packages`.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import lzma
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_targets import TARGETS, add_packages_option, require_packages
from benchmarks.planner.counted import Counted
from benchmarks.planner.counter import count
from benchmarks.planner.experts.plans import experts_of
from benchmarks.planner.judge import MACHINES, judge
from benchmarks.planner.partition import DOES_NOT_APPLY, Partitioned, PartitionError, compile_for
from benchmarks.planner.suite import BUDGETS, Entry, entries, is_meant
from workloads.every_model import EVERY_MODEL

FOLDER = Path(__file__).parent / "experts" / "frozen"


class NotFrozen(Exception):
    """A case has no frozen experts, or those of another slice of the model."""


def path_of(machine: str) -> Path:
    return FOLDER / f"{machine}.json.xz"


def read_machine(machine: str) -> dict[str, Any]:
    """All that is kept of a machine: name of a case → `experts`, those `left_out`, and what made them."""
    path = path_of(machine)
    cases: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}
    return cases


def is_frozen(entry: Entry) -> bool:
    return entry.name in read_machine(entry.machine)


def read(entry: Entry) -> dict[str, Any]:
    """Frozen experts of a case: name → figures, as `figures` gives them. NotFrozen where none are."""
    case = read_machine(entry.machine).get(entry.name)
    if case is None:
        raise NotFrozen(f"no frozen experts of {entry.name}: python -m benchmarks.planner.frozen")
    if case["changes"] != json.loads(json.dumps(entry.changes)):
        raise NotFrozen(
            f"{entry.name} is frozen of {case['changes']}: python -m benchmarks.planner.frozen --again {entry.name}"
        )
    experts: dict[str, Any] = case["experts"]
    return experts


def text_of(case: dict[str, Any]) -> str:
    """What is kept of a case as JSON, one line an expert."""
    head = {key: value for key, value in case.items() if key not in ("experts", "left_out")}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in case["experts"].items())
    left_out = json.dumps(case["left_out"])
    return f'{json.dumps(head)[:-1]},\n "experts": {{\n{lines}\n }},\n "left_out": {left_out}}}'


def compress_cases(cases: dict[str, Any]) -> bytes:
    """The file of a machine's cases, in the order of their names. The same cases are the same bytes."""
    text = ",\n".join(f"{json.dumps(name)}: {text_of(case)}" for name, case in sorted(cases.items()))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    return lzma.compress(f"{{\n{text}\n}}\n".encode(), check=lzma.CHECK_CRC32, filters=filters)


def best_that_fits(experts: dict[str, Any], limit_bytes: float) -> str | None:
    """The fastest expert that takes no more than `limit_bytes` on a device."""
    fitting = [name for name, figures in experts.items() if figures["memory_bytes"] <= limit_bytes]
    return min(fitting, key=lambda name: step_s(experts[name]), default=None)


def step_s(figures: dict[str, Any]) -> float:
    """Judged seconds of a step."""
    return float(figures["product_s"] + figures["memory_s"] + figures["communication_s"])


def collectives_of(figures: dict[str, Any]) -> int:
    """How many collectives a step issues."""
    return sum(runs for runs, _ in figures["collectives"].values())


def figures(partitioned: Partitioned, counted: Counted, machine: str) -> dict[str, Any]:
    """What is kept of one program, per device and step: seconds as the judge sees them on a machine, what was counted,
    and of each kind of collective the runs and the bytes on the wire."""
    judged = judge(counted, MACHINES[machine])
    return {
        "product_s": round(judged.product_s, 9),
        "memory_s": round(judged.memory_s, 9),
        "communication_s": round(judged.communication_s, 9),
        "wire_bytes": round(counted.wire_bytes),
        "product_flops": round(counted.product_flops),
        "traffic_bytes": round(counted.memory_bytes),
        "memory_bytes": partitioned.memory_bytes,
        "collectives": {kind: [runs, round(sent)] for kind, (runs, sent) in counted.wire_by_kind().items()},
    }


def counted(entry: Entry, texts: Path | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Compile and count every expert of a case: name → figures, and why the others are left out.

    texts: where XLA's texts are kept; those that are there are counted as they are.
    """
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in experts_of(EVERY_MODEL[entry.model], entry.devices):
        try:
            compiled = _compiled(entry, name, texts)
        except PartitionError as error:
            left_out[name] = str(error).removeprefix(DOES_NOT_APPLY)
            print(f"{entry.name} {name} is left out: {left_out[name]}", flush=True)
            continue
        found[name] = figures(compiled, count(compiled.hlo_text, entry.devices), entry.machine)
        print(f"{entry.name} {name}: {step_s(found[name]) * 1e3:.2f} ms", flush=True)
    return found, left_out


def _compiled(entry: Entry, expert: str, texts: Path | None) -> Partitioned:
    result = texts / f"{entry.name}.{expert}.json.gz" if texts else None
    if result and result.exists():
        return Partitioned(**json.loads(gzip.decompress(result.read_bytes())))
    job = {
        "model": entry.model, "size": entry.size, "devices": entry.devices, "changes": dict(entry.changes),
        "expert": expert,
    }  # fmt: skip
    compiled = compile_for(job, entry.machine)
    if result:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_bytes(gzip.compress(json.dumps(asdict(compiled)).encode(), compresslevel=3))
    return compiled


def freeze(entry: Entry, texts: Path | None = None) -> None:
    """Count every expert of a case, and write them to its machine's file."""
    result, left_out = counted(entry, texts)
    made_by = {"command": "python -m benchmarks.planner.frozen", "jaxlib": importlib.metadata.version("jaxlib")}
    case = {"case": entry.name, "changes": dict(entry.changes), **made_by, "experts": result, "left_out": left_out}
    FOLDER.mkdir(parents=True, exist_ok=True)
    path_of(entry.machine).write_bytes(compress_cases(read_machine(entry.machine) | {entry.name: case}))


def _listed(experts: dict[str, Any], budget: float) -> str:
    best = best_that_fits(experts, budget * experts["data"]["memory_bytes"])
    if best is None:
        return f"{budget:4.0%} none fits"
    wire = experts[best]["wire_bytes"] / 1e6
    return f"{budget:4.0%} {best} {step_s(experts[best]) * 1e3:.2f} ms {wire:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", metavar="NAME", help="cases whose name begins so, though they are there")
    parser.add_argument("--list", action="store_true", help="print the best frozen experts and freeze nothing")
    parser.add_argument("--show", metavar="NAME", help="print what is kept of a case as JSON, and freeze nothing")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="keep XLA's texts there, and count those that are")
    add_packages_option(parser)
    arguments = parser.parse_args()
    if arguments.list:
        for entry in entries():
            if is_frozen(entry):
                print(f"{entry.name:16}", "  ".join(_listed(read(entry), budget) for budget in BUDGETS))
        return
    if arguments.show:
        kept = {name: case for machine in MACHINES for name, case in read_machine(machine).items()}
        if arguments.show not in kept:
            parser.error(f"{arguments.show} is not frozen; {', '.join(sorted(kept))} are")
        print(text_of(kept[arguments.show]))
        return
    again = arguments.again
    chosen = [entry for entry in entries() if (is_meant(entry, again) if again else not is_frozen(entry))]
    if any(entry.machine in TARGETS for entry in chosen):
        require_packages(arguments)
    for entry in chosen:
        freeze(entry, arguments.texts)


if __name__ == "__main__":
    main()
