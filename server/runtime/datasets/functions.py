"""Functions that yield batches: from modules that the operator allows, called with JSON values.

A function is `batches(start, *, batch, rows, **options)`. It returns an iterable of the batches `start`, `start + 1`,
…; each is a pytree of arrays with one entry along the first dimension for each of `rows`, which are row numbers of the
whole batch.
"""

from __future__ import annotations

import importlib
import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.clusters.module_names import is_allowed, is_module_name
from shardwright.errors import DatasetError, ShardwrightError
from shardwright.proto.v1 import master_pb2
from shardwright.server.black_box import dataset_key

#: Batches that are read ahead, at most.
MAX_PREFETCH = 64
#: Frames of the user's traceback that an error shows.
_SHOWN_FRAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """What a session reads; the fields are those of the message `Dataset`."""

    dataset_id: str
    function: str
    batch: int
    options_json: str
    prefetch: int

    @classmethod
    def of(cls, message: master_pb2.Dataset) -> DatasetSpec:
        return cls(
            dataset_id=message.dataset_id,
            function=message.function,
            batch=message.batch,
            options_json=message.options_json,
            prefetch=min(message.prefetch, MAX_PREFETCH),
        )

    @property
    def key(self) -> str:
        """See `black_box.dataset_key`."""
        return dataset_key(self.function, self.options_json)

    def require_allowed(self, allowed: Sequence[str]) -> None:
        """Raises DatasetError unless the function's module is one of `allowed`, or lies in a package that is."""
        module, colon, name = self.function.partition(":")
        if not (colon and is_module_name(module) and name.isidentifier() and not name.startswith("_")):
            raise DatasetError(
                f"{self.function!r} names no function of a module", remedy='write "module:function", a public name'
            )
        _require_allowed(module, self.function, allowed)


def open_batches(spec: DatasetSpec, start: int, rows: np.ndarray, allowed: Sequence[str]) -> Iterator[Any]:
    """The function's batches from `start` on. Raises DatasetError where there is no such function, or it raises."""
    spec.require_allowed(allowed)
    function = _find_function(spec, allowed)
    options = json.loads(spec.options_json or "{}")
    return iter(function(start, batch=spec.batch, rows=rows, **options))


def _require_allowed(module: str, function: str, allowed: Sequence[str]) -> None:
    if not is_allowed(module, allowed):
        listed = f"they allow {', '.join(allowed)}" if allowed else "they allow none"
        raise DatasetError(
            f"the servers' operator does not allow datasets of module {module!r}; {listed}",
            where=function,
            remedy=f"start the servers with --dataset-modules {module}, or name it under dataset_modules in the "
            "cluster file; of an embedded server: connect(dataset_modules=…)",
        )


def _find_function(spec: DatasetSpec, allowed: Sequence[str]) -> Callable[..., Any]:
    module_name, _, name = spec.function.partition(":")
    module = importlib.import_module(module_name)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None or not callable(function):
        raise DatasetError(
            f"module {module_name!r}, {getattr(module, '__file__', 'without a file')}, has no function {name!r}",
            where=spec.function,
            remedy="write one: batches(start, *, batch, rows, **options)",
        )
    home = getattr(function, "__module__", None)
    if home != module_name:  # what an allowed module only imports is not allowed by that
        _require_allowed(str(home), spec.function, allowed)
    return function


def reader_error(spec: DatasetSpec, position: int, caught: BaseException) -> ShardwrightError:
    """What the function raised, as the client gets it: with the last lines of its traceback."""
    if isinstance(caught, DatasetError):
        return caught
    own = os.path.dirname(__file__)
    users = [frame for frame in traceback.extract_tb(caught.__traceback__) if not frame.filename.startswith(own)]
    shown = "".join(traceback.format_list(users[-_SHOWN_FRAMES:]))
    last = "".join(traceback.format_exception_only(caught)).strip()
    return DatasetError(
        f"batch {position} cannot be read: {last}\n{shown}".rstrip(),
        where=spec.function,
        remedy="mend the function, or the data; a module that was mended needs servers that start anew",
    )
