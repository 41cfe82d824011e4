"""What moves pass through memory besides what they send, against programs that XLA:GPU compiled for A100s."""

from __future__ import annotations

import pytest

from oracles.gpu_moves import EXCHANGE, GATHER, SCATTER, SHAPE, SHARD_BYTES, Case, list_cases, predict_transpose_bytes
from shardwright.cost import hardware_profile, reshard
from shardwright.cost.moves.relayout import (
    ANY_ORDER,
    LOOP,
    PRODUCT,
    ROWS,
    STORED,
    CollectiveAccess,
    MoveEnds,
    access_of,
    relayout_s,
)
from shardwright.plans.shardings import Mesh, TensorSharding

WHOLE_BYTES = 8 * SHARD_BYTES
EIGHT = Mesh.of({"x": 8})
A100 = hardware_profile("a100")

#: Bytes that kernels around moves read and write, in shards (an eighth of the array): (dimension gathered, maker) → by
#: reader, in the order loop, rows, product, stored. Printed by `python -m oracles.gpu_moves` (jaxlib 0.10.2).
GATHERED = {
    (0, LOOP): (0, 0, 0, 0),
    (0, PRODUCT): (0, 0, 0, 0),
    (0, STORED): (0, 0, 0, 0),
    (1, LOOP): (0, 0, 16, 16),
    (1, PRODUCT): (2, 2, 18, 18),
    (1, STORED): (2, 2, 18, 16),
    (2, LOOP): (0, 16, 0, 16),
    (2, PRODUCT): (0, 16, 0, 16),
    (2, STORED): (2, 18, 2, 16),
}
SCATTERED = {0: 0, 1: 16, 2: 0}
EXCHANGED = {LOOP: dict.fromkeys((0, 1, 2), 0), STORED: {0: 0, 1: 2, 2: 2}}


def compile_shards(case: Case) -> int:
    if case.kind == GATHER and case.source is not None:
        return GATHERED[case.source, case.ends.maker][(LOOP, ROWS, PRODUCT, STORED).index(case.ends.reader)]
    assert case.target is not None
    return SCATTERED[case.target] if case.kind == SCATTER else EXCHANGED[case.ends.maker][case.target]


@pytest.mark.parametrize("case", list(list_cases()), ids=str)
def test_kernels_pass_as_many_bytes_as_xla_compiles(case: Case) -> None:
    assert predict_transpose_bytes(case) == compile_shards(case) * SHARD_BYTES


def test_the_probe_has_every_kind() -> None:
    assert {case.kind for case in list_cases()} == {GATHER, SCATTER, EXCHANGE}


def move_elements(
    shape: tuple[int, ...], source: TensorSharding, target: TensorSharding, mesh: Mesh = EIGHT
) -> list[CollectiveAccess]:
    moves = reshard("f32", shape, source, target, mesh)
    return [access_of(move.kind, move.payload_bytes, move.atoms, move.reads, move.writes) for move in moves]


def split(*dims: str) -> TensorSharding:
    return TensorSharding(tuple(tuple(axes) for axes in dims))


def test_a_dimension_behind_single_elements_lies_outermost_anyway() -> None:
    """One sequence a device, as data parallelism has it."""
    two = Mesh.of({"x": 2, "y": 4})
    ends = MoveEnds(PRODUCT, PRODUCT)
    for batch, is_free in ((2, True), (4, False)):
        moves = move_elements((batch, 1024, 768), split("x", "y", ""), split("x", "", ""), two)
        assert (relayout_s(moves, (batch, 1024, 768), ends, A100) == 0) == is_free


def test_a_transpose_reads_and_writes_all_once() -> None:
    moves = move_elements(SHAPE, split("", "x", ""), split("", "", ""))
    seconds = relayout_s(moves, SHAPE, MoveEnds(LOOP, PRODUCT), A100)
    assert seconds == pytest.approx(2 * WHOLE_BYTES / A100.memory_bandwidth_bytes_per_s)
    assert relayout_s(moves, SHAPE, ANY_ORDER, A100) == 0


def test_a_small_one_takes_a_launch() -> None:
    moves = move_elements((8, 8, 8), split("", "x", ""), split("", "", ""))
    assert relayout_s(moves, (8, 8, 8), MoveEnds(LOOP, PRODUCT), A100) == A100.launch_s


def test_gradients_are_copied_to_be_reduced_together() -> None:
    """GPT-2 124M on 8 A100 by data parallelism: 28 MB of weights are concatenated, and sliced again."""
    partial = TensorSharding(((), ()), ("x",))
    moves = move_elements((768, 3072), partial, split("", ""))
    gradient, activation = MoveEnds(PRODUCT, LOOP, waits=False), MoveEnds(PRODUCT, LOOP)
    copied = 4 * 768 * 3072 * 4
    assert relayout_s(moves, (768, 3072), gradient, A100) * A100.memory_bandwidth_bytes_per_s == pytest.approx(copied)
    assert relayout_s(moves, (768, 3072), activation, A100) == 0
    alone = move_elements((50257, 768), partial, split("", ""))  # over XLA's threshold
    assert relayout_s(alone, (50257, 768), gradient, A100) == 0
