"""Train a small GPT in a torchrun job of plain PyTorch, by a plan that was made without its devices.

python examples/torch/sharded.py plan4.json --plan-for 4
torchrun --nproc-per-node 4 examples/torch/sharded.py plan4.json --save checkpoint
python examples/torch/sharded.py plan2.json --plan-for 2 --force tensor
torchrun --nproc-per-node 2 examples/torch/sharded.py plan2.json --load checkpoint
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a script finds examples/torch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import shardwright.torch as swt
from examples.torch.nanogpt import GPT


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


parser = argparse.ArgumentParser()
parser.add_argument("plan", type=Path)
for name, default in {"--plan-for": 0, "--force": "fsdp", "--save": "", "--load": ""}.items():
    parser.add_argument(name, default=default, type=type(default))
given = parser.parse_args()
torch.manual_seed(0)
model = GPT(context=32, width=64, heads=4, layers=2, dropout=0.0)
text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
if given.plan_for:
    batch = torch.zeros(8, 33, dtype=torch.long)
    plan = swt.plan(
        model, torch.optim.AdamW(model.parameters()), loss_of, batch, cluster=given.plan_for, force=given.force
    )
    given.plan.write_text(plan.to_json())
    sys.exit()
dist.init_process_group("gloo")
sharded = swt.shard(model, given.plan, device_type="cpu")  # the mesh is the plan's
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
if given.load:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=given.load)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
for step in range(5):
    (tokens,) = sharded.place(text[33 * 8 * step :][: 33 * 8].view(8, 33))
    optimizer.zero_grad()
    loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    mean = sharded.average(loss)
    if dist.get_rank() == 0:
        print(f"step {step}  loss {mean.item():.6f}", flush=True)
if given.save:
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=given.save)
dist.destroy_process_group()
