"""Partitioned kernels, lowered for each part that a plan may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from shardwright.client.frontends.jax.kernel_rules import KernelRule
from shardwright.client.limits import KEPT_KERNELS
from shardwright.errors import OptionError
from shardwright.kernels import KernelForm, KernelForms, Price
from shardwright.kernels.prices import BY_KERNEL
from shardwright.kernels.rules import Shapes

PALLAS = "pallas_call"

_NO_MESH = jax.sharding.AbstractMesh((), ())


@lru_cache(maxsize=KEPT_KERNELS)
def lower_forms(
    function: Callable[..., list[Any]], rule: KernelRule, types: tuple[Any, ...], platform: str, where: str
) -> KernelForms:
    """The programs of a kernel, whole first. types: of its whole arrays.

    Raises OptionError: a part gives other results than the rule says. What JAX raises for the whole comes through; for
    a part it means that there is no such part.
    """
    forms: dict[Shapes, KernelForm] = {}
    whole: tuple[Jaxpr, Shapes] | None = None
    for declared, counts in rule.cuts():
        shapes = declared.cut([each.shape for each in types], counts)
        if shapes is None:
            continue
        parts = [jax.ShapeDtypeStruct(shape, each.dtype) for shape, each in zip(shapes, types, strict=True)]  # type: ignore[no-untyped-call]
        try:
            with jax.sharding.use_abstract_mesh(_NO_MESH):  # a part is one device's, whatever stands around the call
                traced = jax.jit(function).trace(*parts)
            if whole is None:
                whole = traced.jaxpr.jaxpr, tuple(aval.shape for aval in traced.jaxpr.out_avals)
            elif not _fills_its_blocks(traced.jaxpr.jaxpr, whole[0]):
                continue
            text = traced.lower(lowering_platforms=(platform,)).as_text("hlo")
        except Exception:  # a kernel's own checks of its sizes, and those of what it is lowered by
            if whole is None or not forms:
                raise
            continue
        given = tuple(aval.shape for aval in traced.jaxpr.out_avals)
        if given != declared.cut_results(whole[1], counts):
            raise OptionError(
                f"a partitioned kernel gives {_list(given)} of parts {_list(shapes)}, the rule says "
                f"{_list(declared.cut_results(whole[1], counts) or ())}",
                where=where,
                remedy="take sizes from the arguments' shapes, or name such factors in need_replication",
            )
        forms[shapes] = KernelForm(hlo_text=text, price=_price(traced.jaxpr.jaxpr))
    return forms


def pallas_price(equation: JaxprEqn) -> Price | None:
    """What a Pallas kernel says that it costs; None where it says nothing, or is interpreted: then XLA computes it."""
    estimate = equation.params.get("cost_estimate") if equation.primitive.name == PALLAS else None
    if estimate is None or equation.params["interpret"]:
        return None
    return _price_of(estimate)


def _price_of(estimate: Any) -> Price:
    return Price(
        flops=float(estimate.flops),
        size_bytes=float(estimate.bytes_accessed),
        transcendentals=float(estimate.transcendentals),
        source=BY_KERNEL,
    )


def _price(jaxpr: Jaxpr) -> Price | None:
    """The estimates of all Pallas kernels in a function, added up; None where one says nothing, or there are none."""
    estimates = [equation.params.get("cost_estimate") for equation in _pallas_calls(jaxpr)]
    if not estimates or any(estimate is None for estimate in estimates):
        return None
    stated = [_price_of(estimate) for estimate in estimates]
    return Price(
        flops=sum(price.flops for price in stated),
        size_bytes=sum(price.size_bytes or 0.0 for price in stated),
        transcendentals=sum(price.transcendentals for price in stated),
        source=BY_KERNEL,
    )


def _fills_its_blocks(part: Jaxpr, whole: Jaxpr) -> bool:
    """Whether a part's kernels run at all, and have blocks that divide its arrays where the whole's do.

    A grid of `rows // 64` has no block for a part of 32 rows, and leaves some of 96 out.
    """
    even = all(map(_divides, _pallas_calls(whole)))
    return all(_runs(equation) and (_divides(equation) or not even) for equation in _pallas_calls(part))


def _runs(equation: JaxprEqn) -> bool:
    return all(size != 0 for size in equation.params["grid_mapping"].grid if isinstance(size, int))


def _divides(equation: JaxprEqn) -> bool:
    return all(
        size % block == 0
        for mapping in equation.params["grid_mapping"].block_mappings
        for size, block in zip(mapping.array_aval.shape, map(_block_size, mapping.block_shape), strict=False)
    )


def _block_size(block: Any) -> int:
    """Elements of a block along a dimension: a number, or what holds one; 1 where it is left out."""
    return int(block) if isinstance(block, int) else int(getattr(block, "block_size", 1) or 1)


def _pallas_calls(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == PALLAS:
            yield equation
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from _pallas_calls(inner)


def _list(shapes: Sequence[Sequence[int]]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)
