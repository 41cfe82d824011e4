"""Where an instruction's sharding is to be written: the user's expressions, and the entries that come of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardwright.explicit.answer import OutSharding, spec_text
from shardwright.explicit.expressions import Expression, Insertion, read_source
from shardwright.hlo import Instruction, Module, SourceLocation
from shardwright.plans.shardings import TensorSharding
from shardwright.tuning import MOST_NEIGHBORS
from shardwright.xla.jax_shardings import to_partition_spec

#: Instructions of which JAX can be told the result's sharding at the call.
ASKABLE = frozenset(["broadcast", "convolution", "dot", "gather", "iota", "reshape"])


#: What JAX makes of an operand ahead of an operator: its type and dimensions as the other's.
_PROMOTIONS = frozenset(["broadcast", "convert", "reshape"])

#: What hands its operand on.
_VIEWS = frozenset(["convert", "copy", "transpose"])

#: Numbers of values that are no operands: an instruction's result, as its call makes it, and the same brought to lie
#: otherwise behind it.
RESULT, BROUGHT = -1, -2


class Place(NamedTuple):
    """An expression by its beginning, and which of its values: an operand's number, `RESULT` or `BROUGHT`.

    depth: how many others of its opcode begin there, within it: 1 of the outer product of `a * b * c`.
    name: of a value that a loop takes, which no operand's number says; else "".
    """

    file: str
    line: int
    column: int
    opcode: str
    depth: int
    value: int
    name: str


@dataclass(slots=True)
class _Asked:
    instruction: Instruction
    layouts: list[TensorSharding] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    needed: list[TensorSharding] = field(default_factory=list)


class Questions:
    """What was planned at each place, and where it has to be said.

    readers: of each instruction.
    """

    def __init__(self, module: Module, readers: Mapping[Instruction, Sequence[Instruction]]) -> None:
        self._module = module
        self._readers = readers
        self._asked: dict[Place, _Asked] = {}

    def note(
        self,
        instruction: Instruction,
        layout: TensorSharding,
        *,
        value: int = RESULT,
        name: str = "",
        sentence: str = "",
        is_needed: bool = True,
    ) -> None:
        """An instruction's result, or another of its values, has this layout; is_needed: and JAX has to be told."""
        if value >= 0 and not name:
            instruction, value = self._reader_of(instruction, value)
        location = self._locate(instruction)
        at = location_of(location) if location else ("", 0, -1)
        name = name or ("" if location else instruction.op_name or instruction.name)
        place = Place(*at, instruction.opcode, self._depth(instruction), value, name)
        asked = self._asked.setdefault(place, _Asked(instruction))
        asked.layouts.append(layout)
        if is_needed and layout not in asked.needed:
            asked.needed.append(layout)
        if sentence and sentence not in asked.sentences:
            asked.sentences.append(sentence)

    def is_asked(self, instruction: Instruction) -> bool:
        """Whether something is to be written at an instruction's place."""
        location = self._module.source(instruction)
        if location is None:
            return False
        at = location_of(location)
        return any(asked.needed and place[:3] == at for place, asked in self._asked.items())

    def takes_out_sharding(self, instruction: Instruction) -> bool:
        """Whether the call that made it can be told its result's sharding, as far as the text and its file say."""
        location = self._module.source(instruction)
        if location is None or instruction.opcode not in ASKABLE:
            return False
        expression = _find_expression(*location_of(location), instruction.opcode, self._depth(instruction))
        return expression is None or expression.takes_out_sharding(instruction.opcode)

    def entries(self) -> tuple[OutSharding, ...]:
        """What is to be written, by place."""
        pieces = [self._piece(place, asked) for place, asked in sorted(self._asked.items()) if asked.needed]
        return tuple(_with_code(piece, pieces) for piece in pieces)

    def _reader_of(self, instruction: Instruction, value: int) -> tuple[Instruction, int]:
        """What the user wrote, and its operand's number, where an operand is brought to its dimensions ahead of it."""
        own = self._module.source(instruction)
        while own is not None and instruction.opcode in _PROMOTIONS and not self.takes_out_sharding(instruction):
            readers = [each for each in self._readers[instruction] if _is_same(own, self._module.source(each))]
            if not readers:
                break
            instruction, value = readers[0], readers[0].operands.index(instruction)
        return instruction, value

    def _origin(self, operand: Instruction, own: SourceLocation | None) -> Instruction:
        """What an operand is brought to its dimensions from, in the same expression."""
        while operand.opcode in _PROMOTIONS and own is not None and _is_same(own, self._module.source(operand)):
            operand = operand.operands[0]
        return operand

    def _locate(self, instruction: Instruction) -> SourceLocation | None:
        """Its line; of what a library's function hands on, and what is inlined without a line, that of a neighbor."""
        pending, seen = [instruction], 0
        while pending and seen < MOST_NEIGHBORS:
            value = pending.pop(0)
            seen += 1
            if (location := self._module.source(value)) is not None:
                return location
            pending += self._readers.get(value, ())
        return None

    def _depth(self, instruction: Instruction) -> int:
        """How many of its kind are made of one another within its expression: 1 of the outer product of `a * b * c`."""
        own, depth = self._module.source(instruction), 0
        source = read_source(own.file) if own else None
        if own is None or source is None:
            return 0
        pending = list(instruction.operands[:1])
        while pending:
            value = pending.pop()
            is_alike = value.opcode == instruction.opcode
            if not (is_alike or value.opcode in _VIEWS) or not _is_same(own, self._module.source(value)):
                break
            depth += is_alike
            pending += value.operands[:1]
        alike = source.expressions((own.line, own.column), instruction.opcode)
        return depth % max(len(alike), 1)  # the expression again, of a loop that Python runs

    def _piece(self, place: Place, asked: _Asked) -> _Piece:
        counts, instruction = Counter(asked.layouts), asked.instruction
        layout = max([*asked.needed, *counts], key=counts.__getitem__)  # the first of those that are as common
        count = counts[layout]
        spec = to_partition_spec(layout, len(layout.dims))
        sentences = [*asked.sentences]
        if count < len(asked.layouts):
            others = dict.fromkeys(str(each) for each in asked.layouts if each != layout)
            sentences.append(
                f"{count} of the {len(asked.layouts)} values of this line lie so, others {', '.join(others)}: "
                "hand the sharding in, or write the loop out"
            )
        if "vmap(" in instruction.op_name:
            sentences.append("under vmap: leave the mapped dimension out")
        expression = _find_expression(*place[:5])
        target, operand, form = expression, place.name, "reshard"
        if place.value >= 0 and not place.name:
            target = self._argument(expression, instruction, place.value) if expression else None
            operand = target.text if target else _describe(instruction.operands[place.value], place.value)
            if expression and target is None:
                sentences.append(f"made within {expression.call}: it can be written around what that is given")
        elif place.value == RESULT and self.takes_out_sharding(instruction):
            form = "out_sharding"
        insertions: tuple[Insertion, ...] = ()
        if target is not None and not place.name:
            text = spec_text(spec)
            insertions = tuple(target.with_out_sharding(text) if form == "out_sharding" else target.resharded(text))
        entry = OutSharding(
            file=place.file,
            line=place.line,
            column=max(place.column, 0),
            call=expression.call if expression else instruction.op_name.rpartition("/")[2] or place.opcode,
            form=form,
            operand=operand,
            spec=spec,
            code="",
            note="; ".join(sentences),
            insertions=insertions,
        )
        return _Piece(entry, expression)

    def _argument(self, expression: Expression, instruction: Instruction, number: int) -> Expression | None:
        """The argument of a call that an operand is; None: it is made within the call."""
        own, arguments = self._module.source(instruction), list(expression.arguments())
        operands = [self._origin(operand, own) for operand in instruction.operands]
        places = [self._module.source(operand) for operand in operands]
        if len(arguments) == 1 and len(set(operands)) == 1:
            return arguments[0]
        holding = [argument for argument in arguments if _holds(argument, places[number])]
        if holding:
            return holding[0]
        if own is not None and _is_same(own, places[number]):
            return None
        name = operands[number].op_name if operands[number].opcode == "parameter" else ""
        key = name[max(name.rfind("["), 0) :]
        by_name = [each for each in arguments if key and each.text.replace('"', "'").endswith(key)]
        if len(by_name) == 1:
            return by_name[0]
        rest = [argument for argument in arguments if not any(_holds(argument, place) for place in places)]
        if len(rest) == 1:
            return rest[0]
        return arguments[number] if len(arguments) == len(operands) else None


class _Piece(NamedTuple):
    entry: OutSharding
    expression: Expression | None


def location_of(location: SourceLocation) -> tuple[str, int, int]:
    """Where an expression begins: file, line, column."""
    return location.file, location.line, location.column


def _find_expression(file: str, line: int, column: int, opcode: str, depth: int) -> Expression | None:
    source = read_source(file) if line else None
    expressions = source.expressions((line, column), opcode) if source else []
    return expressions[min(depth, len(expressions) - 1)] if expressions else None


def _describe(operand: Instruction, number: int) -> str:
    return operand.op_name if operand.opcode == "parameter" else f"operand {number}"


def _is_same(one: SourceLocation, other: SourceLocation | None) -> bool:
    return other is not None and location_of(one) == location_of(other)


def _holds(expression: Expression, location: SourceLocation | None) -> bool:
    """Whether a line and column lie in an expression."""
    if location is None:
        return False
    start, end = expression.span
    return start <= (location.line, location.column) < end


def _with_code(piece: _Piece, pieces: Iterable[_Piece]) -> OutSharding:
    """The entry with its expression as it is to stand, with what is written within it."""
    entry, expression = piece
    if expression is None or not entry.insertions:
        return entry
    span = expression.span
    within: list[Insertion] = []
    for other in pieces:
        if other.expression is not None and other.entry.file == entry.file:
            start, end = other.expression.span
            if span[0] <= start and end <= span[1]:
                within += other.entry.insertions
    return replace(entry, code=expression.source.insert(within, span))
