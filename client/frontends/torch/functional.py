"""Functions of PyTorch in the form that is traced: without decisions by values, or limits of one device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._meta_registrations import _meta_grouped_mm_common as _of_gpu_kernel


def gaussian_nll_loss(
    input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """As `torch.nn.functional.gaussian_nll_loss`; a variance below `eps`, also below 0, counts as `eps`."""
    if not isinstance(var, torch.Tensor):
        var = torch.full_like(input, var)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    if var.ndim != input.ndim or sum(a != b for a, b in zip(input.shape, var.shape, strict=True)) > 1:
        raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else getattr(loss, reduction)()


def infer_grouped_mm(
    mat_a: Any, mat_b: Any, scale_a: Any, scale_b: Any, offs: Any = None, bias: Any = None, scale_result: Any = None,
    out_dtype: Any = None, use_fast_accum: bool = False,
) -> Any:  # fmt: skip
    """The result of `torch.nn.functional.grouped_mm`, of any element type: PyTorch's own form knows that of its GPU
    kernel, bfloat16 alone. Scaled products go to that one."""
    if scale_a is not None or scale_b is not None:
        return _of_gpu_kernel(
            mat_a, mat_b, scale_a, scale_b, offs, bias, scale_result, out_dtype=out_dtype, use_fast_accum=use_fast_accum
        )
    groups = [offs.size(0)] if mat_a.dim() == mat_b.dim() == 2 else []
    groups = [mat_a.size(0)] if mat_a.dim() == mat_b.dim() == 3 else groups
    return mat_a.new_empty([*groups, mat_a.size(-2), mat_b.size(-1)], dtype=out_dtype or mat_a.dtype)
