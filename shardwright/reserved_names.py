"""Names with a meaning in programs: the emitted mesh, and targets of custom calls."""

from __future__ import annotations

#: The mesh name in emitted modules; nobody's own mesh may carry it (XLA aborts on a clash).
MESH_NAME = "shardwright_mesh"

#: custom-call target that `shardwright.annotate` lowers to. `backend_config` holds
#: its pins as `dimension:axis` items joined by commas; `-` is "not split",
#: `*` is "split somewhere", several axes (major first) are joined by `+`:
#: `0:data,1:-,2:*,3:data+model`.
ANNOTATION_TARGET = "shardwright.annotate"

#: custom-call targets that only say how their operand should lie, and hand it on: ours and JAX's.
IDENTITY_TARGETS = frozenset({ANNOTATION_TARGET, "Sharding", "xla.sdy.FuncResultSharding"})

#: custom-call targets at the border of computations written for one device (`shard_map`): not ours to partition.
MANUAL_TARGETS = frozenset(
    {"SPMDFullToShardShape", "SPMDShardToFullShape", "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"}
)

#: custom-call target of `jax.experimental.custom_partitioning` lowered for several devices: its callbacks are Python's.
CALLBACK_TARGET = "CustomSPMDPartitioning"
