"""Executables of this node: one program, or its stages of a pipeline (`pipeline.PipelineExecutable`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwright.plans.layouts import Layout
from shardwright.server.runtime.arrays import StoredArray, local_positions
from shardwright.server.runtime.tasks import StageRecord
from shardwright.server.runtime.transport import StopSignal
from shardwright.xla.runtime import LoadedProgram


class Executable(Protocol):
    """An executable of a step: one program, or the stages of a pipeline."""

    @property
    def donated(self) -> frozenset[int]:
        """Numbers of the arguments whose buffers it reuses."""
        ...

    @property
    def arguments_here(self) -> tuple[bool, ...]:
        """Per argument, whether a part of it is on this node."""
        ...

    def run(
        self, sequence: int, stop: StopSignal, arrays: Sequence[StoredArray | None], records: Sequence[StageRecord]
    ) -> list[StoredArray | None]:
        """Dispatch a step on the arguments present here; per output its array, or None if it is elsewhere."""
        ...

    def new_records(self) -> list[StageRecord]:
        """Empty records of a traced step, per stage of this node."""
        ...

    def markers(self, results: Sequence[StoredArray]) -> tuple[StoredArray, ...]:
        """The results to wait for: once they are ready, the step has run on this node."""
        ...

    def place(self) -> str:
        """Where `run` is, called by another thread."""
        ...

    def close(self) -> None:
        """No step will ask for it any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpmdExecutable:
    """One program on a mesh that has devices of this node."""

    loaded: LoadedProgram
    outputs: tuple[Layout, ...]
    donated: frozenset[int]
    arguments_here: tuple[bool, ...]

    def run(
        self, sequence: int, stop: StopSignal, arrays: Sequence[StoredArray | None], records: Sequence[StageRecord]
    ) -> list[StoredArray | None]:
        del sequence, stop, records
        results = self.loaded.run([stored.value for stored in arrays if stored is not None])
        return [StoredArray(value=value, layout=layout) for value, layout in zip(results, self.outputs, strict=True)]

    def new_records(self) -> list[StageRecord]:
        return []

    def markers(self, results: Sequence[StoredArray]) -> tuple[StoredArray, ...]:
        """One: results of one program are ready together."""
        return tuple(sorted(results, key=lambda stored: stored.value.size)[:1])

    def place(self) -> str:
        positions = (at for at in local_positions() if at in self.outputs[0].devices) if self.outputs else ()
        return "the program on devices " + ", ".join(map(str, positions))

    def close(self) -> None:
        """It has nothing but its program."""
