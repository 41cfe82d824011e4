"""A plan's attention in words: how many are fused kernels, where, what that saves, and what is left as written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwright.plans.attention_note import ATTENTION_KINDS, AttentionNote
from shardwright.units import format_bytes, format_seconds

#: Lines of a summary before the rest is only counted.
_SHOWN_LINES = 6

_KIND_WORDS = {"forward": "forward", "backward": "backward", "again": "forward again"}


def describe_attention(notes: Iterable[AttentionNote]) -> list[str]:
    """A line for each place and kind of attention: `12 forward, 12 backward fused at model.py:31: causal, …;
    1.2 GiB of scores and 3.1 ms a step less`."""
    groups: dict[AttentionNote, list[AttentionNote]] = {}
    for note in notes:
        groups.setdefault(replace(note, kind="", count=0, saved_bytes=0, saved_s=0.0), []).append(note)
    lines = [_describe_group(group) for group in groups.values()]
    more = len(lines) - _SHOWN_LINES
    return lines[:_SHOWN_LINES] + ([f"and {more} other kinds or places"] if more > 0 else [])


def _describe_group(notes: Sequence[AttentionNote]) -> str:
    first = notes[0]
    counts = {kind: sum(note.count for note in notes if note.kind == kind) for kind in ATTENTION_KINDS}
    counted = ", ".join(f"{count} {_KIND_WORDS[kind]}" for kind, count in counts.items() if count)
    state = "fused" if first.replaced else "left as written" if first.reason else "called by the program"
    line = f"{counted} {state}{f' at {first.place}' if first.place else ''}: {first.words}"
    saved_bytes, saved_s = sum(note.saved_bytes for note in notes), sum(note.saved_s for note in notes)
    saved = [f"{format_bytes(saved_bytes)} of scores"] if saved_bytes else []
    saved += [f"{format_seconds(saved_s)} a step"] if saved_s else []
    line += f"; {' and '.join(saved)} less" if saved else ""
    return f"{line}; {first.reason}" if first.reason else line
