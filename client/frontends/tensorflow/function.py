"""A TensorFlow function as a front end: read a call, trace it once for its types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from jax.tree_util import keystr, tree_flatten_with_path

from shardwright.client.array_specs import array_spec
from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.program import Program
from shardwright.client.frontends.tensorflow.owners import variable_paths
from shardwright.client.frontends.tensorflow.remote import RemoteTensor
from shardwright.client.frontends.tensorflow.tracing import Trace, trace
from shardwright.errors import ArgumentError

_COMPOSITES = (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)
_TENSORS = (tf.Tensor, np.ndarray, np.generic, jax.Array, RemoteTensor)
_TYPES = (tf.TensorSpec, jax.ShapeDtypeStruct)
_TENSOR = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call, read: its signature, and the values of its tensors.

    paths: of the tensors in (args, kwargs). specs: their types. rebuild: (args, kwargs) of other tensors in their
    places; it holds none of the call's.
    """

    signature: Hashable
    values: tuple[Any, ...]
    paths: tuple[tuple[Any, ...], ...]
    specs: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Sequence[str]) -> Call:
    """Tensors, arrays and handles are arguments of the program; any other value is part of it, as in `tf.function`.

    Types, `tf.TensorSpec`s, may stand for tensors where nothing runs. parameters: names of the positional ones. Raises
    ArgumentError on sparse and ragged tensors, on text, and on types without fixed shapes.
    """
    leaves, tree = tree_flatten_with_path((args, kwargs))
    key: list[Hashable] = []
    values, paths, specs = [], [], []
    items: list[Any] = []  # values that are part of the program; _TENSOR stands for the others
    for path, leaf in leaves:
        if isinstance(leaf, (*_TENSORS, *_TYPES, *_COMPOSITES)):
            spec = _type_of(leaf, path, parameters)
            key.append((tuple(spec.shape), spec.dtype))
            values.append(_value_of(leaf))
            paths.append(path)
            specs.append(spec)
            items.append(_TENSOR)
        else:
            is_simple = isinstance(leaf, bool | int | float | complex | str | bytes)
            key.append((type(leaf), leaf if is_simple else id(leaf)))
            items.append(leaf)

    def rebuild(tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = iter(tensors)
        args, kwargs = jax.tree.unflatten(tree, [next(rest) if item is _TENSOR else item for item in items])
        return args, kwargs

    return Call(
        signature=(tree, tuple(key)), values=tuple(values), paths=tuple(paths), specs=tuple(specs), rebuild=rebuild
    )


class TensorFlowFunction:
    """A Python function or `tf.function`; a `FrontEnd`. It is called with (a call, handles of the variables).

    paths: gives `id()` of a variable → its path in reports. Default: by the objects in the function's closure.
    """

    def __init__(self, function: Any, name: str, paths: Callable[[], Mapping[int, str]] | None = None) -> None:
        self.name = name
        self._function = getattr(function, "python_function", function)
        self._parameters = _parameter_names(self._function)
        self._paths = paths or partial(variable_paths, function)
        self._traces: dict[Hashable, Trace] = {}

    @property
    def traces(self) -> Sequence[Trace]:
        return tuple(self._traces.values())

    def read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """See `read_call`."""
        return read_call(args, kwargs, self._parameters)

    def trace(self, call: Call) -> Trace:
        """The function for the call's types. Raises UnsupportedProgramError."""
        if call.signature not in self._traces:
            rebuild, function = tf.autograph.experimental.do_not_convert(call.rebuild), self._function

            def run(*tensors: Any) -> Any:
                args, kwargs = rebuild(tensors)
                return function(*args, **kwargs)

            names = [_argument_name(path, self._parameters) for path in call.paths]
            self._traces[call.signature] = trace(run, self._paths, call.specs, names, self.name)
        return self._traces[call.signature]

    def describe(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes_types: bool = False
    ) -> tuple[Hashable, list[Any], Any]:
        """See `FrontEnd.describe`."""
        del kwargs, takes_types
        call, handles = args
        return call.signature, [*call.values, *handles], None

    def lower(self, signature: Any, *, platform: str) -> Program:
        """See `FrontEnd.lower`. TensorFlow writes the same program for all platforms."""
        del platform
        return self._traces[signature].program

    def check_arguments(self, arguments: Any) -> None:
        """Nothing is changed in place."""

    def write_back(self, arguments: Any, program: Program, results: Sequence[Any]) -> None:
        """Nothing is changed in place."""


def _type_of(leaf: Any, path: tuple[Any, ...], parameters: Sequence[str]) -> Any:
    if isinstance(leaf, _COMPOSITES):
        message, remedy = f"a {type(leaf).__name__} was passed", "pass dense tensors, or its parts"
    elif not (shape := tf.TensorShape(leaf.shape)).is_fully_defined():
        message, remedy = f"its shape is {shape}", "give every dimension a size"
    elif (dtype := tf.as_dtype(leaf.dtype)) == tf.string:
        message, remedy = "it holds text", "encode it as numbers outside the step"
    else:
        return tf.TensorSpec(shape, dtype)
    raise ArgumentError(message, where=_argument_name(path, parameters), remedy=remedy)


def _value_of(leaf: Any) -> Any:
    if isinstance(leaf, RemoteTensor):
        return leaf.array
    if isinstance(leaf, RemoteArray):
        return leaf
    if isinstance(leaf, _TYPES):
        return array_spec(tuple(leaf.shape), tf.as_dtype(leaf.dtype).as_numpy_dtype).aval
    return np.asarray(leaf)


def _parameter_names(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def _argument_name(path: tuple[Any, ...], parameters: Sequence[str]) -> str:
    """`x`, `batch['image']`: the parameter, then the way into it."""
    is_named, first, *rest = path[0].idx == 1, path[1], *path[2:]
    if is_named:
        return str(first.key) + keystr(tuple(rest))
    number = first.idx
    return (parameters[number] if number < len(parameters) else f"args[{number}]") + keystr(tuple(rest))
