"""What a part of a program reads: values traced back through tuples, calls, loops and branches.

A value is traced leaf by leaf: of a loop that carries parameters and optimizer state in one tuple, the loss needs the
parameters alone. Calls are followed in their context, so that a function called from two places mixes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwright.hlo import Computation, Instruction, Module, TupleShape
from shardwright.reserved_names import IDENTITY_TARGETS

#: Instructions that compute what other computations say, from their operands.
_CALLS = frozenset({"call", "fusion", "while", "conditional"})

#: Instructions that hand on a table as it is, or in another form of the same elements.
_VIEWS = frozenset({"get-tuple-element", "tuple", "parameter", "optimization-barrier", "copy", "bitcast", "convert"})


@dataclass(frozen=True, slots=True)
class _Value:
    """A leaf of an instruction's result, in the context of the calls around it; leaf: None of arrays and of all."""

    instruction: Instruction
    leaf: int | None = None
    context: tuple[tuple[Instruction, Computation], ...] = ()


class Reads:
    """All that some outputs of a module depend on.

    outputs: numbers of elements of the root's tuple; 0 of a root that is an array.
    """

    def __init__(self, module: Module, outputs: Iterable[int]) -> None:
        root = module.entry.root
        is_tuple = isinstance(root.shape, TupleShape)
        self._readers: defaultdict[_Value, list[tuple[_Value, int]]] = defaultdict(list)
        self._seen: set[_Value] = set()
        self._follow([_Value(root, number if is_tuple else None) for number in outputs])

    def has(self, parameter: Instruction, leaf: int | None) -> bool:
        """Whether a parameter of the entry computation is read."""
        return _Value(parameter, leaf) in self._seen

    def is_looked_up(self, parameter: Instruction, leaf: int | None, fed: frozenset[Instruction]) -> bool:
        """Whether nothing but gathers reads a parameter, at positions that depend on those in `fed`."""
        todo, seen, lookups = [_Value(parameter, leaf)], set[_Value](), 0
        while todo:
            value = todo.pop()
            for reader, position in self._readers[value]:
                if reader in seen:
                    continue
                seen.add(reader)
                if _hands_on(reader.instruction):
                    todo.append(reader)
                elif reader.instruction.opcode == "gather" and position == 0 and self._is_fed(reader, fed):
                    lookups += 1
                else:
                    return False
        return lookups > 0

    def _is_fed(self, gather: _Value, fed: frozenset[Instruction]) -> bool:
        """Whether the positions of a gather depend on one of the parameters."""
        todo = [_value(gather.instruction.operands[1], None, gather.context)]
        seen = set(todo)
        while todo:
            value = todo.pop()
            if value.instruction in fed and not value.context:
                return True
            sources = {source for source, _ in _sources(value)} - seen
            todo += sources
            seen |= sources
        return False

    def _follow(self, todo: list[_Value]) -> None:
        self._seen.update(todo)
        while todo:
            value = todo.pop()
            for source, position in _sources(value):
                self._readers[source].append((value, position))
                if source not in self._seen:
                    self._seen.add(source)
                    todo.append(source)


def _hands_on(instruction: Instruction) -> bool:
    if instruction.opcode == "custom-call":
        return instruction.get("custom_call_target") in IDENTITY_TARGETS
    return instruction.opcode in _VIEWS or instruction.opcode in _CALLS


def _value(instruction: Instruction, leaf: int | None, context: tuple[tuple[Instruction, Computation], ...]) -> _Value:
    return _Value(instruction, leaf if isinstance(instruction.shape, TupleShape) else None, context)


def _sources(value: _Value) -> Iterator[tuple[_Value, int]]:
    """What a value is made of, each with the position of the operand; of a call's result and parameters 0."""
    instruction, leaf, context = value.instruction, value.leaf, value.context
    if instruction.opcode == "parameter":
        yield from _arguments(value)
    elif instruction.opcode in _CALLS:
        yield from _results(value)
    elif instruction.opcode == "get-tuple-element":
        yield _value(instruction.operands[0], instruction.index, context), 0
    elif instruction.opcode == "optimization-barrier":
        yield _value(instruction.operands[0], leaf, context), 0
    elif instruction.opcode == "tuple" and leaf is not None:
        yield _value(instruction.operands[leaf], None, context), leaf
    else:
        for position, operand in enumerate(instruction.operands):
            yield _value(operand, None, context), position


def _arguments(value: _Value) -> Iterator[tuple[_Value, int]]:
    """What a caller hands to a parameter of a called computation."""
    if not value.context:
        return
    (caller, computation), outside = value.context[-1], value.context[:-1]
    if caller.opcode == "while":
        yield _value(caller.operands[0], value.leaf, outside), 0
        (body,) = caller.called["body"]
        yield _value(body.root, value.leaf, (*outside, (caller, body))), 0
    elif caller.opcode == "conditional":
        yield _value(caller.operands[1 + _branches(caller).index(computation)], value.leaf, outside), 0
    else:
        yield _value(caller.operands[value.instruction.index], value.leaf, outside), 0


def _results(value: _Value) -> Iterator[tuple[_Value, int]]:
    """What a call's result is in the computations that it calls."""
    caller, leaf, outside = value.instruction, value.leaf, value.context
    if caller.opcode == "while":
        (body,), (condition,) = caller.called["body"], caller.called["condition"]
        yield _value(body.root, leaf, (*outside, (caller, body))), 0
        yield _value(condition.root, None, (*outside, (caller, condition))), 1
        yield _value(caller.operands[0], leaf, outside), 0
        return
    if caller.opcode == "conditional":
        yield _value(caller.operands[0], None, outside), 1
    for computation in _branches(caller):
        yield _value(computation.root, leaf, (*outside, (caller, computation))), 0


def _branches(caller: Instruction) -> list[Computation]:
    return [computation for called in caller.called.values() for computation in called]
