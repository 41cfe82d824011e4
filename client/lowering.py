"""`shardwright.lower`: a function as HLO text, without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardwright.client.frontends.jax import JaxFunction, LoweredProgram, spec_of


def lower(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    platform: str = "cpu",
    **kwargs: Any,
) -> LoweredProgram:
    """The program of `fn(*args, **kwargs)`; its `hlo_text` is what `shardwright.plan` takes.

    Unlike the text of `jax.jit(fn).lower(...)` it keeps every argument and what `annotate` pins.

    Args:
      args, kwargs: pytrees of arrays, numbers or `jax.ShapeDtypeStruct`; no array is needed.
      donate_argnums, donate_argnames: arguments whose arrays are updated in place, as for `jax.jit`.
      static_argnums, static_argnames: arguments that are part of the program, by value.
      platform: that of the cluster ("cpu", "cuda" or "tpu"), on any machine.

    Raises OptionError for argument numbers and names that do not exist, UnsupportedProgramError for what cannot
    be sent to a server, and what `fn` itself raises.
    """
    function = JaxFunction(
        fn,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )
    signature, _, dynamic = function.describe(args, kwargs, spec_of)
    function.require_unshared(dynamic)
    return function.lower(signature, platform=platform)
