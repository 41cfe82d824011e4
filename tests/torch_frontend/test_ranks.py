"""PyTorch between ranks, in real processes: tensors, optimizers, batch normalization, against one process."""

from __future__ import annotations

import pytest

from tests.ranks.processes import assert_passed, run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("check", ["check_torch", "check_torch_training", "check_torch_batch_norm"])
def test_two_ranks_equal_one_process(check: str) -> None:
    assert_passed(run_ranks(f"tests.ranks.{check}", 2))
