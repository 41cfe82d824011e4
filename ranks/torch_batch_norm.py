"""Batch normalization of PyTorch over the batches of all ranks.

Forward: each rank's count, mean and sum of squares around it, put together as Chan, Golub and LeVeque do ("Algorithms
for computing the sample variance", 1983). Backward, of y = (x - m) / s over N elements a channel:
dx = (dy - Σ dy / N - x̂ Σ (dy x̂) / N) · weight / s, whose sums are over all ranks too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from shardwright.errors import CollectiveError
from shardwright.ranks.collectives import allgather, allreduce
from shardwright.ranks.operations import ReduceOp
from shardwright.ranks.process_sets import ProcessSet


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
    """`torch.nn.BatchNorm1d`, `2d` and `3d`, whose statistics in training are those of all ranks' batches.

    Input: [batch, features, …]; batches may differ in length, one may be empty. All ranks call it at the same point,
    forward and backward. In `eval` it is the plain layer.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        process_set: ProcessSet | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_set = process_set

    def _check_input_dim(self, input: Any) -> None:
        if input.dim() < 2:
            raise CollectiveError(
                f"an input of {input.dim()} dimensions", where="SyncBatchNorm", remedy="[batch, features, …]"
            )

    def forward(self, input: Any) -> Any:
        """The input normalized, times weight, plus bias."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise CollectiveError(
                f"an input of {input.shape[1]} features",
                where="SyncBatchNorm",
                remedy=f"[batch, {self.num_features}, …]",
            )
        with torch.no_grad():
            count, mean, variance = _moments(input, self.process_set)
            self._track(count, mean, variance)
        return _Normalize.apply(
            input, self.weight, self.bias, mean, torch.rsqrt(variance + self.eps), count, self.process_set
        )

    def _track(self, count: float, mean: Any, variance: Any) -> None:
        """Move the running statistics, with the variance of the sample."""
        if not self.track_running_stats or self.running_mean is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_set: ProcessSet | None = None) -> Any:
        """`module` with its layers of batch normalization replaced by these, with the same tensors."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            layer = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set=process_set,
            )
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                setattr(layer, name, tensor)
            layer.training = module.training
            return layer
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_set))
        return module


def _other_dimensions(x: Any) -> list[int]:
    return [dimension for dimension in range(x.dim()) if dimension != 1]


def _wide(x: Any) -> Any:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_channels(vector: Any, x: Any) -> Any:
    """[features] as [1, features, 1, …]."""
    return vector.reshape(1, -1, *[1] * (x.dim() - 2))


def _moments(x: Any, process_set: ProcessSet | None) -> tuple[float, Any, Any]:
    """How many elements a channel has over all ranks; their mean and variance, of the population."""
    wide, axes = _wide(x.detach()), _other_dimensions(x)
    own = x.numel() // x.shape[1]
    mean = wide.sum(axes) / max(own, 1)
    squares = (wide - _of_channels(mean, x)).square().sum(axes)
    message = np.concatenate([[float(own)], _to_numpy(mean), _to_numpy(squares)])
    parts = allgather(message[None], name="SyncBatchNorm", process_set=process_set)
    counts, means, sums = parts[:, :1], *np.split(parts[:, 1:], 2, axis=1)
    total = float(counts.sum())
    if total <= 1:
        raise CollectiveError(
            f"{total:g} elements a channel over all ranks", where="SyncBatchNorm", remedy="train on more examples"
        )
    whole = (counts * means).sum(0) / total
    variance = (sums + counts * np.square(means - whole)).sum(0) / total
    return total, *(torch.from_numpy(array).to(wide) for array in (whole, variance))


def _to_numpy(vector: Any) -> np.ndarray:
    array: np.ndarray = vector.cpu().double().numpy()
    return array


class _Normalize(torch.autograd.Function):  # type: ignore[misc]
    """The normalization, with the gradient that includes how the statistics follow the inputs of all ranks."""

    @staticmethod
    def forward(
        context: Any, x: Any, weight: Any, bias: Any, mean: Any, inverse: Any, count: float, process_set: Any
    ) -> Any:
        normalized = (_wide(x) - _of_channels(mean, x)) * _of_channels(inverse, x)
        context.save_for_backward(x, weight, mean, inverse)
        context.count, context.process_set = count, process_set
        y = normalized if weight is None else normalized * _of_channels(weight, x)
        return (y if bias is None else y + _of_channels(bias, x)).to(x.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(context: Any, grad: Any) -> Any:
        x, weight, mean, inverse = context.saved_tensors
        axes = _other_dimensions(x)
        normalized = (_wide(x) - _of_channels(mean, x)) * _of_channels(inverse, x)
        wide = _wide(grad)
        sum_grad, sum_product = wide.sum(axes), (wide * normalized).sum(axes)
        grad_weight = grad_bias = None
        if weight is not None:
            grad_weight, grad_bias = sum_product.to(weight.dtype), sum_grad.to(weight.dtype)
        grad_x = None
        if context.needs_input_grad[0]:
            totals = allreduce(
                torch.stack([sum_grad, sum_product]),
                ReduceOp.SUM,
                name="SyncBatchNorm gradient",
                process_set=context.process_set,
            )
            mean_grad, mean_product = (_of_channels(total, x) for total in totals / context.count)
            scale = inverse if weight is None else inverse * weight
            grad_x = ((wide - mean_grad - normalized * mean_product) * _of_channels(scale, x)).to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None
