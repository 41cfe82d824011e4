"""The equations of a traced function."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def walk_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All of them, at any depth."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from walk_equations(inner)
