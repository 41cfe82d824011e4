"""What the TPU compiler needs for a plan: `tpu_judge.py STEP.hlo PLAN.json` prints its memory figures as JSON.

Run by `check_memory.py` in an interpreter that has jax and libtpu. It compiles for a topology: no TPU is needed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
}

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jax.experimental import topologies

from shardwright.plans import Plan
from shardwright.xla import emit_stablehlo, private

TOPOLOGY = "v5e:2x4"


def main() -> None:
    text = Path(sys.argv[1]).read_text()
    plan = Plan.from_json(Path(sys.argv[2]).read_text(), hlo_text=text)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    options = private.compile_options([device.id for device in devices], platform="tpu")
    stablehlo = emit_stablehlo(text, plan)
    with private.mlir_context():
        module = private.parse_module(stablehlo)
        executable = devices[0].client.compile(module, private.device_list(devices), options)
    arguments, outputs, alias, temporaries = private.memory_figures(executable)
    figures = {
        "argument_bytes": arguments, "output_bytes": outputs, "alias_bytes": alias, "temporary_bytes": temporaries,
    }  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
