"""How one variable of a training step is kept between steps, and where its update is computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableStrategy:
    """A variable's strategy, its optimizer slots included.

    split: the dimension that is split over all devices; None: nothing is.
    local_copy: with `split`, whether each device keeps the whole variable, and only its slots are split.

    | split | local_copy | variable | slots | its gradient |
    |---|---|---|---|---|
    | None | | whole | whole | all-reduced; every device computes the update |
    | d | True | whole | split | reduce-scattered; the updated variable is gathered (ZeRO-1) |
    | d | False | split | split | reduce-scattered; the variable is gathered where it is used, or its rows exchanged |
    """

    split: int | None = None
    local_copy: bool = False

    @property
    def splits_variable(self) -> bool:
        """Whether a device holds a part of the variable only."""
        return self.split is not None and not self.local_copy

    def __str__(self) -> str:
        if self.split is None:
            return "all-reduce"
        what = "slots" if self.local_copy else "variable and slots"
        return f"{what} split in dimension {self.split}"
