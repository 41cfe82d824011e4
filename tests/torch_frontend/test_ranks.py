"""PyTorch between ranks, in real processes: tensors, optimizers, batch normalization, against one process."""

from __future__ import annotations

import pytest

from tests.ranks.processes import assert_passed, run_ranks

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    "check", ["check_torch", "check_torch_training", "check_torch_batch_norm", "check_horovod_torch"]
)
def test_two_ranks_equal_one_process(check: str) -> None:
    assert_passed(run_ranks(f"tests.ranks.{check}", 2))


def test_keras_on_two_ranks_equals_one_process_on_the_whole_batch() -> None:
    pytest.importorskip("keras")
    assert_passed(run_ranks("tests.ranks.check_keras_training", 2, timeout_s=900, KERAS_BACKEND="torch"))


def test_an_elastic_fit_of_keras_goes_on_where_it_was() -> None:
    pytest.importorskip("keras")
    from tests.ranks.elastic_keras import check_killed_rank

    check_killed_rank(victim=0)
