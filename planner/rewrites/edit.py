"""HLO editing: attributes from values, copies of instructions under new names, consistent headers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from shardwright.errors import InternalError
from shardwright.hlo import (
    ArrayShape,
    Attribute,
    BufferShape,
    Computation,
    Instruction,
    Module,
    Shape,
    TupleShape,
    Window,
    format_shape,
)
from shardwright.hlo.attributes import parse_value
from shardwright.hlo.checks import find_problem


def attribute(name: str, text: str) -> Attribute:
    """An attribute from its text, with the parsed value."""
    return Attribute(name, text, parse_value(name, text))


def int_list(name: str, values: Iterable[int]) -> Attribute:
    """`dimensions={0,2}` and the like."""
    return attribute(name, f"{{{','.join(map(str, values))}}}")


def slice_ranges(ranges: Iterable[tuple[int, int, int]]) -> Attribute:
    """`slice={[0:3], [1:4:2]}` of (start, limit, stride)."""
    texts = [f"[{start}:{limit}{f':{stride}' if stride != 1 else ''}]" for start, limit, stride in ranges]
    return attribute("slice", f"{{{', '.join(texts)}}}")


def padding(amounts: Iterable[tuple[int, int, int]]) -> Attribute:
    """`padding=0_0x1_2_1` of (low, high, interior)."""
    return attribute(
        "padding", "x".join(f"{low}_{high}{f'_{interior}' if interior else ''}" for low, high, interior in amounts)
    )


def window(value: Window) -> Attribute:
    """`window={size=1x2 stride=… pad=… …}`, every field written out."""

    def by_x(values: Iterable[int]) -> str:
        return "x".join(map(str, values))

    pads = "x".join(f"{low}_{high}" for low, high in zip(value.padding_low, value.padding_high, strict=True))
    text = (
        f"{{size={by_x(value.sizes)} stride={by_x(value.strides)} pad={pads} lhs_dilate={by_x(value.lhs_dilation)} "
        f"rhs_dilate={by_x(value.rhs_dilation)} rhs_reversal={by_x(map(int, value.reversal))}}}"
    )
    return attribute("window", text)


def callee_attributes(called: Mapping[str, Sequence[Computation]]) -> dict[str, Attribute]:
    """The attributes `body=%name` and similar, for one called computation each."""
    return {name: attribute(name, f"%{computation.name}") for name, (computation,) in called.items()}


def check_consistency(instruction: Instruction) -> Instruction:
    """The instruction itself. Raises InternalError for attributes that contradict its operands or shape."""
    problem = find_problem(instruction)
    if problem is not None:
        raise InternalError(f"a rewrite broke {instruction.name}: {problem}")
    return instruction


@contextmanager
def without_gc() -> Iterator[None]:
    """Pauses garbage collection: a growing module holds no garbage, and repeated walks take seconds."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Names:
    """Unused names for new instructions of a module."""

    def __init__(self, module: Module) -> None:
        self._used = {instruction.name for instruction in module.instructions()}

    def like(self, base: str, suffix: str) -> str:
        """`base.suffix`, with a number behind it for a used name."""
        name, number = f"{base}.{suffix}", 0
        while name in self._used:
            number += 1
            name = f"{base}.{suffix}{number}"
        self._used.add(name)
        return name


def copy_of(instruction: Instruction, operands: Sequence[Instruction], **changes: object) -> Instruction:
    """The instruction with other operands, and with the fields in `changes`."""
    copy = Instruction(  # by position, for a large program is copied more than once
        instruction.name,
        instruction.opcode,
        instruction.shape,
        tuple(operands),
        dict(instruction.attributes),
        instruction.called,
        instruction.payload,
        instruction.index,
        instruction.is_root,
        instruction.line,
    )
    for name, value in changes.items():
        setattr(copy, name, value)
    return copy


def insert_ahead_of(
    module: Module, targets: Collection[Instruction], write: Callable[[Instruction, Instruction], Iterable[Instruction]]
) -> Module:
    """A copy of `module` with new instructions ahead of each one in `targets`, in any computation.

    write: takes the instruction and its copy, changes the copy in place, and returns the copy's new inputs, in order.
    """
    copies: dict[Instruction, Instruction] = {}
    computations: dict[Computation, Computation] = {}
    for computation in module.computations:
        out: list[Instruction] = []
        for old in computation:
            called = {
                name: tuple(computations.get(callee, callee) for callee in callees)
                for name, callees in old.called.items()
            }
            copies[old] = copy_of(old, [copies[operand] for operand in old.operands], called=called)
            if old in targets:
                out += write(old, copies[old])
            out.append(copies[old])
        computations[computation] = computation_of(computation, out, copies[computation.root])
    return module_of(module, list(computations.values()))


def reshape_to(value: Instruction, dimensions: tuple[int, ...], name: str) -> Instruction:
    """A reshape of an array value, with its producer's metadata."""
    assert isinstance(value.shape, ArrayShape)
    reshape = Instruction(name, "reshape", ArrayShape(value.shape.element_type, dimensions), (value,), line=value.line)
    if "metadata" in value.attributes:
        reshape.attributes["metadata"] = value.attributes["metadata"]
    return reshape


def with_leaves(shape: Shape, leaves: Iterator[ArrayShape]) -> Shape:
    """The shape with its arrays replaced, depth first, by `leaves`."""
    if isinstance(shape, ArrayShape):
        return next(leaves)
    if isinstance(shape, BufferShape):
        return BufferShape(next(leaves))
    if isinstance(shape, TupleShape):
        return TupleShape(tuple(with_leaves(element, leaves) for element in shape.elements))
    return shape


def computation_of(source: Computation, instructions: list[Instruction], root: Instruction) -> Computation:
    """A computation in place of `source`, with other instructions."""
    for instruction in instructions:
        instruction.is_root = instruction is root
    parameters = sorted((i for i in instructions if i.opcode == "parameter"), key=lambda i: i.index)
    return Computation(source.name, instructions, root, tuple(parameters), source.is_entry, source.attributes)


def module_of(source: Module, computations: list[Computation]) -> Module:
    """A module in place of `source`; its header follows the entry's new shapes."""
    (entry,) = (computation for computation in computations if computation.is_entry)
    header = dict(source.header)
    if "entry_computation_layout" in header:
        parameters = ", ".join(format_shape(parameter.shape) for parameter in entry.parameters)
        header["entry_computation_layout"] = attribute(
            "entry_computation_layout", f"{{({parameters})->{format_shape(entry.root.shape)}}}"
        )
    return Module(source.name, header, computations, entry, source.tables)
