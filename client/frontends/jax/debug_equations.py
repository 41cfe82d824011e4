"""`jax.debug.print` and `jax.debug.callback` in a jaxpr: what they read becomes results of the function.

`read_level` says which values; `jaxprs.py` evaluates the function with them as results; the client makes the calls when
it has them (`client/debug_calls.py`).
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.extend.source_info_util import summarize
from jax.sharding import get_abstract_mesh

from shardwright.client.array_specs import ArraySpec, array_spec, physical_shape, spec_of_aval
from shardwright.client.debug_calls import Branches, DebugCall, Entry, Inner, Level, OpenTrips, Operand, Trips
from shardwright.client.frontends.jax.equations import walk_equations
from shardwright.client.limits import DEBUG_LOOP_BYTES, DEBUG_TRIPS

#: Primitives whose calls are made by the client.
DEBUG_PRIMITIVES = ("debug_callback", "debug_print")

#: Primitives that run a function once, where they stand, and the names of their parameter that holds it.
_CALLS = ("jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")
_FUNCTIONS = ("jaxpr", "call_jaxpr")

#: Where JAX has the callback of a breakpoint.
_DEBUGGER = "jax._src.debugger.core"

_FOLLOWED = (*_CALLS, "scan", "while", "cond", "shard_map")


def has_calls(jaxpr: Jaxpr) -> bool:
    """Whether a call stands in it, at any depth."""
    return any(eqn.primitive.name in DEBUG_PRIMITIVES for eqn in walk_equations(jaxpr))


def is_breakpoint(eqn: JaxprEqn) -> bool:
    """Whether it is a `jax.debug.breakpoint`: a callback that asks the user, who cannot stop the servers."""
    cells = getattr(eqn.params.get("callback"), "__closure__", None) or ()
    return any(getattr(cell.cell_contents, "__module__", "") == _DEBUGGER for cell in cells)


def list_unfollowed(jaxpr: Jaxpr) -> Iterator[tuple[JaxprEqn, str]]:
    """Calls in functions that are evaluated as they are, each with the primitive that holds it."""
    for eqn in jaxpr.eqns:
        inner = list(jaxprs_in_params(eqn.params))
        if eqn.primitive.name in _FOLLOWED:
            for each in inner:
                yield from list_unfollowed(each)
        else:
            for each in inner:
                calls = (call for call in walk_equations(each) if call.primitive.name in DEBUG_PRIMITIVES)
                yield from ((call, eqn.primitive.name) for call in calls)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """(constants, carried values) at the head of a scan's inputs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()  # as newer jax writes it
    return len(constants), len(carry)


def list_manual_axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes of a `shard_map` with these parameters that its function sees the parts of, in the mesh's order."""
    return tuple(name for name in params["mesh"].axis_names if name in params["newly_manual_axes"])


def count_parts(params: Mapping[str, Any]) -> int:
    """Number of those parts."""
    return prod(params["mesh"].shape[name] for name in list_manual_axes(params))


# ---- levels ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadLevel:
    """A level, and where its arrays come from.

    values: number of an array → the variable that it is. starts: number of an equation → its first array.
    """

    level: Level
    values: Mapping[int, Any]
    starts: Mapping[int, int]

    def arrays(self, values: Mapping[Any, Any], inner: Mapping[int, Sequence[Any]]) -> list[Any]:
        """The level's arrays; values: by variable; inner: those of equations with levels, by their number."""
        arrays: list[Any] = [None] * len(self.level.types)
        for number, variable in self.values.items():
            value = values[variable]
            arrays[number] = vary(jax.random.key_data(value) if spec_of_aval(variable.aval).is_key else value)
        for number, start in self.starts.items():
            arrays[start : start + len(inner[number])] = inner[number]
        return arrays


def read_level(jaxpr: Jaxpr) -> ReadLevel:
    """The calls of a function."""
    if not has_calls(jaxpr):
        return ReadLevel(Level(), {}, {})
    return _LevelReader(views=_find_views(jaxpr)).read(jaxpr)


@dataclass(slots=True)
class _LevelReader:
    views: Mapping[Any, tuple[Any, int, int]]
    entries: list[Entry] = field(default_factory=list)
    types: list[ArraySpec] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)  # of arrays, by variable
    starts: dict[int, int] = field(default_factory=dict)

    def read(self, jaxpr: Jaxpr) -> ReadLevel:
        for number, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive.name in DEBUG_PRIMITIVES:
                operands = tuple(map(self._operand, eqn.invars))
                say = partial(_SAYERS[eqn.primitive.name], eqn.params)
                self.entries.append(DebugCall(say=say, operands=operands, where=_line_of(eqn)))
            elif any(map(has_calls, jaxprs_in_params(eqn.params))):
                self._read_inner(number, eqn)
        level = Level(entries=tuple(self.entries), types=tuple(self.types))
        return ReadLevel(level, {number: variable for variable, number in self.numbers.items()}, self.starts)

    def _operand(self, atom: Any) -> Operand:
        if isinstance(atom, Literal):
            return Operand(constant=np.asarray(atom.val, spec_of_aval(atom.aval).dtype)[()])
        entries: list[tuple[int, int]] = []
        while atom in self.views:
            atom, dimension, index = self.views[atom]
            entries.insert(0, (dimension, index))
        if atom not in self.numbers:
            self.numbers[atom] = len(self.types)
            self.types.append(_stored(spec_of_aval(atom.aval)))
        return Operand(number=self.numbers[atom], entries=tuple(entries))

    def _read_inner(self, number: int, eqn: JaxprEqn) -> None:
        self.starts[number] = start = len(self.types)
        params = eqn.params
        match eqn.primitive.name:
            case "scan":
                level, length = read_level(params["jaxpr"].jaxpr).level, params["length"]
                self.types += _stacked(level.types, length)
                self.entries.append(Trips(start=start, level=level, length=length, is_reversed=params["reverse"]))
            case "shard_map":  # each device's part has a trip of its own
                level, parts = read_level(params["jaxpr"]).level, count_parts(params)
                self.types += _stacked(level.types, parts)
                self.entries.append(Trips(start=start, level=level, length=parts, is_reversed=False))
            case "while":
                loop = read_loop(params, _line_of(eqn))
                self.types += loop.types
                self.entries.append(
                    OpenTrips(start=start, before=loop.before, level=loop.trip, kept=loop.kept, gap=loop.gap)
                )
            case "cond":
                levels = tuple(read_level(branch.jaxpr).level for branch in params["branches"])
                self.types += [_COUNT, *(kind for level in levels for kind in level.types)]
                self.entries.append(Branches(start=start, levels=levels))
            case _:
                function = next(params[name] for name in _FUNCTIONS if name in params)
                level = read_level(function.jaxpr if isinstance(function, ClosedJaxpr) else function).level
                self.types += level.types
                self.entries.append(Inner(start=start, level=level))


#: Type of a number of trips, and of a branch.
_COUNT = array_spec((), np.dtype("int32"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """A loop whose number of trips is not known.

    before: its condition, which runs once ahead of it; trip: its body, then the condition. kept: trips whose arrays are
    kept. gap: says how many are not.
    """

    before: Level
    trip: Level
    kept: int
    gap: DebugCall

    @property
    def types(self) -> tuple[ArraySpec, ...]:
        """Of its arrays in the level around it: how many trips there were, then those of both levels."""
        return (_COUNT, *self.before.types, *_stacked(self.trip.types, self.kept))


def read_loop(params: Mapping[str, Any], where: str = "") -> OpenLoop:
    """The calls of a `while` with these parameters."""
    test, body = (read_level(params[name].jaxpr).level for name in ("cond_jaxpr", "body_jaxpr"))
    after = Inner(start=len(body.types), level=test)
    trip = Level(entries=(*body.entries, *((after,) if test.entries else ())), types=body.types + test.types)
    trip_bytes = sum(int(np.prod(kind.shape)) * kind.dtype.itemsize for kind in trip.types)
    kept = max(2, min(DEBUG_TRIPS, DEBUG_LOOP_BYTES // max(trip_bytes, 1)))
    gap = DebugCall(say=partial(_say_gap, where), operands=(), where=where)
    return OpenLoop(before=test, trip=trip, kept=kept, gap=gap)


def _stored(spec: ArraySpec) -> ArraySpec:
    """Type of the array that holds such a value: of a key its words."""
    return array_spec(physical_shape(spec), np.dtype("uint32") if spec.is_key else spec.dtype)


def _stacked(types: Sequence[ArraySpec], trips: int) -> list[ArraySpec]:
    return [array_spec((trips, *kind.shape), kind.dtype) for kind in types]


def _line_of(eqn: JaxprEqn) -> str:
    return summarize(eqn.source_info)


def vary(array: Any) -> Any:
    """The array as one that may differ between the parts of a `shard_map` around it: all arrays of a level have one
    type then, whichever branch or trip they are of.
    """
    axes = get_abstract_mesh().manual_axes
    others = tuple(name for name in axes if name not in jax.typeof(array).mat.varying)
    return lax.pcast(array, others, to="varying") if others else array


def make_zeros(level: Level) -> list[Any]:
    """Arrays of a level that did not run."""
    return [vary(jnp.zeros(kind.shape, kind.dtype)) for kind in level.types]


def trace_open_loop(
    loop: OpenLoop,
    test: Callable[[Iterable[Any]], list[Any]],
    body: Callable[[Iterable[Any]], list[Any]],
    carry: Sequence[Any],
) -> list[Any]:
    """A loop with calls: what it carries in the end, and the arrays of `loop.types`.

    test, body: give those of their levels after their results. A condition with calls is evaluated at the end of each
    trip, so that its arrays are kept; another one stays as it is, for planners to read the number of trips from.
    """
    count, has_test = len(carry), bool(loop.before.entries)
    is_true, *before = test(carry) if has_test else [None]
    buffers = [vary(jnp.zeros((loop.kept, *kind.shape), kind.dtype)) for kind in loop.trip.types]

    def run(state: Any) -> Any:
        trip, _, carry, buffers = state
        outputs = body(carry)
        carry, arrays = outputs[:count], outputs[count:]
        is_true, *after = test(carry) if has_test else [None]
        place = jnp.minimum(trip, loop.kept - 1)
        buffers = [
            lax.dynamic_update_index_in_dim(buffer, array, place, 0)
            for buffer, array in zip(buffers, [*arrays, *after], strict=True)
        ]
        return trip + 1, is_true, carry, buffers

    def goes_on(state: Any) -> Any:
        return state[1] if has_test else test(state[2])[0]

    trips, _, carry, buffers = lax.while_loop(goes_on, run, (np.int32(0), is_true, list(carry), buffers))
    return [*carry, trips, *before, *buffers]


# ---- calls under vmap -------------------------------------------------------------


def _find_views(jaxpr: Jaxpr) -> dict[Any, tuple[Any, int, int]]:
    """Variables that are entries of another one, all of which are read: variable → (other one, dimension, index).

    `jax.vmap` writes a call once for each entry of the batch: one array then is read in the place of as many.
    """
    producers = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("slice", "squeeze")}
    read = [
        atom
        for eqn in jaxpr.eqns
        if eqn.primitive.name in DEBUG_PRIMITIVES
        for atom in eqn.invars
        if not isinstance(atom, Literal)
    ]
    views: dict[Any, tuple[Any, int, int]] = {}
    while read:
        groups: dict[tuple[Any, int], dict[int, list[Any]]] = {}
        for variable in read:
            entry = _entry_of(variable, producers)
            if entry is not None:
                source, dimension, index = entry
                groups.setdefault((source, dimension), {}).setdefault(index, []).append(variable)
        read = []
        for (source, dimension), variables in groups.items():
            if len(variables) == source.aval.shape[dimension]:
                views |= {each: (source, dimension, index) for index, same in variables.items() for each in same}
                read.append(source)
    return views


def _entry_of(variable: Any, producers: Mapping[Any, JaxprEqn]) -> tuple[Any, int, int] | None:
    """(other variable, dimension, index) of the entry that a variable is."""
    squeeze = producers.get(variable)
    if squeeze is None or squeeze.primitive.name != "squeeze" or len(squeeze.params["dimensions"]) != 1:
        return None
    cut = producers.get(squeeze.invars[0])
    if cut is None or cut.primitive.name != "slice" or isinstance(cut.invars[0], Literal):
        return None
    (dimension,) = squeeze.params["dimensions"]
    source, starts = cut.invars[0], cut.params["start_indices"]
    shape, sizes = spec_of_aval(cut.outvars[0].aval).shape, spec_of_aval(source.aval).shape
    is_whole = all(size == shape[n] for n, size in enumerate(sizes) if n != dimension)
    return (source, int(dimension), int(starts[dimension])) if is_whole else None


# ---- what a call does -------------------------------------------------------------


def _say_gap(where: str, prefix: str, values: Sequence[Any]) -> None:
    place = f" at {where}" if where else ""
    _write(f"{prefix}… {values[0]} trips of the loop{place} are left out: the next line is the last trip's")


def _print(params: Mapping[str, Any], prefix: str, values: Sequence[Any]) -> None:
    """A line of `jax.debug.print`, as JAX formats it."""
    static, passed = dict(params["static_args"]), iter(values)
    leaves = [static[n] if n in static else next(passed) for n in range(len(static) + len(values))]
    args, kwargs = jax.tree.unflatten(params["in_tree"], leaves)
    if params["has_placeholders"]:
        has_arrays = any(isinstance(leaf, np.ndarray) for leaf in leaves)
        with np.printoptions(**dict(params["np_printoptions"])) if has_arrays else nullcontext():
            text = params["fmt"].format(*args, **kwargs)
    else:
        text = " ".join((params["fmt"], *map(str, args)))
    record = params["logging_record"]
    if record is None:
        _write(prefix + text)
        return
    record = copy.copy(record)
    record.msg = prefix + text
    logging.getLogger(record.name).handle(record)


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")


def _call_back(params: Mapping[str, Any], prefix: str, values: Sequence[Any]) -> None:
    params["callback"](*values)


_SAYERS = {"debug_print": _print, "debug_callback": _call_back}
