"""Static and donated arguments of a function, by number and by name, with `jax.jit`'s semantics.

Numbers and names of positional parameters are interchangeable. A `jax.jit` keeps its own: its static arguments add to
the given ones; its donated ones apply unless others are given.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.errors import OptionError
from shardwright.xla.private import jit_marks

#: As `jax.jit` takes them; None: not given.
Argnums = int | Sequence[int] | None
Argnames = str | Iterable[str] | None

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class ArgumentSet:
    """Arguments by position in the call, and by name when passed by keyword."""

    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def __or__(self, other: ArgumentSet) -> ArgumentSet:
        positions, names = {*self.positions, *other.positions}, {*self.names, *other.names}
        return ArgumentSet(tuple(sorted(positions)), tuple(sorted(names)))


class Parameters:
    """The parameters of a function, from Python's signature."""

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        self.name = name
        try:
            self.signature: inspect.Signature | None = inspect.signature(fn)
        except (TypeError, ValueError):
            self.signature = None
        self._all = list(self.signature.parameters.values()) if self.signature else []
        self._kinds = {parameter.kind for parameter in self._all}
        self._positional = [parameter for parameter in self._all if parameter.kind in _POSITIONAL]

    def name_at(self, position: int) -> str:
        """`x`, `rest[1]` in `*rest`, `args[2]` without a signature."""
        if position < len(self._positional):
            return self._positional[position].name
        rest = next((p.name for p in self._all if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
        return f"{rest}[{position - len(self._positional)}]" if rest else f"args[{position}]"

    def bind_by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments passed by name, moved to their positions when they have one. Raises TypeError like a call."""
        if not kwargs or self.signature is None:
            return args, kwargs
        arguments = self.signature.bind(*args, **kwargs)
        return arguments.args, arguments.kwargs

    def select_arguments(self, numbers: Argnums, names: Argnames, kind: str) -> ArgumentSet:
        """Raises OptionError on anything but a number or name of this function's parameters."""
        positions = self._positions(numbers, f"{kind}_argnums")
        listed = self._names(names, f"{kind}_argnames")
        index = {parameter.name: n for n, parameter in enumerate(self._positional)}
        by_name = [index[name] for name in listed if name in index]
        by_number = [
            self._positional[n].name
            for n in positions
            if n < len(self._positional) and self._positional[n].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        return ArgumentSet(positions, listed) | ArgumentSet(tuple(by_name), tuple(by_number))

    def _positions(self, numbers: Argnums, where: str) -> tuple[int, ...]:
        listed = () if numbers is None else (numbers,) if isinstance(numbers, int) else tuple(numbers)
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in listed):
            raise OptionError(
                f"{listed!r} are not argument numbers", where=where, remedy="write integers, such as (0, 1)"
            )
        count = len(self._positional)
        has_most = self.signature is not None and inspect.Parameter.VAR_POSITIONAL not in self._kinds
        for number in listed:
            if number < -count or (has_most and number >= count):
                raise OptionError(
                    f"{self.name} has {count} positional parameters, so {number} names none",
                    where=where,
                    remedy=f"number them from 0 to {count - 1}" if count else "leave it out",
                )
        return tuple(sorted({number % count if number < 0 else number for number in listed}))

    def _names(self, names: Argnames, where: str) -> tuple[str, ...]:
        listed = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        if not all(isinstance(name, str) for name in listed):
            raise OptionError(f"{listed!r} are not argument names", where=where, remedy="write strings")
        if self.signature is None or inspect.Parameter.VAR_KEYWORD in self._kinds:
            return listed
        keyword_names = [p.name for p in self._all if p.kind in (*_POSITIONAL[1:], inspect.Parameter.KEYWORD_ONLY)]
        for name in listed:
            if name not in keyword_names:
                remedy = f"its parameters are {', '.join(keyword_names)}" if keyword_names else "leave it out"
                raise OptionError(f"{self.name} has no parameter {name!r} to name", where=where, remedy=remedy)
        return listed


def resolve_argnums(
    fn: Callable[..., Any],
    parameters: Parameters,
    *,
    static: tuple[Argnums, Argnames],
    donated: tuple[Argnums, Argnames],
) -> tuple[ArgumentSet, ArgumentSet]:
    """The static and the donated arguments. Raises OptionError on overlap."""
    jit_static, jit_donated = _jit_argument_sets(fn)
    statics = parameters.select_arguments(*static, "static") | jit_static
    consumed = jit_donated if donated == (None, None) else parameters.select_arguments(*donated, "donate")
    both = [parameters.name_at(n) for n in statics.positions if n in consumed.positions]
    both += [name for name in statics.names if name in consumed.names]
    if both:
        raise OptionError(
            f"argument {both[0]} of {parameters.name} is both static and donated",
            where="donate_argnums" if donated[1] is None else "donate_argnames",
            remedy="leave it out of one: a static argument is no array",
        )
    return statics, consumed


def _jit_argument_sets(fn: Callable[..., Any]) -> tuple[ArgumentSet, ArgumentSet]:
    """The static and donated sets of a `jax.jit`; of a partial or a method, in the caller's count."""
    if isinstance(fn, functools.partial):
        return _drop_bound(_jit_argument_sets(fn.func), len(fn.args))
    if isinstance(fn, types.MethodType):
        return _drop_bound(_jit_argument_sets(fn.__func__), 1)
    marks = jit_marks(fn)
    if marks is not None:
        parameters = Parameters(fn, "the jax.jit")
        static = parameters.select_arguments(marks.static_argnums, marks.static_argnames, "static")
        return static, parameters.select_arguments(marks.donate_argnums, marks.donate_argnames, "donate")
    called: Any = type(fn).__call__
    return (ArgumentSet(), ArgumentSet()) if jit_marks(called) is None else _drop_bound(_jit_argument_sets(called), 1)


def _drop_bound(pair: tuple[ArgumentSet, ArgumentSet], count: int) -> tuple[ArgumentSet, ArgumentSet]:
    """The set without the first `count`, bound arguments."""
    static, donated = (ArgumentSet(tuple(n - count for n in m.positions if n >= count), m.names) for m in pair)
    return static, donated
