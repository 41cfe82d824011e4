"""JAX front end: a function and the types of its arguments become HLO text.

Only public JAX is used. The text is the output of `jax.jit(...).lower(...)` on the cluster's platform, from any
machine, with every argument kept, large closed-over arrays turned into arguments, and source lines in its metadata.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.source_info_util import register_exclusion
from jax.sharding import NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from shardwright.client.annotate import keep_annotations
from shardwright.client.array_operators import keep_handles
from shardwright.client.array_specs import (
    ArraySpec,
    ArrayType,
    array_type,
    host_value,
    spec_of,
    spec_of_aval,
    type_of,
    type_of_value,
)
from shardwright.client.arrays import RemoteArray
from shardwright.client.debug_calls import NO_CALLS
from shardwright.client.frontends.exports import serialize_function
from shardwright.client.frontends.jax.argnums import Argnames, Argnums, Parameters, resolve_argnums
from shardwright.client.frontends.jax.arguments import flatten_arguments, result_refusal, specs_of
from shardwright.client.frontends.jax.cudnn_calls import refuse_calls_of_cudnn
from shardwright.client.frontends.jax.donations import aliases_of, without_other_pairs
from shardwright.client.frontends.jax.explicit_axes import keep_argument_types
from shardwright.client.frontends.jax.given_shardings import given_sharding, lower_planned, note_need, with_sharding
from shardwright.client.frontends.jax.jaxprs import (
    HoistedFunction,
    explain_trace_errors,
    hoist_constants,
    refuse_unsupported,
    without_calls,
)
from shardwright.client.frontends.jax.memory_kinds import find_boundary_on_host, lies_on_host
from shardwright.client.frontends.jax.nnx_modules import find_changes, record_variables, require_unshared, write_back
from shardwright.client.frontends.program import Program
from shardwright.dtypes import to_element_type
from shardwright.errors import OptionError
from shardwright.placements import write_boundary
from shardwright.xla import private
from shardwright.xla.cudnn_checks import answer_checks

register_exclusion(str(Path(__file__).parents[2]))  # source lines in programs are the user's, none of the client's

#: Settings that change what is traced, though `jax.jit` itself traces nothing anew when they change.
_TRACED_SETTINGS = ("jax_default_prng_impl", "jax_enable_custom_prng", "jax_legacy_prng_key")


@dataclass(frozen=True, slots=True)
class Signature:
    """Signature of a call: structure and types of its arguments, without their values.

    Two calls with equal signatures run the same program.
    statics: (position or keyword, value) of static arguments; positions first, ascending.
    tree: structure of (args, kwargs) without the static ones.
    specs: types of its leaves, in order.
    settings: JAX's, with effect on tracing: precision, promotion, x64, …
    shardings, on_host: of the leaves, as they were given, and which lie on the host; no part of the signature: what the
        first call says holds.
    """

    statics: tuple[tuple[int | str, Any], ...]
    tree: Any
    specs: tuple[ArraySpec, ...]
    settings: Any = None
    shardings: tuple[NamedSharding | None, ...] = field(default=(), compare=False)
    on_host: frozenset[int] = field(default=frozenset(), compare=False)

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Of the leaves, with their shardings."""
        shardings = self.shardings or (None,) * len(self.specs)
        return [with_sharding(spec.aval, sharding) for spec, sharding in zip(self.specs, shardings, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lowered:
    """A function's text. out_info: JAX's, of (its result, new values). changed: numbers of leaves with new values.
    on_host: numbers of arguments and of results that the function puts there by its `jax.jit`s."""

    text: str
    hoisted: HoistedFunction | None
    out_info: Any
    changed: list[int]
    on_host: tuple[frozenset[int], frozenset[int]]


class JaxFunction:
    """A user's function with its static and donated arguments, ready to be lowered.

    The arguments are `jax.jit`'s; a `jax.jit` keeps its own (see `argnums`). has_debug: whether its programs say what
    `jax.debug` says in the function. Raises OptionError on unknown numbers and names, and on arguments both static and
    donated.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        donate_argnums: Argnums = None,
        donate_argnames: Argnames = None,
        static_argnums: Argnums = None,
        static_argnames: Argnames = None,
        has_debug: bool = True,
    ) -> None:
        if not callable(fn):
            raise OptionError(
                f"fn is to be a function, not {type(fn).__name__}", where="fn", remedy="pass the step itself, uncalled"
            )
        self.fn = fn
        self._has_debug = has_debug
        self.name: str = getattr(fn, "__name__", None) or type(fn).__name__
        self._parameters = Parameters(fn, self.name)
        self._static, self._donated = resolve_argnums(
            fn,
            self._parameters,
            static=(static_argnums, static_argnames),
            donated=(donate_argnums, donate_argnames),
        )

    def describe(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes_types: bool = False
    ) -> tuple[Signature, list[Any], Any]:
        """(signature, leaves, pytree without the static arguments) of a call; see `FrontEnd.describe`.

        Raises UnsupportedProgramError: a leaf is no array, by its path. OptionError: a static argument cannot be
        hashed.
        """
        statics, dynamic = self.split(args, kwargs)
        leaves, tree = flatten_arguments(dynamic, self.name)
        spec = type_of if takes_types else type_of_value
        specs = specs_of(leaves, spec, dynamic, lambda: self._leaf_names(dynamic))
        shardings = tuple(map(given_sharding, leaves))
        on_host = frozenset(number for number, leaf in enumerate(leaves) if lies_on_host(leaf))
        signature = Signature(statics, tree, specs, trace_settings(), shardings, on_host)
        try:
            hash(signature)
        except TypeError as error:
            raise OptionError(
                f"a static argument of {self.name} cannot be hashed: {error}",
                where="static_argnums",
                remedy="pass one that can be: a tuple for a list, a frozen dataclass for a dict",
            ) from None
        return signature, leaves, dynamic

    def check_arguments(self, arguments: Any) -> None:
        """Raises UnsupportedProgramError when two arguments hold one Flax NNX Variable."""
        require_unshared(arguments, lambda: self._leaf_names(arguments))

    def write_back(self, arguments: Any, program: Program, results: Sequence[Any]) -> None:
        """Puts new values of Flax NNX Variables into the caller's."""
        write_back(arguments, {leaf: results[output] for leaf, output in program.changed.items()})

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

    @staticmethod
    def join(signature: Signature, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of a call with these leaves and the signature's static arguments: `describe`, undone."""
        others, kwargs = jax.tree.unflatten(signature.tree, leaves)
        args = list(others)
        for key, value in signature.statics:  # positions ascend, so each lands at its own place
            if isinstance(key, int):
                args.insert(key, value)
            else:
                kwargs[key] = value
        return tuple(args), kwargs

    def _find_donated_leaves(self, dynamic: Any) -> frozenset[int]:
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

    def lower(self, signature: Signature, *, platform: str) -> Program:
        """The program of `signature` for `platform` ("cpu", "cuda", "tpu", …).

        Raises UnsupportedProgramError: the program cannot travel. Errors of the function itself in tracing come
        through.
        """
        with (
            keep_annotations(), keep_handles(), jax.disable_jit(False), explain_trace_errors(self.name),
            answer_checks(platform),
        ):  # fmt: skip
            lowered, need = lower_planned(lambda types: self._lower_text(signature, types, platform), signature.types)
        text, hoisted, changed = note_need(lowered.text, need), lowered.hoisted, lowered.changed
        if platform != "cuda":
            refuse_calls_of_cudnn(text, self.name, platform)
        result, new = lowered.out_info
        results, result_tree = jax.tree.flatten(result)
        constants_at = signature.tree.children()[0].num_leaves
        constants = tuple(_host_value(constant) for constant in (hoisted.constants if hoisted else ()))
        handles = hoisted.handles if hoisted else ()
        dynamic = jax.tree.unflatten(signature.tree, range(len(signature.specs)))
        names = self._leaf_names(dynamic)
        arguments = _argument_types(names, signature.specs, constants, handles, constants_at)
        outputs = _output_types(result, {names[n]: aval for n, aval in zip(changed, new, strict=True)})
        debug = hoisted.debug if hoisted else NO_CALLS
        aliases = aliases_of(text, arguments, outputs)
        if debug.types:
            text = without_other_pairs(text, aliases)
        hoisted_count = len(constants) + len(handles)
        host_arguments, host_results = lowered.on_host
        text = write_boundary(
            text,
            {leaf + (hoisted_count if leaf >= constants_at else 0) for leaf in signature.on_host | host_arguments},
            host_results,
        )
        return Program(
            name=self.name,
            hlo_text=text,
            arguments=arguments,
            outputs=(*outputs, *(array_type(f"debug[{n}]", kind) for n, kind in enumerate(debug.types))),
            aliases=aliases,
            donated=frozenset(
                leaf if leaf < constants_at else leaf + hoisted_count for leaf in self._find_donated_leaves(dynamic)
            ),
            specs=signature.specs,
            results=(*map(spec_of_aval, [*results, *new]), *debug.types),
            argument_tree=signature.tree,
            result_tree=result_tree,
            result_numbers=tuple(range(len(results))),
            changed={leaf: len(results) + n for n, leaf in enumerate(changed)},
            constants=dict(enumerate(constants, constants_at)),
            captured=dict(enumerate(handles, constants_at + len(constants))),
            debug=debug,
        )

    def export(self, signature: Signature, output_names: Sequence[str], *, platform: str) -> bytes:
        """The function in `jax.export`'s container; see `ExportingFrontEnd`. What it closes over is a part of it; calls
        of `jax.debug` are not.
        """
        names = self._leaf_names(jax.tree.unflatten(signature.tree, range(len(signature.specs))))

        def function(arguments: Mapping[str, Any]) -> dict[str, Any]:
            args, kwargs = self.join(signature, [arguments[name] for name in names])
            before = record_variables((args, kwargs))
            result = _require_arrays(self.fn(*args, **kwargs))
            outputs = [*jax.tree.leaves(result), *find_changes(before, result).values()]
            return dict(zip(output_names, outputs, strict=True))

        function.__name__ = self.name
        types = {name: spec.aval for name, spec in zip(names, signature.specs, strict=True)}
        with jax.disable_jit(False), explain_trace_errors(self.name), answer_checks(platform):
            return serialize_function(without_calls(function, types, platform), types, platform=platform)

    # ---- the pieces of `lower` -------------------------------------------------

    def _lower_text(self, signature: Signature, types: Sequence[jax.ShapeDtypeStruct], platform: str) -> _Lowered:
        """types: of the arguments' leaves, with their shardings."""
        args, kwargs = self.join(signature, types)
        changed: list[int] = []

        @functools.wraps(self.fn)
        def function(*args: Any, **kwargs: Any) -> Any:  # new each time: JAX caches by function, not by our annotations
            keep_argument_types(jax.tree.leaves(self.split(args, kwargs)[1]), types)
            before = record_variables((args, kwargs))
            result = _require_arrays(self.fn(*args, **kwargs))
            new = find_changes(before, result)
            changed.extend(new)
            return result, list(new.values())

        traced = jax.jit(function, **self._marks(signature, kwargs), keep_unused=True).trace(*args, **kwargs)
        refuse_unsupported(traced.jaxpr, self.name)
        on_host = find_boundary_on_host(traced.jaxpr)
        hoisted = hoist_constants(traced.jaxpr, platform, has_debug=self._has_debug)
        out_info = traced.out_info
        if hoisted is not None:
            traced = self._trace_with_hoisted(hoisted, signature, types)
        text = traced.lower(lowering_platforms=(platform,)).as_text("hlo", debug_info=True)
        return _Lowered(text=text, hoisted=hoisted, out_info=out_info, changed=changed, on_host=on_host)

    def _marks(self, signature: Signature, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Options of `jax.jit` for a call with these keywords."""
        return {
            "static_argnums": tuple(key for key, _ in signature.statics if isinstance(key, int)),
            "static_argnames": tuple(key for key, _ in signature.statics if isinstance(key, str)),
            "donate_argnums": self._donated.positions,
            "donate_argnames": tuple(name for name in self._donated.names if name in kwargs) or None,
        }

    def _trace_with_hoisted(
        self, hoisted: HoistedFunction, signature: Signature, types: Sequence[jax.ShapeDtypeStruct]
    ) -> Any:
        """Retraces with the constants and handles in one more positional argument."""

        def function(*args: Any, **kwargs: Any) -> Any:
            return hoisted.evaluate(args[-1], jax.tree.leaves((args[:-1], kwargs)))

        function.__name__ = self.name
        args, kwargs = jax.tree.unflatten(signature.tree, types)
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

    def _leaf_names(self, dynamic: Any) -> list[str]:
        args, kwargs = dynamic
        named = [
            (self._parameters.name_at(n), arg) for n, arg in zip(self._dynamic_positions(len(args)), args, strict=True)
        ]
        named += [(key, kwargs[key]) for key in sorted(kwargs)]
        return [name + keystr(path) for name, arg in named for path, _ in tree_flatten_with_path(arg)[0]]


def trace_settings() -> Any:
    """Equal, with equal hashes, under equal settings of tracing and lowering."""
    return private.trace_context(), *(getattr(jax.config, name) for name in _TRACED_SETTINGS)


def _require_arrays(result: Any) -> Any:
    """`result`. Raises `arguments.result_refusal` on a leaf other than an array."""
    for path, leaf in tree_flatten_with_path(result)[0]:
        try:
            jax.typeof(leaf)
        except (TypeError, ValueError, OverflowError):
            if not hasattr(leaf, "__jax_array__"):
                raise result_refusal(leaf, "result" + keystr(path)) from None
    return result


def _host_value(constant: Any) -> np.ndarray:
    return host_value(constant, spec_of(constant))


def _argument_types(
    names: Sequence[str],
    specs: Sequence[ArraySpec],
    constants: Sequence[np.ndarray],
    handles: Sequence[RemoteArray],
    constants_at: int,
) -> tuple[ArrayType, ...]:
    types = [array_type(name, spec) for name, spec in zip(names, specs, strict=True)]
    hoisted = [
        ArrayType(name=f"constants[{n}]", element_type=to_element_type(c.dtype), shape=c.shape)
        for n, c in enumerate(constants)
    ]
    hoisted += [array_type(f"closed_over[{n}]", handle.spec) for n, handle in enumerate(handles)]
    return (*types[:constants_at], *hoisted, *types[constants_at:])


def _output_types(result: Any, changed: Mapping[str, Any]) -> tuple[ArrayType, ...]:
    named = [("result" + keystr(path), leaf) for path, leaf in tree_flatten_with_path(result)[0]]
    return tuple(array_type(name, spec_of_aval(leaf)) for name, leaf in [*named, *changed.items()])
