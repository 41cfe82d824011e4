"""Horovod's names and order of arguments, in a job of one rank; expected values are Horovod's documented ones."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright.horovod as hvd
from shardwright.errors import CollectiveError, OptionError
from shardwright.horovod import reductions
from shardwright.horovod.arguments import submit


@pytest.fixture(autouse=True)
def alone():
    """A job of one process."""
    hvd.init()
    yield
    hvd.shutdown()


def test_public_names_are_there() -> None:
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)


def test_average_is_op_by_another_name() -> None:
    x = np.ones(3, np.float32)
    for arguments in ((), (None,), (True,), (False,), (None, "loss"), (hvd.Sum,), ("max",)):
        assert np.array_equal(hvd.allreduce(x, *arguments), x)
    assert np.array_equal(hvd.allreduce(x, name=None, op=None, compression=hvd.Compression.none), x)
    with pytest.raises(ValueError, match="say the same"):
        hvd.allreduce(x, True, op=hvd.Sum)


@pytest.mark.dear
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("values", [[3, 4, -7], [-1, 0, 1]])
def test_integers_are_scaled_and_divided_towards_zero(kind, values, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions._Process, "has_warned", False)
    x = kind(np.array(values, np.int32))
    with pytest.warns(reductions.IntegerAverageWarning):
        assert hvd.allreduce(x).tolist() == values
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        half = hvd.allreduce(x, postscale_factor=0.5)
    assert half.dtype == np.int32
    assert half.tolist() == np.trunc(np.array(values) * 0.5).astype(int).tolist()
    assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5).tolist() == half.tolist()
    assert [reductions._divide(x, 2).tolist()] == [half.tolist()]


def test_booleans_and_mixed_trees_keep_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions._Process, "has_warned", True)
    tree = {"b": np.array([True, False]), "n": np.array([5], np.int64), "x": np.float32(2), "i": 7}
    found = hvd.allreduce(tree, op=hvd.Sum)
    assert found["b"].tolist() == [True, False]
    assert found["b"].dtype == bool
    found = hvd.allreduce({name: tree[name] for name in "nxi"})
    assert (found["n"].dtype, found["i"]) == (np.int64, 7)
    with pytest.raises(CollectiveError):
        hvd.allreduce(tree["b"])


def test_short_floats_are_scaled_in_32_bits() -> None:
    x = np.array([1.0009765625], np.float16)
    expected = (x.astype(np.float32) * np.float32(0.3)).astype(np.float16)
    assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.3).tobytes() == expected.tobytes()


def test_process_sets_go_by_number_or_object() -> None:
    alone = hvd.ProcessSet([0])
    assert alone.process_set_id is None
    added = hvd.add_process_set([0])
    assert added.process_set_id == 1
    assert hvd.add_process_set(alone) is alone
    assert alone.process_set_id == 1
    for chosen in (0, 1, None, alone, added, hvd.global_process_set):
        assert hvd.allreduce(2.0, process_set=chosen) == 2.0
    assert (hvd.global_process_set.size(), hvd.global_process_set.rank()) == (1, 0)
    assert hvd.get_process_set_ids_and_ranks() == {0: [0], 1: [0]}
    assert hvd.remove_process_set(added)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="no process set"):
        hvd.allreduce(2.0, process_set=1)
    with pytest.raises(ValueError, match="no list of ranks"):
        hvd.ProcessSet(3)  # type: ignore[arg-type]


def test_init_numbers_process_sets_and_refuses_communicators() -> None:
    given = hvd.ProcessSet([0])
    hvd.init(process_sets=[given])
    hvd.init(process_sets="dynamic")
    hvd.init([0])
    assert given.process_set_id == 1
    with pytest.raises(OptionError, match="not all ranks"):
        hvd.init(object())


def test_a_name_that_is_under_way_is_refused() -> None:
    import threading

    gate = threading.Event()
    first = submit("allreduce", "a", None, gate.wait)
    with pytest.raises(ValueError, match="under way"):
        hvd.allreduce_async(np.ones(2), name="a")
    second = hvd.allreduce_async(np.ones(2), name="b")
    assert not hvd.poll(second)
    gate.set()
    assert hvd.synchronize(first) is True
    assert hvd.synchronize(second).tolist() == [1, 1]
    assert hvd.synchronize(hvd.allreduce_async(np.ones(2), name="a")).tolist() == [1, 1]


@pytest.mark.dear
def test_compressors_go_both_ways_own_ones_too() -> None:
    for array in (np.ones(3, np.float32), jnp.ones(3)):
        short, context = hvd.Compression.fp16.compress(array)
        assert short.dtype == np.float16
        assert hvd.Compression.fp16.decompress(short, context).dtype == np.float32
    same, context = hvd.Compression.fp16.compress(np.ones(2, np.int32))
    assert hvd.Compression.fp16.decompress(same, context).dtype == np.int32

    class Halved:
        @staticmethod
        def compress(tensor):
            return tensor / 2, 2

        @staticmethod
        def decompress(tensor, context):
            return tensor * context

    assert hvd.allreduce(np.ones(2), compression=Halved).tolist() == [1, 1]
    assert hvd.reducescatter(np.ones(2), None, Halved).tolist() == [1, 1]
    with pytest.raises(ValueError, match="no compression"):
        hvd.allreduce(np.ones(2), compression="fp16")


def test_rows_move_in_horovods_order() -> None:
    x = np.arange(4.0)
    assert hvd.allgather(x, "n").tolist() == x.tolist()
    assert hvd.broadcast(x, 0, "n").tolist() == x.tolist()
    assert hvd.alltoall(x, [4], "n")[1].tolist() == [4]
    assert hvd.reducescatter(x, "n").tolist() == x.tolist()
    assert hvd.broadcast_object({"a": 1}, 0, "n") == {"a": 1}
    assert hvd.broadcast_object_fn(0)(3) == 3
    assert hvd.join(-1) == 0
    with pytest.raises(RuntimeError):
        hvd.reducescatter(x, op=hvd.Adasum)
    with pytest.raises(ValueError, match="no way to split"):
        hvd.alltoall(x, [3])


def test_what_it_is_built_on_is_said_as_it_is() -> None:
    cpu = jax.default_backend() == "cpu"
    assert (hvd.gloo_built(), hvd.gloo_enabled()) == (True, cpu)
    no = (hvd.mpi_built, hvd.mpi_enabled, hvd.mpi_threads_supported, hvd.ddl_built, hvd.ccl_built)
    assert [call() for call in no] == [False] * 5
    assert bool(hvd.nccl_built()) is (not cpu)


def test_run_takes_horovods_arguments() -> None:
    with pytest.raises(OptionError, match="another machine"):
        hvd.run(print, hosts="192.0.2.1:2")
    with pytest.raises(OptionError, match="min_num_proc"):
        hvd.run(print, min_num_proc=2)


@pytest.mark.cluster
def test_run_returns_each_ranks_result() -> None:
    assert hvd.run(divmod, (7, 2), np=2, hosts="localhost:2", verbose=1) == [(3, 1), (3, 1)]
