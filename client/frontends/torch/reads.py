"""What a step may read beside its arguments: numbers, flags and texts of modules, optimizers, closures and globals.

A program holds them by value. Each call looks whether they are what they were: a number that has changed is an argument
from then on, anything else makes another program. What the step itself writes there is written again by each call.
"""

from __future__ import annotations

import builtins
import dis
import functools
import logging
import random
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from shardwright.client.frontends.torch.labels import is_user_file
from shardwright.client.frontends.torch.tracing import exact_values
from shardwright.client.limits import MOST_COMPARED_ELEMENTS, MOST_READ_PLACES, READ_DEPTH
from shardwright.errors import UnsupportedProgramError

_log = logging.getLogger("shardwright")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OF_MODULES = {*vars(torch.nn.Module())} - {"training"}
_OF_OPTIMIZERS = {"state", "param_groups", "defaults", "step", "_zero_grad_profile_name"}
_LIBRARIES = tuple(
    {path for key, path in sysconfig.get_paths().items() if key in ("stdlib", "platstdlib", "purelib", "platlib")}
    | set(site.getsitepackages())
)


class _Cell:
    """A variable of a closure as a table of one entry."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def __getitem__(self, key: Any) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, key: Any, value: Any) -> None:
        self._cell.cell_contents = value

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a step may read: `table[key]`. name: as messages and arguments call it."""

    table: Any
    key: Any
    name: str

    @property
    def identity(self) -> tuple[int, Any]:
        owner = self.table._cell if isinstance(self.table, _Cell) else self.table
        return id(owner), self.key


@dataclass(frozen=True, slots=True)
class Write:
    """What a step leaves in a place: a value, or a SymPy expression of the call's numbers."""

    place: Place
    value: Any
    expression: Any = None

    def replay(self, symbols: Sequence[Any], numbers: Sequence[float]) -> None:
        value = self.value
        if self.expression is not None:
            result = self.expression.xreplace(exact_values(symbols, numbers))
            value = int(result) if isinstance(self.value, torch.SymInt) else float(result)
        self.place.table[self.place.key] = value


class _Walk:
    """The places that are reachable from a step."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.containers: list[tuple[Any, str]] = []
        self.generators: list[tuple[Any, str]] = []
        self._seen: set[int] = set()

    def visit_table(self, table: Any, entries: Mapping[Any, Any], name: Callable[[Any], str], depth: int) -> None:
        for key, value in entries.items():
            if len(self.places) < MOST_READ_PLACES:
                self.places.append(Place(table, key, name(key)))
                self.visit(value, name(key), depth)

    def visit(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, (*_PLAIN, torch.Tensor, np.ndarray)) or id(value) in self._seen or depth > READ_DEPTH:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            self.visit_module(value, name, depth)
        elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            self.generators.append((value, name))
        elif type(value) in (list, dict):
            self.containers.append((value, name))
            entries = value if isinstance(value, dict) else dict(enumerate(value))
            self.visit_table(value, entries, partial("{}[{!r}]".format, name), depth + 1)
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
        elif _is_of_user(type(value)) and hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
            self.visit_object(value, name, depth, set())

    def visit_module(self, module: torch.nn.Module, name: str, depth: int, *, is_passed: bool = False) -> None:
        """A module. is_passed: the step's own, whose tensors are its state."""
        for path, member in module.named_modules():
            if id(member) in self._seen and not is_passed and member is not module:
                continue
            self._seen.add(id(member))
            prefix = f"{name}.{path}" if path else name
            self.visit_object(member, prefix, depth, _OF_MODULES | {"training"} if is_passed else _OF_MODULES)
            for table in () if is_passed else (member._parameters, member._buffers):
                self.containers.append((table, prefix))
                self.visit_table(table, table, partial("{}.{}".format, prefix), depth)

    def visit_object(self, value: Any, name: str, depth: int, others: set[str]) -> None:
        entries = {key: entry for key, entry in vars(value).items() if key not in others}
        self.containers.append((vars(value), name))
        self.visit_table(vars(value), entries, partial("{}.{}".format, name), depth + 1)
        for kind in type(value).__mro__:
            if _is_of_user(kind) and id(kind) not in self._seen:
                self._seen.add(id(kind))
                for member in vars(kind).values():
                    if isinstance(member, types.FunctionType):
                        self.visit(member, name, depth + 1)

    def visit_function(self, function: types.FunctionType, depth: int) -> None:
        if not _is_of_user(function):
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
            if isinstance(table[name], types.ModuleType) and _is_user_module(table[name]):
                of_module = vars(table[name])
                entries = {key: of_module[key] for key in function.__code__.co_names if key in of_module}
                self.visit_table(of_module, entries, partial("{}.{}".format, name), depth + 1)
        self.visit((function.__defaults__, function.__kwdefaults__), function.__name__, depth + 1)


def _is_of_user(owner: Any) -> bool:
    """Whether a function or a class stands in the user's own files."""
    if isinstance(owner, types.FunctionType):
        file = owner.__code__.co_filename
        return not file.startswith(_LIBRARIES) and (is_user_file(file) or file.startswith("<"))
    module = getattr(owner, "__module__", "")
    return module == "__main__" or _is_user_module(sys.modules.get(module))


def _is_user_module(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and not file.startswith(_LIBRARIES) and is_user_file(file)


def _list_globals(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _list_globals(constant)


class Reads:
    """The places that one step may read."""

    def __init__(self, function: Any, model: Any, optimizers: Sequence[Any]) -> None:
        self._roots = function, model, optimizers
        self._arguments: set[tuple[int, Any]] = set()
        self._numbers: dict[Place, float] | None = None  # what the arguments were at the last look
        self._fixed: set[tuple[int, Any]] = set()
        self._kinds: dict[Any, int] = {}
        self._told: set[str] = set()
        self._places: list[Place] = []
        self._containers: list[tuple[Any, str]] = []
        self._slots: list[tuple[Any, Any, Any]] = []
        self._sizes: list[tuple[Any, int]] = []
        self._values: dict[tuple[int, Any], tuple[str, Any]] = {}
        self._kind = 0
        self.tensors: dict[str, Any] = {}
        self.generators: list[tuple[Any, str]] = []
        self.has_news = False
        self._collect()

    def _collect(self) -> None:
        function, model, optimizers = self._roots
        walk = _Walk()
        walk.visit_module(model, "model", 0, is_passed=True)
        for number, optimizer in enumerate(optimizers):
            name = "optimizer" if len(optimizers) == 1 else f"optimizer[{number}]"
            if _is_of_user(type(optimizer)):
                walk._seen.add(id(optimizer))
                walk.visit_object(optimizer, name, 0, _OF_OPTIMIZERS)
        walk.visit(function, getattr(function, "__name__", "step"), 0)
        self._places, self._containers, self.generators = walk.places, walk.containers, walk.generators
        self._look()

    def _look(self) -> None:
        """Takes the values as they are; what changed since the last look is told."""
        before, self._values, self._numbers = self._values, {}, None
        self._slots = [(place.table, place.key, place.table[place.key]) for place in self._places]
        self._sizes = [(table, len(table)) for table, _ in self._containers]
        self.tensors = {
            place.name: value
            for place, (_, _, value) in zip(self._places, self._slots, strict=True)
            if isinstance(value, torch.Tensor)
        }
        for place, (_, _, contents) in zip(self._places, self._slots, strict=True):
            value = _comparable(contents)
            if value is None:
                continue
            self._values[place.identity] = place.name, value
            _, old = before.get(place.identity, ("", value))
            if old == value or place.identity in self._arguments:
                continue
            if _is_number(old[1]) and _is_number(value[1]) and place.identity not in self._fixed:
                self.make_argument(place)
            else:
                self._tell(place.name, f"has changed from {old[1]!r} to {value[1]!r}: a program for each")
        constants = tuple(
            (identity, entry) for identity, entry in self._values.items() if identity not in self._arguments
        )
        self._kind = self._kinds.setdefault(constants, len(self._kinds))

    def make_argument(self, place: Place) -> None:
        """From now on a number is an argument."""
        self._arguments.add(place.identity)
        self._numbers = None
        self._tell(place.name, "changes: it is an argument of the step from now on")

    @contextmanager
    def bind(self, symbols: Mapping[Place, Any], name: str) -> Iterator[list[Write]]:
        """While a step is traced: symbols in the places that are arguments. Afterwards all is as it was.

        Yields a list, which then has what the step writes. A number that it changes is an argument from then on.
        Raises UnsupportedProgramError where it draws random numbers of Python, which one trace draws once.
        """
        writes: list[Write] = []
        values = [symbols.get(place, value) for place, (_, _, value) in zip(self._places, self._slots, strict=True)]
        keys = [_keys(table) for table, _ in self._containers]
        contents = [(table, table.copy()) for table, _ in self._containers]
        for place, symbol in symbols.items():
            place.table[place.key] = symbol
        try:
            with refuse_random(name, self.generators), self._tell_prints(name):
                yield writes
            for (table, of_table), before in zip(self._containers, keys, strict=True):
                if _keys(table) != before:
                    self._tell(
                        of_table, f"gets or loses entries in {name}, which Python runs once a trace, not in each call"
                    )
            for place, value in zip(self._places, values, strict=True):
                after = _get(place)
                if after is not value:
                    self._take_write(place, value, after, writes, symbols)
        finally:
            for table, before in contents:
                if _keys(table) != _keys(before):
                    table.clear()
                    table.update(before) if isinstance(table, dict) else table.extend(before)
            for place, (_, _, value) in zip(self._places, self._slots, strict=True):
                if _get(place) is not value:
                    place.table[place.key] = value

    def _take_write(
        self, place: Place, value: Any, after: Any, writes: list[Write], symbols: Mapping[Place, Any]
    ) -> None:
        if isinstance(after, torch.SymInt | torch.SymFloat):
            writes.append(Write(place, after, after.node.expr))
        elif _is_number(after) and _is_number(value) and place not in symbols:
            if after != value:
                self.make_argument(place)
                self.has_news = True
        elif isinstance(after, _PLAIN):
            writes.append(Write(place, after))
        elif _comparable(after) != _comparable(value) or isinstance(after, torch.Tensor):
            self._tell(
                place.name,
                "is set by Python code of the step, which runs once a trace, not in each call: return it instead",
            )

    @contextmanager
    def _tell_prints(self, name: str) -> Iterator[None]:
        write = builtins.print

        def print_once(*args: Any, **kwargs: Any) -> None:
            self._tell(name, "prints: Python runs once a trace, not in each call; return what you print")
            write(*args, **kwargs)

        with mock.patch.object(builtins, "print", print_once):
            yield

    def fix(self, place: Place) -> None:
        """A number that decides about sizes makes a program for each value."""
        self._arguments.discard(place.identity)
        self._fixed.add(place.identity)
        self._look()

    def _tell(self, name: str, what: str) -> None:
        if name not in self._told:
            self._told.add(name)
            _log.warning("%s %s", name, what)

    def read(self) -> tuple[dict[Place, float], int]:
        """The numbers that are arguments, and what stands for all else."""
        try:
            is_same = all(len(table) == size for table, size in self._sizes)
            if is_same:
                for table, key, value in self._slots:
                    if table[key] is not value:
                        is_same = False
                        break
        except (KeyError, IndexError, ValueError):
            is_same = False
        if not is_same:
            self._collect()
        if self._numbers is None:
            self._numbers = {
                place: value if type(value) is int else float(value)
                for place, (_, _, value) in zip(self._places, self._slots, strict=True)
                if place.identity in self._arguments and _is_number(value)
            }
        return dict(self._numbers), self._kind


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool)


def _comparable(value: Any) -> tuple[str, Any] | None:
    """A value that compares by equality; None: what does not count, or is followed otherwise."""
    if isinstance(value, (*_PLAIN, np.generic)):
        return type(value).__name__, value
    if isinstance(value, tuple) and all(isinstance(member, _PLAIN) for member in value):
        return "tuple", value
    if isinstance(value, np.ndarray) and value.size <= MOST_COMPARED_ELEMENTS:
        return "array", (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, types.FunctionType | type):
        return "function", value
    return ("tensor", "") if isinstance(value, torch.Tensor) else None


def _get(place: Place) -> Any:
    try:
        return place.table[place.key]
    except (KeyError, IndexError, ValueError):
        return None


def _keys(table: Any) -> Any:
    return list(table) if isinstance(table, dict) else [id(member) for member in table]


@contextmanager
def refuse_random(name: str, generators: Sequence[tuple[Any, str]]) -> Iterator[None]:
    """Raises UnsupportedProgramError where Python's or numpy's random numbers were drawn."""
    drawn: dict[str, Callable[[], Any]] = {
        "random": random.getstate,
        "numpy.random": lambda: repr(np.random.get_state(legacy=False)),
    }
    for generator, of_generator in generators:
        drawn[of_generator] = partial(_state_of, generator)
    before = {key: state() for key, state in drawn.items()}
    yield
    for key, state in drawn.items():
        if state() != before[key]:
            raise UnsupportedProgramError(
                f"{name} draws numbers of {key}, which Python would draw once, when the step is traced",
                where=key,
                remedy="draw them before the call and pass them as floats, or draw them of torch: torch.rand(())",
            )


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return repr(generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state())
