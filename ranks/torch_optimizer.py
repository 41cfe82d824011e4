"""The same for PyTorch: an optimizer of `torch.optim` that steps with the gradients of all ranks.

Gradients go as one message a type when `step` is called, not while `backward` runs.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shardwright.errors import OptionError, ShardwrightWarning
from shardwright.ranks import host_copies, objects, operations
from shardwright.ranks.collectives import allgather, allreduce, broadcast
from shardwright.ranks.compression import Cast
from shardwright.ranks.gradient_options import check_gradient_options
from shardwright.ranks.operations import ReduceOp
from shardwright.ranks.process_sets import ProcessSet


class SynchronizedTwiceWarning(ShardwrightWarning):
    """A step exchanges gradients that `synchronize` has exchanged."""


def DistributedOptimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Cast | None = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """`optimizer` itself, which from now on steps with the gradients of all ranks; schedulers and hooks stay.

    compression: `Compression.fp16` or `bf16`. backward_passes_per_step: how often `backward` runs before each `step`;
    gradients are exchanged in `step`, so it changes nothing. gradient_predivide_factor: of an average, divides before
    the sum, and multiplies back after it. sparse_as_dense: send sparse gradients as whole tensors.

    To look at the exchanged gradients before they are used:

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    A rank outside of process_set steps with its own gradients. named_parameters: names of all of them, each once.
    Raises OptionError.
    """
    op = operations.to_op(op)
    _check_options(optimizer, compression, backward_passes_per_step, op, gradient_predivide_factor)
    names = _name_parameters(optimizer, named_parameters)
    base = type(optimizer)
    optimizer.__class__ = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    optimizer._exchange = _Exchange(op, compression, gradient_predivide_factor, sparse_as_dense, process_set)
    optimizer._skips = optimizer._synchronized = False
    optimizer._parameter_names = names
    if (patched := vars(optimizer).get("step")) is not None:  # by a learning rate scheduler, made before
        optimizer.step = functools.wraps(patched)(functools.partial(optimizer._step, patched))
    return optimizer


def _check_options(optimizer: Any, compression: Any, passes: Any, op: ReduceOp, predivide: float) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"a {type(optimizer).__name__} is no torch.optim.Optimizer", where="optimizer")
    if isinstance(optimizer, _Distributed):
        raise OptionError("it is distributed already", where="optimizer", remedy="wrap it once")
    check_gradient_options("PyTorch", compression, passes, op, predivide)


def _name_parameters(optimizer: Any, named: Iterable[tuple[str, Any]] | None) -> dict[Any, str]:
    """The name of each parameter. Raises OptionError for a name that comes twice, and for parameters without one."""
    groups = [group["params"] for group in optimizer.param_groups]
    if named is None:
        return {
            param: f"allreduce.noname.{index}.{place}"
            for index, group in enumerate(groups)
            for place, param in enumerate(group)
        }
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        remedy = "pass model.named_parameters()"
        raise OptionError("expected pairs of a name and a parameter", where="named_parameters", remedy=remedy)
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise OptionError(f"{name!r} is named twice", where="named_parameters", remedy="give each its own name")
        seen.add(name)
    names = {param: name for name, param in pairs}
    missing = [param for group in groups for param in group if param not in names]
    if missing:
        raise OptionError(
            f"{len(missing)} parameters of the optimizer have no name, the first of shape {list(missing[0].shape)}",
            where="named_parameters",
            remedy="name all of them, or leave named_parameters out",
        )
    return names


class _Distributed:
    """What a distributed optimizer has ahead of its own class."""

    param_groups: list[dict[str, Any]]
    _exchange: _Exchange
    _parameter_names: dict[Any, str]
    _skips: bool
    _synchronized: bool

    def synchronize(self) -> None:
        """Exchange the gradients now; `step` under `skip_synchronize` then uses them as they are."""
        self._exchange([param for group in self.param_groups for param in group["params"] if param.requires_grad])
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step` in the block exchanges nothing."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step, with the gradients of all ranks; those of a closure as often as it is called."""
        return self._step(super().step, closure)  # type: ignore[misc]

    def _step(self, inner: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
        if self._synchronized and not self._skips:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after synchronize(): the gradients are "
                "exchanged once more. Write: with optimizer.skip_synchronize(): optimizer.step()",
                SynchronizedTwiceWarning,
                stacklevel=3,
            )
        try:
            if closure is not None:
                return inner(functools.partial(self._run_closure, closure))
            if not self._skips:
                self.synchronize()
            return inner()
        finally:
            self._synchronized = False

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        if not self._skips:
            self.synchronize()
        return loss


class _Exchange:
    """Puts the reduction over all ranks into the gradients of parameters."""

    def __init__(
        self, op: ReduceOp, compression: Cast | None, predivide: float, sparse_as_dense: bool, group: ProcessSet | None
    ) -> None:
        self._op = op
        self._compression = compression
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._group = group

    def __call__(self, params: list[Any]) -> None:
        if self._group is not None and not self._group.included():
            return
        kinds = self._kinds_at_any_rank(params)
        dense = [param for param, kind in zip(params, kinds, strict=True) if kind == 1]
        sparse = [param for param, kind in zip(params, kinds, strict=True) if kind == 2]
        with torch.no_grad():
            if dense:
                self._reduce(dense)
            for param in sparse:
                self._gather(param)

    def _kinds_at_any_rank(self, params: list[Any]) -> list[int]:
        """The kind of each parameter's gradient over all ranks: 0 none, 1 dense, 2 sparse.

        A parameter unused at this rank takes part with zeros; one unused at all ranks is left alone.
        """
        own = np.zeros(len(params), np.int8)
        for index, param in enumerate(params):
            if param.grad is not None:
                own[index] = 2 if param.grad.is_sparse and not self._sparse_as_dense else 1
        kinds: list[int] = allreduce(
            own, ReduceOp.MAX, name="gradients that there are", process_set=self._group
        ).tolist()
        return kinds

    def _reduce(self, params: list[Any]) -> None:
        grads = [_dense(param) for param in params]
        reduced = allreduce(
            grads,
            self._op,
            name="gradients",
            process_set=self._group,
            prescale_factor=1 / self._predivide,
            postscale_factor=self._predivide,
            compression=self._compression,
        )
        for param, grad in zip(params, reduced, strict=True):
            if param.grad is not None and param.grad.is_sparse:
                param.grad = grad.to_sparse(param.grad.sparse_dim())
            elif param.grad is None:
                param.grad = grad
            else:
                param.grad.copy_(grad)

    def _gather(self, param: Any) -> None:
        """Indices and rows of all ranks; equal indices are added up."""
        own = param.grad.coalesce() if param.grad is not None else _no_rows(param)
        gathered = allgather(
            {"indices": own.indices().t().contiguous(), "rows": own.values(), "ranks": np.ones(1, np.int32)},
            name="sparse gradient",
            process_set=self._group,
        )
        rows = gathered["rows"] / gathered["ranks"].size if self._op is ReduceOp.AVERAGE else gathered["rows"]
        indices = gathered["indices"].t()
        param.grad = torch.sparse_coo_tensor(indices, rows, param.shape, check_invariants=True).coalesce()


def _no_rows(param: Any) -> Any:
    """A sparse gradient without rows."""
    indices, rows = torch.zeros((1, 0), dtype=torch.int64), param.new_zeros((0, *param.shape[1:]))
    return torch.sparse_coo_tensor(indices, rows, param.shape, check_invariants=True).coalesce()


def _dense(param: Any) -> Any:
    if param.grad is None:
        return torch.zeros_like(param)
    return param.grad.to_dense() if param.grad.is_sparse else param.grad


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0) -> None:
    """Put the tensors of rank `root_rank` into those of every rank: a `state_dict()`, `named_parameters()`, a list."""
    items = params.items() if isinstance(params, Mapping) else enumerate(params)
    named = [value if isinstance(value, tuple) else (str(name), value) for name, value in items]
    tensors = {name: tensor for name, tensor in named if isinstance(tensor, torch.Tensor)}
    sent = broadcast({name: tensor.detach() for name, tensor in tensors.items()}, root_rank, name="parameters")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(sent[name])


def broadcast_optimizer_state(optimizer: Any, root_rank: int = 0) -> None:
    """Load the state of rank `root_rank`'s optimizer at every rank: learning rates and moments, where there are any."""
    own = host_copies.copy_to_host(optimizer)
    message = objects.broadcast_object(host_copies.pack(own, "optimizer"), root_rank, name="optimizer state")
    host_copies.restore(host_copies.unpack(message, own, "optimizer"), optimizer)
