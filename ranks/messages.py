"""Bytes between ranks: gathered, broadcast, exchanged. What moves without arithmetic, of any type, goes this way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.ranks import fusion, programs
from shardwright.ranks.agreement import Agreement, Follow, agree
from shardwright.ranks.operations import ReduceOp
from shardwright.ranks.process_sets import ProcessSet
from shardwright.ranks.tuning import PIECE_BYTES

_WORD = np.dtype(np.uint32)


def gather(
    process_set: ProcessSet, call: str, message: np.ndarray, *, follow: Follow = Follow.GATHER
) -> tuple[list[np.ndarray], Agreement]:
    """The message of every rank, in order; empty of ranks without data. Lengths may differ."""
    agreement = agree(process_set, call, message, follow=follow)
    if process_set.size() == 1:
        return [message], agreement
    return gather_rest(process_set, agreement, message), agreement


def gather_rest(process_set: ProcessSet, agreement: Agreement, message: np.ndarray) -> list[np.ndarray]:
    """The messages whose lengths an agreement told: read from it, or gathered in pieces of a power of two."""
    places = range(process_set.size())
    if agreement.all_fit():
        return [agreement.message(place) for place in places]
    longest = max(agreement.lengths)
    step = min(programs.power_of_two(_words(longest)) * _WORD.itemsize, PIECE_BYTES)
    parts: list[list[np.ndarray]] = [[] for _ in places]
    for start in range(0, longest, step):
        words = _as_words(message[start : start + step], step)
        array = programs.run(process_set, programs.gather_all, words[None], replicated=True)
        rows = programs.fetch(array, process_set).view(np.uint8)
        for place in places:
            parts[place].append(rows[place, : max(0, min(step, agreement.lengths[place] - start))])
    return [pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in parts]


def broadcast(process_set: ProcessSet, call: str, message: np.ndarray | None, root: int) -> np.ndarray:
    """The root's message, at every rank. message: the root's; None at the others. root: its place in the set."""
    agreement = agree(process_set, call, np.zeros(0, np.uint8) if message is None else message)
    if process_set.size() == 1:
        return np.zeros(0, np.uint8) if message is None else message
    if agreement.all_fit():
        return agreement.message(root)
    # A sum in which all but the root give zeros: of words, which keep every bit of -0.0 and NaNs.
    length = agreement.lengths[root]
    words = np.zeros(_words(length), _WORD) if message is None else _as_words(message, length)
    return fusion.reduce_flat(process_set, words, ReduceOp.SUM).view(np.uint8)[:length]


def exchange(process_set: ProcessSet, call: str, blocks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A block of bytes for each rank → the block from each rank. Lengths may differ."""
    size, me = process_set.size(), process_set.rank()
    lengths = np.asarray([block.size for block in blocks], np.int64)
    message = np.concatenate([lengths.view(np.uint8), *blocks])
    agreement = agree(process_set, call, message)
    if size == 1:
        return list(blocks)
    if agreement.all_fit():
        return [_block(agreement.message(place), size, me) for place in range(size)]
    rows, _ = gather(process_set, f"{call} lengths", lengths.view(np.uint8))
    table = np.stack([row.copy().view(np.int64) for row in rows])
    longest = int(table.max())
    step = min(programs.power_of_two(_words(longest)) * _WORD.itemsize, max(4096, PIECE_BYTES // size // 4 * 4))
    parts: list[list[np.ndarray]] = [[] for _ in range(size)]
    for start in range(0, longest, step):
        words = np.stack([_as_words(block[start : start + step], step) for block in blocks])
        array = programs.run(process_set, programs.exchange_blocks, words[None])
        received = programs.fetch(array, process_set)[0].view(np.uint8)
        for place in range(size):
            parts[place].append(received[place, : max(0, min(step, int(table[place, me]) - start))])
    return [np.concatenate(pieces) if pieces else np.zeros(0, np.uint8) for pieces in parts]


def _block(message: np.ndarray, size: int, place: int) -> np.ndarray:
    lengths = message[: 8 * size].copy().view(np.int64)
    start = 8 * size + int(lengths[:place].sum())
    return message[start : start + int(lengths[place])]


def _words(nbytes: int) -> int:
    return -(-nbytes // _WORD.itemsize)


def _as_words(message: np.ndarray, nbytes: int) -> np.ndarray:
    """A message as words, padded with zeros to at least `nbytes` bytes."""
    padded = np.zeros(_words(nbytes) * _WORD.itemsize, np.uint8)
    padded[: message.size] = message
    return padded.view(_WORD)
