"""Versions of instructions needed by a program part, found backwards from its outputs.

A value may be needed in several kinds. A whole value with parts in demand is computed in parts from parts of its
operands (a mask from an iota, random bits from their counters), or else cut out of the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import prod

from shardwright.errors import InternalError
from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.microbatch.kinds import DONE, OWN, WHOLE, Along, Done, Kind, Term, Whole
from shardwright.planner.microbatch.labels import KindLabels, Labeller, first_leaf
from shardwright.planner.microbatch.local_rules import localize
from shardwright.planner.tuning import MAX_REPEATED_ELEMENTS

#: One array leaf of an instruction's result, in one kind.
Version = tuple[Instruction, int, Kind]


class EmitMode(Enum):
    """The way an instruction is written."""

    COPY = auto()  # itself, in the shapes of its kinds
    GIVEN = auto()  # handed in: a parameter, a finished term, a collected value
    CUT = auto()  # this micro-batch's part of the whole value
    COUNT = auto()  # an iota along the batch: counts from this micro-batch's first element
    FIRST = auto()  # a whole value as a term: itself in the first micro-batch, zeros in the others
    OWN = auto()  # a term scaled to the whole batch, as of equal micro-batches
    BARRIER = auto()  # an optimization barrier of the needed leaves
    CONTROL = auto()  # a loop or a conditional around new regions


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One version of an instruction.

    mode: the way it is written.
    results: the versions it makes.
    operands: the kind per array leaf of the operands; None: not read.
    regions: of control flow: condition and body, or the branches.
    divisor: see `LocalRule`.
    """

    mode: EmitMode
    results: tuple[Version, ...]
    operands: tuple[Kind | None, ...] = ()
    regions: tuple[Demand, ...] = ()
    divisor: int = 0


@dataclass(slots=True)
class Demand:
    """The needs of one part of the step in one computation.

    labels: the kinds of the computation's values.
    labeller: labels computations of other kinds.
    roots: output versions.
    ahead: input versions, made by another part.
    recipes: per needed instruction, its versions in the order of writing.
    """

    labels: KindLabels
    labeller: Labeller
    roots: tuple[Version, ...]
    ahead: frozenset[Version] = frozenset()
    recipes: dict[Instruction, list[Recipe]] = field(default_factory=dict)
    _wanted: dict[Instruction, dict[Version, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for instruction, leaf, kind in self.roots:
            self._request(instruction, leaf, kind)
        for instruction in reversed(self.labels.computation.instructions):
            wanted = self._wanted.get(instruction)
            if wanted:
                self.recipes[instruction] = self._recipes(instruction, wanted)

    def version(self, instruction: Instruction, leaf: int, kind: Kind) -> Version:
        """The version of a leaf in this kind, by its real producer."""
        while True:
            if instruction.opcode == "get-tuple-element":
                leaf += first_leaf(instruction)
                instruction = instruction.operands[0]
            elif instruction.opcode == "tuple":
                for operand in instruction.operands:
                    count = len(operand.shape.leaves)
                    if leaf < count:
                        instruction = operand
                        break
                    leaf -= count
            elif instruction.opcode in ("domain", "add-dependency"):
                instruction = instruction.operands[0]
            else:
                break
        return instruction, leaf, self._read_as(instruction, leaf, kind)

    def _read_as(self, instruction: Instruction, leaf: int, kind: Kind) -> Kind:
        """The kind read: WHOLE of whole values, DONE on request, OWN of batch values that cannot be made ahead."""
        if kind not in (WHOLE, DONE, OWN):
            return kind
        natural = self.labels.kinds[instruction][leaf]
        if isinstance(natural, Whole):
            return WHOLE
        if kind == DONE:
            return DONE
        return OWN if isinstance(natural, Term | Done) and instruction not in self.labels.cheap else WHOLE

    def inputs(self) -> Iterator[Version]:
        """Input versions, in program order."""
        for instruction in self.labels.computation.instructions:
            for recipe in self.recipes.get(instruction, ()):
                if recipe.mode is EmitMode.GIVEN:
                    yield from recipe.results

    def divisors(self) -> Iterator[tuple[int, Instruction]]:
        """Numbers divisible by every legal number of micro-batches, and their instructions."""
        for instruction, recipes in self.recipes.items():
            shapes = instruction.shape.leaves
            for recipe in recipes:
                if recipe.divisor:
                    yield recipe.divisor, instruction
                for _, leaf, kind in recipe.results:
                    if isinstance(kind, Along):
                        yield shapes[leaf].dimensions[kind.dim] // kind.outer, instruction
                for region in recipe.regions:
                    yield from region.divisors()

    def operand_versions(self, recipe: Recipe, instruction: Instruction) -> Iterator[Version]:
        """The operand versions a recipe of `instruction` reads."""
        kinds = iter(recipe.operands)
        for operand in instruction.operands:
            for leaf in range(len(operand.shape.leaves)):
                kind = next(kinds, None)
                if kind is not None:
                    yield self.version(operand, leaf, kind)

    def computable_ahead(self, batch: Container[Version]) -> list[Version]:
        """Whole values made of the whole batch arguments `batch`, limited to those with other consumers."""
        early: dict[Version, None] = {}
        needed: dict[Version, None] = {}
        for instruction in self.labels.computation.instructions:
            for recipe in self.recipes.get(instruction, ()):
                operands = list(self.operand_versions(recipe, instruction))
                is_whole = recipe.mode is EmitMode.COPY and all(kind == WHOLE for _, _, kind in recipe.results)
                if is_whole and any(version in batch or version in early for version in operands):
                    early |= dict.fromkeys(recipe.results)
                else:
                    own = [(*version[:2], WHOLE) for version in recipe.results]  # cut out of, or scaled from
                    needed |= dict.fromkeys([*operands, *own])
        return [version for version in early if version in needed]

    def computable_once(self, arguments: Collection[Version]) -> list[Version]:
        """Whole arrays made of whole `arguments` and read by what is made for every micro-batch.

        Only what is computed, like a weight's narrower copy: a view of an argument costs nothing where it is read. And
        nothing larger than the arguments that it is made of, for it is kept as long as the micro-batches run.
        """
        sources: dict[Version, int] = {}  # whole array → bytes of the arguments that it is made of
        seen_as: dict[Version, Version] = {}  # view → what it is a view of
        operands_of: dict[Version, list[Version]] = {}
        read: dict[Version, None] = {}
        for instruction in self.labels.computation.instructions:
            for recipe in self.recipes.get(instruction, ()):
                operands = list(self.operand_versions(recipe, instruction))
                if not recipe.results:
                    continue  # a barrier of nothing that is read
                version = recipe.results[0]
                if version in arguments and recipe.mode is EmitMode.GIVEN:
                    sources[version] = instruction.shape.leaves[version[1]].size_bytes
                elif _is_whole_array(instruction, recipe) and _are_known(operands, sources):
                    sources[version] = sum(sources[operand] for operand in dict.fromkeys(operands))
                    operands_of[version] = operands
                    if instruction.opcode in _VIEWS:
                        seen_as[version] = seen_as.get(operands[0], operands[0])
                else:
                    own = [(*result[:2], WHOLE) for result in recipe.results]  # cut out of, or scaled from
                    read |= dict.fromkeys(other for other in (*operands, *own) if other in sources)
        copies: dict[Version, None] = {}
        pending = list(read)
        while pending:
            version = pending.pop()
            version = seen_as.get(version, version)
            if version in copies or version not in operands_of:
                continue
            shape = version[0].shape.leaves[0]
            if prod(shape.dimensions) > MAX_REPEATED_ELEMENTS and shape.size_bytes <= sources[version]:
                copies[version] = None
            else:
                pending += operands_of[version]
        return [version for version in operands_of if version in copies]

    def only_sliced_leaves(self) -> dict[int, Along]:
        """Leaves of the only parameter that are cut along one dimension and otherwise handed on."""
        (parameter,) = self.labels.computation.parameters
        cuts: dict[int, set[Kind]] = {}
        for recipe in self.recipes.get(parameter, ()):
            if recipe.mode is EmitMode.CUT:
                for _, leaf, kind in recipe.results:
                    cuts.setdefault(leaf, set()).add(kind)
        for instruction, recipes in self.recipes.items():
            for recipe in recipes:
                for source, leaf, kind in self.operand_versions(recipe, instruction):
                    if source is parameter and kind == WHOLE:
                        cuts.pop(leaf, None)
        return {leaf: kind for leaf, (kind, *more) in cuts.items() if isinstance(kind, Along) and not more}

    # ---- wanting -----------------------------------------------------------------
    def _request(self, instruction: Instruction, leaf: int, kind: Kind) -> None:
        version = self.version(instruction, leaf, kind)
        self._wanted.setdefault(version[0], {})[version] = None

    def _recipes(self, instruction: Instruction, versions: dict[Version, None]) -> list[Recipe]:
        recipes: list[Recipe] = []
        done: set[Version] = set()
        pending = [*versions]
        while pending:
            version = pending.pop(0)
            if version in done:
                continue
            recipe, needs = self._recipe(version, versions, done)
            if needs is not None and needs not in done:
                pending = [needs, version, *pending]  # the whole value first
                continue
            recipes.append(recipe)
            done.update(recipe.results)
            self._want_operands(instruction, recipe)
        return recipes

    def _want_operands(self, instruction: Instruction, recipe: Recipe) -> None:
        for version in self.operand_versions(recipe, instruction):
            self._wanted.setdefault(version[0], {})[version] = None

    # ---- one version ---------------------------------------------------------------
    def _recipe(
        self, version: Version, versions: Collection[Version], available: Collection[Version]
    ) -> tuple[Recipe, Version | None]:
        """The recipe of a version, and the other version of the same value it needs first, or None."""
        instruction, leaf, kind = version
        natural = self.labels.kinds[instruction][leaf]
        whole = self.version(instruction, leaf, WHOLE)
        if version in self.ahead or (kind == DONE and natural != DONE):
            return Recipe(mode=EmitMode.GIVEN, results=(version,)), None
        if instruction.opcode == "parameter":
            if kind in (natural, WHOLE):
                return Recipe(mode=EmitMode.GIVEN, results=(version,)), None
        elif instruction.opcode in ("opt-barrier", "optimization-barrier"):
            return self._barrier(instruction, [other for other in versions if other not in available]), None
        elif kind == OWN and isinstance(natural, Term):
            return Recipe(mode=EmitMode.OWN, results=(version,)), (instruction, leaf, natural)
        elif kind in (WHOLE, DONE, OWN):
            return self._unsplit(instruction, kind), None
        elif kind == natural:
            return self._natural(instruction), None
        if isinstance(natural, Along) and instruction not in self.labels.cheap:
            raise InternalError(f"{instruction.name} is {natural} and needed as {kind}")
        if isinstance(kind, Term):
            return Recipe(mode=EmitMode.FIRST, results=(version,)), whole
        assert isinstance(kind, Along)
        recipe = None if whole in versions and instruction.operands else self._in_parts(instruction, leaf, kind)
        return (recipe, None) if recipe else (Recipe(mode=EmitMode.CUT, results=(version,)), whole)

    def _natural(self, instruction: Instruction) -> Recipe:
        """The recipe in a micro-batch."""
        kinds = self.labels.kinds[instruction]
        regions = self.labels.regions.get(instruction)
        if regions is not None:
            return self._in_tight_loop(instruction, self._control(instruction, kinds, regions))
        reading = self.labels.local_rules[instruction]
        results = _versions(instruction, kinds)
        return Recipe(mode=EmitMode.COPY, results=results, operands=reading.operands, divisor=reading.divisor)

    def _in_tight_loop(self, instruction: Instruction, recipe: Recipe) -> Recipe:
        """The loop with parts in place of whole values that its body only slices: a mask for the whole batch."""
        while instruction.opcode == "while":
            start = [kind for _, _, kind in recipe.results]
            wanted = self._wanted.get(instruction, {})
            for leaf, kind in recipe.regions[1].only_sliced_leaves().items():
                if (instruction, leaf, WHOLE) not in wanted:
                    start[leaf] = kind
            solution = self._relabel(instruction, start)
            if (
                solution is None
                or list(solution[0]) != start
                or solution[0] == tuple(kind for _, _, kind in recipe.results)
            ):
                break
            recipe = self._control(instruction, *solution)
        return recipe

    def _unsplit(self, instruction: Instruction, kind: Kind) -> Recipe:
        """The instruction unchanged, on operands of the same kind."""
        count = sum(len(operand.shape.leaves) for operand in instruction.operands)
        results = (kind,) * len(instruction.shape.leaves)
        if instruction.opcode not in ("while", "conditional"):
            return Recipe(mode=EmitMode.COPY, results=_versions(instruction, results), operands=(kind,) * count)
        solution = self._relabel(instruction, (WHOLE,) * count)
        if solution is None:
            raise InternalError(f"{instruction.opcode} {instruction.name} of whole values is not whole")
        return replace(
            self._control(instruction, *solution),
            results=_versions(instruction, results),
            operands=(kind,) * count,
        )

    def _control(self, instruction: Instruction, kinds: tuple[Kind, ...], regions: tuple[KindLabels, ...]) -> Recipe:
        if instruction.opcode == "while":
            operands = kinds
            roots: list[tuple[Kind, ...]] = [(WHOLE,), kinds]
        else:
            entered = [
                kind for region in regions for parameter in _parameters(region) for kind in region.kinds[parameter]
            ]
            operands = (WHOLE, *entered)
            roots = [kinds] * len(regions)
        demands = tuple(self._region(labels, root) for labels, root in zip(regions, roots, strict=True))
        return Recipe(mode=EmitMode.CONTROL, results=_versions(instruction, kinds), operands=operands, regions=demands)

    def _region(self, labels: KindLabels, root: tuple[Kind, ...]) -> Demand:
        return Demand(labels, self.labeller, _versions(labels.computation.root, root))

    def _barrier(self, instruction: Instruction, requests: Collection[Version]) -> Recipe:
        """One barrier for all needed leaves, except inputs."""
        count = len(instruction.shape.leaves)
        kinds: list[Kind | None] = [None] * count
        versions: list[Version] = []
        for version in requests:
            _, leaf, kind = version
            if kind == DONE and self.labels.kinds[instruction][leaf] != DONE:
                continue
            if kinds[leaf] is None:
                kinds[leaf] = kind
                versions.append(version)
        return Recipe(mode=EmitMode.BARRIER, results=tuple(versions), operands=tuple(kinds))

    def _in_parts(self, instruction: Instruction, leaf: int, kind: Along) -> Recipe | None:
        """A whole value computed in parts from parts of its operands; None: it must be cut out."""
        opcode = instruction.opcode
        if opcode == "iota":
            is_counted = instruction.get("iota_dimension") == kind.dim
            if is_counted and kind.outer > 1:
                return None
            how = EmitMode.COUNT if is_counted else EmitMode.COPY
            return Recipe(mode=how, results=((instruction, leaf, kind),))
        if opcode in ("parameter", "constant"):
            return None
        if opcode in ("while", "conditional"):
            return self._loop_in_parts(instruction, leaf, kind)
        reading = localize(instruction, leaf, kind, self.labeller.rules)
        if reading is None:
            return None
        results = _versions(instruction, reading.results)
        return Recipe(mode=EmitMode.COPY, results=results, operands=reading.operands, divisor=reading.divisor)

    def _loop_in_parts(self, instruction: Instruction, leaf: int, kind: Along) -> Recipe | None:
        """A loop of whole values that carries parts instead: rounds of a random number generator."""
        if instruction.opcode != "while" or set(self.labels.kinds[instruction]) != {WHOLE}:
            return None
        start: list[Kind] = [WHOLE] * len(instruction.shape.leaves)
        start[leaf] = kind
        solution = self._relabel(instruction, start)
        if solution is None or solution[0][leaf] != kind:
            return None
        return self._control(instruction, *solution)

    def _relabel(
        self, instruction: Instruction, kinds: Iterable[Kind]
    ) -> tuple[tuple[Kind, ...], tuple[KindLabels, ...]] | None:
        label = self.labeller.loop if instruction.opcode == "while" else self.labeller.choice
        return label(instruction, tuple(kinds))


#: Computed where they are read, for nothing or next to nothing.
_VIEWS = frozenset({"bitcast", "broadcast", "copy", "dynamic-slice", "reshape", "reverse", "slice", "transpose"})


def _is_whole_array(instruction: Instruction, recipe: Recipe) -> bool:
    """Whether a recipe computes an array that every micro-batch has alike."""
    is_array = isinstance(instruction.shape, ArrayShape) and instruction.opcode != "custom-call"
    return is_array and recipe.mode is EmitMode.COPY and recipe.results[0][2] == WHOLE


def _are_known(operands: Collection[Version], sources: Container[Version]) -> bool:
    return all(operand in sources for operand in operands)


def _versions(instruction: Instruction, kinds: Iterable[Kind]) -> tuple[Version, ...]:
    return tuple([(instruction, leaf, kind) for leaf, kind in enumerate(kinds)])


def _parameters(labels: KindLabels) -> tuple[Instruction, ...]:
    return labels.computation.parameters
