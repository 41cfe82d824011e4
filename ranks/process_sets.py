"""Process sets: which ranks take part in a collective, and the mesh of one device of each."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.errors import CollectiveError, OptionError
from shardwright.ranks.programs_cache import ProgramHolder
from shardwright.xla import private

#: The name of the ranks' mesh axis, in programs too: `jax.lax.psum(x, sw.ranks.AXIS)`.
AXIS = "rank"


class ProcessSet(ProgramHolder):
    """Some ranks of the job, which call collectives among themselves; the others are not asked.

    ranks: their numbers in the job, in the order that results have. Every rank may make the object; it costs nothing
    before its first collective. Two sets that share ranks must be used in the same order by all that are in both.

    It is good for every job that has these ranks: after `shutdown` and another `init`, too.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        super().__init__()
        self.ranks = tuple(ranks)
        if not self.ranks or any(type(rank) is not int or rank < 0 for rank in self.ranks):
            raise OptionError(f"{list(self.ranks)} is no list of ranks", where="ranks", remedy="whole numbers from 0")
        if len(set(self.ranks)) < len(self.ranks):
            raise OptionError(f"{list(self.ranks)} names a rank twice", where="ranks")
        #: Who still had data at the latest collective: what `join` returns is read off this.
        self.last_active = (True,) * len(self.ranks)
        self._array_types: dict[tuple[tuple[int, ...], np.dtype], Any] = {}

    def __repr__(self) -> str:
        return f"ProcessSet({list(self.ranks)})"

    def drop(self) -> None:
        """Forget the devices of a job that is over."""
        for name in ("mesh", "device", "split", "whole"):
            self.__dict__.pop(name, None)
        self._array_types.clear()
        self.last_active = (True,) * len(self.ranks)

    def size(self) -> int:
        """How many ranks are in the set."""
        return len(self.ranks)

    def included(self) -> bool:
        """Whether this process is in the set."""
        return jax.process_index() in self.ranks

    def rank(self) -> int:
        """This process's place in the set. Raises CollectiveError where it is not in it."""
        return self.place_of(jax.process_index())

    def place_of(self, rank: int) -> int:
        """The place in the set of a rank of the job. Raises CollectiveError where it is not in it."""
        if rank in self.ranks:
            return self.ranks.index(rank)
        raise CollectiveError(
            f"rank {rank} is not in {self}", remedy="call with process_set=None, or only where process_set.included()"
        )

    @cached_property
    def mesh(self) -> Mesh:
        """The first device of each rank, along the axis `rank`."""
        devices: dict[int, jax.Device] = {}
        for device in jax.devices():
            devices.setdefault(device.process_index, device)
        missing = [rank for rank in self.ranks if rank not in devices]
        if missing:
            raise CollectiveError(f"the job has no rank {missing[0]}", where=str(self), remedy="see sw.ranks.size()")
        return Mesh(np.array([devices[rank] for rank in self.ranks]), (AXIS,))

    @cached_property
    def device(self) -> jax.Device:
        """This process's device in the mesh."""
        device: jax.Device = self.mesh.devices[self.rank()]
        return device

    def put(self, part: np.ndarray | jax.Array) -> jax.Array:
        """The array whose dimension 0 is split over the ranks, of which `part` is this one's."""
        if isinstance(part, jax.Array):
            part = jax.device_put(part, self.device)
        array_type = self._array_types.get((part.shape, part.dtype))
        if array_type is not None:
            array: jax.Array = private.put_part(part, array_type, self.split, self.device)
            return array
        shape = (self.size() * part.shape[0], *part.shape[1:])
        array = jax.make_array_from_single_device_arrays(shape, self.split, [jax.device_put(part, self.device)])
        self._array_types[part.shape, part.dtype] = array.aval
        return array

    @cached_property
    def split(self) -> NamedSharding:
        """Dimension 0 split over the ranks."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))  # type: ignore[no-untyped-call]

    @cached_property
    def whole(self) -> NamedSharding:
        """All of it at each rank."""
        return NamedSharding(self.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
