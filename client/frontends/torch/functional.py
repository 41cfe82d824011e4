"""Functions of PyTorch whose own form decides by values, without these decisions."""

from __future__ import annotations

import math
from typing import Any

import torch


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
