"""Counts of the experts' programs, stored as JSON, one compressed file a machine.

`python -m benchmarks.planner.frozen` compiles and counts every missing case, `--again gpt2` all cases with this prefix.
`--list` prints the best experts for each budget, `--show gpt2-124M-8` the entry of a case. Cases on GPUs need
`--gpu-packages`.
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
from benchmarks.planner.counted import ProgramCounts
from benchmarks.planner.counter import count
from benchmarks.planner.experts.plans import build_experts
from benchmarks.planner.judge import MACHINES, judge
from benchmarks.planner.partition import DOES_NOT_APPLY, PartitionedProgram, PartitionError, compile_for
from benchmarks.planner.suite import BUDGETS, Entry, entries, matches_name
from workloads.every_model import EVERY_MODEL

FOLDER = Path(__file__).parent / "experts" / "frozen"


class NotFrozen(Exception):
    """A case has no frozen experts, or those of another slice of the model."""


def machine_path(machine: str) -> Path:
    return FOLDER / f"{machine}.json.xz"


def read_machine(machine: str) -> dict[str, Any]:
    """The file of a machine: name of a case → `experts`, `left_out`, `changes`, and the command and jaxlib."""
    path = machine_path(machine)
    cases: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}
    return cases


def is_frozen(entry: Entry) -> bool:
    return entry.name in read_machine(entry.machine)


def read(entry: Entry) -> dict[str, Any]:
    """Frozen experts of a case: name → `summarize_program`. Raises NotFrozen."""
    case = read_machine(entry.machine).get(entry.name)
    if case is None:
        raise NotFrozen(f"no frozen experts of {entry.name}: python -m benchmarks.planner.frozen")
    if case["changes"] != json.loads(json.dumps(entry.changes)):
        raise NotFrozen(
            f"{entry.name} is frozen of {case['changes']}: python -m benchmarks.planner.frozen --again {entry.name}"
        )
    experts: dict[str, Any] = case["experts"]
    return experts


def format_case(case: dict[str, Any]) -> str:
    """The entry of a case as JSON, one line an expert."""
    head = {key: value for key, value in case.items() if key not in ("experts", "left_out")}
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(expert_figures)}" for name, expert_figures in case["experts"].items()
    )
    left_out = json.dumps(case["left_out"])
    return f'{json.dumps(head)[:-1]},\n "experts": {{\n{lines}\n }},\n "left_out": {left_out}}}'


def compress_cases(cases: dict[str, Any]) -> bytes:
    """The file of a machine's cases, in the order of their names. The same cases are the same bytes."""
    text = ",\n".join(f"{json.dumps(name)}: {format_case(case)}" for name, case in sorted(cases.items()))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    return lzma.compress(f"{{\n{text}\n}}\n".encode(), check=lzma.CHECK_CRC32, filters=filters)


def find_fastest_fitting(experts: dict[str, Any], limit_bytes: float) -> str | None:
    """The fastest expert within `limit_bytes` on a device; None without any."""
    fitting = [name for name, figures in experts.items() if figures["memory_bytes"] <= limit_bytes]
    return min(fitting, key=lambda name: step_s(experts[name]), default=None)


def step_s(figures: dict[str, Any]) -> float:
    """Judged seconds of a step."""
    return float(figures["product_s"] + figures["memory_s"] + figures["communication_s"])


def count_collectives(figures: dict[str, Any]) -> int:
    """Number of collectives in a step."""
    return sum(runs for runs, _ in figures["collectives"].values())


def summarize_program(partitioned: PartitionedProgram, counts: ProgramCounts, machine: str) -> dict[str, Any]:
    """Figures of one program, per device and step: the judge's seconds on a machine, the counts, and for each kind of
    collective its runs and bytes on the wire."""
    judged = judge(counts, MACHINES[machine])
    return {
        "product_s": round(judged.product_s, 9),
        "memory_s": round(judged.memory_s, 9),
        "communication_s": round(judged.communication_s, 9),
        "wire_bytes": round(counts.wire_bytes),
        "product_flops": round(counts.product_flops),
        "traffic_bytes": round(counts.memory_bytes),
        "memory_bytes": partitioned.memory_bytes,
        "collectives": {kind: [runs, round(sent)] for kind, (runs, sent) in counts.wire_by_kind().items()},
    }


def count_experts(entry: Entry, texts: Path | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Compile and count every expert of a case: (name → figures, name → reason of those left out).

    texts: folder of XLA's texts, read if present, else written.
    """
    experts: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in build_experts(EVERY_MODEL[entry.model], entry.devices):
        try:
            compiled = _compile_expert(entry, name, texts)
        except PartitionError as error:
            left_out[name] = str(error).removeprefix(DOES_NOT_APPLY)
            print(f"{entry.name} {name} is left out: {left_out[name]}", flush=True)
            continue
        experts[name] = summarize_program(compiled, count(compiled.hlo_text, entry.devices), entry.machine)
        print(f"{entry.name} {name}: {step_s(experts[name]) * 1e3:.2f} ms", flush=True)
    return experts, left_out


def _compile_expert(entry: Entry, expert: str, texts: Path | None) -> PartitionedProgram:
    cache_path = texts / f"{entry.name}.{expert}.json.gz" if texts else None
    if cache_path and cache_path.exists():
        return PartitionedProgram(**json.loads(gzip.decompress(cache_path.read_bytes())))
    job = {
        "model": entry.model, "size": entry.size, "devices": entry.devices, "changes": dict(entry.changes),
        "expert": expert,
    }  # fmt: skip
    compiled = compile_for(job, entry.machine)
    if cache_path:
        cache_path.parent.mkdir(parents=True, exist_ok=True)
        cache_path.write_bytes(gzip.compress(json.dumps(asdict(compiled)).encode(), compresslevel=3))
    return compiled


def freeze(entry: Entry, texts: Path | None = None) -> None:
    """Count every expert of a case, and write them to the machine's file."""
    experts, left_out = count_experts(entry, texts)
    made_by = {"command": "python -m benchmarks.planner.frozen", "jaxlib": importlib.metadata.version("jaxlib")}
    case = {"case": entry.name, "changes": dict(entry.changes), **made_by, "experts": experts, "left_out": left_out}
    FOLDER.mkdir(parents=True, exist_ok=True)
    machine_path(entry.machine).write_bytes(compress_cases(read_machine(entry.machine) | {entry.name: case}))


def _format_best(experts: dict[str, Any], budget: float) -> str:
    best = find_fastest_fitting(experts, budget * experts["data"]["memory_bytes"])
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
                print(f"{entry.name:16}", "  ".join(_format_best(read(entry), budget) for budget in BUDGETS))
        return
    if arguments.show:
        cases = {name: case for machine in MACHINES for name, case in read_machine(machine).items()}
        if arguments.show not in cases:
            parser.error(f"{arguments.show} is not frozen; {', '.join(sorted(cases))} are")
        print(format_case(cases[arguments.show]))
        return
    again = arguments.again
    chosen = [entry for entry in entries() if (matches_name(entry, again) if again else not is_frozen(entry))]
    if any(entry.machine in TARGETS for entry in chosen):
        require_packages(arguments)
    for entry in chosen:
        freeze(entry, arguments.texts)


if __name__ == "__main__":
    main()
