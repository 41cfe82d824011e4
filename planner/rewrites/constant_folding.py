"""Folds constants spelled in several instructions, and removes identities.

TensorFlow, PyTorch/XLA and hand-written builders write `reduce(x, convert(constant(0)))`, conversions to the same
type, copies, reshapes to the same shape, and scalars through tuples and loops. They hide values from rules: a zero
initial value, a producer's opcode. Folding preserves results to the bit:

1. Regions of reductions are simplified (`regions.py`).
2. An instruction with one known number becomes that constant, under its name; also behind a loop.
3. Consumers of an identity (`convert` to the same type, `copy`, `reshape`, …) and of an element of a tuple read its
   source.
4. Dead instructions are removed.

The program's outputs stay instructions of their own; so does an instruction with attributes beyond its metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from shardwright.hlo import ArrayShape, Computation, Instruction, Module
from shardwright.hlo.shapes import Shape, TupleShape
from shardwright.planner.graph.inlining import callees_first
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.literals import bitcast_literal, convert_literal, negate_literal
from shardwright.planner.rewrites.regions import simplify_regions

#: Knowledge of a value: the literal of all its elements; for a tuple, the knowledge of each element.
_KnownValue = str | tuple["_KnownValue | None", ...]

#: Instructions with elements of their one operand only.
_COPYING = frozenset({"copy", "reshape", "bitcast", "transpose", "broadcast", "slice", "reverse"})

#: Instructions that compute a literal of one.
_COMPUTING = frozenset({"convert", "bitcast-convert", "negate"})

#: Instructions without effects: dead without consumers.
_PURE = frozenset({"constant", "tuple", "get-tuple-element", *_COPYING, *_COMPUTING})

_PLAIN = frozenset({"metadata", "dimensions", "slice", "index"})


def fold_constants(module: Module) -> Module:
    """`module` with its constants and identities folded; `module` itself for nothing to fold."""
    if any("control-predecessors" in instruction.attributes for instruction in module.instructions()):
        return module  # an order between instructions also names dead ones
    module = simplify_regions(module)
    values = _values(module)
    literals = {i: value for i, value in values.items() if isinstance(value, str) and _is_rewritten(i)}
    returned = {module.entry.root, *module.entry.root.operands}
    passed = {
        instruction: source
        for instruction in module.instructions()
        if instruction not in literals and instruction not in returned and not instruction.is_root
        if (source := _source(instruction)) is not None
    }
    if not literals and not passed:
        return module
    return _Folder(module, literals, passed).write()


# ---- what is known -----------------------------------------------------------


def _values(module: Module) -> dict[Instruction, _KnownValue]:
    """Known values of all instructions reachable from the entry, callers before callees."""
    values: dict[Instruction, _KnownValue] = {}
    entering: dict[Instruction, _KnownValue | None] = {}
    for computation in reversed(callees_first(module.entry)):
        for instruction in computation:
            value = entering.get(instruction) if instruction.opcode == "parameter" else _value(instruction, values)
            if value is not None:
                values[instruction] = value
            for parameter, start in _parameter_values(instruction, values):
                before = entering.setdefault(parameter, start)
                entering[parameter] = start if before == start else None
    return values


def _value(instruction: Instruction, values: Mapping[Instruction, _KnownValue]) -> _KnownValue | None:
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "constant":
        return _literal(instruction)
    if opcode == "tuple":
        elements = tuple(values.get(operand) for operand in operands)
        return elements if any(element is not None for element in elements) else None
    source = values.get(operands[0]) if operands else None
    if source is None:
        return None
    if opcode == "while":
        return _invariant(instruction, source)
    if opcode == "opt-barrier" and len(operands) == 1:
        return source
    if isinstance(source, tuple):
        return source[instruction.index] if opcode == "get-tuple-element" else None
    return _fold_literal(instruction, source)


def _fold_literal(instruction: Instruction, literal: str) -> str | None:
    """The result literal of an instruction with one operand."""
    opcode, shapes = instruction.opcode, (instruction.operands[0].shape, instruction.shape)
    if len(instruction.operands) != 1 or not all(isinstance(shape, ArrayShape) for shape in shapes):
        return None
    source, target = (shape.leaves[0].element_type for shape in shapes)
    if opcode in _COPYING:
        return literal if source == target else None
    if opcode == "convert":
        return convert_literal(literal, source, target)
    if opcode == "bitcast-convert":
        return bitcast_literal(literal, source, target)
    return negate_literal(literal, target) if opcode == "negate" else None


def _literal(constant: Instruction) -> str | None:
    """The number of a constant of one element."""
    shape = constant.shape
    if constant.is_elided or not isinstance(shape, ArrayShape) or prod(shape.dimensions) != 1:
        return None
    return constant.payload.strip("{} \t\n")


def _invariant(loop: Instruction, start: _KnownValue) -> _KnownValue | None:
    """Known values of a loop's result: its invariant elements."""
    (body,) = loop.called["body"]
    if not isinstance(start, tuple) or body.root.opcode != "tuple":
        return None
    (parameter,) = body.parameters
    invariant = tuple(
        value if value is not None and _is_element(returned, parameter, index) else None
        for index, (value, returned) in enumerate(zip(start, body.root.operands, strict=True))
    )
    return invariant if any(element is not None for element in invariant) else None


def _is_element(value: Instruction, of: Instruction, index: int) -> bool:
    """Whether a value is this element of a tuple, up to identities."""
    while value.opcode != "get-tuple-element" and (source := _source(value)) is not None:
        value = source
    return value.opcode == "get-tuple-element" and value.operands[0] is of and value.index == index


def _parameter_values(
    instruction: Instruction, values: Mapping[Instruction, _KnownValue]
) -> Iterable[tuple[Instruction, _KnownValue | None]]:
    """Known values of parameters of an instruction's computations."""
    called = instruction.called
    if instruction.opcode == "while":
        for key in ("condition", "body"):
            (computation,) = called[key]
            yield computation.parameters[0], values.get(instruction)
    elif instruction.opcode == "conditional":
        branches = called.get("branch_computations") or (*called["true_computation"], *called["false_computation"])
        for branch, operand in zip(branches, instruction.operands[1:], strict=True):
            yield branch.parameters[0], values.get(operand)
    else:
        arguments = [values.get(operand) for operand in instruction.operands] if instruction.opcode == "call" else []
        for computation in (callee for group in called.values() for callee in group):
            for parameter in computation.parameters:
                yield parameter, arguments[parameter.index] if arguments else None


# ---- what is written ---------------------------------------------------------


def _is_rewritten(instruction: Instruction) -> bool:
    """Whether an instruction of a known number becomes a constant: scalars, and arrays computed from one."""
    shape, opcode = instruction.shape, instruction.opcode
    is_array = isinstance(shape, ArrayShape) and not any(shape.dynamic)
    if not is_array or instruction.is_root or not instruction.attributes.keys() <= _PLAIN:
        return False
    return opcode in _COMPUTING or (opcode in _PURE and opcode != "constant" and not shape.leaves[0].rank)


def _source(instruction: Instruction) -> Instruction | None:
    """The source of an identity; None for other instructions."""
    opcode, operands = instruction.opcode, instruction.operands
    if not instruction.attributes.keys() <= _PLAIN or not operands:
        return None
    if opcode == "get-tuple-element":
        return operands[0].operands[instruction.index] if operands[0].opcode == "tuple" else None
    if len(operands) != 1 or not _is_same(instruction.shape, operands[0].shape):
        return None
    if opcode == "transpose":  # broadcasts stay: emission matches their form of three instructions
        dims = instruction.get("dimensions", ())
        return operands[0] if list(dims) == list(range(len(dims))) else None
    return operands[0] if opcode in _IDENTITIES else None


#: What is an identity wherever it changes no shape.
_IDENTITIES = frozenset({"copy", "reshape", "bitcast", "slice", "convert", "bitcast-convert", "concatenate"})


def _is_same(shape: Shape, other: Shape) -> bool:
    """Whether two shapes are equal, with their layouts in case both have one."""
    if isinstance(shape, TupleShape) or isinstance(other, TupleShape):
        return False
    if isinstance(shape, ArrayShape) and isinstance(other, ArrayShape) and shape.rank <= 1:
        return (shape.element_type, shape.dimensions, shape.dynamic) == (
            other.element_type,
            other.dimensions,
            other.dynamic,
        )
    return shape == other


@dataclass(slots=True)
class _Folder:
    """Writes a module with `literals` as constants; consumers of `passed` read their sources."""

    module: Module
    literals: Mapping[Instruction, str]
    passed: Mapping[Instruction, Instruction]
    _made: dict[Instruction, Instruction] = field(default_factory=dict)
    _computations: dict[Computation, Computation] = field(default_factory=dict)

    def write(self) -> Module:
        names = edit.Names(self.module)
        for computation in self.module.computations:
            out: list[Instruction] = []
            for old in computation:
                if old in self.passed:
                    self._made[old] = self._made[self.passed[old]]
                else:
                    out += self._write_instruction(old, names)
                    self._made[old] = out[-1]
            root = self._made[computation.root]
            self._computations[computation] = edit.computation_of(
                computation, self._drop_dead(computation, out, root), root
            )
        return edit.module_of(self.module, list(self._computations.values()))

    def _write_instruction(self, old: Instruction, names: edit.Names) -> list[Instruction]:
        """A copy of an instruction, behind its broadcast number."""
        if old not in self.literals:
            called = {
                name: tuple(self._computations.get(callee, callee) for callee in callees)
                for name, callees in old.called.items()
            }
            return [edit.copy_of(old, [self._made[operand] for operand in old.operands], called=called)]
        (shape,) = old.shape.leaves
        metadata = {name: attribute for name, attribute in old.attributes.items() if name == "metadata"}
        fields = {"attributes": metadata, "payload": self.literals[old], "index": -1}
        if not shape.rank:
            return [edit.copy_of(old, (), opcode="constant", **fields)]
        scalar = ArrayShape(shape.element_type, ())
        number = edit.copy_of(old, (), opcode="constant", **fields, name=names.like(old.name, "number"), shape=scalar)
        spread = {"dimensions": edit.int_list("dimensions", ()), **metadata}
        return [number, edit.check_consistency(edit.copy_of(old, (number,), opcode="broadcast", attributes=spread))]

    def _drop_dead(self, computation: Computation, out: list[Instruction], root: Instruction) -> list[Instruction]:
        """The instructions without those whose last consumer is gone, and without their inputs."""
        read_before = {self._made[operand] for old in computation for operand in old.operands}
        live, instructions = {root}, []
        for instruction in reversed(out):
            if instruction in live or instruction.opcode not in _PURE or instruction not in read_before:
                live.update(instruction.operands)
                instructions.append(instruction)
        return instructions[::-1]
