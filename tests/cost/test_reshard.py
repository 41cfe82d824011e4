"""Resharding moves against the collectives in XLA's compiled program, and by hand."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

from shardwright.cluster import Cluster
from shardwright.cost import Topology, hardware_profile, reshard, reshard_time_s
from shardwright.plans import Mesh, TensorSharding

ROOT = Path(__file__).resolve().parents[2]
MESH = Mesh.of({"x": 2, "y": 4})
SHAPE = (64, 32)


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("probe_moves", ROOT / "benchmarks" / "probe_moves.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sharding(*dims: str, unreduced: str = "") -> TensorSharding:
    return TensorSharding(tuple(tuple(dim) for dim in dims), tuple(unreduced))


@pytest.mark.parametrize("mesh", [Mesh.of({"x": 8}), MESH], ids=str)
def test_moves_are_those_of_xla(probe: ModuleType, mesh: Mesh) -> None:
    """A sample of all pairs; `benchmarks/probe_moves.py` goes through all of them."""
    pairs = [pair for pair in probe.pairs(mesh, 2) if not pair[0].unreduced]
    chosen = random.Random(0).sample(pairs, min(len(pairs), 24))
    wrong = [
        (str(source), str(target))
        for source, target in chosen
        if probe.realised(mesh, source, target, SHAPE) != probe.predicted(mesh, source, target, SHAPE)
    ]
    assert len(wrong) <= 1, wrong


def test_partial_sums_are_reduced_like_xlas(probe: ModuleType) -> None:
    for source, target in [
        (sharding("", "", unreduced="x"), sharding("", "")),
        (sharding("x", "", unreduced="y"), sharding("x", "")),
        (sharding("x", "", unreduced="y"), sharding("xy", "")),
        (sharding("", "", unreduced="xy"), sharding("", "")),
        (sharding("", "", unreduced="xy"), sharding("xy", "")),
    ]:
        assert probe.realised(MESH, source, target, SHAPE) == probe.predicted(MESH, source, target, SHAPE)


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


def test_uneven_shards_are_rounded_up() -> None:
    (move,) = reshard("bf16", (30, 3), sharding("y", ""), sharding("", ""), MESH)
    assert move.payload_bytes == 30 * 3 * 2
    (move,) = reshard("bf16", (30, 3), sharding("y", ""), sharding("", "y"), MESH)
    assert move.payload_bytes == 8 * 3 * 2


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
