"""A training step with dimensions pinned by `sw.annotate`; the model stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import jax

import shardwright as sw


def annotate_step(train_step: Callable[..., Any], parameters: Mapping[str, Mapping[int, str]]) -> Callable[..., Any]:
    """Pin `train_step(params, opt_state, *batch)`: the batch along the axis "data", and the given parameters.

    parameters: suffix of a parameter's path, such as "['up']['weight']" → {dimension: axis}.
    """

    @wraps(train_step)
    def step(params: Any, opt_state: Any, *batch: jax.Array) -> Any:
        params = jax.tree_util.tree_map_with_path(lambda path, leaf: _pin(path, leaf, parameters), params)
        return train_step(params, opt_state, *(sw.annotate(array, {0: "data"}) for array in batch))

    return step


def _pin(path: Any, parameter: jax.Array, parameters: Mapping[str, Mapping[int, str]]) -> jax.Array:
    name = jax.tree_util.keystr(path)
    for ending, pins in parameters.items():
        if name.endswith(ending):
            return sw.annotate(parameter, pins)
    return parameter
