"""Everything that touches XLA: emission, compilation, loading, inspection.

Names are loaded at first use: a process that only asks a `CompileService` loads neither jax nor MLIR.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.xla.compiled import CompiledMemory, CompiledProgram, ObservedCollective
    from shardwright.xla.emit import emit_stablehlo
    from shardwright.xla.inspect import find_collectives
    from shardwright.xla.jax_shardings import jax_mesh, mesh_devices, to_named_sharding, to_named_shardings
    from shardwright.xla.private import canonical_hlo, check_platform
    from shardwright.xla.runtime import BoundaryArray, LoadedProgram, load_program
    from shardwright.xla.service import Cancellation, CompileJob, CompileService

_HOME = {
    "BoundaryArray": "runtime",
    "Cancellation": "service",
    "CompileJob": "service",
    "CompileService": "service",
    "CompiledMemory": "compiled",
    "CompiledProgram": "compiled",
    "LoadedProgram": "runtime",
    "ObservedCollective": "compiled",
    "canonical_hlo": "private",
    "check_platform": "private",
    "emit_stablehlo": "emit",
    "jax_mesh": "jax_shardings",
    "load_program": "runtime",
    "mesh_devices": "jax_shardings",
    "to_named_sharding": "jax_shardings",
    "to_named_shardings": "jax_shardings",
    "find_collectives": "inspect",
}

__all__ = [
    "BoundaryArray",
    "Cancellation",
    "CompileJob",
    "CompileService",
    "CompiledMemory",
    "CompiledProgram",
    "LoadedProgram",
    "ObservedCollective",
    "canonical_hlo",
    "check_platform",
    "emit_stablehlo",
    "find_collectives",
    "jax_mesh",
    "load_program",
    "mesh_devices",
    "to_named_sharding",
    "to_named_shardings",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
