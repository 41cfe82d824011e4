"""Judged seconds of one program on GPUs, compiled by XLA:GPU without one.

    python -m benchmarks.planner.gpu_judged --gpu-packages F --case gpt2-124M-8 --expert zero1
    python -m benchmarks.planner.gpu_judged --gpu-packages F --stablehlo step.mlir --devices 8 --machine h100

`--changes '{"layers": 2}'`: of the model. `--collectives`, `--kinds`, `--kernels N`: each collective, kernels by kind,
the N longest. `--beside`: the kernels' waits for collectives in XLA's schedule. `--xla OPTION=VALUE`: an option of the
compiler, e.g. `xla_gpu_enable_latency_hiding_scheduler=true`. `--text FILE` keeps the HLO.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_targets import TARGETS, add_packages_option, require_packages
from benchmarks.planner.beside import measure_overlap
from benchmarks.planner.counted import ProgramCounts
from benchmarks.planner.counter import count
from benchmarks.planner.judge import MACHINES, Machine, collective_s, judge, kernel_s
from benchmarks.planner.partition import compile_for_gpus
from benchmarks.planner.suite import UNSEEN, entries


def main() -> None:
    arguments = _parse_arguments()
    job, machine = _build_job(arguments)
    require_packages(arguments)
    compiled = compile_for_gpus(job, machine, options=arguments.xla, limit_s=arguments.limit)
    if arguments.text:
        arguments.text.write_text(compiled.hlo_text)
    counts = count(compiled.hlo_text, job["devices"])
    step_time = judge(counts, MACHINES[machine])
    print(
        f"step {step_time.step_s * 1e3:.2f} ms: communication {step_time.communication_s * 1e3:.2f}, "
        f"memory {step_time.memory_s * 1e3:.2f}, products {step_time.product_s * 1e3:.2f}; "
        f"{sum(c.count for c in counts.collectives)} collectives, {counts.wire_bytes / 1e6:.1f} MB on the wire, "
        f"{sum(k.count for k in counts.kernels)} kernels, {counts.memory_bytes / 1e9:.2f} GB moved, "
        f"{compiled.memory_bytes} bytes of memory"
    )
    if arguments.beside:
        overlap = measure_overlap(compiled.hlo_text, job["devices"], MACHINES[machine])
        print(
            f"waits {overlap.exposed_s * 1e3:.2f} ms for collectives, "
            f"{overlap.hidden_fraction:.0%} of them run beside kernels"
        )
    if arguments.collectives:
        _print_collectives(counts, MACHINES[machine])
    if arguments.kinds:
        _print_kinds(counts, MACHINES[machine])
    _print_kernels(counts, MACHINES[machine], arguments.kernels)


def _build_job(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The job of `partition_child`, and its machine."""
    if arguments.stablehlo:
        return {"stablehlo": str(arguments.stablehlo.resolve()), "devices": arguments.devices}, arguments.machine
    entry = {entry.name: entry for entry in (*entries(), *UNSEEN)}[arguments.case]
    changes = {**entry.changes, **arguments.changes}
    job = {"model": entry.model, "size": entry.size, "devices": entry.devices, "changes": changes}
    return {**job, "expert": arguments.expert}, arguments.machine or entry.machine


def _print_collectives(counts: ProgramCounts, machine: Machine) -> None:
    for collective in sorted(counts.collectives, key=lambda c: -collective_s(c, machine) * c.count):
        print(
            f"{collective.count:5} × {collective.kind:18} {collective.payload_bytes / 1e6:10.3f} MB "
            f"of groups of {collective.group_size}, "
            f"{collective_s(collective, machine) * collective.count * 1e3:.3f} ms"
        )


def _print_kinds(counts: ProgramCounts, machine: Machine) -> None:
    """Print kernels without products by kind: runs, bytes moved, seconds."""
    sums: dict[str, tuple[int, float, float]] = {}
    for kernel in counts.kernels:
        if kernel.product_type is None:
            runs, moved_bytes, seconds = sums.get(kernel.kind, (0, 0.0, 0.0))
            sums[kernel.kind] = (
                runs + kernel.count,
                moved_bytes + kernel.bytes * kernel.count,
                seconds + kernel_s(kernel, machine) * kernel.count,
            )
    for kind, (runs, moved_bytes, seconds) in sorted(sums.items(), key=lambda item: -item[1][2]):
        print(f"{runs:5} × {kind:20} {moved_bytes / 1e6:10.1f} MB {seconds * 1e3:8.3f} ms")


def _print_kernels(counts: ProgramCounts, machine: Machine, limit: int) -> None:
    for kernel in sorted(counts.kernels, key=lambda k: -kernel_s(k, machine) * k.count)[:limit]:
        print(
            f"{kernel.count:5} × {kernel.product_type or kernel.kind:14} {kernel.bytes / 1e6:10.3f} MB, "
            f"{kernel.flops / 1e9:.1f} Gflop, {kernel_s(kernel, machine) * kernel.count * 1e3:.3f} ms"
        )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--case", metavar="NAME", help="a case of the suite, with --expert")
    what.add_argument("--stablehlo", type=Path, metavar="FILE", help="a program that a plan emitted, with --devices")
    parser.add_argument("--expert", default="data", help="by its name in experts/plans.py")
    parser.add_argument("--changes", type=json.loads, default={}, metavar="JSON", help="arguments of the model's build")
    parser.add_argument("--devices", type=int, default=8, metavar="N")
    parser.add_argument("--machine", choices=sorted(TARGETS), help="the case's, or a100")
    parser.add_argument("--beside", action="store_true", help="print how long kernels wait for collectives")
    parser.add_argument("--xla", action="append", default=[], metavar="OPTION=VALUE", help="an option of the compiler")
    parser.add_argument("--collectives", action="store_true", help="print each of them")
    parser.add_argument("--kinds", action="store_true", help="print the kernels without products by what they do")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="print the longest of them")
    parser.add_argument("--text", type=Path, metavar="FILE", help="keep the optimized HLO")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS")
    add_packages_option(parser)
    arguments = parser.parse_args()
    if arguments.stablehlo:
        arguments.machine = arguments.machine or "a100"
    return arguments


if __name__ == "__main__":
    main()
