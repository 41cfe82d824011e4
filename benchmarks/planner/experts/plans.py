"""The experts: layouts that practitioners use, for any number of devices.

data: data parallel. zero1, zero3: optimizer state, or parameters too, sharded over all devices (Rajbhandari et al.,
2020). tensorN: Megatron-LM (Shoeybi et al., 2019), N-way inside a node, data parallel outside; +seq with the residual
stream sharded along the sequence (Korthikanti et al., 2022); +zero1, +zero3: state or parameters sharded over the
data axis as well ("2D"). expertN: experts of a mixture N-way, everything else data parallel (GShard, Lepikhin et
al., 2020); +zero1, +zero3 likewise.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.planner.experts.rules import Expert

#: Dimensions that Megatron's tensor axis splits, in parameters and in activations.
_TENSOR = ("heads", "kv_heads", "mlp", "vocabulary", "gates", "channels")

#: Megatron shards projections of q, k and v one by one.
_APART = {"fused": False}


def experts(devices: int, *, tensor: bool, sequence: bool, mixture: int = 0, fused: bool = False) -> dict[str, Expert]:
    """Experts by name, those that make sense for a kind of model.

    tensor: it has heads or wide layers to split. sequence: its residual stream has a sequence to split.
    mixture: number of experts of a mixture. fused: it has `fused=False` for projections apart.
    """
    found = dict(_data_parallel(devices))
    apart = _APART if fused else {}
    if tensor:
        for ways in (2, 4, 8):
            found.update(_tensor_parallel(devices, ways, sequence, apart))
    for ways in (2, 4, 8, 16, 32, 64):
        if mixture and ways <= devices and mixture % ways == 0:
            found.update(_expert_parallel(devices, ways))
    return found


def _data_parallel(devices: int) -> Iterator[tuple[str, Expert]]:
    mesh = {"data": devices}
    batch = {"batch": ("data",)}
    yield "data", Expert(mesh=mesh, activations=batch)
    yield "zero1", Expert(mesh=mesh, activations=batch, shard_state=("data",))
    yield "zero3", Expert(mesh=mesh, activations=batch, shard_parameters=("data",))


def _tensor_parallel(devices: int, ways: int, sequence: bool, apart: dict[str, bool]) -> Iterator[tuple[str, Expert]]:
    mesh = {"data": devices // ways, "model": ways}
    split = {name: ("model",) for name in _TENSOR}
    whole = {"batch": ("data",), **split}
    layouts = {"": whole}
    if sequence:
        layouts["+seq"] = {**whole, "residual_length": ("model",)}
    for suffix, activations in layouts.items():
        plain = Expert(mesh=mesh, activations=activations, parameters=split, changes=apart)
        yield f"tensor{ways}{suffix}", plain
        if devices == ways:
            continue
        for name, keys in (("zero1", {"shard_state": ("data",)}), ("zero3", {"shard_parameters": ("data",)})):
            yield (
                f"tensor{ways}{suffix}+{name}",
                Expert(mesh=mesh, activations=activations, parameters=split, changes=apart, **keys),
            )


def _expert_parallel(devices: int, ways: int) -> Iterator[tuple[str, Expert]]:
    mesh = {"data": devices // ways, "expert": ways}
    both = ("data", "expert")
    keys = {
        "mesh": mesh,
        "activations": {"batch": both, "experts": ("expert",), "expert_batch": ("data",)},
        "parameters": {"experts": ("expert",)},
    }
    yield f"expert{ways}", Expert(**keys)
    yield f"expert{ways}+zero1", Expert(**keys, shard_state=both)
    yield f"expert{ways}+zero3", Expert(**keys, shard_parameters=both)
