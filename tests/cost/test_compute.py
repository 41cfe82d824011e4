"""Arithmetic against XLA's own cost analysis; times by the roofline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from shardwright.cost import compute_time_s, flops, hardware_profile, is_free, memory_traffic_bytes
from shardwright.cost.compute import Traffic
from shardwright.hlo import Instruction, parse
from shardwright.hlo.opcodes import COLLECTIVES

CORPUS = Path(__file__).resolve().parents[1] / "hlo" / "corpus"


def lower_text(function: Callable[..., object], *shapes: tuple[int, ...]) -> tuple[list[Instruction], float]:
    """Instructions of a function's entry computation, and XLA's count of its operations."""
    arguments = [jax.ShapeDtypeStruct(shape, "f4") for shape in shapes]
    low = jax.jit(function).lower(*arguments)
    analysis = low.cost_analysis()
    assert analysis is not None
    return list(parse(low.as_text("hlo")).entry), analysis.get("flops", 0.0)


def whole(instruction: Instruction) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    operands = [leaf.dimensions for operand in instruction.operands for leaf in operand.shape.leaves]
    return operands, [leaf.dimensions for leaf in instruction.shape.leaves]


def conv(strides: tuple[int, int], padding: str, groups: int = 1) -> Callable[..., jax.Array]:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )

    return function


def weight_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.grad(lambda w: conv((2, 2), "SAME")(x, w).sum())(w)


CASES = {
    "matrix product": (jnp.matmul, (16, 32), (32, 24)),
    "batched product": (lambda a, b: jnp.einsum("bik,bkj->bij", a, b), (4, 16, 32), (4, 32, 24)),
    "two contracted": (lambda a, b: jnp.einsum("aij,ijc->ac", a, b), (4, 8, 16), (8, 16, 24)),
    "convolution, valid": (conv((1, 1), "VALID"), (2, 12, 12, 3), (3, 3, 3, 8)),
    "convolution, padded": (conv((1, 1), "SAME"), (2, 12, 12, 3), (3, 3, 3, 8)),
    "convolution, strided": (conv((2, 2), "SAME"), (2, 12, 12, 3), (5, 5, 3, 8)),
    "convolution, grouped": (conv((1, 1), "SAME", 4), (2, 12, 12, 8), (3, 3, 2, 8)),
    "reduction": (lambda a: a.sum(axis=1), (64, 128)),
}


@pytest.mark.parametrize("case", CASES)
def test_operations_equal_xlas(case: str) -> None:
    function, *shapes = CASES[case]
    instructions, expected = lower_text(function, *shapes)
    assert sum(flops(instruction, *whole(instruction)) for instruction in instructions) == pytest.approx(expected)


def test_weight_gradients_count_dilated_windows_like_xla() -> None:
    instructions, expected = lower_text(weight_gradient, (2, 12, 12, 3), (3, 3, 3, 8))
    (gradient,) = (each for each in instructions if each.opcode == "convolution")
    assert flops(gradient, *whole(gradient)) == pytest.approx(expected, rel=0.01)


def one(function: Callable[..., object], opcode: str, *shapes: tuple[int, ...]) -> Instruction:
    return next(each for each in lower_text(function, *shapes)[0] if each.opcode == opcode)


def test_a_split_product_has_its_share_of_the_work() -> None:
    dot = one(jnp.matmul, "dot", (16, 32), (32, 24))
    assert flops(dot, [(16, 8), (8, 24)], [(16, 24)]) == pytest.approx(2 * 16 * 32 * 24 / 4)
    assert flops(dot, [(4, 32), (32, 24)], [(4, 24)]) == pytest.approx(2 * 16 * 32 * 24 / 4)


def test_a_split_image_has_its_share_of_the_work() -> None:
    each = one(conv((1, 1), "SAME"), "convolution", (2, 12, 12, 3), (3, 3, 3, 8))
    total = flops(each, [(2, 12, 12, 3), (3, 3, 3, 8)], [(2, 12, 12, 8)])
    assert flops(each, [(2, 3, 12, 3), (3, 3, 3, 8)], [(2, 3, 12, 8)]) == pytest.approx(total / 4)


def test_roofline_takes_the_larger_of_arithmetic_and_memory() -> None:
    profile = hardware_profile("h100")
    large = one(jnp.matmul, "dot", (8192, 8192), (8192, 8192))
    thin = one(jnp.matmul, "dot", (8192, 1), (1, 8192))
    tiny = one(jnp.matmul, "dot", (2, 2), (2, 2))
    assert compute_time_s(large, *whole(large), profile) == pytest.approx(
        2 * 8192**3 / profile.matmul_flops_per_s("f32")
    )
    assert compute_time_s(thin, *whole(thin), profile) == pytest.approx(
        memory_traffic_bytes(thin, *whole(thin)) / profile.memory_bandwidth_bytes_per_s
    )
    assert compute_time_s(tiny, *whole(tiny), profile) == profile.launch_s


def test_a_product_over_uneven_shards_sets_their_padding_to_zero() -> None:
    """XLA:GPU: a kernel that selects reads and writes an operand before cuBLAS runs."""
    profile, traffic = hardware_profile("a100"), Traffic((1.0, 1.0), 1.0)
    stored = one(jnp.matmul, "dot", (4096, 50257), (50257, 768))
    outcome = one(lambda a, b: jnp.sin(a) @ jnp.cos(b), "dot", (4096, 50257), (50257, 768))

    def masked_s(dot: Instruction, size: int) -> float:
        even = [(4096, size), (size, 768)]
        alone = one(jnp.matmul, "dot", *even)
        result = [(4096, 768)]
        return compute_time_s(dot, even, result, profile, traffic=traffic) - compute_time_s(
            alone, even, result, profile, traffic=traffic
        )

    size_s = 4 * 25129 * (4096 + 768) / profile.memory_bandwidth_bytes_per_s
    assert masked_s(stored, 25129) == pytest.approx(2 * size_s)
    assert masked_s(outcome, 25129) == pytest.approx(size_s), "what makes it writes both"
    assert masked_s(stored, 50257) == 0


def test_fused_elementwise_instructions_pay_part_of_their_bytes() -> None:
    profile = hardware_profile("h100")
    add = one(jnp.add, "add", (4096, 4096), (4096, 4096))
    full_s = 3 * 4 * 4096**2 / profile.memory_bandwidth_bytes_per_s
    assert compute_time_s(add, *whole(add), profile) == pytest.approx(profile.fused_traffic * full_s)


def test_updates_in_place_move_only_the_update() -> None:
    def update(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(a, b, (3, 0))

    each = one(update, "dynamic-update-slice", (4096, 64), (1, 64))
    assert memory_traffic_bytes(each, *whole(each)) == 2 * 64 * 4


def test_every_opcode_of_the_corpus_has_a_price() -> None:
    """Nothing crashes, and nothing but bookkeeping is free, and collectives: they are priced as what they send."""
    profile = hardware_profile("h100")
    seen = set()
    for path in sorted(CORPUS.glob("**/*.hlo")):
        for instruction in parse(path.read_text(encoding="utf-8")).instructions():
            time_s = compute_time_s(instruction, *whole(instruction), profile)
            is_work = not is_free(instruction) and instruction.opcode not in COLLECTIVES
            has_work = instruction.shape.size_bytes > 0 and is_work
            assert time_s > 0 if has_work else time_s >= 0, instruction
            seen.add(instruction.opcode)
    assert len(seen) > 100


def test_bookkeeping_is_free() -> None:
    instructions, _ = lower_text(lambda a: (a, a[0] * 2), (64,))
    assert all(is_free(each) for each in instructions if each.opcode in ("parameter", "tuple", "constant", "reshape"))
