"""Functions of PyTorch whose result is of a size that depends on values, or that ask for a device, in the form that is
traced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.adaptive import _ASMoutput as _AdaptiveOutput
from torch.overrides import TorchFunctionMode

from shardwright.client.frontends.torch.alignment import ctc_loss
from shardwright.client.frontends.torch.checks import require
from shardwright.client.frontends.torch.distinct import find_distinct
from shardwright.client.frontends.torch.selections import Selection, has_places, take_places
from shardwright.client.frontends.torch.sparse import LOOKUPS, asks_of_optimizer, with_dense_gradients

_IS_SPARSE = torch.Tensor.is_sparse.__get__

_log = logging.getLogger("shardwright")


#: Functions that list where a tensor is not 0.
_OF_PLACES = (torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere, torch.where)


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
        if function is torch.Tensor.__getitem__ and has_places(args[1]):
            return take_places(*args)
        if function in _OF_PLACES and len(args) + len(kwargs) - ("as_tuple" in kwargs) == 1:
            places = Selection.of_places(*args, **{key: value for key, value in kwargs.items() if key != "as_tuple"})
            return places.unbind(1) if function is torch.where or kwargs.get("as_tuple") else places
        if function in (torch.masked_select, torch.Tensor.masked_select):
            return Selection.of(*torch.broadcast_tensors(*args, *kwargs.values()))
        if function in (torch.bincount, torch.Tensor.bincount) and _minlength(*args, **kwargs):
            return count_values(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            with sdpa_kernel(SDPBackend.MATH):
                return function(*args, **kwargs)
        if function in (torch.unique, torch.Tensor.unique) and kwargs.get("dim") is None:
            return find_distinct(*args, **kwargs)
        if function in LOOKUPS and inspect.signature(function).bind(*args, **kwargs).arguments.get("sparse"):
            return with_dense_gradients(function, args, kwargs)
        if function == _IS_SPARSE and asks_of_optimizer(sys._getframe(1)):
            return True
        if function is F.ctc_loss:
            return ctc_loss(*args, **kwargs)
        if function is torch._weight_norm:
            return _scale_to_norm(*args, **kwargs)
        if isinstance(kwargs.get("generator"), torch.Generator):
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
            _tell_generators()
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to or "device" in kwargs:
            args, kwargs = tuple(map(_place, args)), {name: _place(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _scale_to_norm(direction: Any, length: Any, dim: int = 0) -> Any:
    """As `torch._weight_norm`."""
    return direction * (length / torch.norm_except_dim(direction, 2, dim))


@functools.lru_cache(maxsize=1)
def _tell_generators() -> None:
    _log.warning(
        "what a step draws by a torch.Generator is drawn by its own random key, from torch.manual_seed: the seed of "
        "the generator does not count"
    )


def count_values(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """As `torch.bincount` of values below `minlength`. A larger one makes the result longer: an error."""
    if weights is not None:
        weights = weights if weights.is_floating_point() else weights.double()
    ones = torch.ones_like(x, dtype=torch.int64) if weights is None else weights
    is_inside = (x >= 0) & (x < minlength)
    require(is_inside, f"torch.bincount: all values are from 0 to {minlength - 1}, below minlength")
    return ones.new_zeros(minlength).index_add(
        0, torch.where(is_inside, x, 0).long(), torch.where(is_inside, ones, torch.zeros_like(ones))
    )


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


@contextlib.contextmanager
def compute_all_clusters() -> Iterator[None]:
    """While a step is traced: adaptive softmax takes each row through all clusters, and one of them counts."""
    with mock.patch.object(torch.nn.AdaptiveLogSoftmaxWithLoss, "forward", _adaptive_log_softmax):
        yield


def _adaptive_log_softmax(module: Any, x: Any, target: Any) -> Any:
    """As `AdaptiveLogSoftmaxWithLoss.forward`. A cluster without a target, which has no gradient there, is an error."""
    rows, targets = (x, target) if target.dim() else (x.unsqueeze(0), target.unsqueeze(0))
    bounds = list(itertools.pairwise([0, *module.cutoffs]))
    within = [(targets >= low) & (targets < high) for low, high in bounds]
    require(sum(within), f"AdaptiveLogSoftmaxWithLoss: target values are from 0 to {module.n_classes - 1}")
    require(torch.stack([part.any() for part in within[1:]]), "AdaptiveLogSoftmaxWithLoss: each cluster has a target")
    places, scores = targets, torch.zeros_like(rows[:, 0])
    for number, ((low, high), is_here, tail) in enumerate(zip(bounds[1:], within[1:], module.tail, strict=True)):
        places = torch.where(is_here, module.shortlist_size + number, places)
        of_cluster = F.log_softmax(tail(rows), 1).gather(1, (targets - low).clamp(0, high - low - 1).unsqueeze(1))
        scores = torch.where(is_here, of_cluster.squeeze(1), scores)
    heads = F.log_softmax(module.head(rows), 1)
    scores = scores + heads.gather(1, places.clamp(0, heads.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return _AdaptiveOutput(scores if target.dim() else scores.squeeze(0), -scores.mean())
