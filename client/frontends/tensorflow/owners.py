"""Paths of variables, as reports name them: by the objects in a function's closure that own them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf


def variable_paths(function: Any) -> dict[int, str]:
    """`id()` of a `tf.Variable` → its path: `decoder/kernel` in Keras, `layer.weights` in a `tf.Module`."""
    paths: dict[int, str] = {}
    for name, owner in _closure_objects(function):
        if isinstance(owner, keras.Model | keras.Layer | keras.optimizers.Optimizer | keras.metrics.Metric):
            for variable in keras_variables(owner):
                paths.setdefault(id(variable._value), variable.path)
        elif isinstance(owner, keras.Variable):
            paths.setdefault(id(owner._value), owner.path)
        elif isinstance(owner, tf.Module):
            for path, variable in owner._flatten(predicate=lambda leaf: isinstance(leaf, tf.Variable), with_path=True):
                paths.setdefault(id(variable), ".".join(map(str, path)))
        elif isinstance(owner, tf.Variable):
            paths.setdefault(id(owner), name)
    return paths


def keras_variables(owner: Any) -> list[Any]:
    """The variables of a Keras object; of a model its optimizer's and metrics' too. Each once."""
    groups: list[Iterable[Any]] = [owner.variables]
    if isinstance(owner, keras.Model):
        groups.append(owner.metrics_variables)
        optimizer = getattr(owner, "optimizer", None)
        if optimizer is not None:
            groups.append(optimizer.variables)
    return list({id(variable): variable for group in groups for variable in group}.values())


def _closure_objects(function: Any) -> Iterator[tuple[str, Any]]:
    """(name, object) for what a function refers to by name."""
    function = inspect.unwrap(getattr(function, "python_function", function))
    if inspect.ismethod(function):
        yield "self", function.__self__
        function = function.__func__
    elif not inspect.isfunction(function):
        yield "self", function
        function = type(function).__call__
    if not inspect.isfunction(function):
        return
    names = inspect.getclosurevars(function)
    for scope in (names.nonlocals, names.globals):
        for name, value in scope.items():
            values = value if isinstance(value, list | tuple) else [value]
            yield from ((name if element is value else f"{name}[{n}]", element) for n, element in enumerate(values))
            if inspect.isfunction(value) and value is not function:
                yield from _variables_of_functions(value)


def _variables_of_functions(function: Any) -> Iterator[tuple[str, Any]]:
    """One level down: what a helper function refers to."""
    names = inspect.getclosurevars(function)
    yield from names.nonlocals.items()
    yield from names.globals.items()
