"""Tensors of this machine that stand for arrays on the servers: brought in where they are read, sent where written.

A step leaves the tensors here as they were. From then on they have a class of their own, beside their identity: any
function of PyTorch that takes one brings its values in first. Writes are seen by `_version`, which rises with each.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.torch.dtypes import to_tensor
from shardwright.client.limits import MOST_HANDED_OUT
from shardwright.errors import ArrayError, UnsupportedProgramError

#: Without `__torch_function__` of subclasses: what the tensors here hold now.
as_they_are = torch._C.DisableTorchFunctionSubclass

_GRAD = torch.Tensor.grad.__get__
_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__

#: What tells of a tensor nothing that a step changes.
_PROPERTIES = {
    "_backward_hooks", "_base", "_version", "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta",
    "is_mkldnn", "is_mps", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu", "itemsize", "layout",
    "name", "names", "nbytes", "ndim", "output_nr", "requires_grad", "retains_grad", "shape", "volatile",
}  # fmt: skip
_METHODS = {
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "ndimension",
    "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size",
    "storage_offset", "stride",
}  # fmt: skip
_WITHOUT_VALUES = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES if hasattr(torch.Tensor, name)}
_WITHOUT_VALUES |= {getattr(torch.Tensor, name) for name in _METHODS}
_WITHOUT_VALUES |= {torch.Tensor.requires_grad.__set__, torch.Tensor._backward_hooks.__set__}
_WITHOUT_VALUES |= {torch.Tensor.grad.__set__, _GRAD}
_OVERWRITES = {getattr(torch.Tensor, name) for name in ("copy_", "fill_", "normal_", "uniform_", "zero_")} | {_SET_DATA}

#: Of a gradient that never came here, with its version.
_NOT_HERE = object(), 0

#: They read gradients to clear or to convert them.
_CLEARING = {
    inspect.unwrap(function).__code__
    for function in (torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad, torch.nn.Module._apply)
}


class _Followed:
    """What the class of a followed tensor adds."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if _traced:
            _meet(function, (*args, *kwargs.values()))
        elif function not in _WITHOUT_VALUES:
            overwritten = args[0] if function in _OVERWRITES and id(args[0]) in _homes else None
            for tensor in _list_followed((*args, *kwargs.values())):
                if tensor is not overwritten:
                    _read(tensor)
            if overwritten is not None:
                _overwrite(overwritten, replaces=function == _SET_DATA)
        elif function == _GRAD and not _is_clearing(sys._getframe(1)):
            _read_gradient(args[0])
        with as_they_are():
            result = function(*args, **kwargs)
        if not _traced and (function == _DATA or function is torch.Tensor.detach):
            _add_alias(args[0], result, counts_apart=function == _DATA)
        elif function == torch.Tensor.grad.__set__ or (function == _GRAD and result is None):
            _take_gradient(args[0])
        return result

    def __deepcopy__(self, memo: Any) -> Any:
        with _Unfollowed(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _Unfollowed(self):
            return self.__reduce_ex__(protocol)


class FollowedTensor(_Followed, torch.Tensor):  # type: ignore[misc]
    """A buffer, an optimizer's tensor, or what shares memory with one."""


class FollowedParameter(_Followed, torch.nn.Parameter):  # type: ignore[misc]
    """A parameter."""


_CLASSES: dict[type, type] = {torch.Tensor: FollowedTensor, torch.nn.Parameter: FollowedParameter}
_PLAIN = {followed: plain for plain, followed in _CLASSES.items()}

#: `id()` of a followed tensor, which its mirror keeps alive → the mirror and the tensor's name there.
_homes: dict[int, tuple[weakref.ref[Mirror], str]] = {}
#: A tensor that shares memory with a followed one → the same.
_aliases: Any = WeakIdKeyDictionary()


#: While a step is traced, the mirrors of what stands for tensors of the trace then; they are not read.
_traced: list[Mirror] = []
#: Other followed tensors that the trace has met, which are constants to it: they have their plain class meanwhile.
_met: list[tuple[Any, int]] = []


@contextmanager
def traced_over(mirrors: Iterable[Mirror]) -> Iterator[None]:
    """While a step is traced over other tensors than those of these mirrors."""
    before = list(_traced)
    _traced[:] = mirrors
    try:
        yield
    finally:
        _traced[:] = before
        for tensor, version in _met:
            home = home_of(tensor)
            if home is not None:
                home[0].skip(home[1], tensor._version - version)
            tensor.__class__ = _CLASSES[type(tensor)]
        _met.clear()


def _meet(function: Any, args: Sequence[Any]) -> None:
    """Raises UnsupportedProgramError where a traced step uses a parameter that does not come by its arguments."""
    if function in _WITHOUT_VALUES and function != _GRAD:
        return
    for tensor in list(_list_followed(args)):
        home = home_of(tensor)
        if home is not None and any(home[0] is mirror for mirror in _traced):
            raise UnsupportedProgramError(
                f"the step uses {home[1]} of a list or a variable that was made before",
                where=home[1],
                remedy="take it of the model and the optimizer that the step is passed: model.parameters()",
            )
        tensor.__class__ = _PLAIN[type(tensor)]
        _met.append((tensor, tensor._version))


class Mirror:
    """The tensors here of some arrays on the servers, by name.

    values: the arrays' handles, of whoever owns both. lost_gradients: names of parameters whose gradients the last step
    did not keep. left_gradients: handles of those that it did, until they are read.
    """

    def __init__(self, values: dict[str, RemoteArray]) -> None:
        self.tensors: dict[str, Any] = {}
        self.lost_gradients: set[str] = set()
        self.left_gradients: dict[str, RemoteArray] = {}
        self._read_gradients: dict[str, tuple[Any, int]] = {}
        self.values = values
        self.session: weakref.ref[Any] | None = None
        self._versions: dict[str, int] = {}
        self._ahead: set[str] = set()
        self._handed_out: list[tuple[str, Any, int]] = []
        self._kept_aliases: list[tuple[str, weakref.ref[Any], int]] = []
        self._is_displaced = False
        self._reads = 0
        self._ids: set[int] = set()
        weakref.finalize(self, _forget, self._ids)

    def hold(self, name: str, tensor: Any) -> None:
        """Follows a tensor, whose values here and there are equal."""
        if self.tensors.get(name) is not tensor:
            self.drop(name)
            self.tensors[name] = tensor
            self._ids.add(id(tensor))
        home = home_of(tensor)
        if home is not None and home[0] is not self:
            home[0]._is_displaced = True
        _homes[id(tensor)] = weakref.ref(self), name
        if type(tensor) in _CLASSES and not tensor.is_meta:
            tensor.__class__ = _CLASSES[type(tensor)]
        self.settle(name)

    def drop(self, name: str) -> None:
        """Follows the tensor of this name no more."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            return
        self._ids.discard(id(tensor))
        home = home_of(tensor)
        if home is not None and home[0] is self:
            _homes.pop(id(tensor))
            tensor.__class__ = _PLAIN.get(type(tensor), type(tensor))
        self._versions.pop(name, None)
        self._ahead.discard(name)

    def settle(self, name: str) -> None:
        """The values here and there are equal now."""
        with as_they_are():
            self._versions[name] = self.tensors[name]._version
        self._ahead.discard(name)

    def advance(self, names: Iterable[str]) -> None:
        """The servers have newer values."""
        self._ahead.update(name for name in names if name in self.tensors)
        self._reads = 0

    def list_written(self) -> list[str]:
        """Names of the tensors that have changed here. Raises ArrayError where that was over old values."""
        if self._is_displaced:
            self._take_back()
        with as_they_are():
            versions = self._versions
            written = [name for name, tensor in self.tensors.items() if tensor._version != versions[name]]
            if self._handed_out or self._kept_aliases:
                written += self._list_written_aliases()
        for name in written:
            if name in self._ahead:
                raise ArrayError(
                    f"what was written to {name} since the last step went through memory taken before it",
                    where=name,
                    remedy="write to the parameter or the buffer itself",
                )
        return list(dict.fromkeys(written))

    def _list_written_aliases(self) -> list[str]:
        kept = [(name, ref(), version) for name, ref, version in self._kept_aliases]
        alive = [(name, alias, version) for name, alias, version in (*kept, *self._handed_out) if alias is not None]
        self._handed_out.clear()
        self._kept_aliases = [(name, weakref.ref(alias), alias._version) for name, alias, _ in alive]
        return [name for name, alias, version in alive if alias._version != version]

    def _take_back(self) -> None:
        """Another session has run steps of the same tensors: its values come in, and count as written here."""
        for name, tensor in self.tensors.items():
            _read(tensor)
            home = home_of(tensor)
            if home is not None and home[0] is not self:
                home[0]._is_displaced = True
            _homes[id(tensor)] = weakref.ref(self), name
        self._is_displaced = False

    def mark_written(self, name: str) -> None:
        """Takes the tensor here as changed."""
        self._versions[name] = -1

    def skip(self, name: str, writes: int) -> None:
        """Writes that a trace has counted, and not done."""
        if name in self._versions:
            self._versions[name] += writes

    def read(self, name: str) -> None:
        """Brings one tensor in, and all with the second that is read."""
        if name in self._ahead:
            self._reads += 1
            self.bring_in([name] if self._reads == 1 else None)

    def overwrite(self, name: str) -> None:
        """What the servers have of one tensor counts no more."""
        self._ahead.discard(name)

    def bring_in(self, names: Iterable[str] | None = None) -> None:
        """Writes the servers' values into the tensors here, where those are newer."""
        names = [name for name in (self.tensors if names is None else names) if name in self._ahead]
        handles = [self.values[name] for name in names]
        for handle in handles:
            handle.copy_to_host_async()
        with _disable_current_modes(), as_they_are(), torch.inference_mode(False), torch.no_grad():
            for name, handle in zip(names, handles, strict=True):
                self._assign(name, to_tensor(np.asarray(handle)))
                self.settle(name)

    def _assign(self, name: str, value: Any) -> None:
        tensor = self.tensors[name]
        if not tensor.is_meta:
            tensor.copy_(value)
            return
        if isinstance(tensor, torch.nn.Parameter):
            value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, value)
        tensor.__class__ = _CLASSES.get(type(tensor), type(tensor))

    def hand_out(self, name: str, alias: Any) -> None:
        """What shares a tensor's memory, and counts its writes apart."""
        with as_they_are():
            self._handed_out.append((name, alias, alias._version))
            if len(self._handed_out) > MOST_HANDED_OUT:
                for written in self._list_written_aliases():
                    self.mark_written(written)

    def leave_gradients(self, left: Mapping[str, RemoteArray], lost: Iterable[str]) -> None:
        """A step has ended with other gradients than those here."""
        with as_they_are():
            for name in self._read_gradients:
                if name in self.tensors:
                    self.tensors[name].grad = None
        self._read_gradients.clear()
        self.left_gradients, self.lost_gradients = dict(left), set(lost)

    def read_gradient(self, name: str) -> None:
        """Brings a gradient in. Raises ArrayError where eager PyTorch would have one and the step kept none."""
        if name in self.lost_gradients:
            raise ArrayError(
                f"the step's gradient of {name} is not kept on the servers",
                where=f"{name}.grad",
                remedy="clip, log and accumulate gradients in the step: pass the whole step, a function of "
                "(model, optimizer, *batch), and return what you read; or clear them by optimizer.zero_grad()",
            )
        handle = self.left_gradients.pop(name, None)
        if handle is not None:
            with _disable_current_modes(), as_they_are(), torch.inference_mode(False):
                gradient = to_tensor(np.asarray(handle))
                self.tensors[name].grad = gradient
                self._read_gradients[name] = gradient, gradient._version

    def take_gradient(self, name: str) -> None:
        """The gradient here is what the user has set or cleared; what a step has left counts no more."""
        self.lost_gradients.discard(name)
        if self.left_gradients.pop(name, None) is not None:
            self._read_gradients[name] = _NOT_HERE

    def list_written_gradients(self) -> dict[str, Any]:
        """Gradients that the user has set or changed here, by parameter; None: cleared."""
        with as_they_are():
            now = {name: tensor.grad for name, tensor in self.tensors.items() if name not in self.left_gradients}
            written = {}
            for name, gradient in now.items():
                before, version = self._read_gradients.get(name, (None, 0))
                if gradient is not before or (gradient is not None and gradient._version != version):
                    written[name] = gradient
                    self._read_gradients[name] = gradient, 0 if gradient is None else gradient._version
            return written


def bring_in_all(tensors: Iterable[Any]) -> None:
    """Brings in the values of tensors of which any session has newer ones."""
    for tensor in tensors:
        home = home_of(tensor)
        if home is not None:
            home[0].bring_in()


def _forget(ids: set[int]) -> None:
    for number in ids:
        _homes.pop(number, None)


def home_of(tensor: Any) -> tuple[Mirror, str] | None:
    """Who follows a tensor, or what shares memory with it, and under which name; None: nobody."""
    mirror, name = _homes.get(id(tensor)) or _aliases.get(tensor) or (None, "")
    owner = mirror() if mirror is not None else None
    return (owner, name) if owner is not None else None


def _list_followed(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _Followed):
            yield value
        elif isinstance(value, list | tuple):
            yield from _list_followed(value)


def _read(tensor: Any) -> None:
    home = home_of(tensor)
    if home is not None:
        home[0].read(home[1])


def _overwrite(tensor: Any, *, replaces: bool) -> None:
    home = home_of(tensor)
    if home is not None:
        home[0].overwrite(home[1])
        if replaces:
            home[0].mark_written(home[1])


def _read_gradient(tensor: Any) -> None:
    home = home_of(tensor)
    if home is not None:
        home[0].read_gradient(home[1])


def _is_clearing(frame: Any) -> bool:
    """Whether a gradient is read to be taken away, not to be filled with zeros."""
    return frame.f_code in _CLEARING and bool(frame.f_locals.get("set_to_none", True))


def _take_gradient(tensor: Any) -> None:
    """The gradient here counts from now on: it was cleared, or set."""
    home = home_of(tensor)
    if home is not None and home[1]:
        home[0].take_gradient(home[1])


def _add_alias(tensor: Any, alias: Any, *, counts_apart: bool) -> None:
    home = home_of(tensor)
    if home is None or type(alias) not in _CLASSES:
        return
    if counts_apart:
        home[0].hand_out(home[1], alias)
    alias.__class__ = FollowedTensor
    _aliases[alias] = weakref.ref(home[0]), home[1]


class _Unfollowed:
    """The tensor in its plain class, its values brought in."""

    def __init__(self, tensor: Any) -> None:
        self._tensor, self._class = tensor, type(tensor)

    def __enter__(self) -> None:
        _read(self._tensor)
        self._tensor.__class__ = _PLAIN[self._class]

    def __exit__(self, *_: object) -> None:
        self._tensor.__class__ = self._class
