"""Backward slice of a program: values traced back through tuples, calls, loops and branches.

Tuples are traced leaf by leaf: of a loop over a tuple of parameters and optimizer state, the loss needs the parameters
alone. Calls are traced per call site (context-sensitive).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwright.hlo import Computation, Instruction, Module, TupleShape
from shardwright.reserved_names import IDENTITY_TARGETS

#: Instructions with called computations for their results.
_CALLS = frozenset({"call", "fusion", "while", "conditional"})

#: Instructions with their operand's elements for a result.
_VIEWS = frozenset({"get-tuple-element", "tuple", "parameter", "optimization-barrier", "copy", "bitcast", "convert"})


@dataclass(frozen=True, slots=True)
class _Value:
    """A leaf of an instruction's result, in the context of the calls around it.

    leaf: index into a tuple's leaves; None for an array, or for a whole tuple.
    """

    instruction: Instruction
    leaf: int | None = None
    context: tuple[tuple[Instruction, Computation], ...] = ()


class Reads:
    """The backward slice of some outputs of a module.

    outputs: indices into the root's tuple; 0 for an array root.
    """

    def __init__(self, module: Module, outputs: Iterable[int]) -> None:
        root = module.entry.root
        is_tuple = isinstance(root.shape, TupleShape)
        self._readers: defaultdict[_Value, list[tuple[_Value, int]]] = defaultdict(list)
        self._seen: set[_Value] = set()
        self._follow([_Value(root, number if is_tuple else None) for number in outputs])

    def has(self, parameter: Instruction, leaf: int | None) -> bool:
        """Whether the slice has a parameter of the entry computation."""
        return _Value(parameter, leaf) in self._seen

    def is_looked_up(self, parameter: Instruction, leaf: int | None, fed: frozenset[Instruction]) -> bool:
        """Whether only gathers read a parameter, at positions computed from parameters in `fed`."""
        todo, seen, lookups = [_Value(parameter, leaf)], set[_Value](), 0
        while todo:
            value = todo.pop()
            for reader, position in self._readers[value]:
                if reader in seen:
                    continue
                seen.add(reader)
                if _is_view(reader.instruction):
                    todo.append(reader)
                elif reader.instruction.opcode == "gather" and position == 0 and self._is_fed(reader, fed):
                    lookups += 1
                else:
                    return False
        return lookups > 0

    def _is_fed(self, gather: _Value, fed: frozenset[Instruction]) -> bool:
        """Whether the positions of a gather depend on one of the `fed` parameters."""
        todo = [_make_value(gather.instruction.operands[1], None, gather.context)]
        seen = set(todo)
        while todo:
            value = todo.pop()
            if value.instruction in fed and not value.context:
                return True
            sources = {source for source, _ in _list_sources(value)} - seen
            todo += sources
            seen |= sources
        return False

    def _follow(self, todo: list[_Value]) -> None:
        self._seen.update(todo)
        while todo:
            value = todo.pop()
            for source, position in _list_sources(value):
                self._readers[source].append((value, position))
                if source not in self._seen:
                    self._seen.add(source)
                    todo.append(source)


def _is_view(instruction: Instruction) -> bool:
    if instruction.opcode == "custom-call":
        return instruction.get("custom_call_target") in IDENTITY_TARGETS
    return instruction.opcode in _VIEWS or instruction.opcode in _CALLS


def _make_value(
    instruction: Instruction, leaf: int | None, context: tuple[tuple[Instruction, Computation], ...]
) -> _Value:
    return _Value(instruction, leaf if isinstance(instruction.shape, TupleShape) else None, context)


def _list_sources(value: _Value) -> Iterator[tuple[_Value, int]]:
    """(source, operand position) of a value; position 0 for a call's result and parameters."""
    instruction, leaf, context = value.instruction, value.leaf, value.context
    if instruction.opcode == "parameter":
        yield from _list_argument_sources(value)
    elif instruction.opcode in _CALLS:
        yield from _list_result_sources(value)
    elif instruction.opcode == "get-tuple-element":
        yield _make_value(instruction.operands[0], instruction.index, context), 0
    elif instruction.opcode == "optimization-barrier":
        yield _make_value(instruction.operands[0], leaf, context), 0
    elif instruction.opcode == "tuple" and leaf is not None:
        yield _make_value(instruction.operands[leaf], None, context), leaf
    else:
        for position, operand in enumerate(instruction.operands):
            yield _make_value(operand, None, context), position


def _list_argument_sources(value: _Value) -> Iterator[tuple[_Value, int]]:
    """Sources of a called computation's parameter at its caller."""
    if not value.context:
        return
    (caller, computation), outside = value.context[-1], value.context[:-1]
    if caller.opcode == "while":
        yield _make_value(caller.operands[0], value.leaf, outside), 0
        (body,) = caller.called["body"]
        yield _make_value(body.root, value.leaf, (*outside, (caller, body))), 0
    elif caller.opcode == "conditional":
        yield _make_value(caller.operands[1 + _list_computations(caller).index(computation)], value.leaf, outside), 0
    else:
        yield _make_value(caller.operands[value.instruction.index], value.leaf, outside), 0


def _list_result_sources(value: _Value) -> Iterator[tuple[_Value, int]]:
    """Sources of a call's result in its called computations."""
    caller, leaf, outside = value.instruction, value.leaf, value.context
    if caller.opcode == "while":
        (body,), (condition,) = caller.called["body"], caller.called["condition"]
        yield _make_value(body.root, leaf, (*outside, (caller, body))), 0
        yield _make_value(condition.root, None, (*outside, (caller, condition))), 1
        yield _make_value(caller.operands[0], leaf, outside), 0
        return
    if caller.opcode == "conditional":
        yield _make_value(caller.operands[0], None, outside), 1
    for computation in _list_computations(caller):
        yield _make_value(computation.root, leaf, (*outside, (caller, computation))), 0


def _list_computations(caller: Instruction) -> list[Computation]:
    return [computation for called in caller.called.values() for computation in called]
