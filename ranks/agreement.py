"""The beginning of every collective: each rank announces its call, and all compare them.

One all-gather of a record of fixed length, the same for every call. A call that differs between ranks is an error at
every rank, never a hang or a wrong result. Small values travel in the record, and need nothing more.

| bytes | |
|---|---|
| 0–15 | digest of the call: kind, names, shapes, types |
| 16 | `CALLED`, `JOINED` (no data left), `FAILED` (an error at that rank alone) |
| 17 | `Follow`: the duty of a rank without data after this |
| 24–31 | length of the rank's message |
| 32– | the message, or its beginning |
"""

from __future__ import annotations

import enum
import functools
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.errors import CollectiveError, ShardwrightError
from shardwright.ranks import lifeline, programs, watch
from shardwright.ranks.process_sets import ProcessSet

CALLED, JOINED, FAILED = range(3)
_HEADER = 32
_HEAD = struct.Struct("<16sBB6xQ")


class Follow(enum.IntEnum):
    """The duty of a rank without data once it has heard of a call."""

    REFUSE = 0
    NOTHING = 1
    REDUCE = 2
    GATHER = 3


@functools.cache
def capacity(size: int) -> int:
    """Bytes of a message in the record: all records of all ranks stay small together."""
    return max(224, min(1024, 65536 // size // 32 * 32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """All ranks' announcements.

    rows: their records. kinds, follows: bytes 16 and 17 of each. active: whether each has data. lengths: of their
    messages.
    """

    rows: np.ndarray
    digests: tuple[bytes, ...]
    kinds: tuple[int, ...]
    follows: tuple[int, ...]
    active: tuple[bool, ...]
    lengths: tuple[int, ...]

    def all_fit(self) -> bool:
        """Whether every message is in the records."""
        return max(self.lengths) <= int(self.rows.shape[1]) - _HEADER

    def message(self, place: int) -> np.ndarray:
        """The bytes of a rank's message in its record."""
        return self.rows[place, _HEADER : _HEADER + self.lengths[place]]

    def active_messages(self) -> list[np.ndarray]:
        """The messages of the ranks with data, in their records."""
        return [self.message(place) for place in self.active_places()]

    def follow(self) -> Follow:
        """The part of ranks without data."""
        return Follow(self.follows[self.active_places()[0]])

    def head(self, place: int) -> tuple[bytes, int, int]:
        """What must be equal at all ranks with data."""
        return self.digests[place], self.kinds[place], self.follows[place]

    def active_places(self) -> list[int]:
        """The ranks with data."""
        return [place for place, has_data in enumerate(self.active) if has_data]


@functools.lru_cache(maxsize=4096)
def _digest(call: str) -> bytes:
    return hashlib.blake2b(call.encode(), digest_size=16).digest()


_NO_DIGEST = bytes(16)


def agree(process_set: ProcessSet, call: str, message: np.ndarray, *, follow: Follow = Follow.REFUSE) -> Agreement:
    """Tell all ranks of a call, and hear of theirs.

    call: its text, the same at all ranks. message: bytes of this rank, cut to the record's capacity.
    follow: the part of ranks without data. Raises CollectiveError where calls differ.
    """
    line = lifeline.current()
    if line is not None:
        line.check()
    watch.current().describe(call)
    agreement = _gather(process_set, CALLED, _digest(call), message, follow)
    _check(process_set, agreement, call)
    if follow is Follow.REFUSE and not all(agreement.active):
        raise build_join_error(process_set, agreement, call)
    return agreement


def agree_without_data(process_set: ProcessSet) -> Agreement:
    """The call of the others, told to a rank without data. Raises CollectiveError where theirs differ."""
    agreement = _gather(process_set, JOINED, _NO_DIGEST, np.zeros(0, np.uint8))
    _check(process_set, agreement, "join")
    return agreement


def report_failure(process_set: ProcessSet, error: ShardwrightError) -> None:
    """Tell all ranks of an error at this one: none waits for it."""
    agreement = _gather(process_set, FAILED, _NO_DIGEST, np.zeros(0, np.uint8))
    _calls(process_set, agreement, str(error))


def _gather(
    process_set: ProcessSet, kind: int, digest: bytes, message: np.ndarray, follow: Follow = Follow.NOTHING
) -> Agreement:
    size = process_set.size()
    length = capacity(size)
    record = np.zeros(_HEADER + length, np.uint8)
    record[:_HEADER] = np.frombuffer(_HEAD.pack(digest, kind, follow, message.size), np.uint8)
    fitting = message[:length]
    record[_HEADER : _HEADER + fitting.size] = fitting
    if size == 1:
        rows = record[None]
    else:
        words = programs.run(process_set, programs.gather_all, record.view(np.uint32)[None], replicated=True)
        rows = programs.fetch(words, process_set).view(np.uint8)
    digests, kinds, follows, lengths = zip(*[_HEAD.unpack_from(row) for row in rows], strict=True)
    active = tuple([kind != JOINED for kind in kinds])
    return Agreement(rows=rows, digests=digests, kinds=kinds, follows=follows, active=active, lengths=lengths)


def _check(process_set: ProcessSet, agreement: Agreement, call: str) -> None:
    previous = process_set.last_active
    process_set.last_active = agreement.active
    places = agreement.active_places()
    if not places:
        process_set.last_active = previous
        return
    first = places[0]
    if agreement.kinds[first] == CALLED and all(agreement.head(place) == agreement.head(first) for place in places):
        return
    calls = _calls(process_set, agreement, call)
    lines = "".join(f"\n  rank {process_set.ranks[place]}: {text}" for place, text in enumerate(calls))
    failed = FAILED in agreement.kinds
    raise CollectiveError(
        f"{'a rank failed before' if failed else 'the ranks disagree on'} a collective{lines}",
        where=call.split("\n")[0],
        remedy="every rank must call the same collectives in the same order, with the same shapes and types",
    )


def _calls(process_set: ProcessSet, agreement: Agreement, call: str) -> list[str]:
    """The call of each rank, in words. All ranks ask for it once they disagree."""
    text = np.frombuffer(" ".join(call.split()).encode()[: capacity(process_set.size())], np.uint8)
    return [
        bytes(row.message(place)).decode(errors="replace") or "(nothing)"
        for row in [_gather(process_set, CALLED, _NO_DIGEST, text)]
        for place in range(process_set.size())
    ]


def build_join_error(process_set: ProcessSet, agreement: Agreement, call: str) -> CollectiveError:
    """The error, at all ranks, of a call that needs data of every rank."""
    joined = [process_set.ranks[place] for place, active in enumerate(agreement.active) if not active]
    return CollectiveError(
        f"rank {joined[0]} has joined: it has no data left, and no part in this",
        where=call.split("\n")[0],
        remedy="while others have data, call allreduce, allgather and barrier alone",
    )


def describe(kind: str, name: str, details: Sequence[str]) -> str:
    """The text of a call, for comparison between ranks: `allreduce sum 'loss' float32[4]`."""
    named = f" {name!r}" if name else ""
    return f"{kind}{named} {', '.join(details)}".rstrip()
