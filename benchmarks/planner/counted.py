"""Counts of one device's work in a step: collectives and kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from benchmarks.planner.groups import Groups

#: (kind, payload bytes, groups) and (element type of a product or "", operations, bytes, kind).
CollectiveKey = tuple[str, int, Groups]
KernelKey = tuple[str, float, float, str]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of one device's program.

    payload_bytes: the whole array of an all-reduce, all-gather or reduce-scatter; one device's operand
        of an all-to-all or a permute.
    groups: device positions of each group; (source, target) pairs of a permute.
    count: runs a step.
    """

    kind: str
    payload_bytes: int
    groups: tuple[tuple[int, ...], ...]
    count: int = 1

    @property
    def group_size(self) -> int:
        return 2 if self.kind == "collective-permute" else max(map(len, self.groups), default=1)

    @property
    def wire_bytes(self) -> float:
        """Bytes one device sends for one run, by the ring algorithms (Thakur, Rabenseifner, Gropp, 2005)."""
        if self.kind == "collective-permute":
            return float(self.payload_bytes)
        share = (self.group_size - 1) / self.group_size
        return self.payload_bytes * share * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of one device's program: arithmetic, bytes to and from memory, runs a step.

    product_type: element type of a product's or convolution's operands; None for other kernels. kind: from
        `traffic.kind_of`; only printed.
    """

    flops: float
    bytes: float
    product_type: str | None = None
    kind: str = ""
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class ProgramCounts:
    """Counts of one device's step; equal collectives and kernels are merged."""

    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]

    @property
    def wire_bytes(self) -> float:
        return sum(c.wire_bytes * c.count for c in self.collectives)

    @property
    def product_flops(self) -> float:
        return sum(k.flops * k.count for k in self.kernels if k.product_type)

    @property
    def memory_bytes(self) -> float:
        return sum(k.bytes * k.count for k in self.kernels)

    def wire_by_kind(self) -> dict[str, tuple[int, float]]:
        """kind → (runs a step, wire bytes a step)."""
        entries: dict[str, tuple[int, float]] = {}
        for c in self.collectives:
            runs, sent = entries.get(c.kind, (0, 0.0))
            entries[c.kind] = (runs + c.count, sent + c.wire_bytes * c.count)
        return dict(sorted(entries.items()))


def build_counts(collectives: Counter[CollectiveKey], kernels: Counter[KernelKey]) -> ProgramCounts:
    """Build the counts, sorted."""
    return ProgramCounts(
        collectives=tuple(
            Collective(kind=kind, payload_bytes=size, groups=groups, count=runs)
            for (kind, size, groups), runs in sorted(collectives.items())
        ),
        kernels=tuple(
            Kernel(flops=flops, bytes=size, product_type=product_type or None, kind=kind, count=runs)
            for (product_type, flops, size, kind), runs in sorted(kernels.items())
        ),
    )
