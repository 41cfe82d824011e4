"""Simplifies regions of reductions, scatters and sorts to their plain functions.

Frameworks add in a wider type (`bf16 → f32 → add → bf16`, XLA's own way to add bf16), convert to the same type, or call
the function that adds. Rules that look for `a + b` see it after these simplifications:

- an identity (`convert` to the same type, `copy`, `reshape`, …) becomes its source;
- calls are inlined;
- a number widened and narrowed again becomes that number;
- `narrow(wide(a) ∘ wide(b))` becomes `a ∘ b` in cases of equal double and single rounding: sums and products with
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
from shardwright.planner.tuning import MAX_REGION_INSTRUCTIONS

#: Attributes that name regions of scalars.
_KEYS = ("to_apply", "scatter", "select")

#: What an instruction of one scalar is no other than.
_IDENTITIES = frozenset({"convert", "copy", "reshape", "bitcast", "bitcast-convert", "broadcast", "transpose"})

_PLAIN = frozenset({"metadata", "dimensions", "index"})


def simplify_regions(module: Module) -> Module:
    """`module` with its regions simplified; `module` itself for simple regions."""
    regions = {
        computation
        for instruction in module.instructions()
        if instruction.opcode != "call"
        for key in _KEYS
        for computation in instruction.called.get(key, ())
    }
    names = edit.Names(module)
    simple = {region: candidate for region in regions if (candidate := _simplify(region, names)) is not region}
    if not simple:
        return module
    return _replace_regions(module, simple)


def _replace_regions(module: Module, simple: dict[Computation, Computation]) -> Module:
    """`module` with other regions, without functions called only by the old ones."""
    copies: dict[Instruction, Instruction] = {}
    computations = dict(simple)
    called = {callee for region in simple.values() for callee in _callees(region)}
    for computation in module.computations:
        if computation in simple:
            continue
        for old in computation:
            callees = {name: tuple(computations.get(c, c) for c in group) for name, group in old.called.items()}
            copies[old] = edit.copy_of(old, [copies[operand] for operand in old.operands], called=callees)
        body = [copies[old] for old in computation]
        computations[computation] = edit.computation_of(computation, body, copies[computation.root])
        called.update(_callees(computations[computation]))
    remaining = [computations[other] for other in module.computations]
    return edit.module_of(module, [other for other in remaining if other.is_entry or other in called])


def _callees(computation: Computation) -> set[Computation]:
    return {callee for instruction in computation for group in instruction.called.values() for callee in group}


def _simplify(region: Computation, names: edit.Names) -> Computation:
    """An equal region without superfluous instructions; the region itself without any."""
    scalars = all(not leaf.rank for parameter in region.parameters for leaf in parameter.shape.leaves)
    if not scalars or len(region.instructions) > MAX_REGION_INSTRUCTIONS:
        return region
    writer = _Writer(names)
    root = writer.write(region, None)
    if not writer.changed:
        return region
    live, instructions = {root}, []
    for instruction in reversed(writer.written):
        if instruction in live or instruction.opcode == "parameter":
            live.update(instruction.operands)
            instructions.append(instruction)
    return edit.computation_of(region, instructions[::-1], root)


@dataclass(slots=True)
class _Writer:
    """Writes one region; `changed`: it differs from the source."""

    names: edit.Names
    written: list[Instruction] = field(default_factory=list)
    changed: bool = False

    def write(self, source: Computation, arguments: Sequence[Instruction] | None) -> Instruction:
        """Write a computation's instructions, with `arguments` in place of its parameters; returns its root."""
        substitutes: dict[Instruction, Instruction] = {}
        for old in source:
            if arguments is not None and old.opcode == "parameter":
                substitutes[old] = arguments[old.index]
                continue
            operands = [substitutes[operand] for operand in old.operands]
            instead = self._replacement(old, operands)
            if instead is not None:
                self.changed = True
                substitutes[old] = instead
                continue
            substitutes[old] = edit.copy_of(old, operands, is_root=False)
            if arguments is not None:
                substitutes[old].name = self.names.like(old.name, "inlined")
            self.written.append(substitutes[old])
        return substitutes[source.root]

    def _replacement(self, old: Instruction, operands: Sequence[Instruction]) -> Instruction | None:
        """The substitute for an instruction; None: it stays."""
        if not old.attributes.keys() <= _PLAIN | {"to_apply"}:
            return None
        if old.opcode == "call" and len(self.written) < MAX_REGION_INSTRUCTIONS:
            return self.write(old.called["to_apply"][0], operands)
        if old.opcode == "get-tuple-element" and operands[0].opcode == "tuple":
            return operands[0].operands[old.index]
        if len(operands) != 1 or old.opcode not in _IDENTITIES or len(old.shape.leaves) != 1:
            return None
        return self._fold_convert(old, operands[0])

    def _fold_convert(self, old: Instruction, source: Instruction) -> Instruction | None:
        """The source of an identity, or of a narrowed wide value."""
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
        widened = [operand for operand in source.operands if operand.opcode == "convert"]
        inner = [operand.operands[0] for operand in widened]
        is_inner = len(inner) == 2 and all(operand.shape.leaves[0].element_type == narrow for operand in inner)
        if not is_inner or len(source.operands) != 2 or not _rounds_alike(source.opcode, wide, narrow):
            return None
        narrowed = edit.copy_of(source, inner, name=self.names.like(source.name, narrow), shape=old.shape)
        self.written.append(narrowed)
        return narrowed


def _holds(wide: str, narrow: str) -> bool:
    """Whether one type represents every number of the other."""
    if narrow == "pred":
        return True
    if narrow[0] in "su":
        return wide[0] == narrow[0] and ELEMENT_BITS[wide] >= ELEMENT_BITS[narrow]
    have, want = SIGNIFICANT_BITS.get(narrow), SIGNIFICANT_BITS.get(wide)
    return have is not None and want is not None and have[0] <= want[0] and have[1] <= want[1]


def _rounds_alike(opcode: str, wide: str, narrow: str) -> bool:
    """Whether `a ∘ b` in the narrower type equals the narrowed result of the wider one."""
    if opcode not in REDUCTIONS:
        return False
    if narrow == "pred":
        return opcode in ("and", "or") and wide[0] in "su"
    if narrow[0] in "su" or opcode in ("maximum", "minimum"):
        return True
    return SIGNIFICANT_BITS[wide][0] + 1 >= 2 * (SIGNIFICANT_BITS[narrow][0] + 1) + 2
