"""Every way of passing a partial sum through an instruction, against XLA, on meshes of one to three axes.

Cuts the distinct instructions out of single operations (tests/planner/rules/rule_programs.py), makes operands partial
by a linear way or the result by a contracted factor, lets the other axes idle, split or sum, compiles, runs and
compares (tests/planner/linear_trials.py). Prints wrong results, and programs with more collectives than the intended
sums; exit code 1 if there are any. All of it takes about ten minutes on two idle cores.

    python -m oracles.linear                            # everything
    python -m oracles.linear --mesh 2x2 --only dot      # opcodes that contain a word
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from shardwright.plans.shardings import Mesh
from tests.planner.linear_trials import instructions_of, judge_all, trials_of
from tests.planner.rules.rule_programs import hlo_text, operations

MESHES = ("4", "2x2", "2x4", "4x2", "2x2x2")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", action="append", help=f"such as 2x4; may be repeated (default {' '.join(MESHES)})")
    parser.add_argument("--only", default="", help="a part of the opcode")
    options = parser.parse_args()
    programs = {name: hlo_text(program) for name, program in operations().items()}
    instructions = [instruction for instruction in instructions_of(programs) if options.only in instruction.opcode]
    print(f"{len(instructions)} distinct instructions that are linear in something", flush=True)
    failed = 0
    for text in options.mesh or MESHES:
        mesh = Mesh.of(dict(zip("xyz", map(int, text.split("x")), strict=False)))
        began = time.perf_counter()
        verdicts = judge_all([trial for instruction in instructions for trial in trials_of(instruction, mesh)])
        bad = [verdict for verdict in verdicts if not (verdict.is_exact and verdict.is_cheap)]
        print(f"mesh {mesh}: {len(verdicts)} trials in {time.perf_counter() - began:.0f} s, {len(bad)} bad", flush=True)
        for verdict in bad:
            print(f"  {verdict}", flush=True)
        failed += len(bad)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
