"""Updates in place, of shapes and of what `out=` names, in graphs of functional arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch.nn import functional as F

from shardwright.client.frontends.torch.dtypes import to_numpy, to_tensor
from shardwright.client.frontends.torch.evaluation import Evaluation
from shardwright.client.frontends.torch.tracing import TensorType, trace
from tests.torch_frontend.models import floats


def shapes_in_place(x: Any) -> list[Any]:
    y = x * 2
    y.transpose_(0, 1)
    y.unsqueeze_(0)
    z = y[0]
    z.t_()
    z.add_(1)
    y.squeeze_(0)
    return [y.clone(), z.clone()]


def outputs_given(x: Any) -> list[Any]:
    largest, sums = torch.zeros_like(x), torch.zeros(4)
    torch.maximum(largest, x, out=largest)
    torch.sum(x, 1, out=sums)
    return [largest, sums]


def vector_times_matrix(x: Any) -> list[Any]:
    return [x[:, 0] @ x, x @ x[0]]


def masked(x: Any) -> list[Any]:
    y = x.clone()
    y[x > 0] = 0.5
    return [y]


def products_of_groups(x: Any) -> list[Any]:
    """Of rows, with the gradients of both; of columns; and of as many matrices."""
    rows, ends = x.repeat(4, 4), torch.tensor([3, 3, 16], dtype=torch.int32)
    matrices = torch.linspace(-1, 1, 3 * 12 * 8).reshape(3, 12, 8)
    leaves = [rows.detach().requires_grad_(), matrices.requires_grad_()]
    product = F.grouped_mm(*leaves, offs=ends)
    gradients = torch.autograd.grad((product * torch.arange(8)).sum(), leaves)
    columns = F.grouped_mm(matrices.detach().transpose(1, 2), rows.T, offs=ends)
    return [product.detach(), *gradients, columns, F.grouped_mm(matrices.detach(), matrices.detach().transpose(1, 2))]


@pytest.mark.parametrize("function", [shapes_in_place, outputs_given, vector_times_matrix, masked, products_of_groups])
def test_results_are_those_of_eager_torch(function: Callable[[Any], list[Any]]) -> None:
    x = floats(4, 3)
    graph = trace(
        lambda values: function(*values), [TensorType((4, 3), torch.float32)],
        state_count=0, model=torch.nn.Identity(), optimizers=[], name=function.__name__,
    )  # fmt: skip
    constants = {key: to_numpy(value) for key, value in graph.constants.items()}
    found = jax.jit(lambda value: tuple(Evaluation(graph.nodes, constants, None).run([value])))(to_numpy(x))
    for one, other in zip(found, function(x), strict=True):
        torch.testing.assert_close(to_tensor(one.__array__()), other)
