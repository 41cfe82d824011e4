"""The rules of a program's instructions, each asked for once: equal instructions have the same."""

from __future__ import annotations

from collections.abc import Hashable

from shardwright.hlo import Instruction
from shardwright.planner.graph.signatures import identity, signature
from shardwright.planner.rules import OpRule, rule_of


class RuleCache:
    """`rule_of` that remembers, and numbers that are equal for instructions with equal signatures.

    others: of a program much like this one; both number alike, and what either learns is known to both.
    """

    def __init__(self, others: RuleCache | None = None) -> None:
        self._numbers: dict[Hashable, int] = others._numbers if others else {}
        self._rules: list[OpRule] = others._rules if others else []
        self._number_of: dict[Instruction, int] = {}
        #: By the identities of what instructions are made of, which these keep alive; most that are equal share it.
        self._number_by_identity: dict[Hashable, int] = {}

    def number(self, instruction: Instruction) -> int:
        """The number of the instruction's signature."""
        found = self._number_of.get(instruction)
        if found is None:
            parts = identity(instruction)
            found = self._number_by_identity.get(parts)
            if found is None:
                found = self._number_by_identity[parts] = self._new_number(instruction)
            self._number_of[instruction] = found
        return found

    def _new_number(self, instruction: Instruction) -> int:
        found = self._numbers.setdefault(signature(instruction), len(self._rules))
        if found == len(self._rules):
            self._rules.append(rule_of(instruction))
        return found

    def of_number(self, number: int) -> OpRule:
        """The rule of all instructions with a number."""
        return self._rules[number]

    def __call__(self, instruction: Instruction) -> OpRule:
        """The instruction's rule."""
        return self._rules[self.number(instruction)]
