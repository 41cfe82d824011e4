"""Memory of a plan's program compiled by the TPU compiler, as JSON.

    python -m oracles.tpu_judge STEP.hlo PLAN.json [BYTES]

Run by `oracles.memory` in an interpreter with jax and libtpu. It compiles for a topology: no TPU is needed. The
compiler runs in a child process, killed once buffers are assigned: machine code takes ten times longer.

Temporaries are the peak of live bytes. The compiler itself reports more while there is room: a step of 12.2 GB live and
18.0 GB reported compiles for the 16 GB of a v5e. BYTES limits the memory of the scheduler: it overlaps fewer
collectives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from oracles.assigned_buffers import AssignedBytes, read_assignment

TOPOLOGY = "v5e:2x4"
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
}
#: The file dumped once buffers are assigned.
DUMP_PATTERN = "*.after_optimizations.hlo.pb"
POLL_S = 0.5
#: Memory of a v5e; the scheduler's limit is a percentage of it.
DEVICE_BYTES = 16 << 30


def compile_step(hlo: str, plan: str) -> None:
    """Compile a planned step to the end, in a process with ENVIRONMENT."""
    from jax.experimental import topologies

    from oracles.memory_judge import compile_for, read_step

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    compile_for(*read_step(hlo, plan), devices, "tpu")


def assign_buffers(hlo: str, plan: str, limit_bytes: int | None = None) -> AssignedBytes:
    """Assign the buffers of a step's program. Raises RuntimeError with the compiler's log if it refuses the step."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_proto"}
        if limit_bytes is not None:
            percent = 100 * limit_bytes // DEVICE_BYTES
            flags["LIBTPU_INIT_ARGS"] = f"--xla_tpu_scheduler_percent_shared_memory_limit={percent}"
        command = [sys.executable, "-m", "oracles.tpu_judge", hlo, plan, "--compile"]
        log = Path(folder) / "log"
        with log.open("w") as output:
            child = subprocess.Popen(command, env=os.environ | ENVIRONMENT | flags, stdout=output, stderr=output)
            try:
                while child.poll() is None and _read_dump(folder) is None:
                    time.sleep(POLL_S)
            finally:
                child.kill()
                child.wait()
        buffers = _read_dump(folder)
        if buffers is None:
            raise RuntimeError(log.read_text()[-500:])
        return buffers


def _read_dump(folder: str) -> AssignedBytes | None:
    """Read the dump of the step, the only module; None until it is complete."""
    for path in Path(folder).glob(DUMP_PATTERN):
        try:
            return read_assignment(path)
        except ValueError:
            return None
    return None


def main() -> None:
    hlo, plan, *more = sys.argv[1:]
    if more == ["--compile"]:
        compile_step(hlo, plan)
        return
    buffers = assign_buffers(hlo, plan, *map(int, more))
    print(
        json.dumps(
            {
                "argument_bytes": buffers.arguments_bytes,
                "output_bytes": buffers.outputs_bytes,
                "alias_bytes": 0,
                "temporary_bytes": buffers.live_bytes,
            }
        )
    )


if __name__ == "__main__":
    main()
