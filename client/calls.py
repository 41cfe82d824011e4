"""What made a numbered step, so that it can be made again on another cluster; see `relocation.py`.

An array is known by its *name*: the ids that its parts had when it was first made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.client.checks import Checks
from shardwright.client.placement import Placement
from shardwright.plans.layouts import Layout
from shardwright.proto.v1 import master_pb2

if TYPE_CHECKING:
    from shardwright.client.array_specs import ArraySpec
    from shardwright.client.programs import StepProgram

#: Ids that the parts of an array had when it was first made.
Name = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownArray:
    """An array by name, and how it lies: the ids of its parts, and their placement."""

    name: Name
    spec: ArraySpec
    ids: tuple[int, ...]
    place: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCall:
    """A program was run. leaves: what it was called with: arrays on the servers, or contents.

    outputs: names of the results, by output number; () for unwanted ones. plan_again: makes a program for such leaves;
    None: it is planned freely.
    """

    program: StepProgram
    leaves: tuple[KnownArray | np.ndarray, ...]
    outputs: tuple[Name, ...]
    is_traced: bool
    checks: Checks
    timeout_s: float
    plan_again: Callable[[Sequence[Any]], StepProgram] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCall:
    """Arrays were copied; the names of the copies, in the same order."""

    arrays: tuple[KnownArray, ...]
    copies: tuple[Name, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCall:
    """Arrays were read by the workers, of a checkpoint or of a batch: (name there, type, name here).

    order: the request without its parts; `add_part(request, name, layout, first row)` adds one.
    """

    order: master_pb2.RunStepsRequest
    arrays: tuple[tuple[Any, ArraySpec, Name], ...]
    add_part: Callable[[master_pb2.RunStepsRequest, Any, Layout, int], object]


Call = ProgramCall | CopyCall | ReadCall
