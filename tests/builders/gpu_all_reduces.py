"""The all-reduces that XLA:GPU leaves of a plan, compiled for A100s without one.

    python -m tests.builders.gpu_all_reduces STEP.hlo PLAN.json PACKAGES

Prints their number. PACKAGES is a folder as `benchmarks.gpu_targets` says.
"""

from __future__ import annotations

import os
import re
import sys

from benchmarks.gpu_targets import compile_only_devices, compiler_environment

os.environ |= compiler_environment(sys.argv[3])

from oracles.memory_judge import compile_for, read_step

if __name__ == "__main__":
    text, plan = read_step(*sys.argv[1:3])
    executable = compile_for(text, plan, compile_only_devices(sys.argv[3], "a100", plan.mesh.device_count), "cuda")
    compiled = executable.hlo_modules()[0].to_string()
    print(len(re.findall(r"= .*? all-reduce(?:-start)?\(", compiled)))
