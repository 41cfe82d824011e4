"""Hold what `measure_gpu` measured against the benchmark's judge and the planner's prices. Needs no GPU.

    python -m benchmarks.gpu_measured DIR [--machine h100] [--predict] [--kinds]

Per case: seconds of a step, of its kernels, as judged and, with `--predict`, as the planner predicts for one device.
`--kinds`: kernels by what they do, with the part of the peak they attain: a product's operations, else bytes.
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
from benchmarks.planner.counter import Counting
from benchmarks.planner.judge import MACHINES, Machine, kernel_s
from benchmarks.planner.loops import trip_count
from benchmarks.planner.partitioned_text import read_module
from benchmarks.planner.suite import cluster_json
from workloads.every_model import EVERY_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKernel:
    """Kernels of one instruction in a step: as counted, seconds on the device, seconds as judged."""

    kernel: Kernel
    seconds: float
    judged_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", choices=MACHINES, default="h100")
    parser.add_argument("--predict", action="store_true", help="plan each case for one device (a minute)")
    parser.add_argument("--kinds", action="store_true", help="what kernels of each kind attain")
    arguments = parser.parse_args()
    machine = MACHINES[arguments.machine]
    steps = json.loads((arguments.folder / "figures.json").read_text())["steps"]
    by_kind: dict[str, list[MeasuredKernel]] = defaultdict(list)
    for case, measured in steps.items():
        file = arguments.folder / f"{case.replace(':', '-')}.hlo.gz"
        if "step_s" not in measured or not file.exists():
            continue
        kernels = list(_join(file, machine))
        for each in kernels:
            by_kind[_kind(each.kernel)].append(each)
        _print_case(case, measured, kernels, arguments)
    if arguments.kinds:
        _print_kinds(by_kind, machine)


def _join(file: Path, machine: Machine) -> Iterator[MeasuredKernel]:
    """Every counted instruction that the profiler has seen."""
    with gzip.open(file, "rt") as lines:
        module = read_module(lines.read())
    seconds = {name: total for name, total, _ in json.loads(file.with_name(file.name[:-7] + ".json").read_text())}
    for name, kernel in _kernels(Counting(module, 1), module.entry, 1):
        if name in seconds:
            yield MeasuredKernel(
                kernel=kernel, seconds=seconds[name], judged_s=kernel_s(kernel, machine) * kernel.count
            )


def _kernels(counting: Counting, computation: str, runs: int) -> Iterator[tuple[str, Kernel]]:
    body = counting.module.computations[computation]
    for instruction in body.values():
        if instruction.opcode == "while":
            yield from _kernels(counting, instruction.attribute("body"), runs * trip_count(instruction))
            continue
        alone = Counting(counting.module, 1)
        alone.add(instruction, body, runs)
        for (product_type, flops, size, kind), count in alone.kernels.items():
            kernel = Kernel(flops=flops, bytes=size, product_type=product_type or None, kind=kind, count=count)
            yield instruction.name, kernel


def _kind(kernel: Kernel) -> str:
    if kernel.product_type:
        return f"{kernel.kind} {kernel.product_type}, {'large' if kernel.flops > 1e10 else 'small'}"
    return f"{kernel.kind}, {'large' if kernel.bytes > 50e6 else 'small' if kernel.bytes > 1e6 else 'tiny'}"


def _print_case(
    case: str, measured: dict[str, Any], kernels: list[MeasuredKernel], arguments: argparse.Namespace
) -> None:
    joined_s = sum(each.seconds for each in kernels)
    products_s = sum(each.seconds for each in kernels if each.kernel.product_type)
    judged_s = sum(each.judged_s for each in kernels)
    judged_products_s = sum(each.judged_s for each in kernels if each.kernel.product_type)
    line = (
        f"{case:14} step {measured['step_s'] * 1e3:7.2f} ms, kernels {measured['kernels_s'] * 1e3:7.2f}; of those "
        f"joined {joined_s * 1e3:7.2f} ({products_s * 1e3:6.2f} products), judged {judged_s * 1e3:7.2f} "
        f"({judged_products_s * 1e3:6.2f})"
    )
    if arguments.predict:
        plan = _plan(case, arguments.machine)
        line += f", predicted {plan.cost.step_s * 1e3:7.2f} ms, {plan.memory.peak_bytes / 1e9:.2f} GB"
    size = measured["argument_bytes"] + measured["temporary_bytes"]
    print(f"{line}; compiled {size / 1e9:.2f} GB", flush=True)


def _plan(case: str, machine: str) -> Any:
    import shardwright as sw

    model, size = case.split(":")
    hlo = (
        EVERY_MODEL[model]
        .build(size, 1, **CASES[case])
        .lower()
        .compiler_ir("hlo")
        .as_hlo_text(print_large_constants=True)
    )
    return sw.plan(hlo, sw.Cluster.from_json(cluster_json(1, machine)))


def _print_kinds(by_kind: dict[str, list[MeasuredKernel]], machine: Machine) -> None:
    for kind, kernels in sorted(by_kind.items(), key=lambda item: -sum(each.seconds for each in item[1])):
        seconds = sum(each.seconds for each in kernels)
        runs = sum(each.kernel.count for each in kernels)
        moved = sum(each.kernel.bytes * each.kernel.count for each in kernels)
        part = moved / seconds / machine.memory_bandwidth
        text = f"{part:.2f} of the bandwidth"
        if product_type := kernels[0].kernel.product_type:
            flops = sum(each.kernel.flops * each.kernel.count for each in kernels)
            text += f", {flops / seconds / machine.product_flops_per_s[product_type]:.2f} of the operations"
        judged = sum(each.judged_s for each in kernels)
        print(
            f"{kind:32} {runs:6} runs {seconds * 1e3:8.2f} ms, {seconds / runs * 1e6:7.1f} us each: {text}; "
            f"judged {judged * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    main()
