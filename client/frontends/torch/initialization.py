"""Modules built on `torch.device("meta")`: their tensors are born on the servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from shardwright.client.frontends.torch.dtypes import numpy_type
from shardwright.client.frontends.torch.evaluation import Evaluation
from shardwright.client.frontends.torch.state import ModelState, host_values, swap_tensors
from shardwright.client.frontends.torch.tracing import trace
from shardwright.client.initializer import PendingInit
from shardwright.errors import ArrayError

if TYPE_CHECKING:
    from shardwright.client.step_queue import StepQueue


def initialize(steps: StepQueue, model: Any, state: ModelState, init: Callable[[Any], Any] | None) -> None:
    """Handles of all tensors of the module; they are computed in the layouts of the first step.

    init: fills the module's tensors in place; without one each module's `reset_parameters` does. Raises ArrayError
    where tensors on `meta` are left without values.
    """
    names = list(state.tensors)

    def fill(values: list[Any]) -> list[Any]:
        replacements = {}
        for tensor, value in zip(state.tensors.values(), values, strict=True):
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            replacements[id(tensor)] = torch.nn.Parameter(value, tensor.requires_grad) if is_parameter else value
        with swap_tensors(model, replacements), torch.no_grad():
            (init or _reset)(model)
            now = {f"model.{n}": t for n, t in (*model.named_parameters(), *model.named_buffers())}
        return [now[name].detach() for name in names]

    graph = trace(
        fill, list(state.types.values()), state_count=len(names), model=model, optimizers=[], name="initialization"
    )
    without = [name for n, name in enumerate(names) if state.tensors[name].is_meta and n not in graph.changed]
    if without:
        raise ArrayError(
            f"{', '.join(without[:5])}{' and others' if len(without) > 5 else ''} are on torch.device('meta') and "
            f"{'init leaves them' if init else 'their modules have no reset_parameters'} without values",
            remedy="pass init=, a function of the model that fills its tensors, or build those modules outside of meta",
        )
    held = host_values({name: tensor for name, tensor in state.tensors.items() if not tensor.is_meta})
    constants = host_values(graph.constants)
    seed = np.uint32(state.seed & 0xFFFFFFFF)

    def born(seed: Any, held: dict[str, Any]) -> list[Any]:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), 1)
        inputs = [
            held[name] if name in held else jnp.zeros(kind.shape, numpy_type(kind.dtype))
            for name, kind in state.types.items()
        ]
        outputs = Evaluation(graph.nodes, constants, key).run(inputs)
        return [jnp.array(output, copy=True) for output in outputs[: len(names)]]

    with jax.enable_x64(True):
        handles = PendingInit(steps, born, (seed, held)).handles()
    state.values.update(zip(names, handles, strict=True))


def _reset(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
