"""Which collectives XLA:CPU realises for every resharding of a small array on meshes of one and two axes.

Compiles each (source, target) pair with stock `jax.jit` under Shardy, reads the
collectives from the compiled module, and prints them beside what
`shardwright.cost.reshard` predicts. Exit code 1 where they differ in kind or bytes.

    python benchmarks/probe_moves.py [--rank 3] [--all]     # --all prints the pairs that agree, too
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from itertools import product
from math import prod

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardwright.cost import reshard
from shardwright.plans import Mesh, TensorSharding

SHAPES = {2: (64, 32), 3: (16, 32, 64)}
MESHES = (Mesh.of({"x": 8}), Mesh.of({"x": 2, "y": 4}), Mesh.of({"x": 4, "y": 2}), Mesh.of({"x": 2, "y": 2}))
CONTRACTED = 16
_COLLECTIVE = re.compile(
    r"= (?P<type>\(?[a-z0-9]+\[.*?) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"f32\[([0-9,]*)\]")


def shardings(mesh: Mesh, rank: int) -> Iterator[TensorSharding]:
    """Every sharding of an array of that rank: each axis splits one dimension or none, in mesh order."""
    for dims in product([None, *range(rank)], repeat=len(mesh.axes)):
        split: list[tuple[str, ...]] = [()] * rank
        for axis, dim in zip(mesh.axes, dims, strict=True):
            if dim is not None:
                split[dim] = (*split[dim], axis.name)
        yield TensorSharding(tuple(split))


def realised(
    mesh: Mesh, source: TensorSharding, target: TensorSharding, shape: tuple[int, ...]
) -> list[tuple[str, int]]:
    """(kind, payload bytes) of each collective in XLA's program for one resharding."""
    device_mesh = jax.make_mesh(
        tuple(axis.size for axis in mesh.axes),
        tuple(axis.name for axis in mesh.axes),
        axis_types=(AxisType.Auto,) * len(mesh.axes),
        devices=jax.devices()[: mesh.device_count],
    )

    def named(dims: tuple[tuple[str, ...], ...]) -> NamedSharding:
        return NamedSharding(device_mesh, PartitionSpec(*dims))

    def move(x: jax.Array) -> jax.Array:
        made = jax.lax.with_sharding_constraint(jnp.sin(x), named(source.dims))
        moved = jax.lax.with_sharding_constraint(made, named(target.dims))
        return jax.lax.with_sharding_constraint(jnp.cos(moved), named(target.dims))

    def reduce(x: jax.Array, w: jax.Array) -> jax.Array:
        made = jax.lax.with_sharding_constraint(x @ w, named(target.dims))
        return jax.lax.with_sharding_constraint(jnp.cos(made), named(target.dims))

    if source.unreduced:
        left, right = named((source.dims[0], source.unreduced)), named((source.unreduced, source.dims[1]))
        arguments = [
            jax.ShapeDtypeStruct((shape[0], CONTRACTED), "f4"),
            jax.ShapeDtypeStruct((CONTRACTED, shape[1]), "f4"),
        ]
        compiled = (
            jax.jit(reduce, in_shardings=(left, right), out_shardings=named(target.dims)).lower(*arguments).compile()
        )
    else:
        compiled = (
            jax.jit(move, in_shardings=named(source.dims), out_shardings=named(target.dims))
            .lower(jax.ShapeDtypeStruct(shape, "f4"))
            .compile()
        )
    return collectives(compiled.as_text())


def collectives(text: str) -> list[tuple[str, int]]:
    """(kind, payload bytes) of the collectives in HLO text, in order."""
    found = []
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match:
            sizes = [4 * prod(int(n) for n in dims.split(",") if n) for dims in _ARRAY.findall(match["type"])]
            found.append((match["kind"], sum(sizes) if match["kind"] == "all-to-all" else max(sizes)))
    return found


def pairs(mesh: Mesh, rank: int) -> Iterator[tuple[TensorSharding, TensorSharding]]:
    """All moves of a whole value, and of a matrix product's partial sum all reductions that plans hold."""
    every = list(shardings(mesh, rank))
    yield from ((source, target) for source, target in product(every, repeat=2) if source != target)
    if rank != 2:
        return
    names = tuple(mesh.sizes)
    for reduced in [names[:i] for i in range(1, len(names) + 1)] + [names[i:] for i in range(1, len(names))]:
        for target in every:
            dims = tuple(tuple(axis for axis in axes if axis not in reduced) for axes in target.dims)
            yield TensorSharding(dims, reduced), target


def predicted(
    mesh: Mesh, source: TensorSharding, target: TensorSharding, shape: tuple[int, ...]
) -> list[tuple[str, int]]:
    """The same from the model, a reduce-scatter counted as the all-reduce that XLA:CPU leaves it."""
    return [
        ("all-reduce" if move.kind == "reduce-scatter" else move.kind, move.payload_bytes)
        for move in reshard("f32", shape, source, target, mesh)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="print the pairs that agree, too")
    parser.add_argument("--rank", type=int, choices=sorted(SHAPES), default=2, help="dimensions of the array")
    options = parser.parse_args()
    shape = SHAPES[options.rank]
    total = wrong = 0
    for mesh in MESHES:
        for source, target in pairs(mesh, options.rank):
            real, model = realised(mesh, source, target, shape), predicted(mesh, source, target, shape)
            total += 1
            wrong += real != model
            if options.all or real != model:
                print(f"{mesh}: {source} -> {target}\n    XLA   {real}\n    model {model}")
    print(f"{total - wrong} of {total} pairs agree")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
