"""Sparse gradients of embeddings as dense ones: the same numbers, in the optimizers that take sparse ones."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F
from torch.optim import _functional

#: Functions that are asked for sparse gradients.
LOOKUPS = (F.embedding, F.embedding_bag)

#: It asks whether gradients are sparse.
_STEP = inspect.unwrap(torch.optim.SparseAdam.step).__code__


def with_dense_gradients(function: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """One of the lookups, with `sparse=False`."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.arguments["sparse"] = False
    return function(*call.args, **call.kwargs)


def asks_of_optimizer(frame: Any) -> bool:
    """Whether a function is called by an optimizer that takes sparse gradients only, perhaps through a mode."""
    return any(caller is not None and caller.f_code is _STEP for caller in (frame, frame.f_back))


@contextlib.contextmanager
def update_rows() -> Iterator[None]:
    """While a step is traced: SparseAdam with dense gradients, of which rows of zeros are those that are not there."""
    with mock.patch.object(_functional, "sparse_adam", _sparse_adam):
        yield


def _sparse_adam(
    params: Sequence[Any], grads: Sequence[Any], exp_avgs: Sequence[Any], exp_avg_sqs: Sequence[Any],
    state_steps: Sequence[Any], *, eps: float, beta1: float, beta2: float, lr: Any, maximize: bool,
) -> None:  # fmt: skip
    for param, grad, exp_avg, exp_avg_sq, step in zip(params, grads, exp_avgs, exp_avg_sqs, state_steps, strict=True):
        present = (grad != 0).flatten(1).any(1).reshape(-1, *[1] * (grad.dim() - 1))
        gradient = -grad if maximize else grad
        exp_avg.copy_(torch.where(present, exp_avg + (gradient - exp_avg) * (1 - beta1), exp_avg))
        exp_avg_sq.copy_(torch.where(present, exp_avg_sq + (gradient.square() - exp_avg_sq) * (1 - beta2), exp_avg_sq))
        rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        param.sub_(torch.where(present, rate * exp_avg / (exp_avg_sq.sqrt() + eps), torch.zeros_like(param)))
