"""What a plan says of a manual region of the program (`shard_map`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionNote:
    """The manual regions of one source line with equal manual axes.

    place: the line, `model.py:31`; empty where the text has none.
    count: how many stand in the program; in a loop's body, once.
    axes: the manual axes with their sizes, `cp=8` or `data=2 × model=4`.
    collectives: executions a step of the collectives inside.
    wire_bytes: bytes that one device puts on the wire for them, a step.
    time_s: their seconds a step.
    """

    place: str
    count: int
    axes: str
    collectives: int
    wire_bytes: int
    time_s: float
