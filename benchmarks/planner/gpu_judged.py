"""What one program takes on GPUs, as XLA:GPU compiles it without one.

    python -m benchmarks.planner.gpu_judged --gpu-packages F --case gpt2-124M-8 --expert zero1
    python -m benchmarks.planner.gpu_judged --gpu-packages F --stablehlo step.mlir --devices 8 --machine h100

`--changes '{"layers": 2}'`: of the model. `--collectives`, `--kinds`, `--kernels N`: each collective, kernels by what
they do, the N longest. `--beside`: how long kernels wait for collectives, as XLA has scheduled them. `--xla
OPTION=VALUE`: compiled with it, e.g. `xla_gpu_enable_latency_hiding_scheduler=true`. `--text FILE` keeps the HLO.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_targets import TARGETS, add_packages_option, require_packages
from benchmarks.planner.beside import beside
from benchmarks.planner.counted import Counted
from benchmarks.planner.counter import count
from benchmarks.planner.judge import MACHINES, Machine, collective_s, judge, kernel_s
from benchmarks.planner.partition import compile_for_gpus
from benchmarks.planner.suite import UNSEEN, entries


def main() -> None:
    arguments = _arguments()
    job, machine = _job(arguments)
    require_packages(arguments)
    compiled = compile_for_gpus(job, machine, options=arguments.xla, limit_s=arguments.limit)
    if arguments.text:
        arguments.text.write_text(compiled.hlo_text)
    counted = count(compiled.hlo_text, job["devices"])
    judged = judge(counted, MACHINES[machine])
    print(
        f"step {judged.step_s * 1e3:.2f} ms: communication {judged.communication_s * 1e3:.2f}, "
        f"memory {judged.memory_s * 1e3:.2f}, products {judged.product_s * 1e3:.2f}; "
        f"{sum(c.count for c in counted.collectives)} collectives, {counted.wire_bytes / 1e6:.1f} MB on the wire, "
        f"{sum(k.count for k in counted.kernels)} kernels, {counted.memory_bytes / 1e9:.2f} GB moved, "
        f"{compiled.memory_bytes} bytes of memory"
    )
    if arguments.beside:
        found = beside(compiled.hlo_text, job["devices"], MACHINES[machine])
        print(f"waits {found.waited_s * 1e3:.2f} ms for collectives, {found.hidden:.0%} of them run beside kernels")
    if arguments.collectives:
        _print_collectives(counted, MACHINES[machine])
    if arguments.kinds:
        _print_kinds(counted, MACHINES[machine])
    _print_kernels(counted, MACHINES[machine], arguments.kernels)


def _job(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The job of `partition_child`, and the machine it is for."""
    if arguments.stablehlo:
        return {"stablehlo": str(arguments.stablehlo.resolve()), "devices": arguments.devices}, arguments.machine
    entry = {entry.name: entry for entry in (*entries(), *UNSEEN)}[arguments.case]
    changes = {**entry.changes, **arguments.changes}
    job = {"model": entry.model, "size": entry.size, "devices": entry.devices, "changes": changes}
    return {**job, "expert": arguments.expert}, arguments.machine or entry.machine


def _print_collectives(counted: Counted, machine: Machine) -> None:
    for each in sorted(counted.collectives, key=lambda each: -collective_s(each, machine) * each.count):
        print(
            f"{each.count:5} × {each.kind:18} {each.payload_bytes / 1e6:10.3f} MB of groups of {each.group_size}, "
            f"{collective_s(each, machine) * each.count * 1e3:.3f} ms"
        )


def _print_kinds(counted: Counted, machine: Machine) -> None:
    """Kernels without products: how many of a kind, what they move, how long they take."""
    sums: dict[str, tuple[int, float, float]] = {}
    for each in counted.kernels:
        if each.product_type is None:
            runs, moved, seconds = sums.get(each.kind, (0, 0.0, 0.0))
            sums[each.kind] = (
                runs + each.count, moved + each.bytes * each.count, seconds + kernel_s(each, machine) * each.count
            )  # fmt: skip
    for kind, (runs, moved, seconds) in sorted(sums.items(), key=lambda each: -each[1][2]):
        print(f"{runs:5} × {kind:20} {moved / 1e6:10.1f} MB {seconds * 1e3:8.3f} ms")


def _print_kernels(counted: Counted, machine: Machine, limit: int) -> None:
    for each in sorted(counted.kernels, key=lambda each: -kernel_s(each, machine) * each.count)[:limit]:
        print(
            f"{each.count:5} × {each.product_type or each.kind:14} {each.bytes / 1e6:10.3f} MB, {each.flops / 1e9:.1f} "
            f"Gflop, {kernel_s(each, machine) * each.count * 1e3:.3f} ms"
        )


def _arguments() -> argparse.Namespace:
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
