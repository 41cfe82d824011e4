"""JAX front end: a function and the types of its arguments become HLO text.

Only public JAX is used. The text is what `jax.jit(...).lower(...)` prints for the
cluster's platform, on any machine, with every argument kept, large closed-over
arrays turned into arguments, and source lines in its metadata.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import dtypes
from jax.extend.source_info_util import register_exclusion
from jax.tree_util import keystr, tree_flatten_with_path

from shardwright.client.annotate import annotations_kept
from shardwright.client.array_operators import handles_kept
from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.jaxprs import Hoisted, hoist_constants, refuse_what_cannot_travel
from shardwright.dtypes import to_dtype, to_element_type
from shardwright.errors import ArrayError, OptionError, UnsupportedProgramError
from shardwright.hlo.donors import pair_donors
from shardwright.xla import private

register_exclusion(__file__)  # source lines in programs are the user's

_STACK_FRAME = re.compile(r" stack_frame_id=\d+")
_ALIASES, _DONORS = "input_output_alias={", "buffer_donor={"
_ALIAS = re.compile(r"\{\s*(\d*)\s*\}:\s*\((\d+),")
_DONOR = re.compile(r"\((\d+),")


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, eq=False)
class ArraySpec:
    """Type of one argument or result as JAX sees it; `dtype` may be a PRNG key's.

    Made by `array_spec` only: equal types are the same object, so that the thousand
    types of a call are hashed and compared by identity.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool

    @property
    def is_key(self) -> bool:
        return not isinstance(self.dtype, np.dtype) and bool(jax.numpy.issubdtype(self.dtype, dtypes.prng_key))

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return _aval(self.shape, self.dtype, weak_type=self.weak_type)


@functools.cache
def _interned(shape: tuple[int, ...], dtype: Any, weak_type: bool) -> ArraySpec:
    return ArraySpec(shape, dtype, weak_type)


def array_spec(shape: tuple[int, ...], dtype: Any, weak_type: bool = False) -> ArraySpec:
    """The one ArraySpec of these values."""
    return _interned(shape, dtype, weak_type)


@dataclass(frozen=True, slots=True)
class Signature:
    """How a function is called: what its arguments are, whatever their values.

    Two calls with equal signatures run the same program.
    statics: (position, value) of static arguments.
    tree: structure of (args, kwargs) without the static ones.
    specs: types of its leaves, in order.
    settings: JAX's, as far as they change what is traced: precision, promotion, x64, …
    """

    statics: tuple[tuple[int, Any], ...]
    tree: Any
    specs: tuple[ArraySpec, ...]
    settings: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayType:
    """A flat argument or result as it stands in the HLO text: name, HLO element type, shape.

    A PRNG key stands there as its `uint32` data.
    """

    name: str
    element_type: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredProgram:
    """HLO text of one function for one signature, and how its flat numbers map to pytrees.

    arguments: in the order of the program's parameters: the leaves of the call, with
        hoisted constants from `constants_at` on, then what the function closes over on the servers.
    constants: the hoisted arrays.
    captured: handles that the function closes over, more leaves of every call.
    signature: of the calls it serves.
    result_tree / results: structure of what the function returns, and its leaves.
    aliases: output number → argument number that it updates in place.
    """

    name: str
    signature: Signature
    hlo_text: str
    arguments: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    constants: tuple[np.ndarray, ...]
    constants_at: int
    result_tree: Any
    results: tuple[ArraySpec, ...]
    aliases: dict[int, int]
    captured: tuple[RemoteArray, ...] = field(default=(), compare=False)

    def with_captured(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of a call with what the function closes over, in the order of the program's arguments.

        Raises ArrayError for a handle that is gone since the function was traced.
        """
        for handle in self.captured:
            if handle.is_deleted():
                raise ArrayError(
                    f"{self.name} closes over an array of shape {list(handle.shape)} that was {handle.why_deleted}",
                    remedy="pass it as an argument: a step keeps what it closed over when it was first called",
                )
        return [*leaves[: self.constants_at], *self.captured, *leaves[self.constants_at :]]

    @property
    def leaf_specs(self) -> tuple[ArraySpec, ...]:
        """Types of `with_captured(leaves)`."""
        specs, at = self.signature.specs, self.constants_at
        return (*specs[:at], *(handle.spec for handle in self.captured), *specs[at:])

    def as_text(self) -> str:
        """The HLO text."""
        return self.hlo_text

    @property
    def identity(self) -> str:
        """Equal for programs that differ only in the source lines that they were traced from."""
        start, end = self.hlo_text.find("\nFileNames\n"), self.hlo_text.find("\nStackFrames\n")
        tables_end = self.hlo_text.find("\n\n", end + 1) if 0 <= start < end else -1
        text = self.hlo_text if tables_end < 0 else self.hlo_text[:start] + self.hlo_text[tables_end:]
        return hashlib.sha256(_STACK_FRAME.sub("", text).encode()).hexdigest()

    @property
    def argument_names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(output.name for output in self.outputs)


class JaxFunction:
    """A user's function with its `donate_argnums` and `static_argnums`, ready to be lowered.

    Raises OptionError for numbers that are not integers or are both static and donated.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
    ) -> None:
        if not callable(fn):
            raise OptionError(
                f"fn is to be a function, not {type(fn).__name__}", where="fn", remedy="pass the step itself, uncalled"
            )
        self.fn = fn
        self.name: str = getattr(fn, "__name__", None) or type(fn).__name__
        self._signature = _signature_of(fn)
        self.static_argnums = self._positions(static_argnums, "static_argnums")
        self.donate_argnums = self._positions(donate_argnums, "donate_argnums")
        if both := set(self.static_argnums) & set(self.donate_argnums):
            raise OptionError(
                f"argument {min(both)} is both static and donated",
                where="donate_argnums",
                remedy="leave it out of one: a static argument is no array",
            )

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[tuple[int, Any], ...], Any]:
        """(static arguments, the pytree of all others) of one call."""
        if kwargs and self._signature is not None:
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        if not self.static_argnums:
            return (), (args, kwargs)
        statics = tuple((number, args[number]) for number in self.static_argnums if number < len(args))
        return statics, (tuple(arg for n, arg in enumerate(args) if n not in self.static_argnums), kwargs)

    def donated_leaves(self, dynamic: Any) -> frozenset[int]:
        """Numbers of the leaves of `dynamic` (the second item of `split`) that are donated."""
        args, _ = dynamic
        numbers: list[int] = []
        start = 0
        for position, arg in zip(self._dynamic_positions(len(args)), args, strict=True):
            count = len(jax.tree.leaves(arg))
            if position in self.donate_argnums:
                numbers.extend(range(start, start + count))
            start += count
        return frozenset(numbers)

    def lower(self, signature: Signature, *, platform: str) -> LoweredProgram:
        """The program of `signature` for `platform` ("cpu", "cuda", "tpu", …).

        Raises UnsupportedProgramError for what cannot travel; whatever the function
        itself raises while it is traced comes through.
        """
        args, kwargs = self._avals(signature)
        static = tuple(number for number, _ in signature.statics)

        @functools.wraps(self.fn)
        def function(*args: Any, **kwargs: Any) -> Any:  # new each time: JAX caches by function, not by our annotations
            return self.fn(*args, **kwargs)

        with annotations_kept(), handles_kept(), jax.disable_jit(False):
            traced = jax.jit(
                function, static_argnums=static, donate_argnums=self.donate_argnums, keep_unused=True
            ).trace(*args, **kwargs)
            refuse_what_cannot_travel(traced.jaxpr, self.name)
            hoisted = hoist_constants(traced.jaxpr)
            results, result_tree = jax.tree.flatten(traced.out_info)
            constants_at = len(jax.tree.leaves(self._dynamic(args)))
            if hoisted is not None:
                traced = self._trace_hoisted(hoisted, signature)
            text = traced.lower(lowering_platforms=(platform,)).as_text("hlo", debug_info=True)
        constants = tuple(_host_value(constant) for constant in (hoisted.constants if hoisted else ()))
        captured = hoisted.handles if hoisted else ()
        result_specs = tuple(_spec_of_aval(leaf) for leaf in results)
        arguments = self._argument_types(signature, constants, captured, constants_at)
        outputs = _output_types(jax.tree.unflatten(result_tree, results))
        return LoweredProgram(
            name=self.name,
            signature=signature,
            hlo_text=text,
            arguments=arguments,
            outputs=outputs,
            constants=constants,
            constants_at=constants_at,
            result_tree=result_tree,
            results=result_specs,
            aliases=aliases_of(text, arguments, outputs),
            captured=captured,
        )

    # ---- the pieces of `lower` -------------------------------------------------

    def _trace_hoisted(self, hoisted: Hoisted, signature: Signature) -> Any:
        """Traced again with the constants and handles as one more positional argument."""

        def function(*args: Any, **kwargs: Any) -> Any:
            return hoisted.evaluate(args[-1], jax.tree.leaves((args[:-1], kwargs)))

        function.__name__ = self.name
        args, kwargs = jax.tree.unflatten(signature.tree, [spec.aval for spec in signature.specs])
        positions = self._dynamic_positions(len(args))
        donated = tuple(n for n, position in enumerate(positions) if position in self.donate_argnums)
        avals = tuple(spec_of(value).aval for value in (*hoisted.constants, *hoisted.handles))
        return jax.jit(function, donate_argnums=donated, keep_unused=True).trace(*args, avals, **kwargs)

    def _avals(self, signature: Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dynamic, kwargs = jax.tree.unflatten(signature.tree, [spec.aval for spec in signature.specs])
        args = list(dynamic)
        for number, value in signature.statics:  # ascending, so each lands at its own place
            args.insert(number, value)
        return tuple(args), kwargs

    def _dynamic(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(arg for number, arg in enumerate(args) if number not in self.static_argnums)

    def _dynamic_positions(self, count: int) -> list[int]:
        """Positions in the call of the `count` positional arguments that are not static."""
        positions: list[int] = []
        number = 0
        while len(positions) < count:
            if number not in self.static_argnums:
                positions.append(number)
            number += 1
        return positions

    def _argument_types(
        self,
        signature: Signature,
        constants: Sequence[np.ndarray],
        captured: Sequence[RemoteArray],
        constants_at: int,
    ) -> tuple[ArrayType, ...]:
        names = self._leaf_names(signature)
        types = [array_type(name, spec) for name, spec in zip(names, signature.specs, strict=True)]
        hoisted = [
            ArrayType(name=f"constants[{n}]", element_type=to_element_type(c.dtype), shape=c.shape)
            for n, c in enumerate(constants)
        ]
        hoisted += [array_type(f"closed_over[{n}]", handle.spec) for n, handle in enumerate(captured)]
        types[constants_at:constants_at] = hoisted
        return tuple(types)

    def _leaf_names(self, signature: Signature) -> list[str]:
        args, kwargs = jax.tree.unflatten(signature.tree, range(len(signature.specs)))
        names: list[str] = []
        for position, arg in zip(self._dynamic_positions(len(args)), args, strict=True):
            names += [self._parameter_name(position) + keystr(path) for path, _ in tree_flatten_with_path(arg)[0]]
        for key in sorted(kwargs):
            names += [key + keystr(path) for path, _ in tree_flatten_with_path(kwargs[key])[0]]
        return names

    def _parameter_name(self, position: int) -> str:
        parameters = list(self._signature.parameters.values()) if self._signature else []
        for number, parameter in enumerate(parameters):
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                return f"{parameter.name}[{position - number}]"
            if number == position:
                return parameter.name
        return f"args[{position}]"

    def _positions(self, numbers: int | Sequence[int], where: str) -> tuple[int, ...]:
        listed = (numbers,) if isinstance(numbers, int) else tuple(numbers)
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in listed):
            raise OptionError(
                f"{listed!r} are not argument numbers", where=where, remedy="write integers, such as (0, 1)"
            )
        kinds = [parameter.kind for parameter in self._signature.parameters.values()] if self._signature else []
        count = len([kind for kind in kinds if kind in _POSITIONAL])
        has_most = self._signature is not None and inspect.Parameter.VAR_POSITIONAL not in kinds
        for number in listed:
            if number < -count or (has_most and number >= count):
                raise OptionError(
                    f"{self.name} has {count} positional parameters, so {number} names none",
                    where=where,
                    remedy=f"number them from 0 to {count - 1}" if count else "leave it out",
                )
        return tuple(sorted({number % count if number < 0 else number for number in listed}))


def spec_of(leaf: Any) -> ArraySpec:
    """Type of an argument leaf: numpy and JAX arrays, PRNG keys, Python scalars.

    Raises UnsupportedProgramError for a leaf that JAX cannot trace either.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _spec_of_aval(leaf)
    try:
        return _spec_of_aval(jax.typeof(leaf))
    except TypeError:
        kind = f"numpy array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
        raise UnsupportedProgramError(
            f"an argument leaf is a {kind}, which JAX cannot trace",
            remedy="pass arrays and numbers, or name the argument in static_argnums",
        ) from None


def _spec_of_aval(aval: Any) -> ArraySpec:
    return array_spec(tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False)))


def host_value(leaf: Any, spec: ArraySpec) -> np.ndarray:
    """The bytes of an argument leaf as they stand in the program: key data for a key, else its array."""
    if spec.is_key:
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf, dtype=spec.dtype)


def physical_shape(spec: ArraySpec) -> tuple[int, ...]:
    """Shape in the program: a PRNG key has its `uint32` words as last dimension."""
    return tuple(_key_data(spec).shape) if spec.is_key else spec.shape


def result_value(data: np.ndarray, spec: ArraySpec) -> Any:
    """Fetched contents as the JAX array that `jax.jit` would have returned; for a key the key."""
    is_wide = not spec.is_key and spec.dtype.itemsize > 4
    with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
        value = jax.numpy.asarray(data)
    if spec.is_key:
        return jax.random.wrap_key_data(value, impl=_key_impl(spec.dtype))
    return private.weakly_typed(value) if spec.weak_type else value


@functools.lru_cache(maxsize=256)
def _key_data(spec: ArraySpec) -> Any:
    return jax.eval_shape(jax.random.key_data, _aval(spec.shape, spec.dtype))


def key_impl_name(spec: ArraySpec) -> str:
    """JAX's name of a PRNG key's implementation, e.g. "threefry2x32"."""
    return str(_key_impl(spec.dtype))


def stored_spec(element_type: str, shape: tuple[int, ...], *, key_impl: str, is_weak: bool) -> ArraySpec:
    """Type of an array that stands in programs like this; of a PRNG key where `key_impl` names its implementation."""
    if not key_impl:
        return array_spec(shape, to_dtype(element_type), is_weak)
    dtype = jax.eval_shape(lambda: jax.random.key(0, impl=key_impl)).dtype
    words = len(_key_data(array_spec((), dtype)).shape)
    return array_spec(shape[: len(shape) - words], dtype)


@functools.lru_cache(maxsize=16)
def _key_impl(dtype: Any) -> Any:
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), _aval((), dtype))
    return found[0]


def _aval(shape: tuple[int, ...], dtype: Any, *, weak_type: bool = False) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)  # type: ignore[no-untyped-call]


def _host_value(constant: Any) -> np.ndarray:
    return host_value(constant, spec_of(constant))


def array_type(name: str, spec: ArraySpec) -> ArrayType:
    """How an array of that type stands in programs."""
    dtype = np.dtype("uint32") if spec.is_key else spec.dtype
    return ArrayType(name=name, element_type=to_element_type(dtype), shape=physical_shape(spec))


def _output_types(out_info: Any) -> tuple[ArrayType, ...]:
    leaves, _ = tree_flatten_with_path(out_info)
    return tuple(array_type("result" + keystr(path), _spec_of_aval(leaf)) for path, leaf in leaves)


def aliases_of(text: str, arguments: Sequence[ArrayType], outputs: Sequence[ArrayType]) -> dict[int, int]:
    """Output number → parameter number, from `input_output_alias={ {0}: (1, {}, may-alias) }`, and as the planner pairs
    what `buffer_donor={ (0, {}) }` leaves open."""
    header = text[: text.index("\n")]
    aliases = {int(output or 0): int(parameter) for output, parameter in _ALIAS.findall(_value(header, _ALIASES))}
    donors = map(int, _DONOR.findall(_value(header, _DONORS)))
    given, made = ([(each.element_type, each.shape) for each in types] for types in (arguments, outputs))
    return aliases | pair_donors(donors, given, made, aliases)


def _value(header: str, name: str) -> str:
    """The value of one attribute, as far as the attribute after it; '' where there is none."""
    start = header.find(name)
    return header[start : header.find("=", start + len(name))] if start >= 0 else ""


def _signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None
