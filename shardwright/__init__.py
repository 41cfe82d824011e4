"""Shardwright: automatic parallelization of training steps, as a service.

Names load when they are first used: importing the package starts neither JAX
nor a solver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwright import errors
from shardwright.errors import (
    AnnotationError,
    ArgumentError,
    ArrayError,
    AuthenticationError,
    CheckpointError,
    ClusterConfigError,
    CollectiveError,
    CompilationAbortedError,
    CompilationError,
    DatasetError,
    DeadlineError,
    DebugCallbackError,
    ExecutionError,
    HloSyntaxError,
    InternalError,
    LaunchError,
    MemoryBudgetError,
    MicroBatchError,
    NonFiniteError,
    ObjectTypeError,
    OptionError,
    PlanCheckError,
    PlanError,
    PlatformError,
    ProtocolError,
    RankLostError,
    RepeatedLossError,
    ResourceLimitError,
    ServerDrainingError,
    ServerUnavailableError,
    SessionError,
    ShardwrightError,
    SnapshotLostError,
    StateStoreError,
    StepCancelledError,
    StepTimeoutError,
    UnpartitionableError,
    UnsupportedProgramError,
    WorkerLostError,
)
from shardwright.package import VERSION

if TYPE_CHECKING:
    from shardwright import builders as strategies
    from shardwright import hlo, horovod, ranks
    from shardwright.client.annotate import annotate
    from shardwright.client.arrays import RemoteArray
    from shardwright.client.automatic_saves import CheckpointPolicy
    from shardwright.client.datasets import Dataset
    from shardwright.client.debug_calls import debug_step
    from shardwright.client.kept import Resumed
    from shardwright.client.kernels import partition
    from shardwright.client.local_statistics import local_statistics
    from shardwright.client.lowering import lower
    from shardwright.client.recovery import Recovered
    from shardwright.client.session import Session, connect
    from shardwright.clusters.cluster import Cluster
    from shardwright.clusters.resource_spec import resource_spec
    from shardwright.cost.given import cost
    from shardwright.offline import plan
    from shardwright.user_plans import Plan

__version__ = VERSION

#: Public name → the module that holds it ("" is the module itself).
_LAZY = {
    "CheckpointPolicy": "shardwright.client.automatic_saves",
    "Cluster": "shardwright.clusters.cluster",
    "Dataset": "shardwright.client.datasets",
    "Plan": "shardwright.user_plans",
    "Recovered": "shardwright.client.recovery",
    "Resumed": "shardwright.client.kept",
    "RemoteArray": "shardwright.client.arrays",
    "Session": "shardwright.client.session",
    "annotate": "shardwright.client.annotate",
    "connect": "shardwright.client.session",
    "debug_step": "shardwright.client.debug_calls",
    "local_statistics": "shardwright.client.local_statistics",
    "lower": "shardwright.client.lowering",
    "partition": "shardwright.client.kernels",
    "plan": "shardwright.offline",
    "resource_spec": "shardwright.clusters.resource_spec",
}
#: Public name → the module that it is.
_LAZY_MODULES = {
    "cost": "shardwright.cost",
    "hlo": "shardwright.hlo",
    "horovod": "shardwright.horovod",
    "ranks": "shardwright.ranks",
    "strategies": "shardwright.builders",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(_LAZY_MODULES[name])
    if name not in _LAZY:
        raise AttributeError(f"module 'shardwright' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES})


__all__ = [
    "AnnotationError",
    "ArgumentError",
    "ArrayError",
    "AuthenticationError",
    "CheckpointError",
    "CheckpointPolicy",
    "Cluster",
    "ClusterConfigError",
    "CollectiveError",
    "CompilationAbortedError",
    "CompilationError",
    "Dataset",
    "DatasetError",
    "DeadlineError",
    "DebugCallbackError",
    "ExecutionError",
    "HloSyntaxError",
    "InternalError",
    "LaunchError",
    "MemoryBudgetError",
    "MicroBatchError",
    "NonFiniteError",
    "ObjectTypeError",
    "OptionError",
    "Plan",
    "PlanCheckError",
    "PlanError",
    "PlatformError",
    "ProtocolError",
    "RankLostError",
    "Recovered",
    "RemoteArray",
    "RepeatedLossError",
    "ResourceLimitError",
    "Resumed",
    "ServerDrainingError",
    "ServerUnavailableError",
    "Session",
    "SessionError",
    "ShardwrightError",
    "SnapshotLostError",
    "StateStoreError",
    "StepCancelledError",
    "StepTimeoutError",
    "UnpartitionableError",
    "UnsupportedProgramError",
    "WorkerLostError",
    "__version__",
    "annotate",
    "connect",
    "cost",
    "debug_step",
    "errors",
    "hlo",
    "horovod",
    "local_statistics",
    "lower",
    "partition",
    "plan",
    "ranks",
    "resource_spec",
    "strategies",
]
