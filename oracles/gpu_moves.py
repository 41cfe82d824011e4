"""Memory traffic of XLA:GPU's kernels around moves, beside the cost model's (`shardwright.cost.moves.relayout`).

Each move is one small program: the maker of an array of three equally long dimensions → the move → its reader, compiled
for eight A100s without a GPU. Its traffic is the program's bytes through memory, minus those of the same program with
the move along the first dimension (all-gathers, reduce-scatters) or without it (all-to-alls). A tenth of a second each.

    python -m oracles.gpu_moves --gpu-packages F      # `make gpu-packages` fills F
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.gpu_targets import (
    add_packages_option,
    compile_only_devices,
    compiler_environment,
    packages_folder,
    require_packages,
)
from shardwright.cost import reshard
from shardwright.cost.moves.relayout import LOOP, PRODUCT, ROWS, STORED, MoveEnds, access_of, transpose_bytes
from shardwright.plans.shardings import Mesh, TensorSharding

DEVICES = 8
SIZE = 256
SHAPE = (SIZE, SIZE, SIZE)
SHARD_BYTES = 4 * SIZE**3 // DEVICES
MESH = Mesh.of({"x": DEVICES})
NAMES = {LOOP: "loop", ROWS: "rows", PRODUCT: "product", STORED: "stored"}
GATHER, SCATTER, EXCHANGE = "all-gather", "reduce-scatter", "all-to-all"


class Case(NamedTuple):
    """A move between split dimensions (None: replicated); a reduce-scatter starts from a product's partial sums."""

    kind: str
    source: int | None
    target: int | None
    ends: MoveEnds


def list_cases() -> Iterator[Case]:
    """All-gathers, reduce-scatters and all-to-alls of each dimension, with each possible maker and reader."""
    for dim in range(3):
        for maker in (LOOP, PRODUCT, STORED):
            yield from (Case(GATHER, dim, None, MoveEnds(maker, reader)) for reader in (LOOP, ROWS, PRODUCT, STORED))
        yield Case(SCATTER, None, dim, MoveEnds(PRODUCT, LOOP))
    for source in range(3):
        for target in range(3):
            if source != target:
                yield Case(EXCHANGE, source, target, MoveEnds(LOOP, LOOP))
                yield Case(EXCHANGE, source, target, MoveEnds(STORED, LOOP))


def predict_transpose_bytes(case: Case) -> float:
    """Bytes read and written by transposing kernels, by the cost model."""
    source = TensorSharding(_split_dims(case.source), ("x",) if case.kind == SCATTER else ())
    moves = [
        access_of(move.kind, move.payload_bytes, move.atoms, move.reads, move.writes)
        for move in reshard("f32", SHAPE, source, TensorSharding(_split_dims(case.target)), MESH)
    ]
    return 2 * sum(transpose_bytes(moves, SHAPE, case.ends))


def _is_by_columns(case: Case) -> bool:
    """Whether each device computes columns of a product, from all rows."""
    return case.ends.maker == PRODUCT and case.source == len(SHAPE) - 1


def _split_dims(dim: int | None) -> tuple[tuple[str, ...], ...]:
    return tuple(("x",) if dim == axis_dim else () for axis_dim in range(len(SHAPE)))


class Probe:
    """Compiles cases for compile-only devices."""

    def __init__(self, devices: list[Any]) -> None:
        import jax
        import numpy as np
        from jax.sharding import Mesh as JaxMesh

        self.jax = jax
        self.mesh = JaxMesh(np.array(devices), ("x",))

    def count_bytes(self, case: Case) -> float:
        """Bytes through memory of all kernels of a case."""
        from benchmarks.planner.counter import count

        jax = self.jax
        function, shapes, shardings, result = self._build_program(case)
        jitted = jax.jit(function, in_shardings=shardings, out_shardings=result)
        text = jitted.lower(*[jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]).compile().as_text()
        kernels = count(text, DEVICES).kernels
        return float(sum(kernel.bytes * kernel.count for kernel in kernels if not kernel.kind.startswith(EXCHANGE)))

    def count_base_bytes(self, case: Case) -> float:
        """Bytes through memory of the same case without the move's traffic."""
        if case.kind == EXCHANGE:  # without it, what is sent is not written, nor read
            fused_bytes = 2 * SHARD_BYTES if case.ends.maker == LOOP else 0
            return self.count_bytes(case._replace(target=case.source)) + fused_bytes
        if case.kind == SCATTER:
            return self.count_bytes(case._replace(target=0))
        first = case._replace(source=0)
        if not _is_by_columns(case):
            return self.count_bytes(first)
        loop = MoveEnds(case.ends.maker, LOOP)  # a product that makes columns reads more: as much, whatever reads it
        more = self.count_bytes(case._replace(ends=loop)) - self.count_bytes(first._replace(ends=loop))
        return self.count_bytes(first) + more

    def _build_program(self, case: Case) -> tuple[Callable[..., Any], list[tuple[int, ...]], tuple[Any, ...], Any]:
        jnp, constrain = self.jax.numpy, self.jax.lax.with_sharding_constraint
        before, after, square = self._shard_along(case.source), self._shard_along(case.target), (SIZE, SIZE)
        whole, by_columns, by_rows = (self._make_sharding(*axes) for axes in ((None, None), (None, "x"), ("x", None)))

        def function(x: Any, v: Any, w: Any) -> Any:
            result = {LOOP: jnp.sin, STORED: lambda x: x, PRODUCT: lambda x: x @ v}[case.ends.maker](x)
            y = result if case.kind == SCATTER else constrain(result, before)
            y = constrain(y, after)
            reads = {LOOP: jnp.cos, STORED: lambda y: y, ROWS: self.jax.nn.softmax, PRODUCT: lambda y: y @ w}
            return reads[case.ends.reader](y)

        if case.kind == SCATTER:
            return function, [SHAPE, square, square], (self._shard_along(2), by_rows, whole), after
        is_column = _is_by_columns(case)
        argument = self._shard_along(None) if is_column else before
        return function, [SHAPE, square, square], (argument, by_columns if is_column else whole, whole), after

    def _shard_along(self, dim: int | None) -> Any:
        return self._make_sharding(*("x" if dim == axis_dim else None for axis_dim in range(len(SHAPE))))

    def _make_sharding(self, *axes: str | None) -> Any:
        from jax.sharding import NamedSharding, PartitionSpec

        return NamedSharding(self.mesh, PartitionSpec(*axes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_packages_option(parser)
    require_packages(parser.parse_args())
    os.environ.update(compiler_environment(packages_folder()))
    probe = Probe(compile_only_devices(packages_folder(), "a100", DEVICES))
    wrong = total = 0
    for case in list_cases():
        real, model = probe.count_bytes(case) - probe.count_base_bytes(case), predict_transpose_bytes(case)
        agrees = abs(real - model) <= 0.2 * SHARD_BYTES
        total, wrong = total + 1, wrong + (not agrees)
        ends = f"{NAMES[case.ends.maker]} → {NAMES[case.ends.reader]}"
        print(
            f"{case.kind:14} {case.source} → {case.target}  {ends:18} XLA {real / 1e6:7.1f} MB, "
            f"model {model / 1e6:7.1f} MB{'' if agrees else '  differs'}",
            flush=True,
        )
    print(f"{total - wrong} of {total} agree")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
