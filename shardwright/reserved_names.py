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

#: custom-call target of JAX that says in which memory of its device a value lies.
PLACEMENT_TARGET = "annotate_device_placement"

#: custom-call targets at the border of computations written for one device (`shard_map`): not ours to partition.
MANUAL_TARGETS = frozenset(
    {"SPMDFullToShardShape", "SPMDShardToFullShape", "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"}
)

#: custom-call targets of ours at the same border, one array each, in programs as they are planned (`regions.border`).
ENTER_REGION = "shardwright.enter_region"
LEAVE_REGION = "shardwright.leave_region"
BORDER_TARGETS = frozenset({ENTER_REGION, LEAVE_REGION})

#: custom-call target of `jax.experimental.custom_partitioning` lowered for several devices: its callbacks are Python's.
CALLBACK_TARGET = "CustomSPMDPartitioning"

#: The header's frontend attribute that says why a step was traced with shardings in its types.
TYPES_NEED = "shardwright.types_need"

#: custom-call target of a program that asks how many rows of its mixtures were over their experts' capacity: `s32[]`.
ROWS_OVER = "shardwright.rows_over"
