"""Steps of PyTorch on batches that the workers read themselves."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
import shardwright.torch as swt
from tests.datasets import sources
from tests.datasets.training import BATCH, BATCHES, MODULE
from tests.torch_frontend.comparison import relative, sgd, train_eagerly

STEPS = 5


@pytest.fixture(scope="module")
def reading_session() -> Iterator[sw.Session]:
    with sw.connect(devices=4, dataset_modules=MODULE) as session:
        yield session


def loss_fn(model: Any, x: Any, label: Any) -> Any:
    return F.cross_entropy(model(x), label.long() % 4)


def test_handles_are_the_arguments_of_a_step(reading_session: sw.Session) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(sources.WIDTH, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    eager = copy.deepcopy(model)
    whole = [sources.whole_batch(number, BATCH, seed=0) for number in range(STEPS)]
    batches = [(torch.from_numpy(batch["x"]), torch.from_numpy(batch["label"])) for batch in whole]
    wanted = train_eagerly(eager, sgd(eager), loss_fn, batches)

    step = swt.parallelize(reading_session, model, sgd(model), loss_fn, force="data")
    data = reading_session.dataset(BATCHES, batch=BATCH)
    step.compile(data.element_spec["x"], data.element_spec["label"])
    found = []
    for _ in range(STEPS):
        batch = next(data)
        found.append(step(batch["x"], batch["label"]))
    assert relative([loss.item() for loss in found], wanted) < 1e-5
    assert data.position == STEPS
