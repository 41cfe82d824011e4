"""CPU time that a call of a PyTorch step takes of the client, beside eager PyTorch's forward, backward and update.

Stacks of Linear layers (bias, width 64, batch 32) under SGD with momentum, of 4, 40 and 200 parameters. Both sides in
turn in one process; the servers are another. CPU time of all threads of the client; of the rounds the fastest counts.

    build/frontends/torch/bin/python -m benchmarks.runtime.torch_calls

Exit code 1 where a call takes more than eager's step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch

import shardwright as sw
import shardwright.torch as swt

WIDTH, BATCH = 64, 32


def build(parameters: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(parameters // 2)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.mse_loss(model(x), y)


def eager_step(parameters: int) -> Callable[[Any, Any], Any]:
    model, optimizer = build(parameters)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def cpu_ms(step: Callable[[Any, Any], Any], batch: tuple[Any, Any], steps: int) -> float:
    """CPU milliseconds of this process a step; the last loss is read."""
    start = time.process_time()
    for _ in range(steps):
        loss = step(*batch)
    loss.item()
    return (time.process_time() - start) / steps * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="*", default=[4, 40, 200])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50, help="in a round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    is_slower = False
    with sw.connect(devices=1) as session:
        for parameters in arguments.parameters:
            sides = {
                "here": swt.parallelize(session, *build(parameters), loss_of),
                "eager": eager_step(parameters),
            }
            for step in sides.values():
                cpu_ms(step, batch, 5)
            figures = {
                name: min(cpu_ms(step, batch, arguments.steps) for _ in range(arguments.rounds))
                for name, step in sides.items()
            }
            print(f"{parameters} parameters: {figures['here']:.2f} ms a call, eager {figures['eager']:.2f} ms")
            is_slower |= figures["here"] > figures["eager"]
    return int(is_slower)


if __name__ == "__main__":
    sys.exit(main())
