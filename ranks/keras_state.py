"""What a model or an optimizer of Keras is made of, to be copied to host memory and put back; see `host_copies`."""

from __future__ import annotations

import sys
from typing import Any

from shardwright.errors import OptionError

_State = dict[str, list[Any]]


def is_keras(value: Any) -> bool:
    """Whether a value is a model or an optimizer of Keras; nothing is imported."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(value, (keras.Model, keras.optimizers.Optimizer))


def read(value: Any) -> _State:
    """Its variables' values as numpy arrays: weights, random seeds, statistics; the optimizer's, metrics left out."""
    import keras

    if isinstance(value, keras.Model) and hasattr(value, "jax_state_sync"):
        value.jax_state_sync()  # within `fit`, Keras on JAX has the values elsewhere
    return {
        name: [keras.ops.convert_to_numpy(variable).copy() for variable in variables]
        for name, variables in _variables(value).items()
    }


def write(value: Any, state: _State) -> None:
    """Puts such values back. Its steps are compiled anew: they may be of devices that are gone.

    Raises OptionError where it has other variables.
    """
    import keras

    if isinstance(value, keras.Model):
        _forget_compiled(value)
        if state["optimizer"] and (optimizer := getattr(value, "optimizer", None)) is not None and not optimizer.built:
            optimizer.build(value.trainable_variables)
    for name, variables in _variables(value).items():
        values = state[name]
        if [variable.shape for variable in variables] != [each.shape for each in values]:
            raise OptionError(
                f"{value.name!r} has {len(variables)} variables of {name}, the state {len(values)}, or of other shapes",
                where="State",
                remedy="build the model before State is made: give it an Input, or call it once",
            )
        for variable, each in zip(variables, values, strict=True):
            variable.assign(each)


def _variables(value: Any) -> dict[str, list[Any]]:
    import keras

    if isinstance(value, keras.optimizers.Optimizer):
        return {"optimizer": list(value.variables)}
    optimizer = getattr(value, "optimizer", None)  # none before it is compiled
    return {
        "model": list(value.variables),
        "optimizer": list(optimizer.variables) if optimizer is not None and optimizer.built else [],
    }


def _forget_compiled(model: Any) -> None:
    model.train_function = model.test_function = model.predict_function = None
    if hasattr(model, "jax_state_sync"):
        model._jax_state = None  # of a `fit` that an error has ended
