"""Places sends and receives between the computations of a stage.

A send follows the program that made the value. A receive is posted one group of programs (a cell, say) before the
program that reads the value: the transfer runs beside that group. It is never posted after one sent later between the
same stages: both ends order their transfers equally.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.tasks.tuning import GROUPS_AHEAD


class Slot(NamedTuple):
    """A place in a stage's computing: group first, program in the group second."""

    group: int
    program: int


class Route(NamedTuple):
    """One transfer: from the producer's stage and slot to the stage and slot of the first reader."""

    source: int
    made: Slot
    target: int
    read: Slot


class TransferPlacement(NamedTuple):
    """Sends and receives of one stage: receives before a group begins, sends after a program (by slot)."""

    receives: dict[int, list[int]]
    sends: dict[Slot, list[int]]


def place_transfers(routes: Sequence[Route], stages: int) -> tuple[TransferPlacement, ...]:
    """Places of each route's send and receive, per stage."""
    woven = tuple(TransferPlacement(defaultdict(list), defaultdict(list)) for _ in range(stages))
    channels: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number in sorted(range(len(routes)), key=lambda n: routes[n].made):
        channels[routes[number].source, routes[number].target].append(number)
    for (source, target), numbers in sorted(channels.items()):
        for number in numbers:
            woven[source].sends[routes[number].made].append(number)
        post = routes[numbers[-1]].read.group
        posts = []
        for number in reversed(numbers):
            post = min(post, routes[number].read.group)
            posts.append((max(post - GROUPS_AHEAD, 0), number))
        for group, number in reversed(posts):
            woven[target].receives[group].append(number)
    return woven
