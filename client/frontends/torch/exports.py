"""What leaves the service: a step as StableHLO, and the tensors of a module, for programs without this package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from shardwright.client.frontends.exports import serialize_function
from shardwright.client.frontends.torch.function import Call, Traced, function_of
from shardwright.client.frontends.torch.state import RANDOM
from shardwright.errors import PlatformError


def export_step(call: Call, platform: str) -> bytes:
    """A call's step, serialized by `jax.export`: (state, inputs), dicts by name → (changed state, results).

    Raises PlatformError without flatbuffers, the format of its container.
    """
    graph = call.graph
    traced = Traced.of(graph)
    run, constants = function_of(graph, call, traced)
    state_names = call.names[: call.state_count + 1]
    changed = [call.names[number] for number in traced.changed] + ([RANDOM] if traced.draws else [])
    own = len(changed)
    changed += graph.new_state

    def step(state: Mapping[str, Any], inputs: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        leaves = [state[name] if name in state else inputs[name] for name in call.names]
        outputs = run(*leaves, *map(jax.numpy.asarray, constants.values()))
        outputs = outputs[:own] + outputs[own + traced.has_checks :]
        return dict(zip(changed, outputs, strict=False)), list(outputs[len(changed) :])

    types = {name: spec.aval for name, spec in zip(call.names, call.specs, strict=True)}
    state = {name: types[name] for name in state_names}
    inputs = {name: kind for name, kind in types.items() if name not in state}
    with jax.enable_x64(True):
        return serialize_function(step, state, inputs, platform=platform)


def write_safetensors(model: Any, path: Path) -> None:
    """The module's parameters and buffers, tied ones once. Raises PlatformError where safetensors is not installed."""
    try:
        from safetensors.torch import save_model
    except ImportError:
        raise PlatformError(
            "safetensors is not installed", where=path.name, remedy="pip install safetensors, or export to .pt"
        ) from None
    save_model(model, str(path))
