"""Planned programs run as XLA compiles them, on the CPU devices of this process."""

from __future__ import annotations

import jax
import numpy as np

from shardwright import xla
from shardwright.plans.plan import Plan
from shardwright.xla import emit_stablehlo


def xla_outputs(planned: Plan, *arguments: np.ndarray) -> list[np.ndarray]:
    """The outputs of the emitted program, run on eight devices; arguments must divide evenly."""
    loaded = xla.load_program(
        emit_stablehlo(planned.require_hlo(), planned, platform="cpu").encode(), is_serialized=False, mesh=planned.mesh,
        arguments=[xla.BoundaryArray.of(variable) for variable in planned.parameters],
        outputs=[xla.BoundaryArray.of(variable) for variable in planned.outputs], donated=[],
    )  # fmt: skip
    put = [jax.device_put(value, loaded.argument_shardings[number]) for number, value in enumerate(arguments)]
    return [
        np.asarray(value)[tuple(slice(size) for size in variable.shape)]
        for value, variable in zip(loaded.run(put), planned.outputs, strict=True)
    ]
