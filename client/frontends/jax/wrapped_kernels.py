"""Kernels behind a primitive that is lowered through `custom_partitioning`.

Transformer Engine and `jax.nn.scaled_matmul` bind a primitive of their own; the function with the sharding rule shows
up where that primitive is lowered, `mlir.lower_fun(custom_partitioning(…))`. Lowered for one device, JAX inlines it and
drops the rule. Here the function is traced, so that it can stand in the primitive's place, rule and all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from shardwright.client.frontends.jax.custom_partitioning import PRIMITIVE, foreign_call, rule_of, types_of
from shardwright.xla.lowering_rules import lowered_function

#: Where functions are written that hold no kernel of anybody's.
_OWN_MODULES = "jax."


class WrappedKernels:
    """Of one program, for one platform: what its equations stand for."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self._functions: dict[Any, ClosedJaxpr | None] = {}  # by primitive, types and parameters

    def function_of(self, equation: JaxprEqn) -> ClosedJaxpr | None:
        """The function that an equation is lowered to, where it has kernels with sharding rules; else None."""
        function, is_list = lowered_function(equation.primitive, self.platform) or (None, False)
        is_own = (getattr(function, "__module__", None) or "").startswith(_OWN_MODULES)
        if function is None or (is_own and not isinstance(function, custom_partitioning)):
            return None
        types = types_of(equation)
        key = (equation.primitive, *((each.shape, each.dtype) for each in types), *sorted(equation.params.items()))
        try:
            known = key in self._functions
        except TypeError:  # a parameter that cannot be hashed
            return self._trace(function, types, equation.params, is_list=is_list)
        if not known:
            self._functions[key] = self._trace(function, types, equation.params, is_list=is_list)
        return self._functions[key]

    def _trace(
        self, function: Callable[..., Any], types: Sequence[Any], params: Mapping[str, Any], *, is_list: bool
    ) -> ClosedJaxpr | None:
        def results(*arguments: Any) -> list[Any]:
            values = function(*arguments, **params)
            return list(values) if is_list else [values]

        traced = jax.make_jaxpr(results)(*types)
        return traced if self._has_rule(traced.jaxpr) else None

    def _has_rule(self, jaxpr: Jaxpr) -> bool:
        return any(
            (
                equation.primitive.name == PRIMITIVE
                and (call := foreign_call(equation.params["call"], self.platform)) is not None
                and rule_of(equation.params, call) is not None
            )
            or any(map(self._has_rule, jaxprs_in_params(equation.params)))
            for equation in jaxpr.eqns
        )
