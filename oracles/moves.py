"""XLA's collectives for every resharding of a small array, beside the cost model's.

For each mesh and shape, one program has all (source, target) pairs, each a chain of operations with Shardy constraints.
XLA's partitioner takes a second or two for a few hundred pairs. Its collectives are read from its dump and compared
with `shardwright.cost.moves.reshard`. Exit code 1 if one differs in kind, devices or bytes.

    python -m oracles.moves [--mesh 2x2x2 --shape 16x32x64] [--all]   # --all prints what agrees, too
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from typing import NamedTuple

from shardwright.cost import reshard, wire_bytes
from shardwright.cost.moves.device_groups import groups_along
from shardwright.hlo.replica_groups import parse_replica_groups
from shardwright.plans.shardings import Mesh, TensorSharding, rotate_axes
from shardwright.xla import CompileService, find_collectives
from shardwright.xla.boundary import sharding_text
from shardwright.xla.emit import mesh_text
from shardwright.xla.partial_sums import steps_to

#: (mesh, shape) pairs: one to three axes, ranks 2 to 4, sizes that are no powers of two, uneven shards,
#: dimensions shorter than an axis.
GRID = (
    ("8", "64x32"),
    ("2x4", "64x32"),
    ("4x2", "16x32x64"),
    ("2x2x2", "16x32x64"),
    ("2x2", "16x32x64x8"),
    ("3x4", "48x144"),
    ("2x6", "48x144"),
    ("2x2x3", "48x144"),
    ("2x2x4", "64x32"),
    ("4x4", "64x32"),
    ("8", "30x21"),
    ("2x4", "30x21"),
    ("2x2x2", "13x27"),
    ("3x4", "25x34"),
    ("4x2", "60x36x10"),
    ("2x2x2", "30x21"),
    ("2x4", "3x32"),
    ("2x4", "3x2x5"),
    ("2x6", "7x3"),
    ("2x2x4", "9x5"),
    ("2x2x6", "3x13"),
    ("4x2x4", "5x9"),
)
CASES_A_PROGRAM = 1000
PERMUTE = "collective-permute"
ALL_REDUCE = "all-reduce"
REDUCE_SCATTER = "reduce-scatter"
CONTRACTED_SIZE = 144


Groups = tuple[tuple[int, ...], ...]


class Case(NamedTuple):
    """One resharding; `source.unreduced` is a matrix product's partial sum."""

    source: TensorSharding
    target: TensorSharding


class Collective(NamedTuple):
    """groups: the devices of each, in order; empty for permutes: XLA also lists devices that keep their data."""

    kind: str
    group_size: int
    payload_bytes: int
    groups: Groups


def list_shardings(mesh: Mesh, rank: int) -> Iterator[TensorSharding]:
    """Every sharding of an array of a rank: each axis splits one dimension or none, axes in mesh order or rotated."""
    for dims in product([None, *range(rank)], repeat=len(mesh.axes)):
        split: list[tuple[str, ...]] = [()] * rank
        for axis, dim in zip(mesh.axes, dims, strict=True):
            if dim is not None:
                split[dim] = (*split[dim], axis.name)
        sharding = TensorSharding(tuple(split))
        yield from dict.fromkeys((sharding, rotate_axes(sharding, mesh)))


def list_cases(mesh: Mesh, shape: Sequence[int]) -> Iterator[Case]:
    """All moves of a whole value, and all reductions of a matrix product's partial sum."""
    all_shardings = list(list_shardings(mesh, len(shape)))
    yield from (Case(source, target) for source, target in product(all_shardings, repeat=2) if source != target)
    if len(shape) != 2:
        return
    names = tuple(mesh.sizes)
    for reduced in sorted({names[i:j] for i in range(len(names)) for j in range(i + 1, len(names) + 1)}):
        for source, target in product(all_shardings, repeat=2):
            if not set(reduced) & set(source.axes):
                yield Case(TensorSharding(source.dims, reduced), target)


def _is_uneven(mesh: Mesh, shape: Sequence[int]) -> bool:
    return any(size % mesh.device_count for size in shape)


# ---- XLA -----------------------------------------------------------------------
def partition_cases(mesh: Mesh, cases: Sequence[Case], shape: Sequence[int]) -> list[list[Collective]]:
    """Collectives inserted by XLA's partitioner for each case, in order."""
    with CompileService(mesh.device_count) as service:
        text = service.compile_stablehlo(build_program(mesh, cases, shape), inspect="partition-pass")
    results: list[list[Collective]] = [[] for _ in cases]
    for collective in find_collectives(text, mesh.device_count):
        if collective.group_size > 1 and collective.op_name.startswith("case"):
            groups = (
                [range(mesh.device_count)] if collective.groups == "all" else parse_replica_groups(collective.groups)
            )
            result = _make_collective(collective.kind, collective.group_size, collective.payload_bytes, groups)
            results[int(collective.op_name.removeprefix("case"))].append(result)
    return results


def build_program(mesh: Mesh, cases: Sequence[Case], shape: Sequence[int]) -> str:
    """StableHLO with one chain of operations a case; locations carry the cases' numbers.

    XLA pads no arguments. With uneven shards the arguments are therefore replicated and sliced first, and the results
    gathered under another name.
    """
    whole = TensorSharding.replicated(len(shape)) if _is_uneven(mesh, shape) else None
    chains = [_build_chain(number, case, shape, mesh, whole) for number, case in enumerate(cases)]
    arguments = ", ".join(argument for chain in chains for argument in chain.arguments)
    results = ", ".join(_format_sharded_tensor(shape, whole or case.target) for case in cases)
    returned = ", ".join(f"%r{i}" for i in range(len(cases)))
    types = ", ".join([_format_tensor(shape)] * len(cases))
    body = "\n".join(line for chain in chains for line in chain.lines)
    return (
        f"module {{\n{mesh_text(mesh)}\nfunc.func @main({arguments}) -> ({results}) {{\n{body}\n"
        f"return {returned} : {types}\n}}\n}}"
    )


class _Chain(NamedTuple):
    arguments: list[str]
    lines: list[str]


def _build_chain(number: int, case: Case, shape: Sequence[int], mesh: Mesh, whole: TensorSharding | None) -> _Chain:
    source, target = case
    kind = _format_tensor(shape)
    lines: list[str] = []

    def constrain(value: str, result: str, sharding: TensorSharding, name: str, kind: str = kind) -> None:
        lines.append(
            f"{result} = sdy.sharding_constraint {value} <@shardwright_mesh, {sharding_text(sharding)}> : {kind} {name}"
        )

    here = f'loc("case{number}")'
    if source.unreduced:
        left_shape, right_shape = (shape[0], CONTRACTED_SIZE), (CONTRACTED_SIZE, shape[1])
        operands = (
            TensorSharding((source.dims[0], source.unreduced)),
            TensorSharding((source.unreduced, source.dims[1])),
        )
        arguments = []
        for name, dimensions, sharding in zip("ab", (left_shape, right_shape), operands, strict=True):
            arguments.append(f"%{name}{number}: {_format_sharded_tensor(dimensions, whole or sharding)}")
            constrain(f"%{name}{number}", f"%{name}s{number}", sharding, here, _format_tensor(dimensions))
        types = f"({_format_tensor(left_shape)}, {_format_tensor(right_shape)}) -> {kind}"
        lines.append(f"%m{number} = stablehlo.dot %as{number}, %bs{number} : {types} {here}")
    else:
        arguments = [f"%a{number}: {_format_sharded_tensor(shape, whole or source)}"]
        lines.append(f"%m{number} = stablehlo.sine %a{number} : {kind} {here}")
    is_marked = source.is_even(shape, mesh)  # Shardy aborts at summands of uneven shards
    constrain(f"%m{number}", f"%s{number}", source if is_marked else TensorSharding(source.dims), here)
    value = f"%s{number}"
    for step, sharding in enumerate((*steps_to(source, target, tuple(shape), mesh), target)):
        constrain(value, f"%t{number}_{step}", sharding, here)
        value = f"%t{number}_{step}"
    lines.append(f"%e{number} = stablehlo.cosine {value} : {kind} {here}")
    constrain(f"%e{number}", f"%k{number}", target, here)
    constrain(f"%k{number}", f"%r{number}", whole or target, here if whole is None else 'loc("out")')
    return _Chain(arguments, lines)


def _format_tensor(shape: Sequence[int]) -> str:
    return f"tensor<{'x'.join(map(str, shape))}xf32>"


def _format_sharded_tensor(shape: Sequence[int], sharding: TensorSharding) -> str:
    return f"{_format_tensor(shape)} {{sdy.sharding = #sdy.sharding<@shardwright_mesh, {sharding_text(sharding)}>}}"


# ---- the model -------------------------------------------------------------------
def predict_collectives(mesh: Mesh, case: Case, shape: Sequence[int]) -> list[Collective]:
    """Collectives of a case by the cost model."""
    moves = reshard("f32", tuple(shape), case.source, case.target, mesh)
    return [
        _make_collective(move.kind, move.group_size, move.payload_bytes, groups_along(move.atoms, mesh))
        for move in moves
    ]


def agree(real: Sequence[Collective], model: Sequence[Collective]) -> bool:
    """Whether both have equal collectives in any order, all-reduces also if only their bytes on the wire agree."""
    real = [_as_model(collective, model) for collective in real]
    if sorted(real) == sorted(model):
        return True
    same_others = sorted(_exclude_kind(real, ALL_REDUCE)) == sorted(_exclude_kind(model, ALL_REDUCE))
    return same_others and _sum_wire_bytes(real) == _sum_wire_bytes(model)


def _as_model(collective: Collective, model: Sequence[Collective]) -> Collective:
    """XLA's reduce-scatter of a sliced sum is an all-reduce if the model has no reduce-scatter; proofs do the same."""
    whole = collective._replace(kind=ALL_REDUCE)
    is_sum = collective not in model and (whole in model or all(other.kind != REDUCE_SCATTER for other in model))
    return whole if collective.kind == REDUCE_SCATTER and is_sum else collective


def _sum_wire_bytes(collectives: Sequence[Collective]) -> int:
    sums = (collective for collective in collectives if collective.kind == ALL_REDUCE)
    return sum(wire_bytes(ALL_REDUCE, collective.payload_bytes, collective.group_size) for collective in sums)


def _exclude_kind(collectives: Sequence[Collective], kind: str) -> list[Collective]:
    return [collective for collective in collectives if collective.kind != kind]


def _make_collective(kind: str, group_size: int, payload_bytes: int, groups: Iterable[Iterable[int]]) -> Collective:
    if kind == PERMUTE:
        return Collective(kind, 0, payload_bytes, ())
    return Collective(kind, group_size, payload_bytes, tuple(sorted(tuple(sorted(group)) for group in groups)))


def parse_mesh(text: str) -> Mesh:
    return Mesh.of(dict(zip("xyzw", map(int, text.split("x")), strict=False)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="print the moves that agree, too")
    parser.add_argument("--mesh", help="one mesh, such as 2x2x2 (default: a grid of meshes and shapes)")
    parser.add_argument("--shape", default="64x32", help="with --mesh: the array's dimensions")
    options = parser.parse_args()
    wrong = 0
    for sizes, dimensions in [(options.mesh, options.shape)] if options.mesh else GRID:
        mesh, shape = parse_mesh(sizes), tuple(map(int, dimensions.split("x")))
        wrong += probe(mesh, shape, show_all=options.all)
    return int(wrong > 0)


def probe(mesh: Mesh, shape: tuple[int, ...], *, show_all: bool) -> int:
    """Print the differences of XLA and the model on the moves of one mesh and shape; returns their number."""
    remaining = list_cases(mesh, shape)
    total = wrong = 0
    while chosen := list(islice(remaining, CASES_A_PROGRAM)):
        for case, real in zip(chosen, partition_cases(mesh, chosen, shape), strict=True):
            model = predict_collectives(mesh, case, shape)
            same = agree(real, model)
            total += 1
            wrong += not same
            if show_all or not same:
                print(f"{case.source} -> {case.target}\n    XLA   {real}\n    model {model}")
    print(f"{mesh}, f32{list(shape)}: {total - wrong} of {total} moves agree", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
