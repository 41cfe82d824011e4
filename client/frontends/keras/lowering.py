"""The program of a model's step from types alone: no value is needed, nothing is sent."""

from __future__ import annotations

from typing import Any

import jax
import keras

from shardwright.client.array_specs import array_spec
from shardwright.client.frontends.keras.births import collect_births
from shardwright.client.frontends.keras.training import (
    groups_of,
    step_of_kind,
    strip_trailing_nones,
    variable_types,
)
from shardwright.client.frontends.model_steps import require_kind
from shardwright.client.frontends.program import Program
from shardwright.errors import OptionError


def lower_step(model: Any, batch: tuple[Any, Any, Any], *, kind: str, platform: str) -> Program:
    """The train, test or predict step of a model for a batch (x, y, sample_weight) of arrays or types.

    Raises OptionError: an unknown kind, or a model that is not compiled.
    """
    require_kind(kind)
    if not isinstance(model, keras.Model):
        raise OptionError(f"model is a {type(model).__name__}", where="model", remedy="pass a keras.Model")
    if kind != "predict" and not model.compiled:
        raise OptionError(f"{model.name} is not compiled", where="model", remedy="call model.compile() first")
    types = strip_trailing_nones(jax.tree.map(_type, batch if kind != "predict" else batch[:1]))
    symbols = jax.tree.map(lambda leaf: keras.KerasTensor(leaf.shape, str(leaf.dtype)), types)
    if kind == "predict" and not all(layer.built for layer in model._flatten_layers()):
        with collect_births():
            keras.src.backend.compute_output_spec(model, symbols[0], training=False)
    elif kind != "predict":
        with collect_births():
            model._symbolic_build(data_batch=symbols)
    of_kind = step_of_kind(model, kind, groups_of(model, kind))
    function = of_kind.function
    signature, _, _ = function.describe((variable_types(of_kind.variables), types), {}, takes_types=True)
    return function.lower(signature, platform=platform)


def _type(leaf: Any) -> Any:
    return array_spec(tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype)).aval
