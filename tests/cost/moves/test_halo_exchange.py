"""Rows that neighbours exchange, by hand; `test_reshard.py` holds whole moves against XLA's."""

from __future__ import annotations

from shardwright.cost.moves.halo_exchange import even_bounds, halo_permutes, part_bounds, resize_permutes


def test_shards_that_lie_right_send_nothing() -> None:
    assert halo_permutes(24, 6, even_bounds(6, 4)) == []


def test_the_last_shard_with_rows_is_off_the_most() -> None:
    assert halo_permutes(25, 9, even_bounds(7, 4)) == [6]
    assert halo_permutes(9, 3, even_bounds(4, 4)) == [2], "the fourth has padding alone"


def test_a_shard_sends_to_one_other_in_a_permute() -> None:
    """The last part of each shard reaches into the next one: the third of three rows goes to two shards."""
    assert halo_permutes(3, 1, part_bounds(1, 1, 4, 2)) == [1, 1]


def test_a_shard_receives_from_one_other_in_a_permute() -> None:
    assert halo_permutes(25, 3, part_bounds(7, 3, 4, 3)) == [3, 3, 2]


def test_different_shards_share_a_permute_whatever_their_distance() -> None:
    assert halo_permutes(10, 2, [(0, 2), (0, 2), (4, 6), (6, 8), (4, 6)]) == [2]


def test_rows_of_both_ends_do_not_share_a_permute() -> None:
    """All rows between them would go along."""
    assert halo_permutes(12, 4, [(7, 8), (8, 9), (8, 12)]) == [1, 1]


def test_beside_an_all_to_all_every_distance_has_a_permute() -> None:
    assert resize_permutes(13, 6, 2, 2) == [4], "sliced: the second shard's two rows, and those behind them"
    assert resize_permutes(5, 2, 4, 4) == [2, 2, 2], "put together: as far as the last but one reaches"
    assert resize_permutes(24, 6, 6, 4) == []


def test_beside_an_all_to_all_shards_that_reach_far_are_gathered() -> None:
    assert resize_permutes(3, 1, 3, 3) is None
    assert resize_permutes(4, 1, 4, 4) is None


def test_what_lies_between_is_not_sent() -> None:
    """Rows 7 and 8 come from the third and the second shard before; the one next to it has none of them."""
    assert halo_permutes(14, 2, part_bounds(7, 2, 2, 6)) == [1, 1]
