"""What a plan says of kernels of the program's own: how far it knows them, and what they hold of it."""

from __future__ import annotations

from dataclasses import dataclass

#: Who said what a call costs: the user, by `shardwright.cost`; the kernel, by `cost_estimate`; nobody.
KERNEL_PRICES = ("sw.cost", "cost_estimate", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNote:
    """Calls of one kernel at one source line.

    place: source line; empty where the text has none. name: a Triton kernel's own, or the custom call's target. count:
    how many stand in the program; in a loop's body, once. whole: whether every device runs them whole. price: one of
    `KERNEL_PRICES`. step_share, memory_share: parts of the predicted step, and of the peak memory, that they hold;
    without a price, the seconds of their bytes alone.
    """

    place: str
    name: str
    count: int
    whole: bool
    price: str
    step_share: float
    memory_share: float

    @property
    def is_known(self) -> bool:
        """Whether it is split, and has a price: then a plan is weighed like any other."""
        return bool(self.price) and not self.whole
