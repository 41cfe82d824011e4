"""Looks for NaNs and infinities in a step's results on their devices: one flag of each shard is read, no contents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from shardwright.plans.layouts import Slices, distinct_shards
from shardwright.proto.v1 import master_pb2
from shardwright.server.runtime.arrays import StoredArray, local_positions

#: What elements of fewer than 16 bits are looked at as.
_WIDE = jnp.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class FiniteCheck:
    """One array that is being looked at: `flags`, per distinct shard here, say (has NaNs, has infinities)."""

    array_id: int
    flags: tuple[jax.Array, ...]

    def finding(self) -> master_pb2.NotFinite | None:
        """Waits for the flags; None if all values are finite."""
        nans, infs = ([bool(flag[kind]) for flag in map(jax.device_get, self.flags)] for kind in (0, 1))
        if not any(nans) and not any(infs):
            return None
        return master_pb2.NotFinite(array_id=self.array_id, nans=any(nans), infs=any(infs))


def dispatch_checks(
    arrays: Iterable[tuple[int, StoredArray]], step: master_pb2.RunStepsRequest
) -> tuple[FiniteCheck, ...]:
    """Dispatch the checks of `step` on the devices holding the arrays; types without such values are skipped."""
    if not (step.check_nans or step.check_infs):
        return ()
    kinds = (step.check_nans, step.check_infs)
    return tuple(
        FiniteCheck(array_id=array_id, flags=tuple(_dispatch_flags(stored, kinds)))
        for array_id, stored in arrays
        if jnp.issubdtype(stored.layout.dtype, jnp.inexact)
    )


def _dispatch_flags(stored: StoredArray, kinds: tuple[bool, bool]) -> Iterable[jax.Array]:
    layout, positions = stored.layout, local_positions()
    parts = {part.device: part.data for part in stored.value.addressable_shards}
    for shard in distinct_shards(layout, positions):
        extents = _without_padding(shard.slices, layout.shape)
        if 0 not in extents:
            yield _find_not_finite(parts[positions[shard.holders[0]]], extents, kinds)


def _without_padding(slices: Slices, shape: Sequence[int]) -> tuple[int, ...]:
    """Elements of a shard along each dimension that are the array's own."""
    return tuple(max(0, min(part.stop, size) - part.start) for part, size in zip(slices, shape, strict=True))


@partial(jax.jit, static_argnums=(1, 2))
def _find_not_finite(part: jax.Array, extents: tuple[int, ...], kinds: tuple[bool, bool]) -> jax.Array:
    part = part[tuple(slice(0, extent) for extent in extents)]
    part = part.astype(_WIDE) if part.dtype.itemsize < 2 else part
    has_nans = jnp.isnan(part).any() if kinds[0] else jnp.zeros((), bool)
    has_infs = jnp.isinf(part).any() if kinds[1] else jnp.zeros((), bool)
    return jnp.stack([has_nans, has_infs])
