"""What must be done to a traced function before it is lowered.

Two passes over a jaxpr: `refuse_unsupported` names host callbacks and
manual computations with their source lines, and `hoist_constants` makes large
closed-over arrays inputs (in HLO text a float costs 13 bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.extend.source_info_util import summarize

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.jax.custom_partitioning import ATTRIBUTE, PRIMITIVE, foreign_call, rule_of
from shardwright.client.limits import MIN_HOISTED_ELEMENTS
from shardwright.errors import UnsupportedProgramError

#: Primitive → what it is, in words. All of them need the client's process or its devices.
_UNSUPPORTED_PRIMITIVES = {
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
    "debug_callback": "jax.debug.callback",
    "debug_print": "jax.debug.print",
    "infeed": "infeed",
    "outfeed": "outfeed",
    "shard_map": "jax.shard_map or jax.pmap",  # the latter is written with the former
}

_REMEDIES = {
    "shard_map": "write that part without shard_map and pmap, for the whole batch and without psum and pmean: the "
    "planner shards it; pin dimensions with shardwright.annotate",
}

#: How an error that JAX raises while it traces begins → (what it is, what to do).
_TRACE_ERRORS = {
    "Found an unbound axis name": (
        "a collective over an axis of jax.pmap, jax.shard_map or jax.vmap stands outside of it",
        "leave psum, pmean and axis_name out: the step sees the whole batch, and its mean is the batch's",
    ),
    "Cannot abstractly evaluate a checkify.check": (
        "a checkify.check stands outside of checkify.checkify",
        "parallelize checkify.checkify(step), whose first result is the error",
    ),
}

_CALLBACK_REMEDY = "remove it, or return the value from the step and use it on the client"


def refuse_unsupported(closed: ClosedJaxpr, name: str) -> None:
    """Raises UnsupportedProgramError with every such call at its `file:line (function)`."""
    if any(isinstance(constant, jax.Ref) for constant in closed.consts):
        raise UnsupportedProgramError(
            f"{name} closes over a mutable array (jax.Ref), which servers do not hold",
            remedy="pass its value, ref[...], as an argument, and return the new one",
        )
    calls = {(eqn.primitive.name, summarize(eqn.source_info)): None for eqn in _equations(closed.jaxpr)}
    refused = [(primitive, line) for primitive, line in calls if primitive in _UNSUPPORTED_PRIMITIVES]
    if not refused:
        return
    lines = "".join(
        f"\n  {_UNSUPPORTED_PRIMITIVES[primitive]}{f' at {line}' if line else ''}" for primitive, line in refused
    )
    remedies = {_REMEDIES.get(primitive, _CALLBACK_REMEDY) for primitive, _ in refused}
    raise UnsupportedProgramError(
        f"{name} holds what cannot run on a server:{lines}", where=refused[0][1], remedy="; ".join(sorted(remedies))
    )


@contextmanager
def explain_trace_errors(name: str) -> Iterator[None]:
    """Rewords JAX errors with advice about `jax.jit` to advice about us; others come through."""
    try:
        yield
    except (NameError, ValueError) as error:
        for beginning, (what, remedy) in _TRACE_ERRORS.items():
            if str(error).startswith(beginning):
                first, _, _ = str(error).partition("\n")
                raise UnsupportedProgramError(f"{name}: {what} ({first})", remedy=remedy) from error
        raise


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _equations(inner)


# ---- constants ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HoistedFunction:
    """A traced function whose large closed-over arrays, and handles, are inputs.

    constants: the arrays, one per object. handles: arrays on the servers, likewise.
    evaluate: (constants and handles, flat arguments) → flat results; traceable.
    """

    constants: tuple[Any, ...]
    handles: tuple[RemoteArray, ...]
    evaluate: Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def hoist_constants(closed: ClosedJaxpr) -> HoistedFunction | None:
    """None unless the function captures a large constant or a handle, or a kernel has a sharding rule."""
    constants_by_id = {id(constant): constant for constant in _constants(closed)}
    handles = {key: constant for key, constant in constants_by_id.items() if isinstance(constant, RemoteArray)}
    constants = {
        key: constant for key, constant in constants_by_id.items() if key not in handles and _is_large(constant)
    }
    hoisted = constants | handles
    if not hoisted and not _is_partitioned(closed.jaxpr):
        return None

    def evaluate(values: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        return _Retracer(dict(zip(hoisted, values, strict=True))).evaluate_closed(closed, arguments)

    return HoistedFunction(constants=tuple(constants.values()), handles=tuple(handles.values()), evaluate=evaluate)


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


def _is_partitioned(jaxpr: Jaxpr) -> bool:
    """Whether something in a function was given a sharding rule."""
    return any(eqn.primitive.name == PRIMITIVE for eqn in _equations(jaxpr))


def _is_large(constant: Any) -> bool:
    return prod(getattr(constant, "shape", ())) >= MIN_HOISTED_ELEMENTS


class _Retracer:
    """Evaluates a jaxpr with some constants replaced by given values.

    Only equations with such a constant somewhere inside, or a kernel with a sharding rule, are retraced, through JAX's
    public functions; all others are bound unchanged, with their source lines.
    """

    def __init__(self, values: dict[int, Any]) -> None:
        self._values = values

    def evaluate_closed(self, closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        constants = [self._values.get(id(constant), constant) for constant in closed.consts]
        return self.evaluate_open(closed.jaxpr, [*constants, *arguments])

    def evaluate_open(self, jaxpr: Jaxpr, arguments: Sequence[Any]) -> list[Any]:
        """`arguments`: values of the constant variables, then of the input variables."""
        if not self._is_retraced(jaxpr.eqns):
            split = len(jaxpr.constvars)
            return list(jax.core.eval_jaxpr(jaxpr, arguments[:split], *arguments[split:]))
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))
        for eqn in jaxpr.eqns:
            inputs = [atom.val if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]
            values.update(zip(eqn.outvars, self._evaluate_equation(jaxpr, eqn, inputs), strict=True))
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]

    def _evaluate_equation(self, jaxpr: Jaxpr, eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        rule = _RETRACERS.get(eqn.primitive.name)
        if rule is not None and self._is_retraced([eqn]):
            return list(rule(self, eqn.params, inputs))
        values = {atom: value for atom, value in zip(eqn.invars, inputs, strict=True) if not isinstance(atom, Literal)}
        alone = jaxpr.replace(  # type: ignore[no-untyped-call]
            constvars=[], invars=list(values), outvars=list(eqn.outvars), eqns=[eqn]
        )
        return list(jax.core.eval_jaxpr(alone, (), *values.values()))

    def _is_retraced(self, equations: Sequence[JaxprEqn]) -> bool:
        if any(
            id(constant) in self._values for closed in _walk_closed_jaxprs(equations) for constant in _constants(closed)
        ):
            return True
        return any(
            eqn.primitive.name == PRIMITIVE or any(map(_is_partitioned, jaxprs_in_params(eqn.params)))
            for eqn in equations
        )

    # ---- one method for each kind of equation that holds functions -------------

    def trace_call(self, params: dict[str, Any], inputs: list[Any]) -> list[Any]:
        function = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        return (
            self.evaluate_closed(function, inputs)
            if isinstance(function, ClosedJaxpr)
            else self.evaluate_open(function, inputs)
        )

    def trace_remat(self, params: dict[str, Any], inputs: list[Any]) -> list[Any]:
        if params["prevent_cse"]:  # the recomputation must not be merged with the first computation
            inputs = list(lax.optimization_barrier(tuple(inputs)))  # type: ignore[no-untyped-call]
        return self.trace_call(params, inputs)

    def trace_partitioning(self, params: dict[str, Any], inputs: list[Any]) -> list[Any]:
        """The function of a `custom_partitioning`; its rule goes with its foreign call."""
        call = foreign_call(params["call"])
        rule = rule_of(params, call) if call is not None else None
        if call is None or rule is None:
            return self.evaluate_closed(params["call"], inputs)
        equation = call.equation
        operands = [inputs[number] for number in call.arguments]
        with set_xla_metadata(**{ATTRIBUTE: rule}):  # type: ignore[no-untyped-call]
            outputs = equation.primitive.bind(*operands, **equation.params)  # type: ignore[no-untyped-call]
        results = {number: value for number, value in zip(call.results, outputs, strict=True) if number is not None}
        return [results[number] for number in range(len(results))]

    def trace_scan(self, params: dict[str, Any], inputs: list[Any]) -> list[Any]:
        constants, carried = _scan_counts(params)
        carry_end = constants + carried

        def body(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = self.evaluate_closed(params["jaxpr"], [*inputs[:constants], *carry, *x])
            return results[:carried], results[carried:]

        carry, stacked = lax.scan(
            body, inputs[constants:carry_end], inputs[carry_end:],
            length=params["length"], reverse=params["reverse"], unroll=params["unroll"],
        )  # fmt: skip
        return [*carry, *stacked]

    def trace_while(self, params: dict[str, Any], inputs: list[Any]) -> list[Any]:
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        return list(
            lax.while_loop(
                lambda carry: self.evaluate_closed(params["cond_jaxpr"], [*inputs[:first], *carry])[0],
                lambda carry: self.evaluate_closed(params["body_jaxpr"], [*inputs[first:second], *carry]),
                inputs[second:],
            )
        )

    def trace_cond(self, params: dict[str, Any], inputs: list[Any]) -> list[Any]:
        branches = [
            lambda *operands, branch=branch: self.evaluate_closed(branch, operands) for branch in params["branches"]
        ]
        return list(lax.switch(inputs[0], branches, *inputs[1:]))


def _scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """(constants, carried values) at the head of a scan's inputs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()  # as newer jax writes it
    return len(constants), len(carry)


_RETRACERS: dict[str, Callable[[_Retracer, dict[str, Any], list[Any]], list[Any]]] = {
    "jit": _Retracer.trace_call,
    "closed_call": _Retracer.trace_call,
    "core_call": _Retracer.trace_call,
    "custom_jvp_call": _Retracer.trace_call,  # nothing is differentiated any more
    "custom_vjp_call": _Retracer.trace_call,
    PRIMITIVE: _Retracer.trace_partitioning,
    "remat2": _Retracer.trace_remat,
    "checkpoint": _Retracer.trace_remat,
    "scan": _Retracer.trace_scan,
    "while": _Retracer.trace_while,
    "cond": _Retracer.trace_cond,
}
