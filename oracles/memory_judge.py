"""Compiles a planned step for compile-only devices; shared by the judges of `oracles.memory`.

Importing this module loads JAX: a judge sets its environment first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.plans.plan import Plan
from shardwright.plans.plan_json import decode
from shardwright.xla import emit_stablehlo, private


def read_step(hlo_path: str, plan_path: str) -> tuple[str, Plan]:
    """A step's HLO text and its plan, from the files of `oracles.memory`."""
    text = Path(hlo_path).read_text()
    return text, decode(Path(plan_path).read_text(), hlo_text=text)


def compile_for(text: str, plan: Plan, devices: Sequence[Any], platform: str) -> Any:
    """Compile a planned step for a platform, with the plan's options."""
    overrides = [*plan.compile_options.items()]
    options = private.compile_options([device.id for device in devices], platform=platform, overrides=overrides)
    stablehlo = emit_stablehlo(text, plan)
    with private.mlir_context():
        return devices[0].client.compile(private.parse_module(stablehlo), private.device_list(devices), options)


def print_memory(text: str, plan: Plan, devices: Sequence[Any], platform: str) -> None:
    """Print a device's bytes under the plan as one line of JSON (`CompiledMemory`'s fields)."""
    arguments, outputs, alias, temporaries = private.memory_figures(compile_for(text, plan, devices, platform))
    print(
        json.dumps(
            {
                "argument_bytes": arguments,
                "output_bytes": outputs,
                "alias_bytes": alias,
                "temporary_bytes": temporaries,
            }
        )
    )
