"""Lifetimes of a module's values, independent of sharding: memory in linear constraints of a search.

The bytes on one device at a position of the schedule: the arguments, the results not written over arguments, and the
shards of the values live there. At a chosen position

    sum over live values v of bytes(v, sharding of v)  <=  budget

is linear in the choice of shardings. Left out, since they depend on the choice: buffers of collectives, and fused
values stored only to be resharded. `cost.peak.memory` has both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.peak.buffer_assignment import Buffers, assign_buffers
from shardwright.cost.peak.copy_readers import CopyReader, reader_of
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.device_program_cache import DeviceProgramCache
from shardwright.cost.peak.inline import bodies
from shardwright.cost.peak.lowering import Lowering
from shardwright.cost.peak.schedule import ScheduleStep
from shardwright.cost.profiles import HardwareProfile, hardware_profile
from shardwright.hlo import Computation, Module
from shardwright.plans.shardings import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The stored values of one computation. Values without a buffer of their own are excluded: views, fused or
    overwriting values, parameters, results.

    order: name of the instruction at each position.
    names / leaves: the instruction and array leaf of each value, in a loop's body if the loop hoists it; a name repeats
        if its computation is called several times.
    readers: per value, the consumer it is a copy for, or None.
    sizes_bytes: of the whole array.
    starts / ends: first and last live position.
    bodies: per position of a loop, conditional or call, the computations called there; the peak of the largest adds to
        that position.
    """

    order: tuple[str, ...]
    names: tuple[str, ...]
    leaves: NDArray[np.int64]
    readers: tuple[CopyReader | None, ...]
    sizes_bytes: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    bodies: tuple[tuple[int, tuple[Liveness, ...]], ...]

    def live_at(self, position: int) -> NDArray[np.int64]:
        """Indices of the values live at a position."""
        return np.flatnonzero((self.starts <= position) & (position <= self.ends))

    def live_bytes(self, sizes_bytes: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Bytes at each position, bodies included, at the given size of each value (default: unsharded).

        With sizes given, bodies are left out: they have values, and sizes, of their own.
        """
        sizes = self.sizes_bytes if sizes_bytes is None else sizes_bytes
        change = np.zeros(len(self.order) + 1, dtype=np.int64)
        np.add.at(change, self.starts, sizes)
        np.subtract.at(change, self.ends + 1, sizes)
        live = np.cumsum(change)[:-1]
        if sizes_bytes is None:
            for position, bodies in self.bodies:
                live[position] += max((int(body.live_bytes().max(initial=0)) for body in bodies), default=0)
        return live

    def peaks(self, count: int) -> list[int]:
        """Up to `count` positions worth a constraint, largest first: the maxima of equal parts of the schedule."""
        live = self.live_bytes()
        bounds = np.linspace(0, len(live), min(count, len(live)) + 1).astype(np.int64)
        positions = [int(a + np.argmax(live[a:b])) for a, b in pairwise(bounds)]
        return sorted(positions, key=lambda position: (-live[position], position))


def liveness(module: Module, profile: HardwareProfile | None = None) -> Liveness:
    """The stored values of a module's entry and, inside, of its loops' and branches' bodies.

    profile: its compiler fuses and schedules; by default the CPU's.
    """
    profile = profile or hardware_profile("cpu")
    return _LivenessBuilder(profile).of(module.entry)


class _LivenessBuilder:
    def __init__(self, profile: HardwareProfile) -> None:
        self._profile = profile
        self._programs = DeviceProgramCache(Lowering(Mesh(axes=()), {}, profile))
        self._made: dict[tuple[Computation, bool], Liveness] = {}

    def of(self, computation: Computation, *, is_loop: bool = False) -> Liveness:
        key = (computation, is_loop)
        if key not in self._made:
            program = self._programs.of(computation, is_loop=is_loop)
            self._made[key] = self._liveness(program, assign_buffers(program, self._profile))
        return self._made[key]

    def _liveness(self, program: DeviceProgram, buffers: Buffers) -> Liveness:
        indices = [
            i
            for i, (size, start, end) in enumerate(zip(buffers.size_bytes, buffers.starts, buffers.ends, strict=True))
            if size and start <= end
        ]
        owners = [buffers.owners[i] for i in indices]
        users = program.users()
        return Liveness(
            order=tuple(program.instructions[step[0]].name for step in buffers.order),
            names=tuple(program.instructions[node].name for node, _ in owners),
            leaves=_array([leaf for _, leaf in owners]),
            readers=tuple(reader_of(program, users, node) for node, _ in owners),
            sizes_bytes=_array([buffers.size_bytes[i] for i in indices]),
            starts=_array([buffers.starts[i] for i in indices]),
            ends=_array([buffers.ends[i] for i in indices]),
            bodies=tuple(self._bodies(program, buffers.order)),
        )

    def _bodies(
        self, program: DeviceProgram, order: Sequence[ScheduleStep]
    ) -> Iterator[tuple[int, tuple[Liveness, ...]]]:
        for position, (node, *_) in enumerate(order):
            called = bodies(program.instructions[node])
            if called:
                is_loop = program.opcodes[node] == "while"
                yield position, tuple(self.of(body, is_loop=is_loop) for body in called)


def _array(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
