"""Compare the figures of `measure_gpu` with the benchmark's judge and the planner's prices. Needs no GPU.

    python -m benchmarks.gpu_measured DIR [--machine h100] [--predict h200] [--kinds]

Per case: seconds of a step and of its kernels, measured, judged as of `--machine` and, with `--predict`, predicted by
the planner for one device of that hardware profile. `--kinds`: kernels by kind, with the part of the peak they attain
(products: of operations, others: of bytes).
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure_gpu import CASES
from benchmarks.planner.counted import Kernel
from benchmarks.planner.counter import ProgramCounter
from benchmarks.planner.judge import MACHINES, Machine, kernel_s
from benchmarks.planner.loops import trip_count
from benchmarks.planner.partitioned_text import read_module
from workloads.every_model import EVERY_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKernel:
    """Kernels of one instruction in a step: their counts, measured seconds and judged seconds."""

    kernel: Kernel
    seconds: float
    judged_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", choices=MACHINES, default="h100")
    parser.add_argument("--predict", metavar="PROFILE", help="plan each case for one such device (a minute)")
    parser.add_argument("--kinds", action="store_true", help="what kernels of each kind attain")
    arguments = parser.parse_args()
    machine = MACHINES[arguments.machine]
    steps = json.loads((arguments.folder / "figures.json").read_text())["steps"]
    by_kind: dict[str, list[MeasuredKernel]] = defaultdict(list)
    for case, measured in steps.items():
        file = arguments.folder / f"{case.replace(':', '-')}.hlo.gz"
        if "step_s" not in measured or not file.exists():
            continue
        kernels = list(_join_kernels(file, machine))
        for sample in kernels:
            by_kind[_kind_of(sample.kernel)].append(sample)
        _print_case(case, measured, kernels, arguments)
    if arguments.kinds:
        _print_kinds(by_kind, machine)


def _join_kernels(file: Path, machine: Machine) -> Iterator[MeasuredKernel]:
    """Join counted instructions with the profiler's seconds."""
    with gzip.open(file, "rt") as lines:
        module = read_module(lines.read())
    seconds = {name: total for name, total, _ in json.loads(file.with_name(file.name[:-7] + ".json").read_text())}
    for name, kernel in _count_kernels(ProgramCounter(module, 1), module.entry, 1):
        if name in seconds:
            yield MeasuredKernel(
                kernel=kernel, seconds=seconds[name], judged_s=kernel_s(kernel, machine) * kernel.count
            )


def _count_kernels(counter: ProgramCounter, computation: str, runs: int) -> Iterator[tuple[str, Kernel]]:
    body = counter.module.computations[computation]
    for instruction in body.values():
        if instruction.opcode == "while":
            yield from _count_kernels(counter, instruction.attribute("body"), runs * trip_count(instruction))
            continue
        counts = ProgramCounter(counter.module, 1)
        counts.add(instruction, body, runs)
        for (product_type, flops, size, kind), count in counts.kernels.items():
            kernel = Kernel(flops=flops, bytes=size, product_type=product_type or None, kind=kind, count=count)
            yield instruction.name, kernel


def _kind_of(kernel: Kernel) -> str:
    if kernel.product_type:
        return f"{kernel.kind} {kernel.product_type}, {'large' if kernel.flops > 1e10 else 'small'}"
    return f"{kernel.kind}, {'large' if kernel.bytes > 50e6 else 'small' if kernel.bytes > 1e6 else 'tiny'}"


def _print_case(
    case: str, measured: dict[str, Any], kernels: list[MeasuredKernel], arguments: argparse.Namespace
) -> None:
    joined_s = sum(sample.seconds for sample in kernels)
    products_s = sum(sample.seconds for sample in kernels if sample.kernel.product_type)
    judged_s = sum(sample.judged_s for sample in kernels)
    judged_products_s = sum(sample.judged_s for sample in kernels if sample.kernel.product_type)
    line = (
        f"{case:14} step {measured['step_s'] * 1e3:7.2f} ms, kernels {measured['kernels_s'] * 1e3:7.2f}; of those "
        f"joined {joined_s * 1e3:7.2f} ({products_s * 1e3:6.2f} products), judged {judged_s * 1e3:7.2f} "
        f"({judged_products_s * 1e3:6.2f})"
    )
    if arguments.predict:
        plan = _plan_case(case, arguments.predict)
        line += f", predicted {plan.cost.step_s * 1e3:7.2f} ms, {plan.memory.peak_bytes / 1e9:.2f} GB"
    size = measured["argument_bytes"] + measured["temporary_bytes"]
    print(f"{line}; compiled {size / 1e9:.2f} GB", flush=True)


def _plan_case(case: str, hardware: str) -> Any:
    import shardwright as sw

    model, size = case.split(":")
    hlo = (
        EVERY_MODEL[model]
        .build(size, 1, **CASES[case])
        .lower()
        .compiler_ir("hlo")
        .as_hlo_text(print_large_constants=True)
    )
    cluster = {"hardware": hardware, "insecure": True, "master": {"ip": "10.0.0.1", "port": 2222, "gpu_ids": [0]}}
    return sw.plan(hlo, sw.Cluster.from_json(json.dumps(cluster)))


def _print_kinds(by_kind: dict[str, list[MeasuredKernel]], machine: Machine) -> None:
    for kind, kernels in sorted(by_kind.items(), key=lambda item: -sum(sample.seconds for sample in item[1])):
        seconds = sum(sample.seconds for sample in kernels)
        runs = sum(sample.kernel.count for sample in kernels)
        moved_bytes = sum(sample.kernel.bytes * sample.kernel.count for sample in kernels)
        part = moved_bytes / seconds / machine.memory_bandwidth
        text = f"{part:.2f} of the bandwidth"
        if product_type := kernels[0].kernel.product_type:
            flops = sum(sample.kernel.flops * sample.kernel.count for sample in kernels)
            text += f", {flops / seconds / machine.product_flops_per_s[product_type]:.2f} of the operations"
        judged_s = sum(sample.judged_s for sample in kernels)
        print(
            f"{kind:32} {runs:6} runs {seconds * 1e3:8.2f} ms, {seconds / runs * 1e6:7.1f} us each: {text}; "
            f"judged {judged_s * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    main()
