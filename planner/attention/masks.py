"""Which mask an attention has: told from its logits where all scores are 0, all rows and keys of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from shardwright.hlo import Instruction
from shardwright.planner.attention.axes import CutAxisError, Label, NoLabelsError
from shardwright.planner.attention.cone import Cone
from shardwright.planner.attention.elementwise import Array
from shardwright.planner.attention.evaluate import Evaluation
from shardwright.planner.attention.flow import Flow
from shardwright.planner.attention.tuning import BLOCK_ELEMENTS, HIDDEN
from shardwright.planner.attention.whole import UnknownValueError, WholeValues


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask in the kernel's words.

    kind: `none` or `causal`; window: as in AttentionCall; is_biased: whether logits have to be added to the scores.
    """

    kind: str = "none"
    window: int = 0
    is_biased: bool = True

    @property
    def words(self) -> str:
        parts = [f"window of {self.window}" if self.window else self.kind] if self.kind != "none" else []
        return " and ".join([*parts, *(["bias"] if self.is_biased else [])]) or "none"


class Masks:
    """Finds masks, equal ones once."""

    def __init__(self, flow: Flow, whole: WholeValues) -> None:
        self._flow, self._whole = flow, whole
        self._masks: dict[Hashable, Mask] = {}

    def find(self, cone: Cone, logits: Instruction, rows: str) -> Mask:
        """The mask of logits; one with a bias where it depends on arguments, or has other numbers than hidden ones."""
        key = (self._flow.number_within(logits, cone.labels, cone.product), cone.labels[logits], rows)
        if key not in self._masks:
            self._masks[key] = self._find(cone, logits, rows)
        return self._masks[key]

    def _find(self, cone: Cone, logits: Instruction, rows: str) -> Mask:
        labels = cone.labels[logits]
        (keys,) = cone.keys
        total, count = cone.sizes[rows], cone.sizes[keys]
        zero = np.zeros([1] * len(cone.labels[cone.product]))
        given = {cone.product: (cone.labels[cone.product], zero)}
        coordinates = {axis: np.arange(size) for axis, size in cone.sizes.items()}
        block = max(1, BLOCK_ELEMENTS // count)
        pattern: tuple[str, int] | None = None
        is_even = True
        for start in reversed(range(0, total, block)):
            coordinates[rows] = np.arange(start, min(total, start + block))
            evaluation = Evaluation(self._flow, self._whole, cone.sizes, coordinates, given, cone.labels, None)
            try:
                value = evaluation.value(logits, labels)
            except (UnknownValueError, NoLabelsError, CutAxisError):
                return Mask()
            hidden, even = _hidden(value, [label or () for label in labels], rows, keys)
            if hidden is None:
                return Mask()
            is_even &= even
            here = _pattern(hidden, coordinates[rows], count, pattern)
            if here is None:
                return Mask()
            pattern = here
        kind, window = pattern or ("none", 0)
        return Mask(kind, window, not is_even)


def _hidden(value: Array, labels: list[Label], rows: str, keys: str) -> tuple[Array | None, bool]:
    """Hidden keys by row, equal in all other axes (None if they are not), and whether all others have one number."""
    row, key = (next(dim for dim, label in enumerate(labels) if axis in label) for axis in (rows, keys))
    if labels[row] != (rows,) or labels[key] != (keys,):
        return None, False
    moved = np.moveaxis(value, (row, key), (-2, -1))
    flat = moved.reshape(-1, *moved.shape[-2:])
    top = flat.max(-1, keepdims=True)
    hidden = flat <= top + HIDDEN
    if not (hidden == hidden[:1]).all() or not np.isfinite(top).all():
        return None, False
    even = bool((hidden | (flat == top)).all())
    return hidden[0], even


def _pattern(hidden: Array, rows: Array, keys: int, after: tuple[str, int] | None) -> tuple[str, int] | None:
    """The kind and window that hidden keys of some rows have in common with those after them; None for others."""
    seen = ~np.broadcast_to(hidden, (len(rows), keys))
    if after is None:
        width = int(seen[-1].sum())
        after = ("none", 0) if width == keys and seen.all() else ("causal", width % min(int(rows[-1]) + 1, keys))
    kind, window = after
    numbers = np.arange(keys)[None, :]
    if kind == "none":
        later_see_all = int(rows[-1]) + 1 >= keys - 1
        is_causal = later_see_all and np.array_equal(seen, numbers <= rows[:, None])
        return after if seen.all() else ("causal", 0) if is_causal else None
    expected = numbers <= rows[:, None]
    if window:
        expected &= numbers > rows[:, None] - window
    return after if np.array_equal(seen, expected) else None
