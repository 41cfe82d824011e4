"""Numpy functions within TensorFlow's graphs, for what Keras runs in them.

A graph calls back into Python. XLA has no such calls: a step that has one is not compiled by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_Function = Callable[[list[np.ndarray]], list[np.ndarray]]


class ArrayFunction:
    """Calls `function` with tensors as arrays, eagerly or whenever a graph is run. Its results have their types.

    IndexedSlices become whole tensors.
    """

    def __init__(self, function: _Function) -> None:
        self._function = function
        self._error: Exception | None = None

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        tensors = [tf.convert_to_tensor(value) for value in values]
        if not tensors:
            return []
        if tf.executing_eagerly():
            return [tf.convert_to_tensor(result) for result in self._function([tensor.numpy() for tensor in tensors])]
        results: list[Any] = tf.numpy_function(self._run, tensors, [tensor.dtype for tensor in tensors])
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)
        return results

    def _run(self, *arrays: np.ndarray) -> list[np.ndarray]:
        try:
            return self._function(list(arrays))
        except Exception as error:
            self._error = error
            raise

    def raises_its_own(self, graph: Callable[..., Any]) -> Callable[..., Any]:
        """`graph`, a function that runs one, but with the function's own errors instead of TensorFlow's for them."""

        def run(*args: Any) -> Any:
            self._error = None
            try:
                return graph(*args)
            except tf.errors.OpError:
                if self._error is None:
                    raise
            raise self._error

        return run
