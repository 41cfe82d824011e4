"""How a mixture's rows and experts are laid out in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Rows in `replicas` x `experts` blocks; each of a replica's blocks owns the experts of one of `experts` parts.

    bound: rows that a block takes from another, over their mean; None: all that may come. 1.25 leaves a quarter more.
    """

    replicas: int
    experts: int
    bound: float | None = None

    @property
    def count(self) -> int:
        """Blocks of rows."""
        return self.replicas * self.experts

    def capacity(self, rows: int) -> int:
        """Rows that one block sends another at most; rows: of the mixture, before they are in blocks."""
        own = rows // self.count
        return own if self.bound is None else min(own, ceil(self.bound * own / self.experts))

    def describe(self) -> str:
        """`8 blocks × 2 of rows, capacity 1.25`; `8 blocks of rows, each with all experts`"""
        if self.experts == 1:
            return f"{self.replicas} blocks of rows, each with all experts"
        bound = "worst case" if self.bound is None else f"{self.bound:g}"
        rows = f" × {self.replicas} of rows" if self.replicas > 1 else ""
        return f"{self.experts} blocks{rows}, capacity {bound}"
