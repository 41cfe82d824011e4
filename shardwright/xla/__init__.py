"""Everything that touches XLA: emission, compilation, loading, inspection.

Names are loaded when first used: the master's process needs none of MLIR.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.xla.emit import emit_stablehlo
    from shardwright.xla.private import canonical_hlo, check_platform

_HOME = {
    "canonical_hlo": "private",
    "check_platform": "private",
    "emit_stablehlo": "emit",
}

__all__ = ["canonical_hlo", "check_platform", "emit_stablehlo"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
