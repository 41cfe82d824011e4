"""What a plan says of the program's mixtures of experts by ragged products."""

from __future__ import annotations

from dataclasses import dataclass

#: Parts of a mixture, in the order of its rows' way: they are sent to experts, multiplied, and brought back.
MIXTURE_PARTS = ("dispatch", "experts", "combine")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureNote:
    """One part of all mixtures together, on one device, a step: forward, again where they are computed again, backward.

    part: one of `MIXTURE_PARTS`.
    mixtures: how many a step runs, a loop's as often as it runs; what is computed again is not counted again.
    rows: that these multiply, on all devices.
    time_s: predicted seconds, collectives that move the part's arrays included.
    wire_bytes: that these put on the wire.
    flops: operations.
    """

    part: str
    mixtures: int
    rows: int
    time_s: float
    wire_bytes: int
    flops: float
