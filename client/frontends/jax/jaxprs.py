"""What must be done to a traced function before it is lowered.

Two passes over a jaxpr: `refuse_unsupported` names host callbacks and
`jax.pmap` with their source lines, and `hoist_constants` makes large
closed-over arrays inputs (in HLO text a float costs 13 bytes), and what
`jax.debug.print` reads results (`debug_equations.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.extend.source_info_util import current_name_stack, summarize, user_context
from jax.sharding import PartitionSpec

from shardwright.client.arrays import RemoteArray
from shardwright.client.debug_calls import Level
from shardwright.client.frontends.jax.custom_partitioning import PRIMITIVE, UNREAD, foreign_call, rule_of
from shardwright.client.frontends.jax.debug_equations import (
    DEBUG_PRIMITIVES,
    ReadLevel,
    has_calls,
    is_breakpoint,
    list_manual_axes,
    list_unfollowed,
    make_zeros,
    read_level,
    read_loop,
    scan_counts,
    trace_open_loop,
)
from shardwright.client.frontends.jax.equations import walk_equations
from shardwright.client.frontends.jax.kernel_forms import pallas_price
from shardwright.client.frontends.jax.wrapped_kernels import WrappedKernels
from shardwright.client.limits import MIN_HOISTED_ELEMENTS
from shardwright.errors import UnsupportedProgramError
from shardwright.kernels import PRICE_ATTRIBUTE, RULE_ATTRIBUTE

#: Primitive → what it is, in words. All of them need the client's process or its devices.
_UNSUPPORTED_PRIMITIVES = {
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
    "breakpoint": "jax.debug.breakpoint",
    "inspect_sharding": "jax.debug.inspect_array_sharding or visualize_array_sharding",
    "infeed": "infeed",
    "outfeed": "outfeed",
    "pmap": "jax.pmap",
}

#: The same of calls that the client makes, in functions that it does not follow.
_UNFOLLOWED_CALLS = {"debug_callback": "jax.debug.callback", "debug_print": "jax.debug.print"}
_UNFOLLOWED_REMEDY = "have that function return the value, and print it outside"

_REMEDIES = {
    "inspect_sharding": "return the value and look at its handle's sharding, or at step.plan.explain(): a step is "
    "traced before it has layouts",
    "pmap": "write that part without pmap, for the whole batch and without psum and pmean: the planner shards it; or "
    "with jax.shard_map, which is kept as it is written",
}

#: What an error says that JAX raises while it traces and lowers → (what it is, what to do).
_TRACE_ERRORS = {
    "Found an unbound axis name": (
        "a collective over an axis of jax.pmap, jax.shard_map or jax.vmap stands outside of it",
        "leave psum, pmean and axis_name out: the step sees the whole batch, and its mean is the batch's",
    ),
    "Cannot abstractly evaluate a checkify.check": (
        "a checkify.check stands outside of checkify.checkify",
        "parallelize checkify.checkify(step), whose first result is the error",
    ),
    "already bound by a parent sdy.manual_computation": (
        "JAX cannot lower a jax.shard_map in another one, as differentiation left it",
        "write the gradient of the outer one by hand (jax.custom_vjp), or make both one region over all their axes",
    ),
}

#: Where JAX has the function of a `jax.pmap`, which it writes as a `shard_map`.
_PMAP_SOURCE = "/jax/_src/pmap.py:"

_CALLBACK_REMEDY = "remove it, or return the value from the step and use it on the client"


def refuse_unsupported(closed: ClosedJaxpr, name: str) -> None:
    """Raises UnsupportedProgramError with every such call at its `file:line (function)`."""
    if any(isinstance(constant, jax.Ref) for constant in closed.consts):
        raise UnsupportedProgramError(
            f"{name} closes over a mutable array (jax.Ref), which servers do not hold",
            remedy="pass its value, ref[...], as an argument, and return the new one",
        )
    calls = {(_name_of(eqn), summarize(eqn.source_info)): None for eqn in walk_equations(closed.jaxpr)}
    refused = [
        (_UNSUPPORTED_PRIMITIVES[primitive], line, _REMEDIES.get(primitive, _CALLBACK_REMEDY))
        for primitive, line in calls
        if primitive in _UNSUPPORTED_PRIMITIVES
    ]
    refused += [
        (f"{_UNFOLLOWED_CALLS[eqn.primitive.name]} in a {holder}", summarize(eqn.source_info), _UNFOLLOWED_REMEDY)
        for eqn, holder in list_unfollowed(closed.jaxpr)
    ]
    if not refused:
        return
    lines = "".join(f"\n  {what}{f' at {line}' if line else ''}" for what, line, _ in refused)
    raise UnsupportedProgramError(
        f"{name} holds what cannot run on a server:{lines}",
        where=refused[0][1],
        remedy="; ".join(sorted({remedy for _, _, remedy in refused})),
    )


def _name_of(eqn: JaxprEqn) -> str:
    """The name of an equation's primitive, `pmap`, or `breakpoint`."""
    name = eqn.primitive.name
    if name == "debug_callback" and is_breakpoint(eqn):
        return "breakpoint"
    if name == "shard_map" and _PMAP_SOURCE in str(eqn.params["jaxpr"].debug_info):
        return "pmap"
    return name


@contextmanager
def explain_trace_errors(name: str) -> Iterator[None]:
    """Rewords JAX errors with advice about `jax.jit` to advice about us; others come through."""
    try:
        yield
    except (NameError, ValueError) as error:
        for said, (what, remedy) in _TRACE_ERRORS.items():
            if said in str(error):
                first, _, _ = str(error).partition("\n")
                raise UnsupportedProgramError(f"{name}: {what} ({first})", remedy=remedy) from error
        raise


# ---- constants ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HoistedFunction:
    """A traced function whose large closed-over arrays, and handles, are inputs.

    constants: the arrays, one per object. handles: arrays on the servers, likewise.
    evaluate: (constants and handles, flat arguments) → flat results, and after them the arrays of `debug`; traceable.
    debug: the calls of `jax.debug` in it.
    """

    constants: tuple[Any, ...]
    handles: tuple[RemoteArray, ...]
    evaluate: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    debug: Level


def hoist_constants(closed: ClosedJaxpr, platform: str, *, has_debug: bool = True) -> HoistedFunction | None:
    """None unless the function captures a large constant or a handle, a kernel has a sharding rule or a price, or it
    calls `jax.debug`; such calls are left out where `has_debug` is false.
    """
    kernels = WrappedKernels(platform)
    constants_by_id = {id(constant): constant for constant in _constants(closed)}
    handles = {key: constant for key, constant in constants_by_id.items() if isinstance(constant, RemoteArray)}
    constants = {
        key: constant for key, constant in constants_by_id.items() if key not in handles and _is_large(constant)
    }
    hoisted = constants | handles
    if not hoisted and not _is_partitioned(closed.jaxpr, kernels) and not has_calls(closed.jaxpr):
        return None
    read = read_level if has_debug else lambda jaxpr: ReadLevel(Level(), {}, {})

    def evaluate(values: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        return _Retracer(dict(zip(hoisted, values, strict=True)), kernels, read).evaluate_closed(closed, arguments)

    return HoistedFunction(
        constants=tuple(constants.values()),
        handles=tuple(handles.values()),
        evaluate=evaluate,
        debug=read(closed.jaxpr).level,
    )


def without_calls(function: Callable[..., Any], types: Any, platform: str) -> Callable[..., Any]:
    """A function of one pytree of these types that does not call `jax.debug`."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(types)
    if not has_calls(closed.jaxpr):
        return function
    silent = hoist_constants(closed, platform, has_debug=False)
    assert silent is not None

    def run(arguments: Any) -> Any:
        values = (*silent.constants, *silent.handles)
        return jax.tree.unflatten(jax.tree.structure(result), silent.evaluate(values, jax.tree.leaves(arguments)))

    return run


def _constants(closed: ClosedJaxpr) -> Iterator[Any]:
    yield from closed.consts
    for inner in _walk_closed_jaxprs(closed.jaxpr.eqns):
        yield from _constants(inner)


def _walk_closed_jaxprs(equations: Sequence[JaxprEqn]) -> Iterator[ClosedJaxpr]:
    """Closed jaxprs in the parameters of `equations`, at any depth of open ones."""
    for eqn in equations:
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, ClosedJaxpr):
                    yield item
                elif isinstance(item, Jaxpr):
                    yield from _walk_closed_jaxprs(item.eqns)


def _is_partitioned(jaxpr: Jaxpr, kernels: WrappedKernels) -> bool:
    """Whether something in a function was given a sharding rule, or a price."""
    return any(_is_kernel(eqn, kernels) for eqn in walk_equations(jaxpr))


def _is_kernel(eqn: JaxprEqn, kernels: WrappedKernels) -> bool:
    return eqn.primitive.name == PRIMITIVE or pallas_price(eqn) is not None or kernels.function_of(eqn) is not None


def _is_large(constant: Any) -> bool:
    return prod(getattr(constant, "shape", ())) >= MIN_HOISTED_ELEMENTS


class _Retracer:
    """Evaluates a jaxpr with some constants replaced by given values.

    Only equations with such a constant somewhere inside, a kernel with a sharding rule or a price, or a call of
    `jax.debug`, are retraced, through JAX's public functions; all others are bound unchanged, with their source lines.

    read_level: the calls of `jax.debug` in a jaxpr. What is evaluated gives the arrays of its level after its results.
    """

    def __init__(
        self, values: dict[int, Any], kernels: WrappedKernels, read_level: Callable[[Jaxpr], ReadLevel]
    ) -> None:
        self._values = values
        self._kernels = kernels
        self._read_level = read_level

    def evaluate_closed(
        self, closed: ClosedJaxpr, arguments: Sequence[Any], unread: frozenset[int] = frozenset()
    ) -> list[Any]:
        """Its results, then its arrays for `jax.debug`. unread: numbers of results that nobody reads."""
        constants = [self._values.get(id(constant), constant) for constant in closed.consts]
        return self.evaluate_open(closed.jaxpr, [*constants, *arguments], unread)

    def evaluate_open(self, jaxpr: Jaxpr, arguments: Sequence[Any], unread: frozenset[int] = frozenset()) -> list[Any]:
        """`arguments`: values of the constant variables, then of the input variables."""
        if not self._is_retraced(jaxpr.eqns):
            split = len(jaxpr.constvars)
            return list(jax.core.eval_jaxpr(jaxpr, arguments[:split], *arguments[split:]))
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))
        read = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars}
        read |= {id(atom) for number, atom in enumerate(jaxpr.outvars) if number not in unread}
        inner: dict[int, list[Any]] = {}
        for place, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive.name in DEBUG_PRIMITIVES:
                continue
            inputs = [atom.val if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]
            dropped = frozenset(number for number, atom in enumerate(eqn.outvars) if id(atom) not in read)
            outputs = self._evaluate_equation(jaxpr, eqn, inputs, dropped)
            values.update(zip(eqn.outvars, outputs, strict=False))
            inner[place] = outputs[len(eqn.outvars) :]
        results = [atom.val if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]
        return results + self._read_level(jaxpr).arrays(values, inner)

    def _evaluate_equation(self, jaxpr: Jaxpr, eqn: JaxprEqn, inputs: list[Any], unread: frozenset[int]) -> list[Any]:
        rule = _RETRACERS.get(eqn.primitive.name)
        if rule is not None and self._is_retraced([eqn]):
            names = current_name_stack() + eqn.source_info.name_stack
            with user_context(eqn.source_info.traceback, name_stack=names):
                return list(rule(self, eqn.params, inputs, unread))
        kernel = self._kernels.function_of(eqn)
        if kernel is not None:
            return self.evaluate_closed(kernel, inputs, unread)
        values = {atom: value for atom, value in zip(eqn.invars, inputs, strict=True) if not isinstance(atom, Literal)}
        alone = jaxpr.replace(  # type: ignore[no-untyped-call]
            constvars=[], invars=list(values), outvars=list(eqn.outvars), eqns=[eqn]
        )
        price = pallas_price(eqn)
        attributes = {PRICE_ATTRIBUTE: price.to_text()} if price else {}
        with set_xla_metadata(**attributes):  # type: ignore[no-untyped-call]  # the user's own goes before it
            return list(jax.core.eval_jaxpr(alone, (), *values.values()))

    def _is_retraced(self, equations: Sequence[JaxprEqn]) -> bool:
        if any(
            id(constant) in self._values for closed in _walk_closed_jaxprs(equations) for constant in _constants(closed)
        ):
            return True
        return any(
            _is_kernel(eqn, self._kernels)
            or eqn.primitive.name in DEBUG_PRIMITIVES
            or any(_is_partitioned(inner, self._kernels) or has_calls(inner) for inner in jaxprs_in_params(eqn.params))
            for eqn in equations
        )

    # ---- one method for each kind of equation that holds functions; unread: numbers of its results ----

    def trace_call(self, params: dict[str, Any], inputs: list[Any], unread: frozenset[int]) -> list[Any]:
        function = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        return (
            self.evaluate_closed(function, inputs, unread)
            if isinstance(function, ClosedJaxpr)
            else self.evaluate_open(function, inputs, unread)
        )

    def trace_remat(self, params: dict[str, Any], inputs: list[Any], unread: frozenset[int]) -> list[Any]:
        if params["prevent_cse"]:  # the recomputation must not be merged with the first computation
            inputs = list(lax.optimization_barrier(tuple(inputs)))  # type: ignore[no-untyped-call]
        return self.trace_call(params, inputs, unread)

    def trace_partitioning(self, params: dict[str, Any], inputs: list[Any], unread: frozenset[int]) -> list[Any]:
        """The function of a `custom_partitioning`; its rule goes with its foreign call."""
        call = foreign_call(params["call"], self._kernels.platform)
        rule = rule_of(params, call) if call is not None else None
        if call is None or rule is None:
            return self.evaluate_closed(params["call"], inputs, unread)
        equation = call.equation
        operands = [inputs[number] for number in call.inputs]
        dropped = [str(place) for place, number in enumerate(call.results) if number is None or number in unread]
        attributes = {RULE_ATTRIBUTE: rule} | ({UNREAD: ",".join(dropped)} if dropped else {})
        with set_xla_metadata(**attributes):  # type: ignore[no-untyped-call]
            outputs = equation.primitive.bind(*operands, **equation.params)  # type: ignore[no-untyped-call]
        outputs = outputs if equation.primitive.multiple_results else [outputs]
        results = {number: value for number, value in zip(call.outputs, outputs, strict=True) if number is not None}
        return [results[number] for number in range(len(results))]

    def trace_region(self, params: dict[str, Any], inputs: list[Any], unread: frozenset[int]) -> list[Any]:
        types, count = self._read_level(params["jaxpr"]).level.types, len(params["out_specs"])

        def run(*arguments: Any) -> list[Any]:
            outputs = self.evaluate_open(params["jaxpr"], arguments)
            return [*outputs[:count], *(array[None] for array in outputs[count:])]

        spec: Any = PartitionSpec  # JAX's has no types
        region = jax.shard_map(
            run, mesh=params["mesh"], in_specs=params["in_specs"],
            out_specs=[*params["out_specs"], *[spec(list_manual_axes(params))] * len(types)],
            axis_names=params["newly_manual_axes"], check_vma=params["check_vma"],
        )  # fmt: skip
        return list(region(*inputs))

    def trace_scan(self, params: dict[str, Any], inputs: list[Any], unread: frozenset[int]) -> list[Any]:
        constants, carried = scan_counts(params)
        carry_end = constants + carried

        def body(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = self.evaluate_closed(params["jaxpr"], [*inputs[:constants], *carry, *x])
            return results[:carried], results[carried:]

        carry, stacked = lax.scan(
            body, inputs[constants:carry_end], inputs[carry_end:],
            length=params["length"], reverse=params["reverse"], unroll=params["unroll"],
        )  # fmt: skip
        return [*carry, *stacked]

    def trace_while(self, params: dict[str, Any], inputs: list[Any], unread: frozenset[int]) -> list[Any]:
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def test(carry: Iterable[Any]) -> list[Any]:
            return self.evaluate_closed(params["cond_jaxpr"], [*inputs[:first], *carry])

        def body(carry: Iterable[Any]) -> list[Any]:
            return self.evaluate_closed(params["body_jaxpr"], [*inputs[first:second], *carry])

        levels = [self._read_level(params[name].jaxpr).level for name in ("cond_jaxpr", "body_jaxpr")]
        if not any(level.entries for level in levels):
            return list(lax.while_loop(lambda carry: test(carry)[0], body, inputs[second:]))
        return trace_open_loop(read_loop(params), test, body, inputs[second:])

    def trace_cond(self, params: dict[str, Any], inputs: list[Any], unread: frozenset[int]) -> list[Any]:
        levels = [self._read_level(branch.jaxpr).level for branch in params["branches"]]
        count = len(params["branches"][0].out_avals)

        def evaluate(number: int, operands: Sequence[Any]) -> list[Any]:
            outputs = self.evaluate_closed(params["branches"][number], operands)
            arrays = [make_zeros(level) if place != number else outputs[count:] for place, level in enumerate(levels)]
            return [*outputs[:count], *(array for own in arrays for array in own)]

        branches = [lambda *operands, number=number: evaluate(number, operands) for number in range(len(levels))]
        outputs = list(lax.switch(inputs[0], branches, *inputs[1:]))
        has_arrays = any(level.entries for level in levels)
        return [*outputs[:count], inputs[0], *outputs[count:]] if has_arrays else outputs


_RETRACERS: dict[str, Callable[[_Retracer, dict[str, Any], list[Any], frozenset[int]], list[Any]]] = {
    "jit": _Retracer.trace_call,
    "closed_call": _Retracer.trace_call,
    "core_call": _Retracer.trace_call,
    "custom_jvp_call": _Retracer.trace_call,  # nothing is differentiated any more
    "custom_vjp_call": _Retracer.trace_call,
    PRIMITIVE: _Retracer.trace_partitioning,
    "remat2": _Retracer.trace_remat,
    "checkpoint": _Retracer.trace_remat,
    "shard_map": _Retracer.trace_region,
    "scan": _Retracer.trace_scan,
    "while": _Retracer.trace_while,
    "cond": _Retracer.trace_cond,
}
