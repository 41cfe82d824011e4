"""JAX's settings around a step: the servers look for NaNs and infinities; settings without effect give a warning."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from shardwright.client.array_operators import frames_to_user
from shardwright.errors import NonFiniteError, SettingWarning

if TYPE_CHECKING:
    from shardwright.client.arrays import RemoteArray
    from shardwright.client.frontends.program import Program
    from shardwright.client.step_result import StepResult
    from shardwright.proto.v1 import master_pb2

#: Names of bad results that an error gives, at most.
_MAX_REPORTED = 5

_NOT_GUARDED = "what goes to the servers, and comes from them, is not guarded"

#: Settings that act where a program runs → what that means for a step.
_WITHOUT_EFFECT: dict[str, str] = {
    "jax_disable_jit": "a step is compiled all the same; call the function itself to run it operation by operation",
    "jax_debug_key_reuse": "the keys of a step are not followed; call the function itself to have them checked",
    "jax_log_compiles": 'the servers compile; logging.getLogger("shardwright") tells of it at level INFO',
    "jax_explain_cache_misses": 'the logger "shardwright" tells at level INFO what is planned and compiled',
    "jax_transfer_guard": _NOT_GUARDED,
    "jax_transfer_guard_host_to_device": _NOT_GUARDED,
    "jax_transfer_guard_device_to_host": _NOT_GUARDED,
    "jax_default_device": "steps run on the devices of the servers",
}
#: Values of a setting that is not on.
_OFF = (None, False, "", "allow")

_warned_settings: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks by the servers on the results of a step."""

    nans: bool = False
    infs: bool = False

    def __bool__(self) -> bool:
        return self.nans or self.infs


NO_CHECKS = Checks()


def checks_from_settings() -> Checks:
    """The checks requested by `jax_debug_nans` and `jax_debug_infs` now."""
    nans, infs = (bool(getattr(jax.config, name)) for name in ("jax_debug_nans", "jax_debug_infs"))
    return Checks(nans, infs) if nans or infs else NO_CHECKS


def raise_not_finite(lowered: Program, results: Sequence[RemoteArray | None], result: Any) -> None:
    """Waits for the step that makes `results`, the leaves of `result`; raises the step's error.

    Raises NonFiniteError with the path of the first result with NaNs or infinities.
    """
    handles = [(number, handle) for number, handle in enumerate(results) if handle is not None]
    step = next((handle._result for _, handle in handles if handle._result is not None), None)
    if step is None:
        return
    step.wait()
    bad = [(lowered.outputs[number].name, handle) for number, handle in handles if _find_not_finite(step, handle)]
    if bad:
        error = NonFiniteError(
            _describe_values(step, bad),
            where=lowered.name,
            remedy="look at the error's `result`: handles of all that the step returned; what was donated is gone",
        )
        error.result = result
        raise error


def _find_not_finite(step: StepResult, handle: RemoteArray) -> list[master_pb2.NotFinite]:
    return [finding for finding in step.not_finite if finding.array_id in handle._ids]


def _describe_values(step: StepResult, bad: Sequence[tuple[str, RemoteArray]]) -> str:
    name, handle = bad[0]
    findings = _find_not_finite(step, handle)
    has_nans, has_infs = any(finding.nans for finding in findings), any(finding.infs for finding in findings)
    what = "NaNs and infinities" if has_nans and has_infs else "NaNs" if has_nans else "infinities"
    others = [other for other, _ in bad[1:_MAX_REPORTED]]
    more = len(bad) - 1 - len(others)
    tail = f"; so do {', '.join(others)}" if others else ""
    return f"{name}, {handle.dtype}{list(handle.shape)}, holds {what}{tail}{f' and {more} more' if more else ''}"


def warn_of_settings(session: object) -> None:
    """Warns, once a session and setting, of settings of JAX that are on and change nothing on the servers."""
    for name, meaning in _WITHOUT_EFFECT.items():
        if getattr(jax.config, name, None) in _OFF:
            continue
        warned_names = _warned_settings.setdefault(session, set())
        if meaning not in warned_names:
            warned_names.add(meaning)
            warnings.warn(
                f"{name} has no effect on the servers: {meaning}", SettingWarning, stacklevel=frames_to_user()
            )
