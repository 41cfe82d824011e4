"""Rows that neighbours exchange, by hand; `test_reshard.py` holds whole moves against XLA's."""

from __future__ import annotations

from shardwright.cost.edges import evenly, parts_of, sent_rows


def test_shards_that_lie_right_send_nothing() -> None:
    assert sent_rows(24, 6, evenly(6, 4)) == []


def test_the_last_shard_with_rows_is_off_the_most() -> None:
    assert sent_rows(25, 9, evenly(7, 4)) == [6]
    assert sent_rows(9, 3, evenly(4, 4)) == [2], "the fourth has padding alone"


def test_neighbours_at_two_distances_take_two_permutes() -> None:
    assert sent_rows(25, 3, parts_of(7, 3, 4, 3)) == [3, 3]


def test_distances_that_serve_different_shards_share_a_permute() -> None:
    assert sent_rows(25, 3, parts_of(9, 3, 3, 4)) == [3]


def test_what_lies_between_is_not_sent() -> None:
    """Rows 7 and 8 come from the third and the second shard before; the one next to it has none of them."""
    assert sent_rows(14, 2, parts_of(7, 2, 2, 6)) == [1, 1]
