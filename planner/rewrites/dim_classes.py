"""Classes of dimensions that become two together, and the choice among them.

A class is flooded from a cut dimension through the ties of `links`, across loops and calls, to parameters and outputs.
It is split into (k, n/k), with n/k the greatest block without a cut through it. The whole class is split or none of
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd

from shardwright.hlo import Computation, Instruction, Module
from shardwright.hlo.entry import flat_aliases
from shardwright.planner.rewrites.dim_links import Dim, Links, callees_of, links
from shardwright.planner.rules.data_movement import reshape_groups
from shardwright.planner.tuning import MAX_PIECES

#: Dimensions by number of an array leaf.
Views = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Required:
    """Fixed storage dimensions of array leaves of the entry's parameters and result."""

    parameters: Views = field(default_factory=dict)
    outputs: Views = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class DimClass:
    """Dimensions of one size that are tied together.

    dims: the dimensions.
    size: elements of each.
    block: elements of the greatest block without a cut through it.
    merged: (major-most part, whole), the part in this class.
    denied_by: an instruction that takes no split, or None.
    """

    dims: dict[Dim, None]
    size: int
    block: int
    merged: list[tuple[Dim, Dim]]
    denied_by: Instruction | None

    @property
    def pieces(self) -> int:
        return self.size // self.block


@dataclass(slots=True, kw_only=True)
class SplitChoice:
    """factors: per dimension to split, (pieces, elements of each). notes: dimensions left whole, with reasons."""

    factors: dict[Dim, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def choose_splits(module: Module, required: Required) -> SplitChoice:
    """The dimensions to split in one round: each class at most once."""
    graph = _Graph(module)
    forced = _blocks_required(graph, required)
    fixed = {
        (value, leaf, dim)
        for value, leaf, _ in graph.storage_dims(required)
        for dim in range(value.shape.leaves[leaf].rank)
    }
    chosen = SplitChoice()
    for dim_class in _cut_classes(graph, forced):
        _decide(graph, dim_class, forced, fixed, chosen)
    return chosen


def _cut_classes(graph: _Graph, forced: Mapping[Dim, int]) -> list[DimClass]:
    """Every class with a cut in it, including reshape results of a cut part and other dimensions."""
    pending = deque([*forced, *graph.cut_dims()])
    classes: dict[Dim, DimClass] = {}
    while pending:
        seed = pending.popleft()
        if seed in classes:
            continue
        dim_class = graph.flood(seed)
        classes.update(dict.fromkeys(dim_class.dims, dim_class))
        for part, whole in dim_class.merged:
            # One block of the part, with the dimensions behind it, is one block of the whole.
            block = dim_class.block * (graph.size(whole) // graph.size(part))
            whole_class = classes.get(whole)
            if whole_class is None:
                graph.blocks[whole] = gcd(block, graph.blocks.get(whole, 0))
                pending.append(whole)
            else:
                whole_class.block = gcd(whole_class.block, block)
    return list({id(dim_class): dim_class for dim_class in classes.values()}.values())


def _decide(
    graph: _Graph, dim_class: DimClass, forced: Mapping[Dim, int], fixed: set[Dim], choice: SplitChoice
) -> None:
    """Split the class, or note the reason against it."""
    blocks = {forced[dim] for dim in dim_class.dims if dim in forced}
    if not blocks and (
        not 1 < dim_class.pieces <= min(MAX_PIECES, dim_class.block) or not graph.has_parameter(dim_class)
    ):
        return
    first = next(iter(dim_class.dims))
    what = f"{first[0].name}: dimension {first[2]} holds {dim_class.pieces} blocks of {dim_class.block}"
    if dim_class.denied_by is not None:
        choice.notes.append(
            f"{what} but stays whole: {dim_class.denied_by.opcode} {dim_class.denied_by.name} takes no split"
        )
        return
    block = blocks.pop() if blocks else dim_class.block
    stored = {dim for dim in dim_class.dims if dim in fixed}
    if blocks or dim_class.block % block or stored - forced.keys():
        choice.notes.append(f"{what} but stays whole: an array that it is part of is stored otherwise already")
        return
    choice.factors.update(dict.fromkeys(dim_class.dims, (dim_class.size // block, block)))


def _blocks_required(graph: _Graph, required: Required) -> dict[Dim, int]:
    """Blocks of variables' dimensions with several storage dimensions."""
    forced = {}
    for value, leaf, wanted in graph.storage_dims(required):
        dimensions = value.shape.leaves[leaf].dimensions
        for dims, stored_dims in reshape_groups(dimensions, wanted):
            if len(dims) == 1 and len(stored_dims) > 1:
                forced[(value, leaf, dims[0])] = dimensions[dims[0]] // wanted[stored_dims[0]]
    return forced


class _Graph:
    """Consumers of values, and the cached links of instructions."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.parameters = [
            (parameter, leaf) for parameter in module.entry.parameters for leaf in range(len(parameter.shape.leaves))
        ]
        self.blocks: dict[Dim, int] = {}  # of dimensions that reshapes merge
        self._links: dict[Instruction, Links] = {}
        self._users: dict[Instruction, list[Instruction]] = {}
        self._callers: dict[Instruction, list[Instruction]] = {}  # of a parameter's or a root's computation
        self._of_entry = set(module.entry.parameters)
        self._aliased = self._alias_ties()
        for instruction in module.instructions():
            for operand in instruction.operands:
                self._users.setdefault(operand, []).append(instruction)
            if instruction.called:
                for callee in callees_of(instruction):
                    for end in (*callee.parameters, callee.root):
                        self._callers.setdefault(end, []).append(instruction)

    def _alias_ties(self) -> dict[tuple[Instruction, int], tuple[Instruction, int]]:
        """An output in a parameter's buffer has the same storage: leaf ↔ leaf."""
        root = self.module.entry.root
        ties = {}
        for output, parameter in flat_aliases(self.module).items():
            ties[(root, output)] = self.parameters[parameter]
            ties[self.parameters[parameter]] = (root, output)
        return ties

    def size(self, dim: Dim) -> int:
        value, leaf, number = dim
        return value.shape.leaves[leaf].dimensions[number]

    def storage_dims(self, required: Required) -> list[tuple[Instruction, int, tuple[int, ...]]]:
        """Array leaves of arguments and outputs, and their required storage dimensions."""
        arguments = [(*self.parameters[leaf], wanted) for leaf, wanted in required.parameters.items()]
        return [*arguments, *((self.module.entry.root, leaf, wanted) for leaf, wanted in required.outputs.items())]

    def has_parameter(self, dim_class: DimClass) -> bool:
        return any(value in self._of_entry for value, _, _ in dim_class.dims)

    def cut_dims(self) -> Iterator[Dim]:
        """Dimensions one instruction cuts into at most `MAX_PIECES` pieces.

        Not into more pieces than elements of a piece: no class with such a cut is split. Such a cut counts only before
        a possible merge, that is beside a reshape that merges a dimension of its size.
        """
        planned = reachable_computations(self.module)
        merged = _sizes_in_merges(planned)
        for computation in planned:
            for instruction in computation:
                if instruction.opcode not in ("slice", "pad", "concatenate"):
                    continue
                for dim, offsets in self.links(instruction).cuts.items():
                    size = self.size(dim)
                    block = gcd(size, *offsets)
                    if block and 1 < size // block <= (MAX_PIECES if size in merged else min(MAX_PIECES, block)):
                        yield dim

    def links(self, instruction: Instruction) -> Links:
        dim_links = self._links.get(instruction)
        if dim_links is None:
            dim_links = self._links[instruction] = links(instruction)
        return dim_links

    def flood(self, seed: Dim) -> DimClass:
        """The class of a dimension."""
        dim_class = DimClass(dims={seed: None}, size=self.size(seed), block=self.size(seed), merged=[], denied_by=None)
        pending = [seed]
        while pending:
            dim = pending.pop()
            dim_class.block = gcd(dim_class.block, self.blocks.get(dim, 0))
            for other in self._ties_of(dim, dim_class):
                if other not in dim_class.dims:
                    dim_class.dims[other] = None
                    pending.append(other)
        return dim_class

    def _ties_of(self, dim: Dim, dim_class: DimClass) -> Iterator[Dim]:
        """The ties of one dimension; adds its cuts, merges and denials to `dim_class`."""
        value, leaf, number = dim
        alias = self._aliased.get((value, leaf))
        if alias is not None:
            yield (*alias, number)
        for instruction in (value, *self._users.get(value, ()), *self._callers.get(value, ())):
            seen = self.links(instruction)
            if dim in seen.denied and dim_class.denied_by is None:
                dim_class.denied_by = instruction
            dim_class.block = gcd(dim_class.block, *seen.cuts.get(dim, ()))
            dim_class.merged += [(part, whole) for part, whole in seen.merged if part == dim]
            yield from seen.ties.get(dim, ())


def _sizes_in_merges(computations: Iterable[Computation]) -> set[int]:
    """Sizes of the major-most dimensions a reshape merges, or splits off one."""
    reshapes = {
        (instruction.operands[0].shape.leaves[0].dimensions, instruction.shape.leaves[0].dimensions)
        for computation in computations
        for instruction in computation.instructions
        if instruction.opcode == "reshape"
    }
    sizes: set[int] = set()
    for source, target in reshapes:
        for source_dims, target_dims in reshape_groups(source, target):
            if len(source_dims) == 1 < len(target_dims):
                sizes.add(target[target_dims[0]])
            elif len(target_dims) == 1 < len(source_dims):
                sizes.add(source[source_dims[0]])
    return sizes


def reachable_computations(module: Module) -> list[Computation]:
    """The entry and its control flow computations; not computations of scalars (of a reduce)."""
    reached = [module.entry]
    seen = {module.entry}
    for computation in reached:
        for instruction in computation:
            if instruction.called:
                new = [callee for callee in callees_of(instruction) if callee not in seen]
                seen.update(new)
                reached += new
    return reached
