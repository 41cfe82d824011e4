"""Regions of reductions, scatters and sorts written as what they compute.

Frameworks add in a wider type (`bf16 → f32 → add → bf16`, which is how XLA adds bf16 anyway), convert to the type that
a value has already, or call the function that adds. A rule that looks for `a + b` sees it once those are gone:

- identities (`convert` to the same type, `copy`, `reshape`, …) are what they are made of;
- calls are written out in place;
- a number that is widened and narrowed again is that number;
- `narrow(wide(a) ∘ wide(b))` is `a ∘ b` where rounding twice gives what rounding once does: of sums and products with
  2 p + 2 significant bits for p (S. A. Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter 30, 1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.hlo import Computation, Instruction, Module
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.planner.rewrites import edit
from shardwright.planner.rules.linear import SIGNIFICANT_BITS
from shardwright.planner.rules.reduction import REDUCTIONS

#: Attributes that name regions of scalars.
_KEYS = ("to_apply", "scatter", "select")

#: What an instruction of one scalar is no other than.
_IDENTITIES = frozenset({"convert", "copy", "reshape", "bitcast", "bitcast-convert", "broadcast", "transpose"})

_PLAIN = frozenset({"metadata", "dimensions", "index"})

_MAX_INSTRUCTIONS = 1000


def simplify_regions(module: Module) -> Module:
    """`module` with its regions simplified; the same one where all are simple."""
    found = {
        computation
        for instruction in module.instructions()
        if instruction.opcode != "call"
        for key in _KEYS
        for computation in instruction.called.get(key, ())
    }
    names = edit.Names(module)
    simple = {region: made for region in found if (made := _simplify(region, names)) is not region}
    if not simple:
        return module
    return _replace_regions(module, simple)


def _replace_regions(module: Module, simple: dict[Computation, Computation]) -> Module:
    """`module` with other regions, without functions that only the regions called."""
    made: dict[Instruction, Instruction] = {}
    computations = dict(simple)
    called = {callee for region in simple.values() for callee in _callees(region)}
    for computation in module.computations:
        if computation in simple:
            continue
        for old in computation:
            callees = {name: tuple(computations.get(c, c) for c in group) for name, group in old.called.items()}
            made[old] = edit.copy_of(old, [made[operand] for operand in old.operands], called=callees)
        body = [made[old] for old in computation]
        computations[computation] = edit.computation_of(computation, body, made[computation.root])
        called.update(_callees(computations[computation]))
    kept = [computations[each] for each in module.computations]
    return edit.module_of(module, [each for each in kept if each.is_entry or each in called])


def _callees(computation: Computation) -> set[Computation]:
    return {callee for instruction in computation for group in instruction.called.values() for callee in group}


def _simplify(region: Computation, names: edit.Names) -> Computation:
    """A region that computes the same; the same one where nothing in it is more than it needs."""
    scalars = all(not leaf.rank for parameter in region.parameters for leaf in parameter.shape.leaves)
    if not scalars or len(region.instructions) > _MAX_INSTRUCTIONS:
        return region
    writer = _Writer(names)
    root = writer.write(region, None)
    if not writer.changed:
        return region
    read, kept = {root}, []
    for instruction in reversed(writer.written):
        if instruction in read or instruction.opcode == "parameter":
            read.update(instruction.operands)
            kept.append(instruction)
    return edit.computation_of(region, kept[::-1], root)


@dataclass(slots=True)
class _Writer:
    """Writes one region; `changed` says whether it is another one now."""

    names: edit.Names
    written: list[Instruction] = field(default_factory=list)
    changed: bool = False

    def write(self, source: Computation, arguments: Sequence[Instruction] | None) -> Instruction:
        """Write the instructions of a computation, its parameters being `arguments`; its root is returned."""
        made: dict[Instruction, Instruction] = {}
        for old in source:
            if arguments is not None and old.opcode == "parameter":
                made[old] = arguments[old.index]
                continue
            operands = [made[operand] for operand in old.operands]
            instead = self._replacement(old, operands)
            if instead is not None:
                self.changed = True
                made[old] = instead
                continue
            made[old] = edit.copy_of(old, operands, is_root=False)
            if arguments is not None:
                made[old].name = self.names.like(old.name, "inlined")
            self.written.append(made[old])
        return made[source.root]

    def _replacement(self, old: Instruction, operands: Sequence[Instruction]) -> Instruction | None:
        """What is read in place of an instruction; None where it stays."""
        if not old.attributes.keys() <= _PLAIN | {"to_apply"}:
            return None
        if old.opcode == "call" and len(self.written) < _MAX_INSTRUCTIONS:
            return self.write(old.called["to_apply"][0], operands)
        if old.opcode == "get-tuple-element" and operands[0].opcode == "tuple":
            return operands[0].operands[old.index]
        if len(operands) != 1 or old.opcode not in _IDENTITIES or len(old.shape.leaves) != 1:
            return None
        return self._fold_convert(old, operands[0])

    def _fold_convert(self, old: Instruction, source: Instruction) -> Instruction | None:
        """What an identity is, or one that narrows what was widened."""
        (have,), (want,) = source.shape.leaves, old.shape.leaves
        if have.rank or want.rank:
            return None
        narrow, wide = want.element_type, have.element_type
        if narrow == wide:
            return source
        if old.opcode != "convert" or not _holds(wide, narrow):
            return None
        if source.opcode == "convert" and source.operands[0].shape.leaves[0].element_type == narrow:
            return source.operands[0]
        widened = [each for each in source.operands if each.opcode == "convert"]
        inner = [each.operands[0] for each in widened]
        is_inner = len(inner) == 2 and all(each.shape.leaves[0].element_type == narrow for each in inner)
        if not is_inner or len(source.operands) != 2 or not _rounds_alike(source.opcode, wide, narrow):
            return None
        made = edit.copy_of(source, inner, name=self.names.like(source.name, narrow), shape=old.shape)
        self.written.append(made)
        return made


def _holds(wide: str, narrow: str) -> bool:
    """Whether each number of one type is one of the other."""
    if narrow == "pred":
        return True
    if narrow[0] in "su":
        return wide[0] == narrow[0] and ELEMENT_BITS[wide] >= ELEMENT_BITS[narrow]
    have, want = SIGNIFICANT_BITS.get(narrow), SIGNIFICANT_BITS.get(wide)
    return have is not None and want is not None and have[0] <= want[0] and have[1] <= want[1]


def _rounds_alike(opcode: str, wide: str, narrow: str) -> bool:
    """Whether `a ∘ b` in the narrower type is what the wider one gives, narrowed."""
    if opcode not in REDUCTIONS:
        return False
    if narrow == "pred":
        return opcode in ("and", "or") and wide[0] in "su"
    if narrow[0] in "su" or opcode in ("maximum", "minimum"):
        return True
    return SIGNIFICANT_BITS[wide][0] + 1 >= 2 * (SIGNIFICANT_BITS[narrow][0] + 1) + 2
