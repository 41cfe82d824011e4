"""A thread that reads the rows of one worker, batch after batch, some of them ahead."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardwright.errors import DatasetError, ShardwrightError
from shardwright.server.runtime.datasets.functions import DatasetSpec, reader_error
from shardwright.server.tuning import BATCH_POLL_S, READER_IDLE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a worker needs of each batch.

    rows: row numbers of the whole batch, ascending, as bytes of int64. leaves: numbers of the leaves; None: all.
    """

    rows: bytes
    leaves: frozenset[int] | None

    @property
    def row_numbers(self) -> np.ndarray:
        return np.frombuffer(self.rows, np.int64).copy()


class BatchReader:
    """Reads one dataset for one demand, from `position` on; its thread ends with `close`.

    open_batches: called in the thread: the function's batches from a number on, for these rows. idle_s: seconds without
    a call after which it closes itself. reading: within it the function works on a batch. Arrays that it hands on are
    copies: the function may use its memory again. Thread-safe; one thread at a time takes batches.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        demand: Demand,
        position: int,
        open_batches: Callable[[int, np.ndarray], Iterator[Any]],
        *,
        idle_s: float = READER_IDLE_S,
        reading: Callable[[int], AbstractContextManager[None]] = lambda position: nullcontext(),
    ) -> None:
        self._reading = reading
        self._spec, self._demand = spec, demand
        self._rows = len(demand.row_numbers)
        self._open = open_batches
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._batches: deque[list[np.ndarray | None]] = deque()
        self._first = position  # number of the first of them
        self._limit = position + 1 + spec.prefetch
        self._end: int | None = None  # the first number without a batch
        self._error: ShardwrightError | None = None  # of the batch after those
        self._has_raised = False  # it was told: who asks once more wants another attempt
        self._is_taking = False
        self._is_retired = False  # closed once nobody takes a batch
        self._is_closed = False
        self.used_s = time.monotonic()
        self.structure: Any = None  # of the first batch: its pytree, with arrays at its leaves
        threading.Thread(target=self._read, args=(position,), name=f"dataset {spec.function}", daemon=True).start()

    @property
    def ready(self) -> int:
        """Batches before this one have been read."""
        return self._first + len(self._batches)

    def reaches(self, position: int, first: int) -> bool:
        """Whether the batch is still to come, and reading on to `first` takes no longer than beginning there."""
        with self._changed:
            is_near = self._first <= position and first <= self.ready + self._spec.prefetch + 1
            return is_near and not (self._is_closed or self._is_retired or self._has_raised)

    def skip_to(self, position: int) -> None:
        """Batches before this one are not needed."""
        with self._changed:
            self._drop_before(position)

    def wait_for(self, position: int, timeout_s: float) -> tuple[int, bool]:
        """(`ready`, whether the data end there), as soon as the batch is there or is known not to exist.

        Returns after `timeout_s` otherwise. Raises DatasetError where the batch cannot be read.
        """
        with self._changed:
            self._want(position)
            self._changed.wait_for(lambda: self.ready > position or self._is_over, timeout_s)
            if self.ready <= position:
                self._raise_error()
            return self.ready, self._end is not None

    def take(self, position: int, check: Callable[[], None]) -> list[np.ndarray | None]:
        """The leaves of a batch, None in the place of those that are not needed here; it is gone afterwards.

        check: called while it waits; may raise. Raises DatasetError where there is no such batch.
        """
        with self._changed:
            self._want(position)
            self._is_taking = True
            try:
                while (batch := self._pop(position)) is None:
                    check()
                    self._changed.wait(BATCH_POLL_S)
                return batch
            finally:
                self._is_taking = False
                if self._is_retired:
                    self.close()

    def _pop(self, position: int) -> list[np.ndarray | None] | None:
        """The batch, if it is there. Raises DatasetError where it will not come."""
        self._drop_before(position)
        if self._first == position and self._batches:
            self._first += 1
            self._changed.notify_all()
            return self._batches.popleft()
        self._raise_error()
        if self._is_closed:
            raise DatasetError(f"the dataset was closed before batch {position}", where=self._spec.function)
        if self._end is not None:
            raise DatasetError(
                f"there is no batch {position}: the data end before batch {self._end}",
                where=self._spec.function,
                remedy="every worker must find as many batches, whatever its rows",
            )
        return None

    def retire(self) -> None:
        """Another reader takes over: `close`, once a batch that is being waited for has come."""
        with self._changed:
            self._is_retired = True
            if not self._is_taking:
                self.close()

    def close(self) -> None:
        """The thread ends, at once or when the function returns."""
        with self._changed:
            self._is_closed = True
            self._batches.clear()
            self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._end is not None or self._error is not None

    def _raise_error(self) -> None:
        if self._error is not None:
            self._has_raised = True
            raise self._error

    def _want(self, position: int) -> None:
        self.used_s = time.monotonic()
        self._limit = max(self._limit, position + 1 + self._spec.prefetch)
        self._changed.notify_all()

    def _drop_before(self, position: int) -> None:
        while self._batches and self._first < position:
            self._batches.popleft()
            self._first += 1
            self._changed.notify_all()

    # ---- the thread ------------------------------------------------------------------------

    def _read(self, position: int) -> None:
        batches: Iterator[Any] | None = None
        try:
            while self._may_read():
                with self._reading(position):
                    if batches is None:
                        batches = self._open(position, self._demand.row_numbers)
                    arrays = self._arrays_of(next(batches), position)
                if arrays is None:
                    break
                with self._changed:
                    self._batches.append(arrays)
                    self._changed.notify_all()
                position += 1
        except StopIteration:
            pass
        except BaseException as caught:
            with self._changed:
                self._error = reader_error(self._spec, position, caught)
        finally:
            with self._changed:
                self._end = position if self._error is None and not self._is_closed else None
                self._changed.notify_all()
            close = getattr(batches, "close", None)
            with contextlib.suppress(BaseException):
                if close is not None:  # of a generator: its `finally` blocks run
                    close()

    def _may_read(self) -> bool:
        """Waits until there is room for another batch; False once the reader is closed."""
        with self._changed:
            while not (self._is_closed or self.ready < self._limit):
                idle_s = time.monotonic() - self.used_s
                if idle_s >= self._idle_s:
                    self.close()
                else:
                    self._changed.wait(self._idle_s - idle_s)
            return not self._is_closed

    def _arrays_of(self, batch: Any, position: int) -> list[np.ndarray | None] | None:
        """The needed leaves of a batch, in host memory of their own; None where it has fewer rows: the data end."""
        leaves, structure = jax.tree.flatten(batch)
        wanted = self._demand.leaves
        arrays = [
            _to_array(leaf, self._spec, number, position) if wanted is None or number in wanted else None
            for number, leaf in enumerate(leaves)
        ]
        if self.structure is None:
            self.structure = jax.tree.unflatten(structure, arrays)
        if wanted is not None and wanted and max(wanted) >= len(leaves):
            raise DatasetError(
                f"batch {position} has {len(leaves)} arrays, others have more",
                where=self._spec.function,
                remedy="yield the same structure each time, on every worker",
            )
        return arrays if self._has_all_rows(arrays, position) else None

    def _has_all_rows(self, arrays: Sequence[np.ndarray | None], position: int) -> bool:
        asked = self._rows
        for number, array in enumerate(arrays):
            if array is None or array.shape[0] == asked:
                continue
            if array.shape[0] < asked and position > 0:
                return False
            raise DatasetError(
                f"array {number} of batch {position} has {array.shape[0]} rows, asked for were {asked}",
                where=self._spec.function,
                remedy="yield one entry along the first dimension for each of `rows`, which are the numbers of this "
                "worker's rows in the whole batch",
            )
        return True


def _to_array(leaf: Any, spec: DatasetSpec, number: int, position: int) -> np.ndarray:
    """A copy of a leaf; a leaf without arguments is called."""
    value = leaf() if callable(leaf) else leaf
    array = np.array(value)
    if array.dtype.hasobject or array.dtype.kind in "USMm" or not array.ndim:
        raise DatasetError(
            f"array {number} of batch {position} is {array.dtype} of shape {list(array.shape)}",
            where=spec.function,
            remedy="yield arrays of numbers whose first dimension counts rows",
        )
    return array
