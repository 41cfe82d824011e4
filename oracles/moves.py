"""Which collectives XLA realises for every resharding of a small array, beside what the cost model predicts.

For each mesh and shape, one program holds all (source, target) pairs, as Shardy constraints on a chain of
operations each. XLA's partitioner takes a second or two for a few hundred of them; what it inserted is read from
its dump and held against `shardwright.cost.moves.reshard`. Exit code 1 where one differs in kind, devices or bytes.

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
SUM = "all-reduce"
SCATTERED = "reduce-scatter"
CONTRACTED = 144


Groups = tuple[tuple[int, ...], ...]


class Case(NamedTuple):
    """One resharding; `source.unreduced` is a matrix product's partial sum."""

    source: TensorSharding
    target: TensorSharding


class Collective(NamedTuple):
    """groups: the devices of each, in order. A permute's are left out: XLA lists those that keep their data, too."""

    kind: str
    group_size: int
    payload_bytes: int
    groups: Groups


def shardings(mesh: Mesh, rank: int) -> Iterator[TensorSharding]:
    """Every sharding of an array of that rank: each axis splits one dimension or none, in mesh order or turned."""
    for dims in product([None, *range(rank)], repeat=len(mesh.axes)):
        split: list[tuple[str, ...]] = [()] * rank
        for axis, dim in zip(mesh.axes, dims, strict=True):
            if dim is not None:
                split[dim] = (*split[dim], axis.name)
        lies = TensorSharding(tuple(split))
        yield from dict.fromkeys((lies, rotate_axes(lies, mesh)))


def cases(mesh: Mesh, shape: Sequence[int]) -> Iterator[Case]:
    """All moves of a whole value, and of a matrix product's partial sum that is reduced."""
    every = list(shardings(mesh, len(shape)))
    yield from (Case(source, target) for source, target in product(every, repeat=2) if source != target)
    if len(shape) != 2:
        return
    names = tuple(mesh.sizes)
    for reduced in sorted({names[i:j] for i in range(len(names)) for j in range(i + 1, len(names) + 1)}):
        for source, target in product(every, repeat=2):
            if not set(reduced) & set(source.axes):
                yield Case(TensorSharding(source.dims, reduced), target)


def _is_uneven(mesh: Mesh, shape: Sequence[int]) -> bool:
    return any(size % mesh.device_count for size in shape)


# ---- XLA -----------------------------------------------------------------------
def realised(mesh: Mesh, chosen: Sequence[Case], shape: Sequence[int]) -> list[list[Collective]]:
    """What XLA inserts for each case, in order."""
    with CompileService(mesh.device_count) as service:
        text = service.compile_stablehlo(program(mesh, chosen, shape), inspect="partition-pass")
    results: list[list[Collective]] = [[] for _ in chosen]
    for seen in find_collectives(text, mesh.device_count):
        if seen.group_size > 1 and seen.op_name.startswith("case"):
            groups = [range(mesh.device_count)] if seen.groups == "all" else parse_replica_groups(seen.groups)
            result = _plain(seen.kind, seen.group_size, seen.payload_bytes, groups)
            results[int(seen.op_name.removeprefix("case"))].append(result)
    return results


def program(mesh: Mesh, chosen: Sequence[Case], shape: Sequence[int]) -> str:
    """StableHLO with one chain of operations a case; locations carry the cases' numbers.

    XLA pads no arguments, so where shards are uneven those are whole and sliced first, and the results gathered
    under another name.
    """
    whole = TensorSharding.replicated(len(shape)) if _is_uneven(mesh, shape) else None
    chains = [_chain(number, case, shape, mesh, whole) for number, case in enumerate(chosen)]
    arguments = ", ".join(argument for chain in chains for argument in chain.arguments)
    results = ", ".join(_typed(shape, whole or case.target) for case in chosen)
    returned = ", ".join(f"%r{i}" for i in range(len(chosen)))
    types = ", ".join([_tensor(shape)] * len(chosen))
    body = "\n".join(line for chain in chains for line in chain.lines)
    return (
        f"module {{\n{mesh_text(mesh)}\nfunc.func @main({arguments}) -> ({results}) {{\n{body}\n"
        f"return {returned} : {types}\n}}\n}}"
    )


class _Chain(NamedTuple):
    arguments: list[str]
    lines: list[str]


def _chain(number: int, case: Case, shape: Sequence[int], mesh: Mesh, whole: TensorSharding | None) -> _Chain:
    source, target = case
    kind = _tensor(shape)
    lines: list[str] = []

    def constrain(value: str, result: str, lies: TensorSharding, name: str, kind: str = kind) -> None:
        lines.append(
            f"{result} = sdy.sharding_constraint {value} <@shardwright_mesh, {sharding_text(lies)}> : {kind} {name}"
        )

    here = f'loc("case{number}")'
    if source.unreduced:
        left, right = (shape[0], CONTRACTED), (CONTRACTED, shape[1])
        lies = TensorSharding((source.dims[0], source.unreduced)), TensorSharding((source.unreduced, source.dims[1]))
        arguments = []
        for name, dimensions, each in zip("ab", (left, right), lies, strict=True):
            arguments.append(f"%{name}{number}: {_typed(dimensions, whole or each)}")
            constrain(f"%{name}{number}", f"%{name}s{number}", each, here, _tensor(dimensions))
        types = f"({_tensor(left)}, {_tensor(right)}) -> {kind}"
        lines.append(f"%m{number} = stablehlo.dot %as{number}, %bs{number} : {types} {here}")
    else:
        arguments = [f"%a{number}: {_typed(shape, whole or source)}"]
        lines.append(f"%m{number} = stablehlo.sine %a{number} : {kind} {here}")
    is_marked = source.is_even(shape, mesh)  # Shardy aborts at summands of uneven shards
    constrain(f"%m{number}", f"%s{number}", source if is_marked else TensorSharding(source.dims), here)
    reached = f"%s{number}"
    for step, lies in enumerate((*steps_to(source, target, tuple(shape), mesh), target)):
        constrain(reached, f"%t{number}_{step}", lies, here)
        reached = f"%t{number}_{step}"
    lines.append(f"%e{number} = stablehlo.cosine {reached} : {kind} {here}")
    constrain(f"%e{number}", f"%k{number}", target, here)
    constrain(f"%k{number}", f"%r{number}", whole or target, here if whole is None else 'loc("out")')
    return _Chain(arguments, lines)


def _tensor(shape: Sequence[int]) -> str:
    return f"tensor<{'x'.join(map(str, shape))}xf32>"


def _typed(shape: Sequence[int], lies: TensorSharding) -> str:
    return f"{_tensor(shape)} {{sdy.sharding = #sdy.sharding<@shardwright_mesh, {sharding_text(lies)}>}}"


# ---- the model -------------------------------------------------------------------
def predicted(mesh: Mesh, case: Case, shape: Sequence[int]) -> list[Collective]:
    """The same from the model."""
    moves = reshard("f32", tuple(shape), case.source, case.target, mesh)
    return [_plain(move.kind, move.group_size, move.payload_bytes, groups_along(move.atoms, mesh)) for move in moves]


def agree(real: Sequence[Collective], model: Sequence[Collective]) -> bool:
    """Whether both have the same collectives, in whatever order, or all-reduces of as many bytes on the wire."""
    real = [_as_model(each, model) for each in real]
    same_sums = _wire(real) == _wire(model) and sorted(_others(real, SUM)) == sorted(_others(model, SUM))
    return sorted(real) == sorted(model) or same_sums


def _as_model(seen: Collective, model: Sequence[Collective]) -> Collective:
    """A sum that XLA slices as it moves on is no reduce-scatter where the model has none there: proofs read it so."""
    whole = seen._replace(kind=SUM)
    is_sum = seen not in model and (whole in model or SCATTERED not in {each.kind for each in model})
    return whole if seen.kind == SCATTERED and is_sum else seen


def _wire(collectives: Sequence[Collective]) -> int:
    return sum(wire_bytes(SUM, each.payload_bytes, each.group_size) for each in collectives if each.kind == SUM)


def _others(collectives: Sequence[Collective], kind: str) -> list[Collective]:
    return [each for each in collectives if each.kind != kind]


def _plain(kind: str, group_size: int, payload_bytes: int, groups: Iterable[Iterable[int]]) -> Collective:
    if kind == PERMUTE:
        return Collective(kind, 0, payload_bytes, ())
    return Collective(kind, group_size, payload_bytes, tuple(sorted(tuple(sorted(group)) for group in groups)))


def parsed_mesh(text: str) -> Mesh:
    return Mesh.of(dict(zip("xyzw", map(int, text.split("x")), strict=False)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="print the moves that agree, too")
    parser.add_argument("--mesh", help="one mesh, such as 2x2x2 (default: a grid of meshes and shapes)")
    parser.add_argument("--shape", default="64x32", help="with --mesh: the array's dimensions")
    options = parser.parse_args()
    wrong = 0
    for sizes, dimensions in [(options.mesh, options.shape)] if options.mesh else GRID:
        mesh, shape = parsed_mesh(sizes), tuple(map(int, dimensions.split("x")))
        wrong += probe(mesh, shape, show_all=options.all)
    return int(wrong > 0)


def probe(mesh: Mesh, shape: tuple[int, ...], *, show_all: bool) -> int:
    """Print the moves of one mesh and shape on which XLA and the model differ; returns how many do."""
    remaining = cases(mesh, shape)
    total = wrong = 0
    while chosen := list(islice(remaining, CASES_A_PROGRAM)):
        for case, real in zip(chosen, realised(mesh, chosen, shape), strict=True):
            model = predicted(mesh, case, shape)
            same = agree(real, model)
            total += 1
            wrong += not same
            if show_all or not same:
                print(f"{case.source} -> {case.target}\n    XLA   {real}\n    model {model}")
    print(f"{mesh}, f32{list(shape)}: {total - wrong} of {total} moves agree", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
