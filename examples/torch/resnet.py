"""Train a ResNet-18 of PyTorch on scikit-learn's handwritten digits, from a DataLoader.

    python examples/torch/resnet.py
    python examples/torch/resnet.py --width 64 --epochs 10

Batch statistics are those of the whole batch, on any number of devices. With SERVER_IP and SERVER_PORT set, steps run
on that server; else an embedded server with CPU devices is started. Only the numbered lines know about Shardwright.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a script finds examples/common

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shardwright as sw
import shardwright.torch as swt
from examples.common.digits import digits
from examples.common.options import number_parser, run_example
from examples.common.progress import TrainingProgress

_SIDE = 16  # of the images, enlarged


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """Logits [batch, 10] of images [batch, 1, height, width]. width: channels of the first of four stages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Block(inputs, outputs, 1 if stage == 0 else 2), Block(outputs, outputs, 1))
                for stage, (inputs, outputs) in enumerate(pairwise(widths))
            )
        )
        self.head = nn.Linear(8 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.stages(self.stem(images)), 1).flatten(1))


def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def dataset(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
    enlarged = images.repeat(_SIDE // 8, axis=1).repeat(_SIDE // 8, axis=2)
    return TensorDataset(torch.from_numpy(enlarged[:, None]), torch.from_numpy(labels).long())


def main() -> None:
    parser = number_parser(__doc__, epochs=4, batch=100, width=16, devices=4)
    given = parser.parse_args()

    torch.manual_seed(0)
    model = ResNet18(given.width)
    training, validation = (dataset(*part) for part in digits())
    loader = DataLoader(training, given.batch, shuffle=True, drop_last=True)
    steps = given.epochs * len(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
    with (
        sw.connect(devices=given.devices) as session,  # Shardwright 1: a server
        TrainingProgress(steps, given.batch, "images") as progress,
    ):
        step = swt.parallelize(session, model, optimizer, loss_of)  # 2: forward, backward and optimizer, one program
        predict = swt.parallelize(session, model, None, lambda model, images: model(images).argmax(1))  # 3: same state
        for _ in range(given.epochs):
            for batch in loader:
                progress.step(step(*batch))
                scheduler.step()
        model.eval()
        images, labels = validation[:]
        hits = (predict(images).numpy() == labels.numpy()).mean()
        plan = step.plan
    print(f"accuracy on held-out images: {hits:.3f}")
    print(plan.explain())


if __name__ == "__main__":
    run_example(main)
