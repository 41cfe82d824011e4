"""What a plan says of the program's attention: what runs as a fused kernel, and why the rest does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

#: Passes of a training step; `again` is a forward pass that is computed again for the backward pass.
ATTENTION_KINDS = ("forward", "backward", "again")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNote:
    """Equal attentions of one source line.

    place: source line of the scores' product, `model.py:31`; empty where the text has none.
    count: how many stand in the program; in a loop's body, once.
    kind: one of `ATTENTION_KINDS`.
    words: mask, heads and sizes, e.g. `causal, 16 heads on 8 of 64, 1024 × 1024, bf16`.
    saved_bytes: arrays of rows × keys, on all devices together, that the program no longer makes; of all `count`.
    saved_s: predicted seconds a step that one device would take longer, were they written out; of all `count`.
    replaced: whether it became a fused kernel.
    reason: why it did not, and what would change that; empty where it was one already, or became one.
    """

    place: str
    count: int
    kind: str
    words: str
    saved_bytes: int = 0
    saved_s: float = 0.0
    replaced: bool = True
    reason: str = ""


def gather_notes(notes: Iterable[AttentionNote]) -> tuple[AttentionNote, ...]:
    """One note for all that differ in number, bytes and seconds only, in order of the first."""
    groups: dict[AttentionNote, list[AttentionNote]] = {}
    for note in notes:
        groups.setdefault(replace(note, count=0, saved_bytes=0, saved_s=0.0), []).append(note)
    return tuple(
        replace(
            kind,
            count=sum(note.count for note in group),
            saved_bytes=sum(note.saved_bytes for note in group),
            saved_s=sum(note.saved_s for note in group),
        )
        for kind, group in groups.items()
    )
