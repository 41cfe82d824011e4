"""Process sets as Horovod numbers them: 0 is all ranks, the others are numbered as they are added.

Nothing has to be added before a collective: a set is an object of its ranks. The number is for programs that pass sets
by it; all ranks add theirs in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from shardwright import ranks
from shardwright.horovod.errors import OptionValueError, as_value_errors


class ProcessSet(ranks.ProcessSet):
    """Some ranks of the job, in ascending order. process_set_id: its number; None before `add_process_set`."""

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise OptionValueError(
                f"a {type(ranks).__name__} is no list of ranks", where="ProcessSet", remedy="ProcessSet([0, 2])"
            )
        with as_value_errors():
            super().__init__(sorted(ranks))
        self.process_set_id: int | None = None


class _GlobalProcessSet:
    """All ranks of the job that is joined."""

    process_set_id = 0

    def __repr__(self) -> str:
        return "global_process_set"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of all ranks."""
        return ranks.world().ranks

    def size(self) -> int:
        """How many ranks the job has."""
        return ranks.size()

    def rank(self) -> int:
        """This process's number."""
        return ranks.rank()

    def included(self) -> bool:
        """True."""
        return True


global_process_set = _GlobalProcessSet()


class _Registry:
    """The sets that were added, by number."""

    sets: ClassVar[dict[int, ProcessSet]] = {}
    next_number = 1


def forget_process_sets() -> None:
    """Begin a job: no set has a number."""
    for process_set in _Registry.sets.values():
        process_set.process_set_id = None
    _Registry.sets.clear()
    _Registry.next_number = 1


def add_process_set(process_set: ranks.ProcessSet | Sequence[int]) -> ProcessSet:
    """Number a process set. One of the same ranks that has a number shares it."""
    if isinstance(process_set, ProcessSet):
        chosen = process_set
    else:
        chosen = ProcessSet(process_set.ranks if isinstance(process_set, ranks.ProcessSet) else process_set)
    for number, added in _Registry.sets.items():
        if added.ranks == chosen.ranks:
            chosen.process_set_id = number
            return chosen
    chosen.process_set_id = _Registry.next_number
    _Registry.sets[_Registry.next_number] = chosen
    _Registry.next_number += 1
    return chosen


def remove_process_set(process_set: Any) -> bool:
    """Take the number from a process set. False where it has none, or is that of all ranks."""
    number = getattr(process_set, "process_set_id", None)
    if not number or _Registry.sets.pop(number, None) is None:
        return False
    process_set.process_set_id = None
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of each numbered set."""
    return {0: list(ranks.world().ranks)} | {number: list(added.ranks) for number, added in _Registry.sets.items()}


def resolve(process_set: Any) -> ranks.ProcessSet | None:
    """The set of an argument `process_set`: an object or a number; None for all ranks. Raises OptionValueError."""
    if process_set is None or process_set is global_process_set or (type(process_set) is int and process_set == 0):
        return None
    if isinstance(process_set, ranks.ProcessSet):
        return process_set
    if type(process_set) is int and process_set in _Registry.sets:
        return _Registry.sets[process_set]
    raise OptionValueError(
        f"{process_set!r} is no process set", where="process_set", remedy="pass what add_process_set returned"
    )


def members(process_set: Any) -> ranks.ProcessSet:
    """The same; the set of all ranks instead of None."""
    return resolve(process_set) or ranks.world()
