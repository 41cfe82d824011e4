"""Keras on TensorFlow between ranks, in real processes: against one process on the whole batch."""

from __future__ import annotations

import pytest

from tests.ranks.elastic_keras import check_killed_rank
from tests.ranks.processes import assert_passed, run_ranks

pytestmark = pytest.mark.cluster


def test_two_ranks_equal_one_process_on_the_whole_batch() -> None:
    assert_passed(run_ranks("tests.ranks.check_keras_training", 2, timeout_s=900, KERAS_BACKEND="tensorflow"))


def test_an_elastic_fit_goes_on_where_it_was() -> None:
    check_killed_rank(victim=2)
