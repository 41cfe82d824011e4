"""Run by torchrun: modules sharded by a folder's plans train, are saved, and go on from where others were saved.

python -m torch.distributed.run … tests/torch_frontend/check_sharding.py FOLDER [RANKS OF A CHECKPOINT]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardwright.torch as swt
from shardwright.errors import OptionError, PlanError
from shardwright.plans.plan import CostSummary, MemorySummary, Plan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding
from tests.torch_frontend.models import Recurrent, ids, token_loss
from tests.torch_frontend.test_transformers import gpt2, llama, t5


def model_loss(model: Any, x: Any, y: Any) -> Any:
    return model(input_ids=x, labels=y).loss


class Mixed(torch.nn.Module):
    """Attention of PyTorch's, a recurrent layer, a tied embedding, a scale, and sizes that four ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = Recurrent()
        self.recurrent.head.weight = torch.nn.Parameter(torch.randn(50, 24) / 5)
        self.attention = torch.nn.MultiheadAttention(50, 5, batch_first=True)
        self.norm = torch.nn.LayerNorm(50)
        self.head = torch.nn.Linear(50, 50)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        h = self.norm(self.recurrent(x))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = torch.utils.checkpoint.checkpoint(self.head, h, use_reentrant=False)
        return h * self.scale


#: By the number of ranks.
FORCED = {2: ("fsdp", "tensor"), 4: ("fsdp", "megatron")}
#: The loss function and the largest token of each model.
CASES: dict[str, tuple[Any, Any, int]] = {
    "gpt2": (gpt2, model_loss, 96),
    "llama": (llama, model_loss, 96),
    "t5": (t5, model_loss, 96),
    "mixed": (Mixed, token_loss, 50),
}


def make(name: str) -> tuple[Any, Any, list[Any]]:
    """(module, loss function, six batches)"""
    kind, loss_fn, below = CASES[name]
    torch.manual_seed(0)
    return kind(), loss_fn, [tuple(ids(8, 16, below=below, seed=n + k) for k in (0, 9)) for n in range(6)]


def plan_of(model: Any, axes: dict[str, int], layouts: dict[str, Any], batch: Any = (("data",), ())) -> Plan:
    """A plan with layouts of some parameters, of a batch of [8, 16]."""
    mesh = Mesh.of(axes)
    kinds = {f"model.{name}": (tuple(value.shape), layouts.get(name)) for name, value in model.named_parameters()}
    variables = [
        VariablePlan.from_sharding(
            number, name, "f32", shape, TensorSharding(dims or ((),) * len(shape)), mesh,
            view_of=shape if name.removeprefix("model.") in layouts.get("views", ()) else None,
        )
        for number, (name, (shape, dims)) in enumerate((kinds | dict.fromkeys("xy", ((8, 16), batch))).items())
    ]  # fmt: skip
    return Plan(
        module_name="step", hlo_sha256="0" * 64, mesh=mesh, hardware="cpu", origin="test", instructions=(),
        parameters=tuple(variables), outputs=(), collectives=(),
        cost=CostSummary(compute_s=0, communication_s=0, lower_bound_s=0, bound_scope=""),
        memory=MemorySummary(arguments_bytes=0, outputs_bytes=0, temporaries_bytes=0),
    )  # fmt: skip


def lay_out_mixed(model: Any, force: str, ranks: int) -> Plan:
    """Every row over one axis; or over two axes in both orders, of rows, of columns, and some whole."""
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    if force != "megatron":
        axis = "data" if force == "fsdp" else "model"
        layouts = {name: ((axis,), *[()] * (len(shape) - 1)) if shape else () for name, shape in shapes.items()}
        return plan_of(model, {axis: ranks}, layouts, ((axis,) if axis == "data" else (), ()))
    layouts = {
        name: (("model", "data"), *[()] * (len(shape) - 1)) for name, shape in shapes.items() if "lstm" in name
    } | {
        "recurrent.embed.weight": (("model",), ("data",)),
        "attention.in_proj_weight": (("data",), ("model",)),
        "norm.weight": (("model",),),
        "head.weight": ((), ("model",)),
    }  # fmt: skip
    return plan_of(model, {"data": 2, "model": 2}, layouts)


def adam(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: Any, loss_fn: Any, batches: Any, sharded: Any = None) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(model, *(sharded.place(*batch) if sharded else batch))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses += [sharded.average(loss).item(), norm.full_tensor().item()] if sharded else [loss.item(), norm.item()]
    return losses


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def check(name: str, force: str, folder: Path, loaded: str) -> dict[str, Any]:
    ranks = dist.get_world_size()
    model, loss_fn, batches = make(name)
    plan = lay_out_mixed(model, force, ranks) if name == "mixed" else folder / f"{name}_{force}_{ranks}.json"
    early = adam(model)
    sharded = swt.shard(model, plan, device_type="cpu")
    with pytest.raises(OptionError, match="after shard"):
        early.zero_grad()
    optimizer = adam(model)
    results: dict[str, Any] = {"losses": train(model, optimizer, loss_fn, batches[:5], sharded)}
    parts = {name: str(list(value.placements)) for name, value in model.named_parameters()}
    results["placements"] = parts
    local = sum(value.to_local().numel() for value in model.parameters())
    results["share"] = local / sum(value.numel() for value in model.parameters())
    dcp.save(state_of(model, optimizer), checkpoint_id=str(folder / f"{name}_{force}_{ranks}"))
    for source in [str(ranks), *([loaded] if loaded else [])]:
        torch.manual_seed(1)
        other = CASES[name][0]()
        sharded = swt.shard(other, plan, device_type="cpu")
        optimizer = adam(other)
        state = state_of(other, optimizer)
        dcp.load(state, checkpoint_id=str(folder / f"{name}_{force}_{source}"))
        set_state_dict(other, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        results[f"sixth from {source}"] = train(other, optimizer, loss_fn, batches[5:], sharded)
    return results


def main() -> None:
    folder, loaded = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    results = {}
    for name in CASES:
        for force in FORCED[dist.get_world_size()]:
            results[f"{name} {force}"] = check(name, force, folder, loaded)
    other, _, _ = make("t5")
    with pytest.raises(PlanError, match=r"shared\.weight: not in the plan"):
        swt.shard(other, folder / f"gpt2_fsdp_{dist.get_world_size()}.json")
    if dist.get_rank() == 0:
        (folder / f"results_{dist.get_world_size()}").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
