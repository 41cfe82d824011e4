"""Rewrites sharding attributes of ordinary instructions to `Sharding` calls.

Any instruction of a module may carry its result's sharding: `dot(a, b), sharding={devices=[2,1]0,1}`, or Shardy's
`frontend_attributes={xla.sdy.sharding=…}`; TensorFlow, PyTorch/XLA and dumped modules do. JAX's
`with_sharding_constraint` instead leaves a call that forwards its operand and carries the sharding. Both mean the same,
and the call survives every rewrite. All consumers of an annotated value therefore read a call with its sharding: inside
loops, branches and called functions too, per array of a tuple.

A call on a scalar says nothing and is taken out: JAX's Explicit mode puts one on each counter and bound of a loop,
where trip counts and rewrites of loops do not look for it.

The shardings of the program's parameters, its root and JAX's output marks (`out_shardings`) describe the storage of
variables. They are read from the original program (`annotations.VariableShardings`), then removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardwright.hlo import ArrayShape, Attribute, Computation, Instruction, Module, Shape, TupleShape
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.graph.imported_shardings import (
    SHARDING_ATTRIBUTES,
    SHARDY,
    ShardingAttributes,
    frontend_attributes,
    read_sharding_attributes,
)
from shardwright.planner.rewrites.dim_classes import reachable_computations
from shardwright.planner.rewrites.edit import Names, attribute, computation_of, copy_of
from shardwright.reserved_names import IDENTITY_TARGETS

#: JAX's custom call that carries the sharding of a value.
_CALL_TARGET = "Sharding"

#: … and the one of an output.
_OUTPUT_TARGET = "xla.sdy.FuncResultSharding"


#: Number of an output, and the instruction and array leaf with its sharding.
ShardingSource = tuple[int, Instruction, int]


def find_output_shardings(root: Instruction) -> Iterator[ShardingSource]:
    """The source of each output's sharding: JAX's mark, else the root itself."""
    for leaf, maker in enumerate(_makers(root)):
        if maker is not None and _is_output_mark(maker):
            yield leaf, maker, 0
        elif root.opcode != "parameter" and root.get("custom_call_target") not in IDENTITY_TARGETS:
            yield leaf, root, leaf


def _makers(value: Instruction) -> Iterator[Instruction | None]:
    """Per array leaf: the single-array instruction producing it, through tuples and their elements; None without
    one."""
    if value.opcode == "tuple":
        for operand in value.operands:
            yield from _makers(operand)
    elif value.opcode == "get-tuple-element" and value.operands[0].opcode == "tuple":
        yield from _makers(value.operands[0].operands[value.index])
    else:
        leaves = len(value.shape.leaves)
        yield from (value,) if leaves == 1 else (None,) * leaves


def _is_output_mark(instruction: Instruction) -> bool:
    return bool(instruction.get("custom_call_target") == _OUTPUT_TARGET)


def insert_sharding_calls(module: Module, outputs: Iterable[ShardingSource]) -> Module:
    """`module` with its instructions' shardings in calls; `module` itself without any.

    outputs: its `find_output_shardings`.
    """
    planned = reachable_computations(module)
    marks = {maker for _, maker, _ in outputs if _is_output_mark(maker)}
    written = (instruction for computation in planned for instruction in computation)
    if not marks and not any(_is_marked(instruction) or _is_on_scalar(instruction) for instruction in written):
        return module
    with gc_paused():
        return _Writer(module, set(planned), marks).run()


def _is_marked(instruction: Instruction) -> bool:
    """Whether an instruction carries shardings to be rewritten."""
    if SHARDING_ATTRIBUTES.isdisjoint(instruction.attributes) or not any(_shardings_of_leaves(instruction)):
        return False
    return instruction.get("custom_call_target") not in IDENTITY_TARGETS


def _is_on_scalar(instruction: Instruction) -> bool:
    """Whether an instruction is a `Sharding` call on a scalar."""
    if instruction.get("custom_call_target") != _CALL_TARGET:
        return False
    return isinstance(instruction.shape, ArrayShape) and not instruction.shape.rank


def _shardings_of_leaves(instruction: Instruction) -> list[ShardingAttributes | None]:
    """An instruction's sharding per leaf of its result, arrays and others in XLA's count; None without one.

    A replicated scalar counts like one without.
    """
    leaves = list(_leaves(instruction.shape))
    shardings = [read_sharding_attributes(instruction, number) for number in range(len(leaves))]
    return [
        None if carried is None or (carried.is_trivial_for_scalars and not _rank(leaf)) else carried
        for carried, leaf in zip(shardings, leaves, strict=True)
    ]


def _leaves(shape: Shape) -> Iterator[Shape]:
    if isinstance(shape, TupleShape):
        for element in shape.elements:
            yield from _leaves(element)
    else:
        yield shape


def _rank(shape: Shape) -> int:
    return shape.rank if isinstance(shape, ArrayShape) else 0


class _Writer:
    """Rewrites every planned computation; `_made` maps old values to their replacements."""

    def __init__(self, module: Module, planned: set[Computation], marks: set[Instruction]) -> None:
        self._module = module
        self._planned = planned
        self._marks = marks  # of outputs
        self._ends = {*module.entry.parameters, module.entry.root}
        self._names = Names(module)
        self._made: dict[Instruction, Instruction] = {}
        self._elements: dict[Instruction, list[Instruction]] = {}  # of tuples with calls among them
        self._whole: dict[Instruction, Instruction] = {}  # such tuples, reassembled
        self._says: dict[Instruction, ShardingAttributes | None] = {}  # of calls: values with that sharding
        self._computations: dict[Computation, Computation] = {}
        self._loops: dict[
            Instruction, list[ShardingAttributes | None]
        ] = {}  # of the results of a loop's body, by its root
        self._out: list[Instruction] = []
        self._added: set[Instruction] = set()  # instructions dropped unless they are read

    def run(self) -> Module:
        module = self._module
        for computation in self._planned:
            for loop in computation:
                if loop.opcode == "while" and _is_marked(loop):
                    self._loops[loop.called["body"][0].root] = _shardings_of_leaves(loop)
        out = [self._computation(source) if source in self._planned else source for source in module.computations]
        (entry,) = (computation for computation in out if computation.is_entry)
        return Module(module.name, module.header, out, entry, module.tables)

    def _computation(self, source: Computation) -> Computation:
        self._out = []
        for instruction in source:
            self._made[instruction] = self._instruction(instruction)
        root = self._as_whole(self._made[source.root])
        out = self._computations[source] = computation_of(source, _without_unread(self._out, root, self._added), root)
        return out

    def _instruction(self, old: Instruction) -> Instruction:
        """The replacement of `old`."""
        shardings: Sequence[ShardingAttributes | None] = ()
        if old not in self._ends:
            shardings = _shardings_of_leaves(old) if _is_marked(old) else self._loops.get(old, ())
        operands = [self._made[operand] for operand in old.operands]
        if old in self._marks or _is_on_scalar(old):
            return operands[0]
        if old.opcode == "get-tuple-element" and operands[0] in self._elements:
            value = self._elements[operands[0]][old.index]
        else:
            value = self._copy(old, operands)
        if old.get("custom_call_target") in IDENTITY_TARGETS:
            self._says[value] = read_sharding_attributes(old, 0)
        return self._with_calls(value, iter(shardings)) if any(shardings) else value

    def _copy(self, old: Instruction, operands: Sequence[Instruction]) -> Instruction:
        called = {
            name: tuple(self._computations.get(callee, callee) for callee in callees)
            for name, callees in old.called.items()
        }
        copy = copy_of(old, [self._as_whole(operand) for operand in operands], called=called)
        if _is_marked(old):
            copy.attributes = _without_shardings(copy.attributes)
        self._out.append(copy)
        return copy

    def _with_calls(self, value: Instruction, shardings: Iterator[ShardingAttributes | None]) -> Instruction:
        """`value`, each of its arrays behind a call with its sharding."""
        if not isinstance(value.shape, TupleShape):
            carried = next(shardings)
            return value if carried is None else self._call(value, carried)
        if value in self._elements:
            parts = self._elements[value]
        elif value.opcode == "tuple":
            parts = list(value.operands)
            self._added.add(value)
        else:
            parts = [self._element(value, number) for number in range(len(value.shape.elements))]
        self._elements[value] = [self._with_calls(part, shardings) for part in parts]
        self._whole.pop(value, None)
        return value

    def _element(self, value: Instruction, number: int) -> Instruction:
        assert isinstance(value.shape, TupleShape)
        name = self._names.like(value.name, "element")
        element = Instruction(name, "get-tuple-element", value.shape.elements[number], (value,), index=number)
        element.attributes["index"] = attribute("index", str(number))
        return self._add(element, value)

    def _call(self, value: Instruction, carried: ShardingAttributes) -> Instruction:
        if not isinstance(value.shape, ArrayShape) or self._says.get(value) == carried:
            return value
        call = Instruction(self._names.like(value.name, "sharding"), "custom-call", value.shape, (value,))
        call.attributes["custom_call_target"] = attribute("custom_call_target", f'"{_CALL_TARGET}"')
        call.attributes.update(carried.attributes)
        self._says[call] = carried
        return self._add(call, value)

    def _as_whole(self, value: Instruction) -> Instruction:
        """A tuple with calls among its elements, reassembled; any other value itself."""
        if value not in self._elements:
            return value
        if value not in self._whole:
            elements = [self._as_whole(element) for element in self._elements[value]]
            whole = Instruction(self._names.like(value.name, "whole"), "tuple", value.shape, tuple(elements))
            self._whole[value] = self._add(whole, value)
        return self._whole[value]

    def _add(self, instruction: Instruction, source: Instruction) -> Instruction:
        """Append an instruction serving `source`."""
        if "metadata" in source.attributes:
            instruction.attributes["metadata"] = source.attributes["metadata"]
        instruction.line = source.line
        self._added.add(instruction)
        self._out.append(instruction)
        return instruction


def _without_shardings(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    others_kept = {name: attr for name, attr in attributes.items() if name not in SHARDING_ATTRIBUTES}
    others = attributes["frontend_attributes"].value if "frontend_attributes" in attributes else {}
    others = {key: text for key, text in others.items() if key != SHARDY}
    return {**others_kept, "frontend_attributes": frontend_attributes(others)} if others else others_kept


def _without_unread(
    instructions: Sequence[Instruction], root: Instruction, added: set[Instruction]
) -> list[Instruction]:
    """The instructions without unused ones among `added`."""
    used, remaining = {root}, list[Instruction]()
    for instruction in reversed(instructions):
        if instruction in used or instruction not in added:
            used.update(instruction.operands)
            remaining.append(instruction)
    return remaining[::-1]
