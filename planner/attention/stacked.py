"""Attention whose probabilities one loop stacks for another: the backward loop computes them again.

Without `jax.checkpoint`, `lax.scan` stores what the backward pass reads of a layer's attention, arrays of rows x keys
among it. Computed again from the operands of the scores, which are stacked as well, an attention stands whole in the
body of the backward loop, and can be replaced. Its forward call there then gives way to the output and the statistics
of the forward loop's, stacked instead of the probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise

from shardwright.attention import read_call
from shardwright.hlo import Computation, Instruction, Module
from shardwright.planner.attention.elementwise import ELEMENTWISE
from shardwright.planner.attention.flow import Flow, text_of
from shardwright.planner.attention.rebuild import Rewritten, rebuild
from shardwright.planner.attention.write import reshaped
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.instruction_writer import InstructionWriter
from shardwright.planner.rewrites.loop_bodies import is_carried
from shardwright.planner.rewrites.remat_loops import LoopPair, loop_pairs, rematerialize_loops, stack_rows

#: What brings the same elements into another form.
_VIEWS = frozenset({"reshape", "transpose", "broadcast", "convert", "copy", "slice", "bitcast"})

#: What hands values on between two products.
_INNER = ELEMENTWISE | _VIEWS | {"reduce"}

#: Finds the products that scores may be, of a computation.
FindProducts = Callable[[Computation], Sequence[Instruction]]


def compute_again(module: Module, find_products: FindProducts, apart: Collection[str]) -> Rewritten | None:
    """`module` without stacks of what is computed from scores, copies of products in backward loops by products in
    forward loops; None where there are none.

    apart: names of products in forward loops that stay as they are.
    """
    names: set[str] = set()
    products: set[str] = set()
    for pair in loop_pairs(module):
        for product in find_products(pair.body):
            recomputed = _recomputed(pair, product) if product.name not in apart else set()
            if recomputed:
                names |= recomputed
                products.add(product.name)
    if not products:
        return None
    rewritten, twins = rematerialize_loops(module, names)
    return Rewritten(module=rewritten, origins={new: old for new, old in twins.items() if old in products})


def _recomputed(pair: LoopPair, product: Instruction) -> set[str]:
    """Names of values from operands of a product to what is stacked of its scores; empty without stacks."""
    from_scores = _computed_from(product, pair.body)
    rows = {row.value for row in pair.saved}
    stacked = rows & from_scores
    recomputed: set[str] = set()
    pending = list(stacked)
    while pending:
        value = pending.pop()
        if value.name in recomputed:
            continue
        if value in from_scores or (value not in rows and _is_cheap(value, pair)):
            recomputed.add(value.name)
            pending += value.operands
    return recomputed


def _computed_from(product: Instruction, body: Computation) -> Set[Instruction]:
    """Values computed from a product without another product between."""
    values = {product}
    for instruction in body:
        if instruction.opcode in _INNER and not values.isdisjoint(instruction.operands):
            values.add(instruction)
    return values


def _is_cheap(value: Instruction, pair: LoopPair) -> bool:
    """Whether a value is a view of another, or computed of constants and of what every trip has."""
    return value.opcode in _VIEWS or (value.opcode in _INNER and _is_at_hand(value.operands, pair))


def _is_at_hand(values: Iterable[Instruction], pair: LoopPair) -> bool:
    pending, visited = list(values), set[Instruction]()
    while pending:
        value = pending.pop()
        if value in visited or pair.is_at_hand(value):
            continue
        visited.add(value)
        if value.opcode not in _INNER or pair.element(value) is not None:
            return False
        pending += value.operands
    return True


# ---- results of the forward loop ---------------------------------------------------


def keep_results(module: Module, calls: Mapping[str, str]) -> tuple[Module, set[str]]:
    """`module`, whose instructions are its own and are changed, and names of the calls that are gone.

    calls: names of forward calls in backward loops, and those in forward loops that they repeat.
    """
    outputs: dict[Instruction, Instruction] = {}
    written: dict[Computation, list[tuple[Instruction, list[Instruction]]]] = {}
    repeated: dict[str, str] = {}
    names, flow = edit.Names(module), Flow(module)
    for pair in loop_pairs(module):
        rows = _Rows(pair, flow, names)
        for again in list(pair.backward_body):
            first = next((each for each in pair.body if each.name == calls.get(again.name)), None)
            news = rows.take_over(first, again) if first is not None else None
            if first is None or news is None:
                continue
            repeated[again.name] = first.name
            written.setdefault(pair.body, []).append((first, news))
            output, views = _element(pair.backward_body, again, 0), rows.view_of_output(first)
            if output is not None and views:
                outputs[output] = views[-1]
                written.setdefault(pair.backward_body, []).append((views[0].operands[0], views))
    module = rebuild(module, outputs, written)
    return stack_rows(module, _list_elements(module, repeated)), set(repeated)


def _list_elements(module: Module, repeated: Mapping[str, str]) -> dict[str, str]:
    """Names of what is read of the calls of backward loops, and of the same elements of forward loops' calls."""
    names = edit.Names(module)
    elements: dict[str, str] = {}
    for pair in loop_pairs(module):
        for again in pair.backward_body:
            first = next((each for each in pair.body if each.name == repeated.get(again.name)), None)
            for place in (0, 1) if first is not None else ():
                element = _element(pair.backward_body, again, place)
                if element is not None and first is not None:
                    elements[element.name] = _require_element(pair.body, first, place, names).name
    return elements


def _element(body: Computation, call: Instruction, place: int) -> Instruction | None:
    return next((each for each in body if call in each.operands and each.index == place), None)


def _require_element(body: Computation, call: Instruction, place: int, names: edit.Names) -> Instruction:
    element = _element(body, call, place)
    if element is None:
        element = InstructionWriter(call, names).element(call, place)
        body.instructions.insert(body.instructions.index(call) + 1, element)
    return element


class _Rows:
    """What two loops have of each other's values."""

    def __init__(self, pair: LoopPair, flow: Flow, names: edit.Names) -> None:
        self._pair, self._flow, self._names = pair, flow, names
        self._values = {
            taker: row.value for row in pair.saved for taker in pair.backward.indices[row.read]
        }  # of the forward body, by what reads their stacks
        self._elements = {flow.origin(each): each for each in pair.body if is_carried(each, pair.body)}

    def take_over(self, first: Instruction, again: Instruction) -> list[Instruction] | None:
        """Have a forward loop's call compute what the backward loop's does, which is then the same.

        Gives new instructions of the forward body; None where the calls compute something else.
        """
        call, before = read_call(again), read_call(first)
        if call is None or before is None or replace(call, statistics=False, scale=before.scale) != before:
            return None
        if not self._is_same(first.operands[2], again.operands[2]):
            return None
        writer = InstructionWriter(first, self._names)
        operands = [self._forward(each, writer) for each in again.operands]
        present = tuple(each for each in operands if each is not None)
        if len(present) < len(operands):
            return None
        first.operands = present
        first.shape = call.result_shape
        first.attributes |= {name: edit.attribute(name, text) for name, text in call.attribute_texts().items()}
        return writer.written

    def _forward(self, value: Instruction, writer: InstructionWriter) -> Instruction | None:
        """A value of the backward body in the forward body; None where that does not have it."""
        if value in self._values:
            leaf = value.shape.leaves[0]
            return reshaped(writer, self._values[value], leaf.dimensions)
        element = self._elements.get(self._flow.origin(value))
        if element is not None or value.opcode not in _INNER | {"constant", "iota"}:
            return element
        operands = [self._forward(operand, writer) for operand in value.operands]
        present = [each for each in operands if each is not None]
        if len(present) < len(operands):
            return None
        copy = edit.copy_of(value, present, name=self._names.like(value.name, "forward"))
        writer.written.append(copy)
        return copy

    def _is_same(self, first: Instruction, second: Instruction) -> bool:
        """Whether two values of the forward and the backward body have the same elements."""
        pending = [(first, second)]
        while pending:
            first, second = (_without_reshapes(value) for value in pending.pop())
            if self._values.get(second) is first or self._flow.origin(first) is self._flow.origin(second):
                continue
            operands = list(zip(first.operands, second.operands, strict=False))
            if first.opcode not in _INNER or text_of(first) != text_of(second) or not operands:
                return False
            if any(one.shape.leaves[0].dimensions != other.shape.leaves[0].dimensions for one, other in operands):
                return False
            pending += operands
        return True

    def view_of_output(self, first: Instruction) -> list[Instruction]:
        """Instructions of the backward body that bring a row that is stacked already, a view of a call's output, into
        the output's form; empty without such a row."""
        for taker, row in self._values.items():
            views: list[Instruction] = []
            value = row
            while value.opcode in ("transpose", "reshape"):
                views.append(value)
                value = value.operands[0]
            if value.opcode == "get-tuple-element" and value.operands[0] is first:
                return _undo([*views, value], taker, self._names)
        return []


def _without_reshapes(value: Instruction) -> Instruction:
    while value.opcode in ("reshape", "bitcast"):
        value = value.operands[0]
    return value


def _undo(views: Sequence[Instruction], row: Instruction, names: edit.Names) -> list[Instruction]:
    """From a row of the first of `views`, the last, which the others are views of."""
    writer = InstructionWriter(row, names)
    value = reshaped(writer, row, views[0].shape.leaves[0].dimensions)
    for view, source in pairwise(views):
        leaf = source.shape.leaves[0]
        if view.opcode == "reshape":
            value = reshaped(writer, value, leaf.dimensions)
        else:
            order = view.get("dimensions")
            back = ",".join(str(order.index(dim)) for dim in range(len(order)))
            value = writer.array("transpose", leaf.element_type, leaf.dimensions, value, dimensions=f"{{{back}}}")
    return writer.written
