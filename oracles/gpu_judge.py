"""Memory of a plan's program compiled by XLA:GPU, as JSON.

    python -m oracles.gpu_judge STEP.hlo PLAN.json PACKAGES

Run by `oracles.memory`. Compiles for A100s without a GPU; PACKAGES: see `benchmarks.gpu_targets`.
"""

from __future__ import annotations

import os
import sys

from benchmarks.gpu_targets import compile_only_devices, compiler_environment

os.environ |= compiler_environment(sys.argv[3])

from oracles.memory_judge import print_memory, read_step


def main() -> None:
    text, plan = read_step(*sys.argv[1:3])
    print_memory(text, plan, compile_only_devices(sys.argv[3], "a100", plan.mesh.device_count), "cuda")


if __name__ == "__main__":
    main()
