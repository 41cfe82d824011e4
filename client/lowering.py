"""`shardwright.lower`: a function as HLO text, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardwright.client.frontends.jax import JaxFunction, LoweredProgram, Signature, spec_of


def lower(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    platform: str = "cpu",
    **kwargs: Any,
) -> LoweredProgram:
    """The program of `fn(*args, **kwargs)`; its `hlo_text` is what `shardwright.plan` takes.

    Unlike the text of `jax.jit(fn).lower(...)` it keeps every argument and what `annotate` pins.

    Args:
      args, kwargs: pytrees of arrays, numbers or `jax.ShapeDtypeStruct`; no array is needed.
      donate_argnums: arguments whose arrays are updated in place.
      static_argnums: arguments that are part of the program, by value.
      platform: that of the cluster ("cpu", "cuda" or "tpu"), on any machine.

    Raises OptionError for argument numbers that do not exist, UnsupportedProgramError for what cannot
    be sent to a server, and what `fn` itself raises.
    """
    function = JaxFunction(fn, donate_argnums=donate_argnums, static_argnums=static_argnums)
    statics, dynamic = function.split(args, kwargs)
    leaves, tree = jax.tree.flatten(dynamic)
    signature = Signature(statics=statics, tree=tree, specs=tuple(spec_of(leaf) for leaf in leaves))
    return function.lower(signature, platform=platform)
