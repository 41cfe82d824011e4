"""`../torchrun/ddp.py`, with five lines changed: python examples/torch/ported/ddp.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shardwright as sw
import shardwright.torch as swt


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64, help="of all ranks together")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save", default="")
given = parser.parse_args()

swt.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 32), torch.randint(0, 10, (512,)))
sampler = DistributedSampler(data, shuffle=True, seed=0)
loader = DataLoader(data, batch_size=given.batch // world, sampler=sampler, drop_last=True)

model = DDP(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = swt.parallelize(sw.connect(), model, optimizer, train_step)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=given.epochs * len(loader))

for epoch in range(given.epochs):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        loss = step(x, y)
        scheduler.step()
        dist.all_reduce(loss)
        loss = loss / world
        if rank == 0 and number % 2 == 0:
            print(f"epoch {epoch}  batch {number}  loss {loss.item():.6f}", flush=True)
    correct = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
    dist.all_reduce(correct)
    if rank == 0:
        print(f"epoch {epoch}  accuracy {correct.item() / world:.4f}", flush=True)

dist.barrier()
if rank == 0 and given.save:
    torch.save(model.module.state_dict(), given.save)
dist.destroy_process_group()
