"""The experts: practitioners' layouts, for any number of devices.

data: data parallel. zero1, zero3: optimizer state, or parameters too, sharded over all devices (Rajbhandari et al.,
2020). tensorN: Megatron-LM (Shoeybi et al., 2019), N-way inside a node, data parallel outside; +seq with the residual
stream sharded along the sequence (Korthikanti et al., 2022); +zero1, +zero3: state or parameters sharded over the
data axis as well ("2D"). expertN: experts of a mixture N-way, everything else data parallel (GShard, Lepikhin et
al., 2020); +zero1 likewise. rows, columns: large tables split so over all devices, the rest data parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.planner.experts.rules import Expert
from workloads.models.registry import Model

#: Dimensions split by Megatron's tensor axis, in parameters and in activations.
_TENSOR = ("heads", "kv_heads", "mlp", "vocabulary", "gates", "channels")

#: The batch of activations, and of the inputs of a mixture's experts without expert parallelism.
_BATCH = {"batch": ("data",), "expert_batch": ("data",)}

#: Ways a tensor axis is split: never wider than a node of eight.
_TENSOR_WAYS = (2, 4, 8)

_EXPERT_WAYS = (8, 16, 64)


def build_experts(model: Model, devices: int) -> dict[str, Expert]:
    """The experts applicable to a model, by name."""
    experts = dict(_data_parallel(devices))
    if model.tensor:
        for ways in (ways for ways in _TENSOR_WAYS if devices % ways == 0):
            experts.update(_tensor_parallel(devices, ways, model.sequence, {"fused": False} if model.fused else {}))
    for ways in _EXPERT_WAYS:
        if devices % ways == 0 and ways <= model.mixture:
            experts.update(_expert_parallel(devices, ways))
    if model.tables:
        experts.update(_split_tables(devices))
    return experts


def _data_parallel(devices: int) -> Iterator[tuple[str, Expert]]:
    mesh = {"data": devices}
    yield "data", Expert(mesh=mesh, activations=_BATCH)
    yield "zero1", Expert(mesh=mesh, activations=_BATCH, shard_state=("data",))
    yield "zero3", Expert(mesh=mesh, activations=_BATCH, shard_parameters=("data",))


def _tensor_parallel(devices: int, ways: int, sequence: bool, changes: dict[str, Any]) -> Iterator[tuple[str, Expert]]:
    mesh = {"data": devices // ways, "model": ways}
    split = dict.fromkeys(_TENSOR, ("model",))
    activations = {**_BATCH, **split}
    keys: dict[str, Any] = {"mesh": mesh, "parameters": split, "changes": changes}
    yield f"tensor{ways}", Expert(activations=activations, **keys)
    best = f"tensor{ways}"
    if sequence:
        best = f"tensor{ways}+seq"
        activations = {**activations, "residual_length": ("model",)}
        yield best, Expert(activations=activations, **keys)
    if devices > ways:
        yield f"{best}+zero1", Expert(activations=activations, shard_state=("data",), **keys)
        yield f"{best}+zero3", Expert(activations=activations, shard_parameters=("data",), **keys)


def _expert_parallel(devices: int, ways: int) -> Iterator[tuple[str, Expert]]:
    both = ("data", "expert")
    keys: dict[str, Any] = {
        "mesh": {"data": devices // ways, "expert": ways},
        "activations": {"batch": both, "experts": ("expert",), "expert_batch": ("data",)},
        "parameters": {"experts": ("expert",)},
    }
    yield f"expert{ways}", Expert(**keys)
    yield f"expert{ways}+zero1", Expert(**keys, shard_state=both)


def _split_tables(devices: int) -> Iterator[tuple[str, Expert]]:
    mesh = {"data": devices}
    for dimension in ("rows", "columns"):
        yield dimension, Expert(mesh=mesh, activations=_BATCH, parameters={dimension: ("data",)})
