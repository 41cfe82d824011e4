"""Real ranks: every collective against numpy, training against one process, failures that end all."""

from __future__ import annotations

import numpy as np
import pytest

import shardwright as sw
from shardwright import ranks
from shardwright.ranks.places import read_place
from tests.ranks.processes import assert_passed, run_ranks


@pytest.mark.cluster
@pytest.mark.parametrize("size", [2, 4])
def test_collectives_equal_numpy(size: int) -> None:
    assert_passed(run_ranks("tests.ranks.check_collectives", size, timeout_s=400))


@pytest.mark.cluster
def test_training_on_two_ranks_equals_one_process_on_the_whole_batch() -> None:
    assert_passed(run_ranks("tests.ranks.check_training", 2, timeout_s=240))


@pytest.mark.cluster
@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 3), ("kill", -9)])
def test_a_failing_rank_ends_at_once_and_the_others_hear_of_it(how: str, code: int) -> None:
    survivor, failed = run_ranks("tests.ranks.check_failures", 2, how, timeout_s=60, grace_s=30)
    assert failed.returncode == code
    assert survivor.returncode == 5, survivor.stdout
    assert "a collective broke off" in survivor.stdout


@pytest.fixture
def alone():
    """A job of one process: no launcher's variables."""
    ranks.init()
    yield
    ranks.shutdown()


@pytest.mark.usefixtures("alone")
def test_one_process_is_a_job() -> None:
    assert (ranks.rank(), ranks.size(), ranks.local_rank(), ranks.local_size()) == (0, 1, 0, 1)
    x = np.arange(6000.0).reshape(3, 2000)
    for op in ("sum", "average", "min", "max", "product", "adasum"):
        assert np.array_equal(ranks.allreduce(x, op), x)
    assert np.array_equal(ranks.allgather(x), x)
    assert np.array_equal(ranks.broadcast(x), x)
    assert np.array_equal(ranks.reducescatter(x), x)
    rows, counts = ranks.alltoall(x, [3])
    assert np.array_equal(rows, x)
    assert counts.tolist() == [3]
    assert ranks.allgather_object({"a": 1}) == [{"a": 1}]
    assert ranks.broadcast_object((1, None)) == (1, None)
    assert ranks.synchronize(ranks.allreduce_async(2.0)) == 2.0
    assert float(ranks.jit(lambda v: ranks.allreduce(v, "sum"))(3.0)) == 3.0
    assert list(ranks.joined([1, 2])) == [1, 2]
    ranks.barrier()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("call", "place"),
    [
        (lambda: ranks.allreduce(1.0, "sums"), "op"),
        (lambda: ranks.broadcast(1.0, 1), "root_rank"),
        (lambda: ranks.alltoall(np.ones(3), [2]), "splits"),
        (lambda: ranks.ProcessSet([]), "ranks"),
        (lambda: ranks.ProcessSet([0, 0]), "ranks"),
        (lambda: ranks.poll(3), "handle"),
    ],
)
def test_wrong_arguments_are_named(call, place: str) -> None:
    with pytest.raises(sw.OptionError) as caught:
        call()
    assert caught.value.where == place


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("value", "op", "path"),
    [
        ({"a": [1.0, "x"]}, "sum", "value['a'][1]"),
        ({"n": np.int32([1])}, "average", "value['n']"),
        (np.array([True]), "sum", "value"),
        (np.array([object()]), "sum", "value"),
        (1 << 70, "sum", "value"),
    ],
)
def test_what_cannot_be_reduced_is_named_by_its_path(value, op: str, path: str) -> None:
    with pytest.raises(sw.CollectiveError) as caught:
        ranks.allreduce(value, op)
    assert caught.value.where == path


def test_before_init_there_is_no_job() -> None:
    for call in (ranks.rank, ranks.size, ranks.barrier, lambda: ranks.allreduce(1.0)):
        with pytest.raises(sw.CollectiveError, match="init"):
            call()


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"SIZE": "two"}, "SIZE"),
        ({"SIZE": "2", "RANK": "2", "COORDINATOR": "a:1"}, "RANK"),
        ({"SIZE": "2", "RANK": "0"}, "COORDINATOR"),
        ({"SIZE": "2", "RANK": "0", "COORDINATOR": "host"}, "COORDINATOR"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK"),
    ],
)
def test_variables_that_make_no_sense_are_named(variables: dict[str, str], name: str) -> None:
    with pytest.raises(sw.OptionError) as caught:
        read_place({f"SHARDWRIGHT_{key}": value for key, value in variables.items()})
    assert caught.value.where == f"SHARDWRIGHT_{name}"


def test_public_names_are_there() -> None:
    assert all(hasattr(ranks, name) for name in ranks.__all__)
