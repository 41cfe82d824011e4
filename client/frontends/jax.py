"""JAX front end: a function and the types of its arguments become HLO text.

Only public JAX is used. The text is the output of `jax.jit(...).lower(...)` on the cluster's platform, from any
machine, with every argument kept, large closed-over arrays turned into arguments, and source lines in its metadata.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import dtypes
from jax.extend.source_info_util import register_exclusion
from jax.tree_util import keystr, tree_flatten_with_path

from shardwright.client.annotate import keep_annotations
from shardwright.client.array_operators import keep_handles
from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.argnums import Argnames, Argnums, Parameters, resolve_argnums
from shardwright.client.frontends.arguments import flatten_arguments, is_too_wide, refusal, result_refusal, specs_of
from shardwright.client.frontends.jaxprs import (
    HoistedFunction,
    explain_trace_errors,
    hoist_constants,
    refuse_unsupported,
)
from shardwright.client.frontends.nnx_modules import find_changes, record_variables, require_unshared
from shardwright.dtypes import to_dtype, to_element_type
from shardwright.errors import ArrayError, OptionError
from shardwright.hlo.donation import pair_donors
from shardwright.xla import private

register_exclusion(__file__)  # source lines in programs are the user's

_STACK_FRAME = re.compile(r" stack_frame_id=\d+")
_ALIASES, _DONORS = "input_output_alias={", "buffer_donor={"
_ALIAS = re.compile(r"\{\s*(\d*)\s*\}:\s*\((\d+),")
_DONOR = re.compile(r"\((\d+),")


@dataclass(frozen=True, slots=True, eq=False)
class ArraySpec:
    """Type of one argument or result in JAX; `dtype` may be a PRNG key's.

    Made by `array_spec` only: equal types are the same object. The thousand types of a call are hashed and compared by
    identity.
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
def _intern_spec(shape: tuple[int, ...], dtype: Any, weak_type: bool) -> ArraySpec:
    return ArraySpec(shape, dtype, weak_type)


def array_spec(shape: tuple[int, ...], dtype: Any, weak_type: bool = False) -> ArraySpec:
    """The one ArraySpec of these values."""
    return _intern_spec(shape, dtype, weak_type)


@dataclass(frozen=True, slots=True)
class Signature:
    """Signature of a call: structure and types of its arguments, without their values.

    Two calls with equal signatures run the same program.
    statics: (position or keyword, value) of static arguments; positions first, ascending.
    tree: structure of (args, kwargs) without the static ones.
    specs: types of its leaves, in order.
    settings: JAX's, with effect on tracing: precision, promotion, x64, …
    """

    statics: tuple[tuple[int | str, Any], ...]
    tree: Any
    specs: tuple[ArraySpec, ...]
    settings: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayType:
    """A flat argument or result in the HLO text: name, HLO element type, shape.

    A PRNG key appears by its `uint32` data.
    """

    name: str
    element_type: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredProgram:
    """HLO text of one function under one signature, and the mapping of its flat numbers to pytrees.

    arguments: in the order of the program's parameters: the leaves of the call, with hoisted constants from
        `constants_at` on, then the captured handles.
    constants: the hoisted arrays.
    captured: handles in the function's closure, more leaves of every call.
    signature: of its calls.
    result_tree: structure of the function's result.
    results: types of its leaves, then of arrays changed in place (see `modules`).
    changed: leaves of the call replaced by those last results.
    aliases: output number → argument number updated in place.
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
    changed: tuple[int, ...]
    aliases: dict[int, int]
    captured: tuple[RemoteArray, ...] = field(default=(), compare=False)

    def with_captured(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of a call plus the captured handles, in the order of the program's arguments.

        Raises ArrayError on a handle deleted after tracing.
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
        """Equal for programs with no difference but their source lines."""
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
    """A user's function with its static and donated arguments, ready to be lowered.

    The arguments are `jax.jit`'s; a `jax.jit` keeps its own (see `argnums`). Raises OptionError on unknown numbers and
    names, and on arguments both static and donated.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        donate_argnums: Argnums = None,
        donate_argnames: Argnames = None,
        static_argnums: Argnums = None,
        static_argnames: Argnames = None,
    ) -> None:
        if not callable(fn):
            raise OptionError(
                f"fn is to be a function, not {type(fn).__name__}", where="fn", remedy="pass the step itself, uncalled"
            )
        self.fn = fn
        self.name: str = getattr(fn, "__name__", None) or type(fn).__name__
        self._parameters = Parameters(fn, self.name)
        self._static, self._donated = resolve_argnums(
            fn,
            self._parameters,
            static=(static_argnums, static_argnames),
            donated=(donate_argnums, donate_argnames),
        )

    def describe(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Callable[[Any], ArraySpec], settings: Any = None
    ) -> tuple[Signature, list[Any], Any]:
        """(signature, leaves, pytree without the static arguments) of a call.

        spec: returns the type of a leaf. settings: JAX's, with effect on tracing.
        Raises UnsupportedProgramError: a leaf is no array, by its path. OptionError: a static argument cannot be
        hashed.
        """
        statics, dynamic = self.split(args, kwargs)
        leaves, tree = flatten_arguments(dynamic, self.name)
        specs = specs_of(leaves, spec, dynamic, lambda: self._leaf_names(dynamic))
        signature = Signature(statics, tree, specs, settings)
        try:
            hash(signature)
        except TypeError as error:
            raise OptionError(
                f"a static argument of {self.name} cannot be hashed: {error}",
                where="static_argnums",
                remedy="pass one that can be: a tuple for a list, a frozen dataclass for a dict",
            ) from None
        return signature, leaves, dynamic

    def require_unshared(self, dynamic: Any) -> None:
        """Raises UnsupportedProgramError when two arguments hold one Flax NNX Variable."""
        require_unshared(dynamic, lambda: self._leaf_names(dynamic))

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[tuple[int | str, Any], ...], Any]:
        """(static arguments, the pytree of all others) of one call."""
        args, kwargs = self._parameters.bind_by_name(args, kwargs)
        static = self._static
        if not static.positions and not static.names:
            return (), (args, kwargs)
        by_position = tuple((number, args[number]) for number in static.positions if number < len(args))
        by_name = tuple((name, kwargs[name]) for name in static.names if name in kwargs)
        others = tuple(arg for number, arg in enumerate(args) if number not in static.positions)
        return by_position + by_name, (others, {key: kwargs[key] for key in kwargs if key not in static.names})

    def find_donated_leaves(self, dynamic: Any) -> frozenset[int]:
        """Numbers of the donated leaves of `dynamic` (the second item of `split`)."""
        args, kwargs = dynamic
        numbers: list[int] = []
        start = 0
        is_donated = [position in self._donated.positions for position in self._dynamic_positions(len(args))]
        is_donated += [key in self._donated.names for key in sorted(kwargs)]
        for is_gone, arg in zip(is_donated, [*args, *(kwargs[key] for key in sorted(kwargs))], strict=True):
            count = len(jax.tree.leaves(arg))
            if is_gone:
                numbers.extend(range(start, start + count))
            start += count
        return frozenset(numbers)

    def lower(self, signature: Signature, *, platform: str) -> LoweredProgram:
        """The program of `signature` for `platform` ("cpu", "cuda", "tpu", …).

        Raises UnsupportedProgramError: the program cannot travel. Errors of the function itself in tracing come
        through.
        """
        args, kwargs, marks = self._call(signature)
        changed: list[int] = []

        @functools.wraps(self.fn)
        def function(*args: Any, **kwargs: Any) -> Any:  # new each time: JAX caches by function, not by our annotations
            before = record_variables((args, kwargs))
            result = _require_arrays(self.fn(*args, **kwargs))
            new = find_changes(before, result)
            changed.extend(new)
            return result, list(new.values())

        with keep_annotations(), keep_handles(), jax.disable_jit(False), explain_trace_errors(self.name):
            traced = jax.jit(function, **marks, keep_unused=True).trace(*args, **kwargs)
            refuse_unsupported(traced.jaxpr, self.name)
            hoisted = hoist_constants(traced.jaxpr)
            result, new = traced.out_info
            if hoisted is not None:
                traced = self._trace_with_hoisted(hoisted, signature)
            text = traced.lower(lowering_platforms=(platform,)).as_text("hlo", debug_info=True)
        constants = tuple(_host_value(constant) for constant in (hoisted.constants if hoisted else ()))
        captured = hoisted.handles if hoisted else ()
        results, result_tree = jax.tree.flatten(result)
        constants_at = signature.tree.children()[0].num_leaves
        arguments = self._argument_types(signature, constants, captured, constants_at)
        names = self._leaf_names(jax.tree.unflatten(signature.tree, range(len(signature.specs))))
        outputs = _output_types(result, {names[n]: aval for n, aval in zip(changed, new, strict=True)})
        return LoweredProgram(
            name=self.name,
            signature=signature,
            hlo_text=text,
            arguments=arguments,
            outputs=outputs,
            constants=constants,
            constants_at=constants_at,
            result_tree=result_tree,
            results=tuple(_spec_of_aval(leaf) for leaf in [*results, *new]),
            changed=tuple(changed),
            aliases=aliases_of(text, arguments, outputs),
            captured=captured,
        )

    # ---- the pieces of `lower` -------------------------------------------------

    def _call(self, signature: Signature) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """(args, kwargs, options of `jax.jit`) of a call, with types in place of arrays."""
        others, kwargs = jax.tree.unflatten(signature.tree, [spec.aval for spec in signature.specs])
        args = list(others)
        for key, value in signature.statics:  # positions ascend, so each lands at its own place
            if isinstance(key, int):
                args.insert(key, value)
            else:
                kwargs[key] = value
        marks = {
            "static_argnums": tuple(key for key, _ in signature.statics if isinstance(key, int)),
            "static_argnames": tuple(key for key, _ in signature.statics if isinstance(key, str)),
            "donate_argnums": self._donated.positions,
            "donate_argnames": tuple(name for name in self._donated.names if name in kwargs) or None,
        }
        return tuple(args), kwargs, marks

    def _trace_with_hoisted(self, hoisted: HoistedFunction, signature: Signature) -> Any:
        """Retraces with the constants and handles in one more positional argument."""

        def function(*args: Any, **kwargs: Any) -> Any:
            return hoisted.evaluate(args[-1], jax.tree.leaves((args[:-1], kwargs)))

        function.__name__ = self.name
        args, kwargs = jax.tree.unflatten(signature.tree, [spec.aval for spec in signature.specs])
        positions = self._dynamic_positions(len(args))
        donated = tuple(n for n, position in enumerate(positions) if position in self._donated.positions)
        named = tuple(name for name in self._donated.names if name in kwargs)
        avals = tuple(spec_of(value).aval for value in (*hoisted.constants, *hoisted.handles))
        return jax.jit(function, donate_argnums=donated, donate_argnames=named, keep_unused=True).trace(
            *args, avals, **kwargs
        )

    def _dynamic_positions(self, count: int) -> list[int]:
        """Positions of the non-static ones of the call's `count` positional arguments."""
        positions: list[int] = []
        number = 0
        while len(positions) < count:
            if number not in self._static.positions:
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
        dynamic = jax.tree.unflatten(signature.tree, range(len(signature.specs)))
        names = self._leaf_names(dynamic)
        types = [array_type(name, spec) for name, spec in zip(names, signature.specs, strict=True)]
        hoisted = [
            ArrayType(name=f"constants[{n}]", element_type=to_element_type(c.dtype), shape=c.shape)
            for n, c in enumerate(constants)
        ]
        hoisted += [array_type(f"closed_over[{n}]", handle.spec) for n, handle in enumerate(captured)]
        types[constants_at:constants_at] = hoisted
        return tuple(types)

    def _leaf_names(self, dynamic: Any) -> list[str]:
        args, kwargs = dynamic
        named = [
            (self._parameters.name_at(n), arg) for n, arg in zip(self._dynamic_positions(len(args)), args, strict=True)
        ]
        named += [(key, kwargs[key]) for key in sorted(kwargs)]
        return [name + keystr(path) for name, arg in named for path, _ in tree_flatten_with_path(arg)[0]]


def spec_of(leaf: Any) -> ArraySpec:
    """Type of an argument leaf: numpy and JAX arrays, PRNG keys, Python scalars, types.

    Raises `arguments.refusal` on a leaf JAX cannot trace either.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _spec_of_aval(leaf)
    try:
        aval = jax.typeof(leaf)
    except (TypeError, ValueError, OverflowError):
        raise refusal(leaf) from None
    if type(aval) is not jax.core.ShapedArray or isinstance(leaf, jax.core.Tracer) or is_too_wide(aval.dtype):
        raise refusal(leaf)
    return _spec_of_aval(aval)


def spec_of_handle(handle: RemoteArray) -> ArraySpec:
    """`spec_of` a handle. Raises `arguments.refusal` when JAX computes with narrower types."""
    if is_too_wide(handle.spec.dtype):
        raise refusal(handle)
    return handle.spec


def spec_of_value(leaf: Any) -> ArraySpec:
    """`spec_of` a leaf with contents here. Raises `arguments.refusal` on any other."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise refusal(leaf)
    spec = spec_of(leaf)
    if isinstance(leaf, jax.Array) and (leaf.is_deleted() or not leaf.is_fully_addressable):
        raise refusal(leaf)
    return spec


def _require_arrays(result: Any) -> Any:
    """`result`. Raises `arguments.result_refusal` on a leaf other than an array."""
    for path, leaf in tree_flatten_with_path(result)[0]:
        try:
            jax.typeof(leaf)
        except (TypeError, ValueError, OverflowError):
            if not hasattr(leaf, "__jax_array__"):
                raise result_refusal(leaf, "result" + keystr(path)) from None
    return result


def _spec_of_aval(aval: Any) -> ArraySpec:
    return array_spec(tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False)))


def host_value(leaf: Any, spec: ArraySpec) -> np.ndarray:
    """The bytes of an argument leaf in the program's form: key data of a key, else its array."""
    if spec.is_key:
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf, dtype=spec.dtype)


def physical_shape(spec: ArraySpec) -> tuple[int, ...]:
    """Shape in the program: a PRNG key's `uint32` words form its last dimension."""
    return tuple(_key_data(spec).shape) if spec.is_key else spec.shape


def result_value(data: np.ndarray, spec: ArraySpec) -> Any:
    """Fetched contents converted to `jax.jit`'s result; of a key the key."""
    is_wide = not spec.is_key and spec.dtype.itemsize > 4
    with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
        value = jax.numpy.asarray(data)
    if spec.is_key:
        return jax.random.wrap_key_data(value, impl=_key_impl(spec.dtype))
    return private.make_weakly_typed(value) if spec.weak_type else value


@functools.lru_cache(maxsize=256)
def _key_data(spec: ArraySpec) -> Any:
    return jax.eval_shape(jax.random.key_data, _aval(spec.shape, spec.dtype))


def key_impl_name(spec: ArraySpec) -> str:
    """JAX's name of a PRNG key's implementation, e.g. "threefry2x32"."""
    return str(_key_impl(spec.dtype))


def spec_of_stored(element_type: str, shape: tuple[int, ...], *, key_impl: str, is_weak: bool) -> ArraySpec:
    """Type of an array with this form in programs; of a PRNG key when `key_impl` names its implementation."""
    if not key_impl:
        return array_spec(shape, to_dtype(element_type), is_weak)
    dtype = jax.eval_shape(lambda: jax.random.key(0, impl=key_impl)).dtype
    words = len(_key_data(array_spec((), dtype)).shape)
    return array_spec(shape[: len(shape) - words], dtype)


@functools.lru_cache(maxsize=16)
def _key_impl(dtype: Any) -> Any:
    key_impls: list[Any] = []
    jax.eval_shape(lambda key: key_impls.append(jax.random.key_impl(key)), _aval((), dtype))
    return key_impls[0]


def _aval(shape: tuple[int, ...], dtype: Any, *, weak_type: bool = False) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)  # type: ignore[no-untyped-call]


def _host_value(constant: Any) -> np.ndarray:
    return host_value(constant, spec_of(constant))


def array_type(name: str, spec: ArraySpec) -> ArrayType:
    """Program form of an array of this type."""
    dtype = np.dtype("uint32") if spec.is_key else spec.dtype
    return ArrayType(name=name, element_type=to_element_type(dtype), shape=physical_shape(spec))


def _output_types(result: Any, changed: Mapping[str, Any]) -> tuple[ArrayType, ...]:
    named = [("result" + keystr(path), leaf) for path, leaf in tree_flatten_with_path(result)[0]]
    return tuple(array_type(name, _spec_of_aval(leaf)) for name, leaf in [*named, *changed.items()])


def aliases_of(text: str, arguments: Sequence[ArrayType], outputs: Sequence[ArrayType]) -> dict[int, int]:
    """Output number → parameter number, from `input_output_alias={ {0}: (1, {}, may-alias) }`; donors in
    `buffer_donor={ (0, {}) }` are paired like in the planner.
    """
    header = text[: text.index("\n")]
    aliases = {int(output or 0): int(parameter) for output, parameter in _ALIAS.findall(_value(header, _ALIASES))}
    donors = map(int, _DONOR.findall(_value(header, _DONORS)))
    given, output_types = ([(array.element_type, array.shape) for array in types] for types in (arguments, outputs))
    return aliases | pair_donors(donors, given, output_types, aliases)


def _value(header: str, name: str) -> str:
    """The value of one attribute, up to the next attribute; '' if absent."""
    start = header.find(name)
    return header[start : header.find("=", start + len(name))] if start >= 0 else ""
