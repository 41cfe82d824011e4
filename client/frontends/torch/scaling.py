"""`torch.amp.GradScaler` in a traced step: what it decides by values, the servers choose.

Scale and count are state. An optimizer's step is computed in any case, and kept where all gradients are finite.
https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from shardwright.client.frontends.torch.state import StateGroup
from shardwright.client.frontends.torch.tracing import TensorType
from shardwright.errors import OptionError

SCALE, COUNT = "scaler.scale", "scaler.growth_tracker"

_SETTINGS = ("_growth_factor", "_backoff_factor", "_growth_interval")


class ScalerState(StateGroup):
    """Scale and count of a gradient scaler in a session."""

    def __init__(self, scaler: Any) -> None:
        super().__init__()
        self.types = {SCALE: TensorType((), torch.float32), COUNT: TensorType((), torch.int32)}
        self.start = host_scaler(scaler)


def host_scaler(scaler: Any) -> dict[str, np.ndarray]:
    """Scale and count that a scaler holds here."""
    state = scaler.state_dict()
    return {SCALE: np.array(state["scale"], np.float32), COUNT: np.array(state["_growth_tracker"], np.int32)}


def assign_scaler(scaler: Any, values: Mapping[str, Any]) -> None:
    """Writes the servers' scale and count into a scaler here."""
    scaler._scale = values[SCALE].to(scaler._device)
    scaler._growth_tracker = values[COUNT].to(scaler._device)


def scaler_settings(scaler: Any) -> tuple[Any, ...]:
    """What a program holds by value."""
    return tuple(getattr(scaler, name) for name in _SETTINGS)


def require_scaler(scaler: Any) -> None:
    """Raises OptionError on what is no gradient scaler, and on one that is off."""
    if not isinstance(scaler, torch.amp.GradScaler):
        raise OptionError(
            f"scaler is a {type(scaler).__name__}",
            where="scaler",
            remedy="pass a torch.amp.GradScaler, or leave it out",
        )
    if not scaler.is_enabled():
        raise OptionError(
            "the gradient scaler is off, as those for 'cuda' are on a machine without CUDA",
            where="scaler",
            remedy="make it GradScaler('cpu'), which serves any device of the servers; or leave scaler= out",
        )


@contextlib.contextmanager
def refuse_other_scalers(scaler: Any) -> Iterator[None]:
    """While a step is traced, a scaler that is not the one passed has no state: its use raises OptionError."""
    scale = torch.amp.GradScaler.scale

    def scale_known(self: Any, outputs: Any) -> Any:
        if self is not scaler and self.is_enabled():
            raise OptionError(
                "the step uses a gradient scaler whose scale no server keeps",
                where="scaler",
                remedy="pass it: parallelize(..., scaler=scaler)",
            )
        return scale(self, outputs)

    with mock.patch.object(torch.amp.GradScaler, "scale", scale_known):
        yield


@contextlib.contextmanager
def swap_scaler(scaler: Any, scale: Any, count: Any) -> Iterator[None]:
    """The scaler with the tensors of a trace, without decisions by values."""
    saved = dict(vars(scaler))
    scaler._scale, scaler._growth_tracker = scale, count
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
    scaler._unscale_grads_ = _unscale
    scaler._maybe_opt_step = _step_where_finite
    scaler.step = partial(_step_unfused, scaler)
    try:
        with mock.patch.object(torch, "_amp_update_scale_", _update_scale):
            yield
    finally:
        vars(scaler).clear()
        vars(scaler).update(saved)


def _step_unfused(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """`GradScaler.step`. Fused optimizers would scale in their kernels; here none is fused."""
    is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    with mock.patch.object(optimizer, "_step_supports_amp_scaling", False) if is_fused else contextlib.nullcontext():
        return type(scaler).step(scaler, optimizer, *args, **kwargs)


def _unscale(optimizer: Any, inverse: Any, found_inf: Any, allow_fp16: bool) -> dict[Any, Any]:
    """`GradScaler._unscale_grads_`: gradients times `inverse`; 1.0 for its device where any is not finite."""
    with torch.no_grad():
        for parameter in (member for group in optimizer.param_groups for member in group["params"]):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.dtype is torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            found_inf = torch.maximum(found_inf, torch.isfinite(gradient).all().logical_not().to(found_inf.dtype))
            gradient.mul_(inverse.to(gradient.dtype))
    return {found_inf.device: found_inf}


def _step_where_finite(optimizer: Any, optimizer_state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """`GradScaler._maybe_opt_step`: a step whose results count where no gradient was infinite."""
    is_finite = sum(optimizer_state["found_inf_per_device"].values()) == 0
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.detach().clone() for parameter in parameters]
    states = {parameter: _clones(optimizer.state.get(parameter, {})) for parameter in parameters}
    result = optimizer.step(*args, **kwargs)
    with torch.no_grad():
        for parameter, old in zip(parameters, before, strict=True):
            parameter.copy_(torch.where(is_finite, parameter, old))
        for parameter, olds in states.items():
            for key, old in olds.items():
                optimizer.state[parameter][key] = torch.where(is_finite, optimizer.state[parameter][key], old)
    return result


def _clones(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() for key, value in entries.items() if isinstance(value, torch.Tensor)}


def _update_scale(
    scale: Any, count: Any, found_inf: Any, growth_factor: float, backoff_factor: float, growth_interval: int
) -> Any:
    """`torch._amp_update_scale_`: less after an infinite gradient, more after enough steps without, while finite."""
    is_finite = found_inf == 0
    is_due = count + 1 == growth_interval
    grown = scale * growth_factor
    grown = torch.where(torch.isfinite(grown) & is_due, grown, scale)
    scale.copy_(torch.where(is_finite, grown, scale * backoff_factor))
    count.copy_(torch.where(is_finite & is_due.logical_not(), count + 1, torch.zeros_like(count)))
    return scale


def values_of(scaler: Any) -> Sequence[Any]:
    """Scale and count, in the order of the state."""
    return scaler._scale, scaler._growth_tracker
