"""Sharding rules of kernels inside `jax.experimental.custom_partitioning`, carried to the planner.

Lowered for one device, JAX inlines the decorated function. Three cases:

- JAX code: the planner splits it like any other.
- One call of a foreign function (`jax.ffi.ffi_call`, or a primitive that is lowered to one custom call): the declared
  rule is written onto the call in Shardy's syntax (the planner reads it in `rules/declared_rules.py`), with the numbers
  of results that nobody reads.
- A kernel compiled for the sizes of its arrays (Pallas, Triton), or one with callbacks only: it stays whole; callbacks
  run inside the partitioner.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.experimental.custom_partitioning import BATCHING, SdyShardingRule, custom_partitioning
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.interpreters.mlir import dtype_to_ir_type

from shardwright.xla.lowering_rules import CallForm, one_custom_call

PRIMITIVE = "custom_partitioning"

#: The frontend attribute of a call that names the results which nobody reads, by number.
UNREAD = "shardwright.unread_results"

#: Equations that only run what they hold.
_WRAPPERS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}

_SYMBOLS = "ijklmnopqrstuvwxyz"

#: Per dimension, the factors that it is made of, major first.
Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCall:
    """The one foreign call made by a function: on the function's own arguments, in any order.

    inputs / outputs: of the equation that makes it, the function's argument, and the function's result; None: dropped.
    arguments: per operand of the call, the function's argument. results: per result of the call, the function's result;
    None: dropped. shapes: of the call's results.
    """

    equation: JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    arguments: tuple[int, ...]
    results: tuple[int | None, ...]
    shapes: tuple[tuple[int, ...], ...]


def foreign_call(function: ClosedJaxpr, platform: str) -> ForeignCall | None:
    """The foreign call that `function` consists of; None otherwise."""
    jaxpr = function.jaxpr
    while len(jaxpr.eqns) == 1 and (key := _WRAPPERS.get(jaxpr.eqns[0].primitive.name)) is not None:
        (equation,) = jaxpr.eqns
        inner = equation.params.get(key)
        inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
        if not isinstance(inner, Jaxpr) or not _is_alone(jaxpr, equation):
            return None
        jaxpr = inner
    if len(jaxpr.eqns) != 1:
        return None
    (equation,) = jaxpr.eqns
    place = {variable: number for number, variable in enumerate(jaxpr.invars)}
    output_numbers = {
        variable: number for number, variable in enumerate(jaxpr.outvars) if not isinstance(variable, Literal)
    }
    if any(isinstance(atom, Literal) or atom not in place for atom in equation.invars):
        return None
    if not output_numbers.keys() <= set(equation.outvars) or len(output_numbers) != len(jaxpr.outvars):
        return None
    form = _form_of(equation, platform)
    if form is None:
        return None
    inputs = tuple(place[atom] for atom in equation.invars)
    outputs = tuple(output_numbers.get(variable) for variable in equation.outvars)
    numbers = dict(zip(form.returned, outputs, strict=True))
    return ForeignCall(
        equation=equation,
        inputs=inputs,
        outputs=outputs,
        arguments=tuple(inputs[number] for number in form.operands),
        results=tuple(numbers.get(number) for number in range(len(form.results))),
        shapes=form.results,
    )


def _form_of(equation: JaxprEqn, platform: str) -> CallForm | None:
    """The custom call that an equation is lowered to; None where it is lowered to anything else."""
    if equation.primitive.name == "ffi_call":
        avals: list[Any] = [variable.aval for variable in equation.outvars]
        results, shapes = tuple(range(len(avals))), tuple(aval.shape for aval in avals)
        return CallForm(operands=tuple(range(len(equation.invars))), results=shapes, returned=results)

    def bind(*operands: Any) -> Any:
        return equation.primitive.bind(*operands, **equation.params)  # type: ignore[no-untyped-call]

    return one_custom_call(bind, types_of(equation), platform)


def types_of(equation: JaxprEqn) -> list[Any]:
    """The types of an equation's operands."""
    avals: list[Any] = [atom.aval for atom in equation.invars]
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]  # type: ignore[no-untyped-call]


def _is_alone(jaxpr: Jaxpr, equation: JaxprEqn) -> bool:
    """Whether operands and results of an equation equal its function's arguments and results."""
    return list(equation.invars) == list(jaxpr.invars) and list(equation.outvars) == list(jaxpr.outvars)


def rule_of(params: dict[str, Any], call: ForeignCall) -> str | None:
    """The function's declared rule, in Shardy's syntax, on the foreign call; None without one."""
    function: ClosedJaxpr = params["call"]
    shapes = [[aval.shape for aval in avals] for avals in (function.in_avals, function.out_avals)]
    rule = params["sharding_rule"]
    if rule is not None and not isinstance(rule, SdyShardingRule):
        rule = _call_rule(rule, params["static_args"], function)
    if rule is None:
        return None
    sides = (rule.operand_mappings, rule.result_mappings)
    if [*map(len, sides)] != [*map(len, shapes)]:
        return None
    source_dims, dims_of_results = (
        [expand_dims(*of_one) for of_one in zip(*pair, strict=True)] for pair in zip(sides, shapes, strict=True)
    )
    operands = [source_dims[number] for number in call.arguments]
    whole = {*rule.reduction_factors, *rule.need_replication_factors, *rule.permutation_factors}
    sizes = dict(rule.factor_sizes)
    for dims, shape in zip([*source_dims, *dims_of_results], [*shapes[0], *shapes[1]], strict=True):
        for factors, size in zip(dims, shape, strict=True):
            if len(factors) == 1:
                sizes[factors[0]] = min(size, sizes.get(factors[0], size))
    if any(number is None and prod(shape) > 1 for number, shape in zip(call.results, call.shapes, strict=True)):
        whole |= sizes.keys() - _leading([*operands, *(dims_of_results[n] for n in call.results if n is not None)])
    results = [
        dims_of_results[number] if number is not None else _unread_result_dims(shape, index, operands, sizes)
        for index, (shape, number) in enumerate(zip(call.shapes, call.results, strict=True))
    ]
    return rule_text(operands, results, sizes, whole)


def _call_rule(rule: Any, static_args: Sequence[Any], function: ClosedJaxpr) -> SdyShardingRule | None:
    """The result of a rule function on the types of these arrays; None when it needs the mesh."""
    from shardwright.xla import private

    mesh = jax.sharding.Mesh(jax.devices()[:1], ("one",))
    with private.mlir_context():
        kinds = private.ir().RankedTensorType
        types = [
            [kinds.get(aval.shape, dtype_to_ir_type(aval.dtype)) for aval in avals]
            for avals in (function.in_avals, function.out_avals)
        ]
        try:
            declared = rule(*static_args, mesh, *types)
        except Exception:  # a user's own: they are written for a mesh that is not known here
            return None
    options = {}
    if isinstance(declared, tuple | list) and len(declared) == 2:
        declared, options = declared
    if isinstance(declared, str):
        named = custom_partitioning(lambda: None)  # type: ignore[no-untyped-call]
        named.def_partition(None, sharding_rule=declared, **options)  # type: ignore[no-untyped-call]
        declared = named.sharding_rule
    return declared if isinstance(declared, SdyShardingRule) else None


def expand_dims(mapping: Sequence[Any], shape: Sequence[int]) -> Dims:
    """The factors of each dimension of an array, leading ones written out."""
    dims: list[tuple[str, ...]] = []
    for dim in mapping:
        if isinstance(dim, str) and dim.startswith(BATCHING):
            group = dim[1:] or "0"
            dims += [(f"?{group}_{number}",) for number in range(len(shape) - len(mapping) + 1)]
        else:
            dims.append((dim,) if isinstance(dim, str) else tuple(dim))
    return tuple(dims)


def _leading(arrays: Sequence[Dims]) -> set[str]:
    """The common factor in the first dimension of all these arrays."""
    first = {dims[0] if dims else () for dims in arrays}
    return set(next(iter(first))) if len(first) == 1 and len(next(iter(first))) == 1 else set()


def _unread_result_dims(shape: Sequence[int], index: int, operands: Sequence[Dims], sizes: dict[str, int]) -> Dims:
    """The dimensions of an unread result: the first is the batch if the sizes are equal; the others are whole."""
    batch = _leading(operands)
    dims = []
    for number, size in enumerate(shape):
        if number == 0 and any(sizes[name] == size for name in batch):
            dims.append(tuple(batch))
        else:
            name = f"!{index}_{number}"
            sizes[name] = size
            dims.append((name,))
    return tuple(dims)


def rule_text(
    operands: Sequence[Dims],
    results: Sequence[Dims],
    sizes: dict[str, int],
    whole: set[str],
    reduction: Collection[str] = (),
) -> str:
    """A rule in Shardy's notation. whole: factors that need replication. reduction: those whose parts are summed."""
    symbols: dict[str, str] = {}
    for dims in (*operands, *results):
        for name in (name for factors in dims for name in factors):
            count = len(symbols)
            symbol = _SYMBOLS[count] if count < len(_SYMBOLS) else f"z_{count - len(_SYMBOLS) + 1}"
            symbols.setdefault(name, symbol)

    def side(arrays: Sequence[Dims]) -> str:
        texts = [", ".join("".join(symbols[name] for name in factors) for factors in dims) for dims in arrays]
        return ", ".join(f"[{text}]" for text in texts)

    factors = ", ".join(f"{symbol}={sizes[name]}" for name, symbol in symbols.items())
    summed = ", ".join(symbol for name, symbol in symbols.items() if name in reduction)
    replicated = ", ".join(symbol for name, symbol in symbols.items() if name in whole or name.startswith("!"))
    special = f" reduction={{{summed}}}" if summed else ""
    special += f" need_replication={{{replicated}}}" if replicated else ""
    return f"#sdy.op_sharding_rule<({side(operands)})->({side(results)}) {{{factors}}}{special}, custom>"
