"""What a step may read beside its arguments: numbers, flags and texts of modules, optimizers, closures and globals.

A program holds them by value. Each call looks whether they are what they were: a number that has changed is an argument
from then on, anything else makes another program. What the step itself writes there is written again by each call.
"""

from __future__ import annotations

import builtins
import io
import logging
import random
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch

from shardwright.client.frontends.torch.labels import is_user_file
from shardwright.client.frontends.torch.places import PLAIN, Place, Walk, comparable, is_number, is_of_user
from shardwright.client.frontends.torch.tracing import exact_values
from shardwright.errors import UnsupportedProgramError

_log = logging.getLogger("shardwright")


@dataclass(frozen=True, slots=True)
class Write:
    """What a step leaves in a place: a value, or a SymPy expression of the call's numbers."""

    place: Place
    value: Any
    expression: Any = None


def replay(writes: Sequence[Write], symbols: Sequence[Any], numbers: Sequence[float]) -> None:
    """Writes what a step leaves, for the numbers of a call."""
    exact = exact_values(symbols, numbers) if any(write.expression is not None for write in writes) else {}
    results: dict[Any, Any] = {}
    for write in writes:
        value = write.value
        if write.expression is not None:
            if write.expression not in results:
                results[write.expression] = write.expression.xreplace(exact)
            result = results[write.expression]
            value = int(result) if isinstance(value, torch.SymInt) else float(result)
        write.place.table[write.place.key] = value


class Reads:
    """The places that one step may read."""

    def __init__(self, function: Any, model: Any, optimizers: Sequence[Any]) -> None:
        self._roots = function, model, optimizers
        self._hooks: tuple[Any, ...] = ()
        self._arguments: set[tuple[int, Any]] = set()
        self._numbers: dict[Place, float] | None = None  # what the arguments were at the last look
        self._fixed: set[tuple[int, Any]] = set()
        self._kinds: dict[Any, int] = {}
        self._told: set[tuple[str, str]] = set()
        self._places: list[Place] = []
        self._containers: list[tuple[Any, str]] = []
        self._slots: list[tuple[Any, Any, Any]] = []
        self._tables: list[Any] = []
        self._sizes: list[int] = []
        self._values: dict[tuple[int, Any], tuple[str, Any]] = {}
        self._kind = 0
        self.tensors: dict[str, Any] = {}
        self.generators: list[tuple[Any, str]] = []
        self.has_news = False
        self._collect()

    def _collect(self) -> None:
        walk = Walk()
        walk.visit_step(*self._roots, self._hooks)
        self._places, self._containers, self.generators = walk.places, walk.containers, walk.generators
        self._tables = [*(table for table, _ in walk.containers), *walk.tables]
        self._look()

    def _look(self) -> None:
        """Takes the values as they are; what changed since the last look is told."""
        before, self._values, self._numbers = self._values, {}, None
        self._slots = [(place.table, place.key, place.table[place.key]) for place in self._places]
        self._sizes = list(map(len, self._tables))
        self.tensors = {
            place.name: value
            for place, (_, _, value) in zip(self._places, self._slots, strict=True)
            if isinstance(value, torch.Tensor)
        }
        for place, (_, _, contents) in zip(self._places, self._slots, strict=True):
            value = comparable(contents)
            if value is None:
                continue
            self._values[place.identity] = place.name, value
            _, old = before.get(place.identity, ("", value))
            if old == value or place.identity in self._arguments:
                continue
            if is_number(old[1]) and is_number(value[1]) and place.identity not in self._fixed:
                self.make_argument(place)
            else:
                shown = (
                    f" from {old[1]!r} to {value[1]!r}" if isinstance(old[1], PLAIN) and value[0] != "object" else ""
                )
                self._tell(place.name, f"has changed{shown}: a program for each")
        constants = tuple(
            (identity, entry) for identity, entry in self._values.items() if identity not in self._arguments
        )
        self._kind = self._kinds.setdefault((constants, self._hooks), len(self._kinds))

    def make_argument(self, place: Place) -> None:
        """From now on a number is an argument."""
        self._arguments.add(place.identity)
        self._numbers = None
        self._tell(place.name, "changes: it is an argument of the step from now on")

    @contextmanager
    def bind(self, symbols: Mapping[Place, Any], name: str, state: Container[str] = ()) -> Iterator[list[Write]]:
        """While a step is traced: symbols in the places that are arguments. Afterwards all is as it was.

        state: names of places whose tensors are the step's state, as it leaves them. Yields a list, which then has what
        the step writes. A number that it changes is an argument from then on.
        Raises UnsupportedProgramError where it draws random numbers of Python, which one trace draws once.
        """
        writes: list[Write] = []
        stand_ins: dict[Place, Any] = {
            place: _Exhausted(value, place.name, name)
            for place, (_, _, value) in zip(self._places, self._slots, strict=True)
            if isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not is_of_user(type(value))
        }
        stand_ins |= symbols
        values = [stand_ins.get(place, value) for place, (_, _, value) in zip(self._places, self._slots, strict=True)]
        keys = [_keys(table) for table, _ in self._containers]
        contents = [(table, dict(table) if isinstance(table, dict) else list(table)) for table, _ in self._containers]
        for place, value in stand_ins.items():
            place.table[place.key] = value
        try:
            with refuse_random(name, self.generators), self._tell_prints(name):
                yield writes
            for (table, of_table), before in zip(self._containers, keys, strict=True):
                if _keys(table) != before:
                    self._tell(
                        of_table, f"gets or loses entries in {name}, which Python runs once a trace, not in each call"
                    )
            for place, value in zip(self._places, values, strict=True):
                after = place.get()
                if after is not value and place.name not in state:
                    self._take_write(place, value, after, writes, symbols)
        finally:
            for table, before in contents:
                if _keys(table) != _keys(before):
                    table.clear()
                    table.update(before) if isinstance(table, dict) else table.extend(before)
            for place, (_, _, value) in zip(self._places, self._slots, strict=True):
                if place.get() is not value:
                    place.table[place.key] = value

    def _take_write(
        self, place: Place, value: Any, after: Any, writes: list[Write], symbols: Mapping[Place, Any]
    ) -> None:
        if isinstance(after, torch.SymInt | torch.SymFloat):
            writes.append(Write(place, after, after.node.expr))
        elif is_number(after) and is_number(value) and place not in symbols:
            if after != value:
                self.make_argument(place)
                self.has_news = True
        elif isinstance(after, PLAIN):
            writes.append(Write(place, after))
        elif comparable(after) != comparable(value) or isinstance(after, torch.Tensor):
            self._tell(
                place.name,
                "is set by Python code of the step, which runs once a trace, not in each call: return it instead",
            )

    @contextmanager
    def _tell_prints(self, name: str) -> Iterator[None]:
        write = builtins.print

        def print_once(*args: Any, **kwargs: Any) -> None:
            if "/shardwright/client/" not in sys._getframe(1).f_code.co_filename:  # progress, from another thread
                self._tell(name, "prints: Python runs once a trace, not in each call; return what you print")
            write(*args, **kwargs)

        handle = logging.Logger.handle

        def handle_once(logger: Any, record: Any) -> None:
            if is_user_file(record.pathname):
                self._tell(name, "logs: Python runs once a trace, not in each call; return what you log")
            handle(logger, record)

        with (
            mock.patch.object(builtins, "print", print_once),
            mock.patch.object(logging.Logger, "handle", handle_once),
        ):
            yield

    def fix(self, place: Place) -> None:
        """A number that decides about sizes makes a program for each value."""
        self._arguments.discard(place.identity)
        self._fixed.add(place.identity)
        self._look()

    def _tell(self, name: str, what: str) -> None:
        if (name, what) not in self._told:
            self._told.add((name, what))
            _log.warning("%s %s", name, what)

    def list_tensors_now(self, names: Sequence[str]) -> list[Any]:
        """What stands in the places of these names, while a step is traced."""
        places = {place.name: place for place in self._places}
        return [places[name].get() if name in places else None for name in names]

    def read(self, hooks: tuple[Any, ...] = ()) -> tuple[dict[Place, float], int]:
        """The numbers that are arguments, and what stands for all else. hooks: of the parameters now."""
        try:
            is_same = hooks == self._hooks and list(map(len, self._tables)) == self._sizes
            if is_same:
                for table, key, value in self._slots:
                    if table[key] is not value:
                        is_same = False
                        break
        except (KeyError, IndexError, ValueError):
            is_same = False
        if not is_same:
            self._hooks = hooks
            self._collect()
        if self._numbers is None:
            self._numbers = {
                place: value if type(value) is int else float(value)
                for place, (_, _, value) in zip(self._places, self._slots, strict=True)
                if place.identity in self._arguments and is_number(value)
            }
        return dict(self._numbers), self._kind


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


def _keys(table: Any) -> Any:
    return list(table) if isinstance(table, dict) else [id(member) for member in table]


class _Exhausted:
    """Stands for an iterator while a step is traced, which would take one element, once.

    Raises UnsupportedProgramError where the step takes one.
    """

    def __init__(self, iterator: Any, name: str, step: str) -> None:
        self._what = f"{step} takes an element of {name}, a {type(iterator).__name__}, once, when the step is traced"
        self._name = name

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> NoReturn:
        raise UnsupportedProgramError(
            self._what, where=self._name, remedy="take it before the call, by next(…), and pass it to the step"
        )
