"""Walking an MLIR module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Operations that call a function of the module.
CALLS = frozenset({"func.call", "call"})


def operations_within(root: Any) -> Iterator[Any]:
    """Every operation in the regions of one, each followed by those within it."""
    for region in root.regions:
        for block in region.blocks:
            for operation in block.operations:
                yield operation.operation
                yield from operations_within(operation.operation)
