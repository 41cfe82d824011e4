"""The rules of a program's instructions, computed once for equal instructions."""

from __future__ import annotations

from collections.abc import Hashable

from shardwright.hlo import Instruction
from shardwright.planner.graph.manual_regions import Inside
from shardwright.planner.graph.signatures import identity, signature
from shardwright.planner.rules import OpRule, rule_at
from shardwright.planner.rules.indexing import without_rows


class RuleCache:
    """A cache of `rule_of`, with equal numbers for instructions with equal signatures.

    others: cache of a similar program; both share their numbers and rules. Set before the first question:
    `stack_rows`, the program's rows of stacks (`find_stack_rows`), each wanted by all devices in its trip of a loop:
    their devices keep the rows together; `inside`, what stands in manual regions (`find_inside`).
    """

    def __init__(self, others: RuleCache | None = None) -> None:
        self.stack_rows: frozenset[Instruction] = frozenset()
        self.inside = Inside()
        self._numbers: dict[Hashable, int] = others._numbers if others else {}
        self._rules: list[OpRule] = others._rules if others else []
        self._number_of: dict[Instruction, int] = {}
        #: By the identities of instructions' components, kept alive by these; most equal instructions share them.
        self._number_by_identity: dict[Hashable, int] = {}

    def number(self, instruction: Instruction) -> int:
        """The number of the instruction's signature."""
        number = self._number_of.get(instruction)
        if number is None:
            parts = identity(instruction), instruction in self.stack_rows, self.inside.places.get(instruction)
            number = self._number_by_identity.get(parts)
            if number is None:
                number = self._number_by_identity[parts] = self._new_number(instruction)
            self._number_of[instruction] = number
        return number

    def _new_number(self, instruction: Instruction) -> int:
        """The number of a signature; the rule of a new one is made here, whoever asks first."""
        is_stacked = instruction in self.stack_rows
        place = self.inside.places.get(instruction)
        number = self._numbers.setdefault((signature(instruction), is_stacked, place), len(self._rules))
        if number == len(self._rules):
            rule = rule_at(instruction, place)
            self._rules.append(without_rows(rule) if is_stacked else rule)
        return number

    def of_number(self, number: int) -> OpRule:
        """The rule of all instructions with a number."""
        return self._rules[number]

    def __call__(self, instruction: Instruction) -> OpRule:
        """The instruction's rule."""
        return self._rules[self.number(instruction)]
