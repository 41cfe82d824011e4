"""Functions of PyTorch whose result is of a size that depends on values, or that ask for a device, in the form that is
traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from shardwright.client.frontends.torch.selections import Selection


class BoundedForms(TorchFunctionMode):  # type: ignore[misc]
    """While a step is traced: `x[mask]` and `masked_select` are selections, `bincount` has `minlength` places, and
    devices are the servers'.

    Attention is products and a softmax, also where the step asks for another kernel.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if function is torch.Tensor.__getitem__ and _is_mask(args[1], args[0]):
            mask, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
            selection = Selection.of(args[0], mask)
            return selection[(slice(None), *rest)] if rest else selection
        if function in (torch.masked_select, torch.Tensor.masked_select):
            return Selection.of(*torch.broadcast_tensors(*args, *kwargs.values()))
        if function in (torch.bincount, torch.Tensor.bincount) and _minlength(*args, **kwargs):
            return count_values(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            with sdpa_kernel(SDPBackend.MATH):
                return function(*args, **kwargs)
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to or "device" in kwargs:
            args, kwargs = tuple(map(_place, args)), {name: _place(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def count_values(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """As `torch.bincount` of values below `minlength`. A larger one, which would make the result longer, makes all of
    it NaN, or -1 where it counts."""
    if weights is not None:
        weights = weights if weights.is_floating_point() else weights.double()
    ones = torch.ones_like(x, dtype=torch.int64) if weights is None else weights
    is_inside = (x >= 0) & (x < minlength)
    counts = ones.new_zeros(minlength).index_add(
        0, torch.where(is_inside, x, 0).long(), torch.where(is_inside, ones, torch.zeros_like(ones))
    )
    return torch.where(is_inside.all(), counts, torch.full_like(counts, -1 if weights is None else torch.nan))


def _minlength(x: Any, weights: Any = None, minlength: int = 0) -> int:
    del x, weights
    return minlength


def _is_mask(index: Any, tensor: Any) -> bool:
    """Whether an index is a mask of leading dimensions, perhaps with plain indices behind it."""
    mask, *rest = index if isinstance(index, tuple) and index else (index,)
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or not 0 < mask.dim() <= tensor.dim():
        return False
    return mask.shape == tensor.shape[: mask.dim()] and all(isinstance(part, int | slice) for part in rest)


def _place(value: Any) -> Any:
    """ "cuda" as the device that is traced on."""
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value
