"""What the TPU compiler needs for a plan, as JSON.

    python -m oracles.tpu_judge STEP.hlo PLAN.json [BYTES]

Run by `oracles.memory` in an interpreter that has jax and libtpu. It compiles for a topology: no TPU is needed. The
compiler runs in a child process, which is ended once buffers are assigned: machine code takes ten times as long.

What is live at once counts. The temporaries that this compiler reports are more, as long as there is room: a step that
it reports 18.0 GB of, 12.2 of them live at once, compiles for the 16 GB of a v5e. With BYTES its scheduler is told that
a device has no more: it hides less of the collectives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from oracles.assigned_buffers import Assigned, read_assignment

TOPOLOGY = "v5e:2x4"
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
}
#: What is dumped once buffers are assigned.
DUMPED = "*.after_optimizations.hlo.pb"
POLL_S = 0.5
#: Memory of a v5e, of which the scheduler's limit is a percentage.
DEVICE_BYTES = 16 << 30


def compile_step(hlo: str, plan: str) -> None:
    """Compile a planned step to the end; in a process with ENVIRONMENT."""
    from jax.experimental import topologies

    from oracles.memory_judge import compile_for, read_step

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    compile_for(*read_step(hlo, plan), devices, "tpu")


def assigned(hlo: str, plan: str, limit_bytes: int | None = None) -> Assigned:
    """The buffers of a step's program. Raises RuntimeError, with what the compiler said, where it refuses the step."""
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
                while child.poll() is None and _dumped(folder) is None:
                    time.sleep(POLL_S)
            finally:
                child.kill()
                child.wait()
        result = _dumped(folder)
        if result is None:
            raise RuntimeError(log.read_text()[-500:])
        return result


def _dumped(folder: str) -> Assigned | None:
    """What has been dumped of the step, which is the only module; None until it is complete."""
    for path in Path(folder).glob(DUMPED):
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
    result = assigned(hlo, plan, *map(int, more))
    print(
        json.dumps(
            {
                "argument_bytes": result.arguments_bytes,
                "output_bytes": result.outputs_bytes,
                "alias_bytes": 0,
                "temporary_bytes": result.live_bytes,
            }
        )
    )


if __name__ == "__main__":
    main()
