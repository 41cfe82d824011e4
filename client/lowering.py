"""`shardwright.lower`: HLO text of a function, without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from shardwright.client.frontends.jax import JaxFunction
from shardwright.client.frontends.program import Program
from shardwright.cost.profiles import hardware_profile
from shardwright.xla.cudnn_checks import AttentionDevice, lowering_for


def lower(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    platform: str = "cpu",
    hardware: str | None = None,
    **kwargs: Any,
) -> Program:
    """The program of `fn(*args, **kwargs)`; its `hlo_text` is the input of `shardwright.plan`.

    Unlike the text of `jax.jit(fn).lower(...)` it keeps every argument and all annotations.

    Args:
      args, kwargs: pytrees of arrays, numbers or `jax.ShapeDtypeStruct`; no array is needed.
      donate_argnums, donate_argnames: arguments updated in place, with `jax.jit`'s meaning.
      static_argnums, static_argnames: arguments compiled into the program by value.
      platform: the cluster's platform ("cpu", "cuda" or "tpu"); this machine's may differ.
      hardware: the cluster's devices ("h100", "a100", …; a hardware profile), for what JAX asks of them while it traces
        (cuDNN's attention); default: this machine's if it has such, else as of an H100.

    Raises OptionError: unknown argument numbers or names, or hardware. UnsupportedProgramError: the program cannot be
    sent to a server. Errors of `fn` itself come through.
    """
    function = JaxFunction(
        fn,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )
    signature, _, dynamic = function.describe(args, kwargs, takes_types=True)
    function.check_arguments(dynamic)
    with lowering_for(_device(platform, hardware)) if hardware is not None else nullcontext():
        return function.lower(signature, platform=platform)


def _device(platform: str, hardware: str) -> AttentionDevice:
    """The devices of a hardware profile. Raises OptionError on an unknown one."""
    profile = hardware_profile(hardware)
    return AttentionDevice(
        platform=platform, compute_capability=profile.compute_capability, cudnn_version=profile.cudnn_version
    )
