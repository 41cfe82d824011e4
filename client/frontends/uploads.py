"""Values of this machine as state on the servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardwright.client.arrays import RemoteArray
from shardwright.client.initializer import PendingInit

if TYPE_CHECKING:
    from shardwright.client.step_queue import StepQueue


def upload(steps: StepQueue, arrays: Sequence[np.ndarray]) -> list[RemoteArray]:
    """Handles of new arrays, 64-bit ones included: they are sent when a step first needs them, in its layouts."""
    if not arrays:
        return []
    with jax.enable_x64(True):
        return list(PendingInit(steps, initial_values, (tuple(arrays),)).handles())


def initial_values(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies; progress shows this name."""
    return tuple(jax.numpy.array(value, copy=True) for value in values)
