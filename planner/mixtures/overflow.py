"""Counts the pairs that were over the bound: of each mixture once, through the loops that it is in.

A loop that has mixtures carries their count, as one more element behind its own. What a backward pass computes again
sends the same pairs again: mixtures of equal keys count once, and of those in loops the ones with gradients of matrices
do not where there are others of their size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.hlo import ArrayShape, Computation, Instruction, Module, TupleShape
from shardwright.planner.attention.flow import Flow
from shardwright.planner.mixtures.block_writer import BlockWriter
from shardwright.planner.mixtures.orders import RowOrders
from shardwright.planner.mixtures.recognise import Mixture, find_mixtures, is_weights
from shardwright.reserved_names import ROWS_OVER

_COUNT = ArrayShape("s32", ())


def is_question(instruction: Instruction) -> bool:
    """Whether an instruction asks for the count."""
    return instruction.opcode == "custom-call" and instruction.get("custom_call_target") == ROWS_OVER


class Overflow:
    """What is counted of a module, and the loops that carry a count."""

    def __init__(self, module: Module, flow: Flow) -> None:
        self._flow = flow
        self._is_asked = any(is_question(each) for each in module.entry)
        loops = [each for each in module.instructions() if each.opcode == "while"]
        self._bodies = {body for loop in loops for body in loop.called["body"]}
        self._forward_in_loops = {
            _size(mixture)
            for body in self._bodies
            for mixture in (find_mixtures(body, flow, RowOrders(body, flow)) if self._is_asked else ())
            if not _has_gradients(mixture)
        }
        self._carrying: set[Computation] = set()  # new bodies and conditions

    def select(self, computation: Computation, mixtures: Iterable[Mixture]) -> list[Mixture]:
        """The mixtures of a computation that count."""
        if not self._is_asked:
            return []
        counted: dict[int, Mixture] = {}
        for mixture in mixtures:
            is_again = computation in self._bodies and _has_gradients(mixture) and _size(mixture) in (
                self._forward_in_loops
            )  # fmt: skip
            if not is_again:
                counted.setdefault(self._flow.number(mixture.order_keys), mixture)
        return list(counted.values())

    def is_body(self, computation: Computation) -> bool:
        return computation in self._bodies

    def is_carrying(self, loop: Instruction) -> bool:
        """Whether a loop, of new computations, carries a count."""
        return loop.opcode == "while" and loop.called["body"][0] in self._carrying

    def carry(self, writer: BlockWriter, parameter: Instruction, root: Instruction, count: Instruction) -> Instruction:
        """A body's new root, with the count of its turns behind its own elements."""
        _widen(parameter)
        place = len(_elements(root))
        total = writer.elementwise("add", writer.element(parameter, place), count)
        return _whole(writer, [*_unpacked(writer, root), total])

    def note_body(self, body: Computation) -> None:
        """Have loops of this new body carry its count."""
        self._carrying.add(body)

    def write_loop(self, writer: BlockWriter, loop: Instruction) -> tuple[Instruction, Instruction]:
        """A carrying loop's own elements, and its count. loop: a copy, of new computations; it is not written yet."""
        (condition,) = loop.called["condition"]
        if condition not in self._carrying:
            _widen(condition.parameters[0])
            self._carrying.add(condition)
        count = len(_elements(loop))
        loop.operands = (_whole(writer, [*_unpacked(writer, loop.operands[0]), writer.constant("s32", 0)]),)
        loop.shape = loop.operands[0].shape
        writer.written.append(loop)
        elements = [writer.element(loop, place) for place in range(count + 1)]
        return _whole(writer, elements[:-1]), elements[-1]


def sum_counts(writer: BlockWriter, counts: Sequence[Instruction]) -> Instruction | None:
    """The sum of scalars; None without any."""
    total: Instruction | None = None
    for count in counts:
        total = count if total is None else writer.elementwise("add", total, count)
    return total


def _elements(value: Instruction) -> tuple[object, ...]:
    assert isinstance(value.shape, TupleShape)
    return value.shape.elements


def _widen(parameter: Instruction) -> None:
    assert isinstance(parameter.shape, TupleShape)
    parameter.shape = TupleShape((*parameter.shape.elements, _COUNT))


def _unpacked(writer: BlockWriter, value: Instruction) -> list[Instruction]:
    if value.opcode == "tuple":
        return list(value.operands)
    return [writer.element(value, place) for place in range(len(_elements(value)))]


def _whole(writer: BlockWriter, elements: Sequence[Instruction]) -> Instruction:
    return writer.instruction("tuple", TupleShape(tuple(each.shape for each in elements)), *elements)


def _size(mixture: Mixture) -> tuple[int, int]:
    return mixture.rows, mixture.groups


def _has_gradients(mixture: Mixture) -> bool:
    return any(is_weights(product) for product in mixture.products)
