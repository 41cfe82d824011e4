"""Functions that leave the service: StableHLO in `jax.export`'s container, for programs without this package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
from jax import export

from shardwright.errors import PlatformError


def serialize_function(function: Callable[..., Any], *types: Any, platform: str) -> bytes:
    """`function` for arguments of these types, pytrees of plain containers; `jax.export.deserialize` reads it.

    Raises PlatformError without flatbuffers, the format of the container.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise PlatformError("flatbuffers is not installed, which jax.export needs", remedy="pip install flatbuffers")
    return bytes(export.export(jax.jit(function), platforms=(platform,))(*types).serialize())
