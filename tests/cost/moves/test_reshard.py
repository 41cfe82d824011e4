"""Resharding moves against the collectives in XLA's compiled program, and by hand."""

from __future__ import annotations

import random
import re

import pytest

from oracles import moves as moves_oracle
from shardwright.clusters.cluster import Cluster
from shardwright.cost import Topology, hardware_profile, reshard, reshard_time_s
from shardwright.errors import CompilationAbortedError, UnpartitionableError
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import CompileService, find_collectives

MESH = Mesh.of({"x": 2, "y": 4})
SHAPE = (64, 32)


def sharding(*dims: str, unreduced: str = "") -> TensorSharding:
    return TensorSharding(tuple(tuple(dim) for dim in dims), tuple(unreduced))


@pytest.mark.dear
@pytest.mark.parametrize(
    ("sizes", "shape", "count"),
    [
        ("8", (64, 32), 99),
        ("2x4", (64, 32), 135),
        ("2x2x2", (16, 64), 400),
        ("3x4", (48, 144), 60),
        ("2x4", (30, 21), 135),
        ("2x2x2", (13, 27), 300),
        ("3x4", (25, 34), 135),
        ("2x4", (3, 5), 135),
        ("2x6", (7, 3), 135),
        ("2x2x4", (9, 5), 200),
        ("2x2x6", (3, 13), 200),
    ],
)
def test_moves_are_those_of_xla(sizes: str, shape: tuple[int, int], count: int) -> None:
    """All moves and reductions, or a sample; `oracles/moves.py` goes through all of them."""
    mesh = moves_oracle.parse_mesh(sizes)
    every = list(moves_oracle.list_cases(mesh, shape))
    chosen = random.Random(0).sample(every, min(len(every), count))
    wrong = [
        f"{case.source} -> {case.target}: {real}"
        for case, real in zip(chosen, moves_oracle.partition_cases(mesh, chosen, shape), strict=True)
        if not moves_oracle.agree(real, moves_oracle.predict_collectives(mesh, case, shape))
    ]
    assert not wrong


def test_edges_are_exchanged_along_the_axes_of_the_shards_that_are_held() -> None:
    """Eighths of 18 rows, joined to halves: what a half has of the next one's rows comes from another quarter, too."""
    case = moves_oracle.Case(sharding("xy", ""), sharding("x", ""))
    with CompileService(MESH.device_count) as service:
        text = service.compile_stablehlo(moves_oracle.build_program(MESH, [case], (18, 32)), inspect="partition-pass")
    seen = [each for each in find_collectives(text, 8) if each.kind == "collective-permute" and each.op_name]
    pairs = [divmod(int(device), 4) for each in seen for device in re.findall(r"\d+", each.groups)]
    changed = {
        axis for sent, got in zip(pairs[::2], pairs[1::2], strict=True) for axis in range(2) if sent[axis] != got[axis]
    }
    (move,) = (move for move in reshard("f32", (18, 32), *case, MESH) if move.kind == "collective-permute")
    assert changed == {("x", "y").index(axis) for axis in move.axes} == {0, 1}


def test_every_pair_has_a_price() -> None:
    """On axes whose factors do not line up, too; the moves must fit together, each from what the last one left."""
    rng = random.Random(0)
    for sizes in ({"x": 6, "y": 10}, {"x": 2, "y": 15, "z": 4}, {"x": 1, "y": 7}, {"x": 9, "y": 4, "z": 6}):
        mesh = Mesh.of(sizes)
        for _ in range(60):
            shape = tuple(rng.choice([1, 2, 7, 36, 360]) for _ in range(rng.randint(1, 4)))
            source, target = (_random_sharding(mesh, len(shape), rng) for _ in range(2))
            moves = reshard("f32", shape, source, target, mesh)
            assert all(1 < move.group_size <= mesh.size(move.axes) for move in moves)
            assert all(move.payload_bytes > 0 for move in moves)
            if source.is_replicated or source == target:
                assert moves == ()


def test_moves_on_which_xla_ends_its_process_are_refused() -> None:
    """Each in a program of its own; its neighbours, which differ in one dimension, go through."""
    mesh = Mesh.of({"x": 2, "y": 4, "z": 2})
    shape = (16, 32, 64, 32)
    fatal = [
        moves_oracle.Case(sharding("y", "z", "", ""), sharding("x", "", "y", "z")),
        moves_oracle.Case(sharding("", "y", "z", "x"), sharding("z", "x", "y", "")),
    ]
    topology = Topology.of(Cluster.local(16), hardware_profile("cpu"))
    for case in fatal:
        with pytest.raises(UnpartitionableError, match="divides by zero"):
            moves_oracle.predict_collectives(mesh, case, shape)
        assert reshard_time_s("f32", shape, case.source, case.target, mesh, topology) == float("inf")
        with pytest.raises(CompilationAbortedError, match="SIGFPE"):
            moves_oracle.partition_cases(mesh, [case], shape)
    near = moves_oracle.Case(sharding("y", "z", "", ""), sharding("x", "", "y", ""))
    (real,) = moves_oracle.partition_cases(mesh, [near], shape)
    assert moves_oracle.agree(real, moves_oracle.predict_collectives(mesh, near, shape))


def _random_sharding(mesh: Mesh, rank: int, rng: random.Random) -> TensorSharding:
    dims: list[tuple[str, ...]] = [()] * rank
    axes = list(mesh.sizes)
    rng.shuffle(axes)
    for axis in axes:
        dim = rng.randint(0, rank)
        if dim < rank:
            dims[dim] = (*dims[dim], axis)
    return TensorSharding(tuple(dims))


def kinds(source: TensorSharding, target: TensorSharding) -> list[tuple[str, tuple[str, ...], int]]:
    return [(move.kind, move.axes, move.payload_bytes) for move in reshard("f32", SHAPE, source, target, MESH)]


def test_moves_by_hand() -> None:
    full = 64 * 32 * 4
    assert kinds(sharding("", ""), sharding("x", "y")) == []
    assert kinds(sharding("x", "y"), sharding("x", "")) == [("all-gather", ("y",), full // 2)]
    assert kinds(sharding("y", ""), sharding("", "y")) == [("all-to-all", ("y",), full // 4)]
    assert kinds(sharding("x", ""), sharding("", "y")) == [("all-gather", ("x",), full)]
    assert kinds(sharding("", "", unreduced="y"), sharding("y", "")) == [("reduce-scatter", ("y",), full)]
    assert kinds(sharding("", "", unreduced="xy"), sharding("y", "")) == [
        ("reduce-scatter", ("y",), full),
        ("all-reduce", ("x",), full // 4),
    ]
    assert kinds(sharding("", "", unreduced="y"), sharding("", "", unreduced="y")) == []


def test_only_axes_that_cut_ahead_of_others_scatter_a_sum() -> None:
    full = 64 * 32 * 4
    # Each device slices an eighth then; of what is scattered over y alone it would have a quarter.
    behind = kinds(sharding("", "", unreduced="y"), sharding("xy", ""))
    assert behind == [("all-reduce", ("y",), full)]
    ahead = [("reduce-scatter", ("x",), full)]
    assert kinds(sharding("", "", unreduced="x"), sharding("xy", "")) == ahead
    assert kinds(sharding("", "", unreduced="xy"), sharding("yx", "")) == [("reduce-scatter", ("x", "y"), full)]


def test_uneven_shards_travel_with_their_padding() -> None:
    (move,) = reshard("bf16", (30, 3), sharding("y", ""), sharding("", ""), MESH)
    assert move.payload_bytes == 32 * 3 * 2
    (move,) = reshard("bf16", (30, 3), sharding("y", ""), sharding("", "y"), MESH)
    assert move.payload_bytes == 8 * 4 * 2


def test_sums_are_not_scattered_onto_uneven_shards() -> None:
    """XLA pads the sum before it slices it: no reduce-scatter is made of the three."""
    partial = sharding("", "", unreduced="y")
    (move,) = reshard("f32", (30, 8), partial, sharding("y", ""), MESH)
    assert (move.kind, move.payload_bytes) == ("all-reduce", 30 * 8 * 4)
    (move,) = reshard("f32", (30, 8), partial, sharding("", "y"), MESH)
    assert move.kind == "reduce-scatter"
    (move,) = reshard("f32", (29, 8), sharding("x", "", unreduced="y"), sharding("x", "y"), MESH)
    assert (move.kind, move.payload_bytes) == ("reduce-scatter", 15 * 8 * 4)


def test_axes_of_one_device_move_nothing() -> None:
    mesh = Mesh.of({"x": 1, "y": 8})
    assert reshard("f32", SHAPE, sharding("x", ""), sharding("", "x"), mesh) == ()
    assert reshard("f32", SHAPE, sharding("", "", unreduced="x"), sharding("", ""), mesh) == ()


def test_time_is_the_sum_of_the_moves() -> None:
    topology = Topology.of(Cluster.local(8), hardware_profile("cpu"))
    source, target = sharding("", "", unreduced="xy"), sharding("y", "")
    moves = reshard("f32", SHAPE, source, target, MESH)
    assert reshard_time_s("f32", SHAPE, source, target, MESH, topology) == pytest.approx(
        sum(move.time_s(MESH, topology) for move in moves)
    )
    assert all(move.time_s(MESH, topology) > 0 and move.wire_bytes > 0 for move in moves)


def test_equal_elements_are_not_permuted() -> None:
    """Every device has what differs along a broadcast's dimension only; behind a collective XLA forgets that."""
    source, target = sharding("", "x"), sharding("", "y")
    square = Mesh.of({"x": 2, "y": 2})
    assert [move.kind for move in reshard("f32", SHAPE, source, target, square)] == ["collective-permute"]
    assert reshard("f32", SHAPE, source, target, square, frozenset({1})) == ()
    assert reshard("f32", SHAPE, source, target, square, frozenset({0})) != ()
    swapped = reshard("f32", SHAPE, sharding("x", "y"), sharding("y", "x"), square, frozenset({0, 1}))
    assert swapped == ()
    turned = reshard("f32", SHAPE, sharding("y", "x"), sharding("x", "y"), MESH, frozenset({0, 1}))
    assert [move.kind for move in turned] == ["all-to-all", "collective-permute"]
