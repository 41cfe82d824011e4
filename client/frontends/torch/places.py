"""Where a step may read beside its arguments: in modules, closures, globals, classes, lists, dicts and objects."""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import random
import site
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from shardwright.client.frontends.torch.labels import is_user_file
from shardwright.client.limits import MOST_COMPARED_ELEMENTS, MOST_READ_PLACES, READ_DEPTH

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OF_MODULES = {*vars(torch.nn.Module())} - {"training"}
_OF_OPTIMIZERS = {"state", "param_groups", "defaults", "step", "_zero_grad_profile_name"}
_HOOKS_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_LIBRARIES = tuple(
    {path for key, path in sysconfig.get_paths().items() if key in ("stdlib", "platstdlib", "purelib", "platlib")}
    | set(site.getsitepackages())
)


class _Cell:
    """A variable of a closure as a table of one entry."""

    def __init__(self, cell: Any) -> None:
        self.owner = cell

    def __getitem__(self, key: Any) -> Any:
        return self.owner.cell_contents

    def __setitem__(self, key: Any, value: Any) -> None:
        self.owner.cell_contents = value

    def __len__(self) -> int:
        return 1


class _Attributes:
    """What a class, or an object with slots, holds by name, as a table."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._is_class = isinstance(owner, type)

    def __getitem__(self, key: Any) -> Any:
        return self.owner.__dict__[key] if self._is_class else getattr(self.owner, key, None)

    def __setitem__(self, key: Any, value: Any) -> None:
        setattr(self.owner, key, value)

    def __len__(self) -> int:
        return len(self.owner.__dict__) if self._is_class else 0


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a step may read: `table[key]`. name: as messages and arguments call it."""

    table: Any
    key: Any
    name: str

    @property
    def identity(self) -> tuple[int, Any]:
        return id(self.table.owner if isinstance(self.table, _Cell | _Attributes) else self.table), self.key

    def get(self) -> Any:
        """What stands there; None: nothing any more."""
        try:
            return self.table[self.key]
        except (KeyError, IndexError, ValueError):
            return None


class Walk:
    """The places that are reachable from a step.

    containers: tables whose entries may come and go; tables: such that are not put back. generators: of Python's and
    numpy's random numbers.
    """

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.containers: list[tuple[Any, str]] = []
        self.tables: list[Any] = []
        self.generators: list[tuple[Any, str]] = []
        self._seen: set[int] = set()

    def visit_step(
        self, function: Any, model: torch.nn.Module, optimizers: Sequence[Any], hooks: Sequence[Any]
    ) -> None:
        """All of a step: what it calls, and what its module and optimizers hold. hooks: of the parameters."""
        self.visit_module(model, "model", 0, is_passed=True)
        self.visit(tuple(hooks), "hooks", 0)
        for number, optimizer in enumerate(optimizers):
            name = "optimizer" if len(optimizers) == 1 else f"optimizer[{number}]"
            self._seen.add(id(optimizer))
            self._visit_hooks(optimizer, name, _HOOKS_OF_OPTIMIZERS, 0)
            if is_of_user(type(optimizer)):
                self.visit_object(optimizer, name, 0, _OF_OPTIMIZERS)
        self.visit(function, getattr(function, "__name__", "step"), 0)

    def visit_table(self, table: Any, entries: Mapping[Any, Any], name: Callable[[Any], str], depth: int) -> None:
        for key, value in entries.items():
            if len(self.places) < MOST_READ_PLACES:
                self.places.append(Place(table, key, name(key)))
                self.visit(value, name(key), depth)

    def visit(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, (*PLAIN, enum.Enum, torch.Tensor, np.ndarray)):
            return
        if id(value) in self._seen or depth > READ_DEPTH:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            self.visit_module(value, name, depth)
        elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            self.generators.append((value, name))
        elif isinstance(value, list | dict | deque):
            self.containers.append((value, name))
            entries = value if isinstance(value, dict) else dict(enumerate(value))
            self.visit_table(value, entries, partial("{}[{!r}]".format, name), depth + 1)
        elif isinstance(value, set):
            self.tables.append(value)
        elif isinstance(value, tuple):
            for number, member in enumerate(value):
                self.visit(member, f"{name}[{number}]", depth + 1)
        elif isinstance(value, functools.partial):
            self.visit(value.func, name, depth)
            self.visit((value.args, value.keywords), name, depth)
        elif isinstance(value, types.MethodType):
            self.visit(value.__func__, name, depth)
            self.visit(value.__self__, name, depth)
        elif isinstance(value, types.FunctionType):
            self.visit_function(value, depth)
        elif isinstance(value, property):
            self.visit((value.fget, value.fset), name, depth)
        elif isinstance(value, staticmethod | classmethod | functools._lru_cache_wrapper):
            self.visit(value.__wrapped__, name, depth)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler | types.SimpleNamespace | argparse.Namespace):
            self.visit_object(value, name, depth, {"optimizer"})
        elif is_of_user(value if isinstance(value, type) else type(value)):
            self._visit_of_user(value, name, depth)

    def _visit_of_user(self, value: Any, name: str, depth: int) -> None:
        """A class of the user, or an object of one."""
        if isinstance(value, type):
            self.visit_classes(value, name, depth)
        elif hasattr(value, "__dict__"):
            self.visit_object(value, name, depth, set())
        else:
            slots = {key: getattr(value, key) for key in getattr(value, "__slots__", ()) if hasattr(value, key)}
            self.visit_table(_Attributes(value), slots, partial("{}.{}".format, name), depth + 1)
            self.visit_classes(type(value), type(value).__name__, depth)

    def visit_module(self, module: torch.nn.Module, name: str, depth: int, *, is_passed: bool = False) -> None:
        """A module. is_passed: the step's own, whose tensors are its state."""
        for path, member in module.named_modules():
            if id(member) in self._seen and not is_passed and member is not module:
                continue
            self._seen.add(id(member))
            prefix = f"{name}.{path}" if path else name
            self.visit_object(member, prefix, depth, _OF_MODULES | {"training"} if is_passed else _OF_MODULES)
            self._visit_hooks(member, prefix, _HOOKS_OF_MODULES, depth)
            self.containers.append((member._modules, prefix))
            self.places += [Place(member._modules, key, f"{prefix}.{key}") for key in member._modules]
            for table in () if is_passed else (member._parameters, member._buffers):
                self.containers.append((table, prefix))
                self.visit_table(table, table, partial("{}.{}".format, prefix), depth)

    def _visit_hooks(self, owner: Any, name: str, tables: Sequence[str], depth: int) -> None:
        for key in tables:
            table = getattr(owner, key)
            self.containers.append((table, f"{name}.{key}"))
            self.visit_table(table, table, partial("{}.{}[{}]".format, name, key), depth + 1)

    def visit_object(self, value: Any, name: str, depth: int, others: set[str]) -> None:
        entries = {key: entry for key, entry in vars(value).items() if key not in others}
        self.containers.append((vars(value), name))
        self.visit_table(vars(value), entries, partial("{}.{}".format, name), depth + 1)
        self.visit_classes(type(value), type(value).__name__, depth)

    def visit_classes(self, kind: type, name: str, depth: int) -> None:
        """What a class of the user and its bases hold: numbers, tables and functions."""
        for base in kind.__mro__:
            if not is_of_user(base) or issubclass(base, enum.Enum) or (base is not kind and id(base) in self._seen):
                continue
            self._seen.add(id(base))
            table = _Attributes(base)
            self.tables.append(table)
            entries = {key: value for key, value in vars(base).items() if not _is_of_python(key, value)}
            self.visit_table(table, entries, partial("{}.{}".format, name), depth + 1)

    def visit_function(self, function: types.FunctionType, depth: int) -> None:
        if not is_of_user(function):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self.visit_table(_Cell(cell), {0: value}, partial("{}".format, name), depth + 1)
        table = function.__globals__
        names = [name for name in _list_globals(function.__code__) if name in table]
        self.visit_table(table, {name: table[name] for name in names}, str, depth + 1)
        for name in names:
            if isinstance(table[name], types.ModuleType) and is_user_module(table[name]):
                of_module = vars(table[name])
                entries = {key: of_module[key] for key in function.__code__.co_names if key in of_module}
                self.visit_table(of_module, entries, partial("{}.{}".format, name), depth + 1)
        self.visit((function.__defaults__, function.__kwdefaults__), function.__name__, depth + 1)


def _is_of_python(key: str, value: Any) -> bool:
    """Whether an entry of a class is one that Python itself makes."""
    is_special = key.startswith("__") and key.endswith("__")
    return (is_special and not isinstance(value, types.FunctionType)) or isinstance(value, types.MemberDescriptorType)


def is_of_user(owner: Any) -> bool:
    """Whether a function or a class stands in the user's own files."""
    if isinstance(owner, types.FunctionType):
        file = owner.__code__.co_filename
        return not file.startswith(_LIBRARIES) and (is_user_file(file) or file.startswith("<"))
    module = getattr(owner, "__module__", "")
    return module == "__main__" or is_user_module(sys.modules.get(module))


def is_user_module(module: Any) -> bool:
    """Whether a module is one of the user's own files."""
    file = getattr(module, "__file__", None)
    return file is not None and not file.startswith(_LIBRARIES) and is_user_file(file)


def _list_globals(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _list_globals(constant)


def is_number(value: Any) -> bool:
    """An int or a float, numpy's as well, and no flag."""
    return isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool)


def comparable(value: Any) -> tuple[str, Any] | None:
    """A value that compares by equality; None: what does not count, or is followed otherwise."""
    if isinstance(value, (*PLAIN, np.generic, enum.Enum)):
        return type(value).__name__, value
    if isinstance(value, tuple):
        return "tuple", tuple(comparable(member) for member in value)
    if isinstance(value, set | frozenset):
        return "set", frozenset(comparable(member) for member in value)
    if isinstance(value, np.ndarray) and value.size <= MOST_COMPARED_ELEMENTS:
        return "array", (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return "function", value
    if isinstance(value, torch.Tensor):
        return "tensor", ""
    return ("object", id(value)) if callable(value) else None
