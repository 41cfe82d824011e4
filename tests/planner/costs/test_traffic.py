"""What kernels read and write, by hand, and against kernels that XLA:GPU compiled for A100s."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.cost.compute import kernel_bytes
from shardwright.cost.moves.relayout import LOOP, PRODUCT, STORED, MoveEnds
from shardwright.hlo import ArrayShape
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.costs.kernels import find_kernels
from shardwright.planner.costs.prices import Prices
from shardwright.planner.search.program import Program
from shardwright.plans.shardings import Mesh, TensorSharding

ROWS, COLUMNS = 512, 768
SQUARE = (ROWS, COLUMNS)


def arrays(function: Callable[..., object], *shapes: tuple[int, ...], of: tuple[int, ...] = SQUARE) -> float:
    """What all kernels but products read and write, in arrays of one shape."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function).lower(*arguments).as_text("hlo", debug_info=True)
    flow = Program(text, PlanOptions()).flow
    kernels = find_kernels(flow, merges=True)
    total = 0.0
    for node in flow.nodes:
        traffic, instruction = kernels.traffic[node.index], node.instruction
        if node.is_value or traffic is None or instruction.opcode == "dot":
            continue
        operands = [leaf.dimensions for operand in instruction.operands for leaf in operand.shape.leaves]
        total += kernel_bytes(instruction, operands, [shape.dimensions for shape in node.shapes], traffic)
    return total / ArrayShape("f32", of).size_bytes


def adam(
    weight: jax.Array, mean: jax.Array, square: jax.Array, x: jax.Array, y: jax.Array, step: jax.Array
) -> tuple[jax.Array, ...]:
    gradient = x.T @ y
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.99 * square + 0.01 * gradient**2
    scale = 1 - 0.9 ** step[0]
    return weight - (mean / scale) / (jnp.sqrt(square / scale) + 1e-8), mean, square


def test_an_optimizer_reads_and_writes_everything_once() -> None:
    """XLA:GPU: one fusion with three results of AdamW on each weight."""
    weights = [SQUARE] * 3
    around = arrays(lambda w, m, v, x, y, s: x.T @ y, *weights, (64, ROWS), (64, COLUMNS), (1,))
    taken = arrays(adam, *weights, (64, ROWS), (64, COLUMNS), (1,))
    assert taken - around == pytest.approx(7, rel=1e-3)


def test_a_product_takes_a_matrix_transposed() -> None:
    """XLA:GPU: TransposeFolding; what a loop reads, too, is transposed in its kernel."""
    by_product = arrays(lambda w, x: x @ w.T, SQUARE, (64, COLUMNS))
    assert by_product == 0
    assert arrays(lambda w, x: (x @ w.T, w.T * 2), SQUARE, (64, COLUMNS)) > 1


def test_a_softmax_is_one_kernel() -> None:
    """XLA:GPU: one Triton fusion of the rows of attention."""
    assert arrays(lambda x: jax.nn.softmax(x * 2.0), SQUARE) == pytest.approx(2, rel=0.01)


def test_rows_too_long_for_one_kernel_are_read_again() -> None:
    """XLA:GPU reduces rows of a vocabulary twice, and reads them once more for what it writes."""
    shape = (4, 50257)
    assert arrays(jax.nn.softmax, shape, of=shape) == pytest.approx(4, rel=0.01)


def test_a_residual_that_many_read_is_written_once() -> None:
    """What two arrays are added to is not added again for each of its readers."""

    def blocks(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(3):
            x = x + x @ w
        return x

    assert arrays(blocks, SQUARE, (COLUMNS, COLUMNS)) == pytest.approx(3 * 3)


def test_a_chain_reads_and_writes_its_ends() -> None:
    assert arrays(lambda x: jnp.maximum(jnp.exp(x) * 2.0 + 1.0, 0.0), SQUARE) == pytest.approx(2, rel=1e-3)


def test_a_scatter_fills_its_zeros() -> None:
    """The gradient of a lookup: the whole table is written, and what is added to it read, combined and written."""

    def looked_up(table: jax.Array, numbers: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.zeros_like(table).at[numbers.astype(jnp.int32)].add(rows)

    table, count = (50000, 64), 1000
    taken = arrays(looked_up, table, (count,), (count, 64), of=table)
    assert taken == pytest.approx(1 + 3 * count / table[0], rel=0.01)


def test_what_is_gathered_along_an_inner_dimension_takes_longer_on_gpus() -> None:
    mesh, shape = Mesh.of({"x": 8}), ArrayShape("f32", (64, 1024, 768))
    whole = TensorSharding.replicated(3)
    first, middle = TensorSharding((("x",), (), ())), TensorSharding(((), ("x",), ()))
    ends = MoveEnds(PRODUCT, PRODUCT)
    on_gpus = Prices(mesh, Cluster.local(8), hardware_profile("a100"))
    assert on_gpus.reshard_s(shape, first, whole) == on_gpus.reshard_s(shape, middle, whole)
    assert on_gpus.transpose_s(shape, first, whole, ends) == 0 < on_gpus.transpose_s(shape, middle, whole, ends)
    on_cpus = Prices(mesh, Cluster.local(8), hardware_profile("cpu"))
    assert on_cpus.transpose_s(shape, middle, whole, ends) == 0


def test_weights_stored_by_columns_are_turned_before_they_are_gathered() -> None:
    mesh, shape = Mesh.of({"x": 8}), ArrayShape("f32", (768, 3072))
    rows, columns = TensorSharding((("x",), ())), TensorSharding(((), ("x",)))
    profile = hardware_profile("a100")
    prices = Prices(mesh, Cluster.local(8), profile)
    seconds = [
        prices.transpose_s(shape, lies, TensorSharding.replicated(2), MoveEnds(STORED, PRODUCT))
        for lies in (rows, columns)
    ]
    assert seconds == [0.0, max(profile.launch_s, shape.size_bytes / 4 / profile.memory_bandwidth_bytes_per_s)]
    assert prices.transpose_s(shape, columns, TensorSharding.replicated(2), MoveEnds(LOOP, PRODUCT)) == 0
