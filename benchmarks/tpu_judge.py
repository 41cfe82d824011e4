"""What the TPU compiler needs for a plan: `tpu_judge.py STEP.hlo PLAN.json` prints its memory figures as JSON.

Run by `check_memory.py` in an interpreter that has jax and libtpu. It compiles for a topology: no TPU is needed.

What is live at once counts. The temporaries that this compiler reports are more, as long as there is room: a step that
it reports 18.0 GB of, 12.2 of them live at once, compiles for the 16 GB of a v5e.
"""

from __future__ import annotations

import os
import sys

os.environ |= {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
}

from jax.experimental import topologies
from memory_judge import print_memory, read_step

TOPOLOGY = "v5e:2x4"


def main() -> None:
    text, plan = read_step(*sys.argv[1:3])
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    print_memory(text, plan, devices, "tpu", by_peak=True)


if __name__ == "__main__":
    main()
