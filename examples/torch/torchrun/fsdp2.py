"""A training script of FSDP2: torchrun --nproc-per-node 4 examples/torch/torchrun/fsdp2.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32, help="of all ranks together")
parser.add_argument("--save", default="")
given = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randint(0, 100, (256, 17)))
sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=True)
loader = DataLoader(data, batch_size=given.batch // dist.get_world_size(), sampler=sampler)

model = Net()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for number, (tokens,) in enumerate(loader):
    loss = train_step(model, optimizer, tokens)
    dist.all_reduce(loss)
    loss = loss / dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"batch {number}  loss {loss.item():.6f}", flush=True)

state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0 and given.save:
    torch.save(state, given.save)
dist.barrier()
dist.destroy_process_group()
